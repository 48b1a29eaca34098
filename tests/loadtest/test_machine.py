"""A machine that drifts is not taken for a service that changed, and a service that changed is not excused by it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from loadtest import reference
from loadtest.__main__ import app
from loadtest.compare import Comparison, Finding, compare
from loadtest.comparing import machine_line, page_of, sentence
from loadtest.judge import measures_of, peak_of
from loadtest.judgements import LevelClass, MachineSpeed, Verdict
from loadtest.machine import Machine
from loadtest.measure import measure
from loadtest.notes import machine_notes
from loadtest.reading import Reading
from loadtest.records import Level, Phase, ReferenceTime, RunKind, Target
from loadtest.reference import Reference
from loadtest.report import page_of as report_of
from loadtest.search import Settings
from loadtest.session import has_reference
from tests.loadtest import synthetic_kinds
from tests.loadtest.simulated import Drift, SteppingServer
from tests.loadtest.synthetic import LIMITS, run_record, synthetic_map
from tests.loadtest.test_compare import level_of

STEADY, BY = 0.0, 0.08  # of a machine's speed


def server(machine: Drift | None, by: float = 1.0, refusal: float = 0.0) -> SteppingServer:
    """25.6 requests a second; by: as slow as it. refusal: seconds of a step that each takes."""
    return SteppingServer(
        base=0.03 * by, each=0.006 * by, seats=8, tokens=(2, 6), queue=12, machine=machine, refusal=refusal
    )


# --- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_is_the_same_work_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MATRICES", 4)
    first, second = Reference(), Reference()
    assert first.work == second.work
    assert first.work.threads == len(first._cores)
    assert first.work.bytes == first.work.threads * reference.SLABS * 4 * reference.ROWS * reference.INNER * 4
    for one, other in zip(first._shares, second._shares, strict=True):
        assert all((a == b).all() for a, b in zip(one.slabs, other.slabs, strict=True))
    origin = time.monotonic()
    time_taken = first.take(origin)
    assert 0 <= time_taken.at <= time.monotonic() - origin
    assert 0 < time_taken.python < time_taken.seconds
    for made in (first, second):
        made.close()


def test_products_stay_in_the_thread_that_asks_for_them() -> None:
    """As many as cores run at once already: OpenBLAS takes threads of its own from 2^18 multiplications on."""
    assert reference.ROWS * reference.INNER * reference.COLUMNS <= 1 << 18


@pytest.mark.parametrize(
    ("kind", "device", "pid", "expected"),
    [
        (RunKind.MAP, "cpu", 1, True),
        (RunKind.OVERHEAD, "cpu", 1, True),
        (RunKind.MAP, "cuda:0", 1, False),
        (RunKind.MAP, "cpu", None, False),
        (RunKind.FAULTS, "cpu", 1, False),
    ],
)
def test_a_reference_is_taken_where_it_says_something(
    kind: RunKind, device: str, pid: int | None, expected: bool
) -> None:
    assert has_reference(kind, Target(address="x", device=device), pid) is expected


# --- a level's speed -------------------------------------------------------------------------------------------------


def level(index: int, before: float | None, after: float | None, window: float = 10.0) -> Level:
    def reading(seconds: float | None) -> ReferenceTime | None:
        return None if seconds is None else ReferenceTime(at=0.0, seconds=seconds)

    part = level_of([0.1], seconds=window)
    return msgspec.structs.replace(part.level, index=index, before=reading(before), after=reading(after))


def test_a_levels_speed_is_the_mean_of_before_and_after_over_the_runs_median() -> None:
    machine = Machine([level(0, 0.030, 0.030), level(1, 0.030, 0.0333), level(2, 0.027, 0.030)])
    assert machine.seconds == 0.030
    speeds = [machine.of(one) for one in machine.levels]
    assert [speed and round(speed.value, 3) for speed in speeds] == [1.0, 0.95, 1.056]
    assert [speed and speed.unsteady for speed in speeds] == [[], [1], [2]]
    assert speeds[0] is not None
    assert speeds[1] is not None
    assert speeds[1].error == pytest.approx(0.11 / 12**0.5)  # that of a jump at any moment in between
    assert speeds[0].error == pytest.approx(machine.wander / 12**0.5)  # no one looked in between
    whole = machine.of_all(machine.levels)
    assert whole is not None
    assert whole.value == pytest.approx(1.002, abs=0.001)
    assert whole.unsteady == [1, 2]
    assert whole.error < speeds[1].error


def test_a_level_without_both_times_has_no_speed() -> None:
    machine = Machine([level(0, 0.03, 0.03), level(1, 0.03, None)])
    assert machine.of(machine.levels[1]) is None
    assert machine.of_all(machine.levels) is None
    assert Machine([level(0, None, None)]).of_all([level(0, None, None)]) is None


# --- goodput against its peak ----------------------------------------------------------------------------------------

MAP = Settings(
    calibrate=4.0,
    warm_up=4.0,
    window=16.0,
    beyond=16.0,
    ladder=(0.5, 0.9, 1.1, 1.3),
    repeats=1,
    multiples=(1.2, 1.5, 3.0),
    slo_levels=0,
    bends=0,
    most_concurrency=16,
)


async def mapped(folder: Path, seed: int, refusal: float = 0.0) -> Reading:
    return Reading(await synthetic_map(folder, server(Drift(seed), refusal=refusal), settings=MAP))


@pytest.mark.parametrize("seed", [1, 2])
async def test_goodput_holds_while_the_machine_drifts(tmp_path: Path, seed: int) -> None:
    measures = (await mapped(tmp_path / "map", seed)).summary.measures
    assert 0.96 < measures["goodput_share_at_3"] < 1.04
    assert measures["machine_fastest"] - measures["machine_slowest"] > BY
    assert 0.002 < measures["goodput_share_at_3_error"] < 0.05


async def test_goodput_that_really_falls_is_told_while_the_machine_drifts(tmp_path: Path) -> None:
    """At 3 times the knee some 45 requests a second are refused, which is nearly a tenth of the time, and at the peak
    some are, too: 0.93 is left, give or take the error that is told with it."""
    shares = []
    for seed in range(1, 5):
        measures = (await mapped(tmp_path / str(seed), seed, refusal=0.1 / 50)).summary.measures
        shares.append(measures["goodput_share_at_3"])
        assert abs(shares[-1] - 0.93) < 2 * measures["goodput_share_at_3_error"]
    assert 0.85 < statistics.median(shares) < 0.95


def verdict(
    rate: float, goodput: float, level_class: LevelClass, speed: float = 1.0, multiple: float | None = None
) -> Verdict:
    measures = msgspec.structs.replace(measure([level_of([0.1])], LIMITS), goodput=goodput, completion_rate=goodput)
    return Verdict(
        group=f"rate:{rate}",
        levels=[0],
        phase=Phase.LADDER,
        level_class=level_class,
        evidence="",
        measures=measures,
        rate=rate,
        multiple=multiple,
        machine=MachineSpeed(value=speed, error=0.01),
    )


KEEPS, FULL = LevelClass.KEEPS_UP, LevelClass.SATURATED_STABLE


def test_the_peak_is_no_lucky_level() -> None:
    sweep = [verdict(40, 40, KEEPS), verdict(45, 45, KEEPS)]
    sweep += [verdict(rate, goodput, FULL) for rate, goodput in ((47, 49.0), (50, 45.5), (54, 49.0), (67.5, 45.2))]
    sweep += [verdict(135, 44.5, FULL, multiple=3.0)]
    assert peak_of(sweep).measures.goodput == 45.5
    measures = measures_of(sweep, sweep, None)
    assert measures["goodput_share_at_3"] == pytest.approx(44.5 / 45.5)
    assert measures["best_goodput_share_at_3"] == pytest.approx(44.5 / 49.0)


def test_a_fall_right_behind_the_knee_is_not_hidden_by_the_median() -> None:
    sweep = [verdict(45, 45, KEEPS)]
    sweep += [verdict(rate, 40.0, FULL) for rate in (46, 47, 50, 54, 67.5)] + [verdict(135, 40, FULL, multiple=3.0)]
    assert measures_of(sweep, sweep, None)["goodput_share_at_3"] == pytest.approx(40 / 45)


def test_goodput_is_over_the_machines_speed_and_the_raw_figure_stands_beside() -> None:
    sweep = [verdict(45, 45, KEEPS, 1.05), verdict(135, 40, FULL, 0.96, multiple=3.0)]
    measures = measures_of(sweep, sweep, None)
    assert measures["goodput_share_at_3"] == pytest.approx(40 / 0.96 / (45 / 1.05))
    assert measures["goodput_share_at_3_error"] == pytest.approx(measures["goodput_share_at_3"] * 0.01 * 2**0.5)
    assert measures["best_goodput_share_at_3"] == pytest.approx(40 / 45)


# --- comparisons -----------------------------------------------------------------------------------------------------


def levels(folder: Path, machine: Drift | None, seed: int, by: float = 1.0) -> Reading:
    """A few levels; what lies between their rates is no knee."""
    kinds = {"closed": (2, 4, 8, 16), "rates": (12.0,), "beyond": ((2.0, 45.0), (3.0, 65.0))}
    reading = Reading(synthetic_kinds.levels(folder, server(machine, by), seed, **kinds))  # type: ignore[arg-type]
    reading.summary = msgspec.structs.replace(reading.summary, knee=None, corrected_knee=None)
    return reading


def pair(folder: Path, drift: float, by: float = 1.0) -> Comparison:
    """The second on a machine that is slower on average, too."""
    first, second = Drift(1, drift), Drift(2, drift, mean=0.93)
    return compare(levels(folder / "a", first, 1), levels(folder / "b", second, 2, by))


def test_one_server_on_a_drifting_machine_is_the_same(tmp_path: Path) -> None:
    found = pair(tmp_path, BY)
    assert found.finding is Finding.SAME, found.reason
    assert "agrees" in sentence(found)
    assert min(change.raw or 0.0 for change in found.overall) < 0.94  # for which it would have been called slower
    assert all(abs((change.speed or 0.0) - 1) < 0.03 for change in found.overall if "p50" in change.figure)


@pytest.mark.parametrize("drift", [STEADY, BY])
def test_a_server_slower_by_a_tenth_is_told_on_any_machine(tmp_path: Path, drift: float) -> None:
    found = pair(tmp_path, drift, by=1.1)
    assert found.finding is Finding.SLOWER, found.reason
    speeds = [change.speed for change in found.overall if change.figure in ("TTFT p50", "TPOT p50", "tokens/s")]
    assert speeds == pytest.approx([1 / 1.1] * 3, rel=0.03)


def test_a_machine_that_is_slower_as_a_whole_is_no_slower_server(tmp_path: Path) -> None:
    first = levels(tmp_path / "a", Drift(1, STEADY), 1)
    slow = levels(tmp_path / "b", Drift(2, STEADY, mean=0.9), 2)
    found = compare(first, slow)
    assert found.correction.ratio == pytest.approx(0.9, abs=0.01)
    assert found.finding is Finding.SAME, found.reason
    assert "90.2 %" in machine_line(found)


def test_what_is_not_known_of_the_machine_widens_an_interval(tmp_path: Path) -> None:
    """The same rows, with a reference that jumps between before and after."""
    first, second = fewer(tmp_path / "a", Drift(1, STEADY)), fewer(tmp_path / "b", Drift(2, STEADY))

    def width() -> float:
        change = next(change for change in compare(first, second).overall if change.figure == "TPOT p50")
        assert change.low is not None
        assert change.high is not None
        return change.high - change.low

    known = width()
    for reading in (first, second):
        reading.levels = [jumped(one) for one in reading.levels]
        for part in reading.parts.values():
            part.level = jumped(part.level)
    assert width() > known + 0.02


def jumped(one: Level) -> Level:
    """By 6 %, around the same mean."""
    assert one.before is not None
    times = [msgspec.structs.replace(one.before, seconds=one.before.seconds * by) for by in (0.97, 1.03)]
    return msgspec.structs.replace(one, before=times[0], after=times[1])


def test_two_different_references_correct_nothing_and_say_so(tmp_path: Path) -> None:
    first, second = fewer(tmp_path / "a", Drift(1)), fewer(tmp_path / "b", Drift(2))
    assert second.run.reference is not None
    second.run = msgspec.structs.replace(
        second.run, reference=msgspec.structs.replace(second.run.reference, numpy="another")
    )
    found = compare(first, second)
    assert all(change.speed == pytest.approx(change.raw) for change in found.overall)
    assert any("Not corrected for the machine's speed: their references differ" in line for line in found.cautions)


def fewer(folder: Path, machine: Drift | None) -> Reading:
    kinds = {"closed": (2, 8), "rates": (), "beyond": ()}
    return Reading(synthetic_kinds.levels(folder, server(machine), 1, **kinds))  # type: ignore[arg-type]


# --- words -----------------------------------------------------------------------------------------------------------


def test_a_service_elsewhere_is_not_corrected_and_it_says_so(tmp_path: Path) -> None:
    found = compare(fewer(tmp_path / "a", None), fewer(tmp_path / "b", None))
    assert "Not corrected for the machine's speed: of the first, the service was there before the run" in page_of(
        found
    ).replace("&#39;", "'")
    assert machine_line(found).startswith("not corrected: ")
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "c")])
    assert "not corrected" in done.output


async def test_a_map_tells_the_machines_speed_and_what_it_changes(tmp_path: Path) -> None:
    reading = await mapped(tmp_path / "map", 1)
    speed, *knee = machine_notes(reading.run, reading.summary)
    assert "of its median speed" in speed
    assert "(unsteady)" in speed
    assert bool(knee) == (reading.summary.corrected_knee is not None)
    text = report_of(reading, [])
    assert "machine's speed" in text.replace("&#39;", "'")
    assert ", unsteady" in text
    run = run_record()
    assert "Not corrected" in machine_notes(run, reading.summary)[0]
    on_gpu = msgspec.structs.replace(run, target=replace_device(run.target))
    assert "cuda:0" in machine_notes(on_gpu, reading.summary)[0]


def replace_device(target: Target) -> Target:
    return msgspec.structs.replace(target, device="cuda:0")
