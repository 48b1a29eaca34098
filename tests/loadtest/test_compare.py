"""Two results against each other: what differs is found, what does not is not, and how sure it is is said."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from loadtest.__main__ import app
from loadtest.bootstrap import DRAWS, Batches, interval
from loadtest.compare import (
    FIGURES,
    NEAR,
    Change,
    CompareError,
    Comparison,
    Finding,
    compare,
    conclude,
    find,
    knee_change,
    pair_up,
    shows,
)
from loadtest.comparing import page_of, sentence, write_comparison
from loadtest.correction import Correction
from loadtest.judgements import Interval, LevelClass
from loadtest.measure import LevelRows
from loadtest.plan import LevelPlan
from loadtest.reading import Reading
from loadtest.records import Level, Outcome, Phase, RequestRow
from loadtest.search import Settings
from tests.loadtest import chromium, synthetic_kinds
from tests.loadtest.simulated import SteppingServer
from tests.loadtest.synthetic import LIMITS, synthetic_map
from tests.loadtest.test_report import structure


def fast() -> SteppingServer:
    return SteppingServer(queue=20)


def slow(by: float = 1.2) -> SteppingServer:
    return SteppingServer(queue=20, base=0.010 * by, each=0.001 * by)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Reading:
    return Reading(synthetic_kinds.levels(tmp_path_factory.mktemp("results") / "one", fast(), 1))


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Reading:
    return Reading(synthetic_kinds.levels(tmp_path_factory.mktemp("results") / "slower", slow(), 2))


@pytest.fixture(scope="module")
def comparison(one: Reading, slower: Reading) -> Comparison:
    return compare(one, slower)


@pytest.fixture(scope="module")
def written(one: Reading, slower: Reading, tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    return write_comparison(one.folder, slower.folder, tmp_path_factory.mktemp("comparison"))


def change_of(comparison: Comparison, name: str) -> Change:
    return next(change for change in comparison.overall if change.figure == name)


# --- intervals -------------------------------------------------------------------------------------------------------


def test_batches_as_they_are_give_the_verdicts_figures(one: Reading) -> None:
    """Each batch once is the level itself: the same values as by `measure`."""
    for verdict in one.verdicts:
        drawn = Batches.draw(one.parts_of(verdict), np.random.default_rng(1))
        once = drawn.once
        for figure in FIGURES:
            expected = figure.value(verdict.measures)
            samples = figure.samples(once, LIMITS)
            assert samples == pytest.approx(np.array([expected])), figure.name


def level_of(values: list[float], seconds: float = 100.0) -> LevelRows:
    """One request every so often, with these times to first token."""
    step = seconds / len(values)
    level = Level(
        index=0,
        phase=Phase.LADDER,
        group="rate:1",
        process="poisson",
        start=0.0,
        window_start=0.0,
        window_end=seconds,
        end=seconds,
        rate=1.0,
    )
    rows = [
        RequestRow(
            level=0,
            index=index,
            kind="chat",
            outcome=Outcome.COMPLETED,
            intended=index * step,
            sent=index * step,
            first=index * step + value,
            finish=index * step + value,
        )
        for index, value in enumerate(values)
    ]
    return LevelRows(level, rows)


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    generator = random.Random(1)
    figure = next(figure for figure in FIGURES if figure.name == "TTFT p50")
    hits = 0
    for seed in range(100):
        part = level_of([generator.expovariate(1.0) for _ in range(200)])
        found = interval(figure.samples(Batches.draw([part], np.random.default_rng(seed)), LIMITS), 0.95)
        assert found is not None
        hits += found[0] <= math.log(2) <= found[1]
    assert 85 <= hits <= 100  # ten batches make it a little narrow


def test_more_time_makes_an_interval_narrower() -> None:
    generator = random.Random(2)
    figure = next(figure for figure in FIGURES if figure.name == "TTFT p50")

    def width(parts: int) -> float:
        levels = [level_of([generator.expovariate(1.0) for _ in range(200)]) for _ in range(parts)]
        found = interval(figure.samples(Batches.draw(levels, np.random.default_rng(3)), LIMITS), 0.95)
        assert found is not None
        return found[1] - found[0]

    assert width(9) < 0.6 * width(1)


def test_values_that_hang_together_make_it_wider() -> None:
    """A slow stretch is one event and not a hundred."""
    generator = random.Random(4)
    figure = next(figure for figure in FIGURES if figure.name == "TTFT p50")
    clustered = [10.0 ** (index // 20 % 2) * generator.uniform(0.9, 1.1) for index in range(200)]
    mixed = clustered.copy()
    generator.shuffle(mixed)

    def spread(values: list[float]) -> float:
        return float(np.std(figure.samples(Batches.draw([level_of(values)], np.random.default_rng(5)), LIMITS)))

    assert figure.samples(Batches.draw([level_of(mixed)], np.random.default_rng(5)), LIMITS).size == DRAWS
    rate = next(figure for figure in FIGURES if figure.name == "goodput/s")

    def of_goodput(values: list[float]) -> float:
        return float(np.std(rate.samples(Batches.draw([level_of(values)], np.random.default_rng(5)), LIMITS)))

    # Limits of 1 s: about a half of the requests is good, in stretches or evenly.
    assert of_goodput(clustered) > 2 * of_goodput(mixed)
    assert spread(clustered) > 0


def test_a_draw_that_missed_every_value_says_nothing() -> None:
    """All requests came in one batch of ten; about a third of the draws leave that one out."""
    part = level_of([1.0, 2.0, 3.0], seconds=100.0)
    together = [replace(row, intended=5.0 + row.index, first=6.0 + row.index) for row in part.rows]
    drawn = Batches.draw([LevelRows(part.level, together)], np.random.default_rng(6))
    samples = FIGURES[0].samples(drawn, LIMITS)
    assert np.isnan(samples).mean() == pytest.approx(0.9**10, abs=0.03)
    assert set(samples[np.isfinite(samples)]) == {1.0}


def test_nothing_is_made_of_nothing() -> None:
    assert interval(np.array([]), 0.95) is None
    assert interval(np.full(10, np.nan), 0.95) is None


# --- findings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "finding"),
    [
        (0.97, 1.03, Finding.SAME),
        (1.01, 1.04, Finding.SAME),
        (1.01, 1.2, Finding.FASTER),
        (0.8, 0.99, Finding.SLOWER),
        (0.9, 1.1, Finding.CANNOT_TELL),
    ],
)
def test_an_interval_of_a_speed_is_one_finding(low: float, high: float, finding: Finding) -> None:
    assert find(low, high) is finding


def test_a_slower_server_is_slower_in_every_figure(comparison: Comparison) -> None:
    assert comparison.finding is Finding.SLOWER
    for change in comparison.overall:
        if change.figure != "knee":  # no search was made: 20 to 80
            assert change.speed == pytest.approx(1 / 1.2, rel=0.1), change.figure
    assert change_of(comparison, "TPOT p50").low == pytest.approx(1 / 1.2, rel=0.06)


def test_the_other_way_round_it_is_faster(one: Reading, slower: Reading) -> None:
    assert compare(slower, one).finding is Finding.FASTER


def test_a_result_is_the_same_as_itself(one: Reading) -> None:
    found = compare(one, one)
    assert found.finding in (Finding.SAME, Finding.CANNOT_TELL)
    assert all(change.speed == pytest.approx(1.0) for change in found.overall)


@pytest.mark.slow
def test_the_same_server_again_is_not_called_faster_or_slower(tmp_path: Path) -> None:
    findings = []
    for seed in range(8):
        first, second = (
            Reading(synthetic_kinds.levels(tmp_path / f"{number}", fast(), number, closed=(1, 8), rates=(15.0,)))
            for number in (10 + seed, 50 + seed)
        )
        findings.append(compare(first, second, seed).finding)
    wrong = [finding for finding in findings if finding in (Finding.FASTER, Finding.SLOWER)]
    assert len(wrong) <= 1, findings


@dataclass
class Wavering(SteppingServer):
    """Its steps take up to 1 % more or less in each level, as a machine's do."""

    generator: random.Random = field(default_factory=lambda: random.Random(0))

    async def run(self, plan: LevelPlan) -> LevelRows:
        factor = self.generator.uniform(0.99, 1.01)
        base, each = self.base, self.each
        self.base, self.each = base * factor, each * factor
        part = await super().run(plan)
        self.base, self.each = base, each
        return part


MAP = Settings(
    calibrate=8.0,
    warm_up=4.0,
    window=16.0,
    beyond=16.0,
    ladder=(0.5, 0.85, 1.05, 1.3),
    repeats=1,
    multiples=(2.0,),
    slo_levels=0,
    bends=0,
    most_concurrency=32,
)


@pytest.mark.slow
async def test_two_maps_of_one_server_agree_and_one_of_a_server_slower_by_a_tenth_differs(tmp_path: Path) -> None:
    async def mapped(name: str, by: float, luck: int) -> Reading:
        server = Wavering(queue=40, base=0.010 * by, each=0.001 * by, generator=random.Random(luck))
        return Reading(await synthetic_map(tmp_path / name, server, settings=MAP))

    first, again, slower = [await mapped(*way) for way in (("a", 1.0, 1), ("b", 1.0, 2), ("c", 1.1, 3))]
    assert compare(first, again).finding is Finding.SAME
    assert "agrees" in sentence(compare(first, again))
    assert compare(first, slower).finding is Finding.SLOWER
    assert "differs" in sentence(compare(first, slower))


def test_figures_that_contradict_each_other_decide_nothing() -> None:
    faster, slower = Change("TTFT p50", Finding.FASTER), Change("TPOT p50", Finding.SLOWER)
    assert conclude([faster, slower])[0] is Finding.CANNOT_TELL
    assert conclude([faster])[0] is Finding.FASTER
    assert conclude([Change("TTFT p50", Finding.SAME), Change("TTFT p99", Finding.CANNOT_TELL)])[0] is Finding.SAME
    assert conclude([Change("TTFT p50", Finding.CANNOT_TELL)])[0] is Finding.CANNOT_TELL


def test_knees_are_intervals(one: Reading) -> None:
    def with_knee(knee: Interval | None) -> Reading:
        made = copy.copy(one)
        made.summary = replace(one.summary, knee=knee)
        return made

    first = with_knee(Interval(low=10.0, high=10.4))
    for low, high, finding in (
        (10.1, 10.5, Finding.SAME),
        (12.0, 12.5, Finding.FASTER),
        (8.0, 8.3, Finding.SLOWER),
        (9.0, 11.8, Finding.CANNOT_TELL),
    ):
        second = with_knee(Interval(low=low, high=high))
        change = knee_change(first, second, Correction.between(first, second))
        assert change is not None
        assert change.finding is finding
    assert knee_change(first, with_knee(None), Correction.between(first, first)) is None


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_levels_are_paired_by_concurrency_rate_and_multiple(tmp_path: Path) -> None:
    first = Reading(synthetic_kinds.levels(tmp_path / "a", fast(), 1, closed=(1, 2), rates=(10.0, 20.0)))
    near = 10.0 * (1 + NEAR / 2)
    second = Reading(
        synthetic_kinds.levels(
            tmp_path / "b", fast(), 2, closed=(2, 4), rates=(near, 30.0), beyond=((2.0, 90.0), (3.0, 120.0))
        )
    )
    names = [(name, a.group, b.group) for name, a, b in pair_up(first, second)]
    assert names == [
        ("2 in flight", "closed:2", "closed:2"),
        ("10/s", "rate:10", f"rate:{near:.4g}"),
        ("2 × its own knee", "rate:80", "rate:90"),
    ]
    assert set(compare(first, second).unpaired) == {
        "first: 1 in flight",
        "first: 20/s",
        "second: 4 in flight",
        "second: 30/s",
        "second: 120/s (3 × knee)",
    }


def test_a_void_level_has_no_partner(one: Reading) -> None:
    second = copy.copy(one)
    second.verdicts = [replace(verdict, level_class=LevelClass.VOID) for verdict in one.verdicts]
    with pytest.raises(CompareError):
        compare(one, second)


def test_latency_of_a_queue_and_rates_of_a_load_are_no_evidence(comparison: Comparison) -> None:
    latency, rate = FIGURES[0], FIGURES[-1]
    by_name = {pair.name: pair for pair in comparison.pairs}
    closed, below, above = by_name["4 in flight"], by_name["12/s"], by_name["80/s (2 × knee)"]
    assert [shows(latency, pair) for pair in (closed, below, above)] == [True, True, False]
    assert [shows(rate, pair) for pair in (closed, below, above)] == [True, False, True]
    for pair in (below, above):
        unsure = replace(pair.second, level_class=LevelClass.CANNOT_TELL)
        assert not shows(latency, dataclasses.replace(pair, second=unsure))
        assert not shows(rate, dataclasses.replace(pair, second=unsure))


def test_what_else_differs_is_said(one: Reading, slower: Reading) -> None:
    other = copy.copy(slower)
    other.run = replace(other.run, mix="long", fingerprint=replace(other.run.fingerprint, cpu="another"))
    found = compare(one, other).cautions
    assert "They differ in machine: simulated and another." in found
    assert "They differ in mix: chat and long." in found


# --- table and page --------------------------------------------------------------------------------------------------


def test_the_page_is_whole(written: tuple[Comparison, Path]) -> None:
    comparison, page = written
    found = structure(page)
    assert (found.faults, found.open, found.tables_without_caption) == ([], [], 0)
    assert set(found.references) <= set(found.ids)
    assert [url for url in found.fetched if not url.startswith(("#", "data:"))] == []
    text = page.read_text(encoding="utf-8")
    assert text == page_of(comparison)
    assert "The second differs: it is slower than the first" in text
    assert text.count('<td class="change') == len(comparison.pairs) * len(FIGURES)
    assert {file.name for file in (page.parent / "plots").iterdir()} >= {"12-comparison.png", "12-comparison.csv"}


def test_the_command_prints_its_finding(one: Reading, slower: Reading, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["compare", str(one.folder), str(slower.folder), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "The second differs: it is slower than the first" in done.output
    assert (out / "report.html").exists()


def test_a_folder_that_is_no_result_is_one_line(one: Reading, tmp_path: Path) -> None:
    for command in (["compare", str(one.folder), str(tmp_path)], ["report", str(tmp_path)]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2
        assert "no run.json" in done.output


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_renders_in_a_browser(written: tuple[Comparison, Path], width: int) -> None:
    if chromium.found() is None:
        pytest.skip("no Chromium on the PATH and none named by OCTAVO_CHROMIUM")
    page = written[1]
    with chromium.browser() as browser:
        browser.open(page, width, 900)
        assert browser.complaints == []
        shapes = browser.value(
            "[...document.querySelectorAll('[data-figure]')].map(root => root.querySelectorAll('svg path').length)"
        )
        assert len(shapes) == 3
        assert min(shapes) > 5
        assert browser.value("document.documentElement.scrollWidth") <= width
