"""A machine that drifts is not taken for a service that changed, and a service that changed is not excused by it."""

from __future__ import annotations

import asyncio
import math
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
from loadtest.judgements import LevelClass, MachineSpeed, Verdict, Window
from loadtest.machine import Machine
from loadtest.mean_knee import TYPICAL, mean_knee
from loadtest.measure import measure
from loadtest.notes import machine_notes
from loadtest.quantity import share
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
    assert first.work.bytes == reference.SLABS * 4 * reference.ROWS * reference.INNER * 4
    assert all((one == other).all() for one, other in zip(first.slabs, second.slabs, strict=True))
    origin = time.monotonic()
    taken = first.take(origin)
    assert 0 <= taken.at <= time.monotonic() - origin
    assert taken.seconds > 0


def test_products_stay_in_the_thread_that_asks_for_them() -> None:
    """OpenBLAS takes threads of its own from 2^18 multiplications on."""
    assert reference.ROWS * reference.INNER * reference.COLUMNS <= 1 << 18


async def test_the_reference_is_timed_again_and_again_until_a_level_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MATRICES", 1)
    monkeypatch.setattr(reference, "PERIOD", 0.01)
    async with Reference().watch(time.monotonic()) as times:
        while len(times) < 3:
            await asyncio.sleep(0.01)
    count = len(times)
    await asyncio.sleep(0.05)
    assert len(times) == count
    assert [taken.at for taken in times] == sorted(taken.at for taken in times)


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


def level(index: int, *seconds: float, window: float = 10.0) -> Level:
    """With the reference taken at even times."""
    times = [ReferenceTime(at=window * (at + 0.5) / len(seconds), seconds=taken) for at, taken in enumerate(seconds)]
    return msgspec.structs.replace(level_of([0.1], seconds=window).level, index=index, reference=times)


def test_a_levels_speed_is_its_mean_over_that_of_the_run() -> None:
    machine = Machine([level(0, *[0.030] * 10), level(1, *[0.0333] * 10), level(2, *[0.027, 0.030] * 5)])
    mean = (1 / 0.030 + 1 / 0.0333 + (1 / 0.027 + 1 / 0.030) / 2) / 3
    assert machine.seconds == pytest.approx(1 / mean)
    speeds = [machine.of(one) for one in machine.levels]
    found = [speed.value for speed in speeds if speed]
    assert found == pytest.approx([1 / 0.030 / mean, 1 / 0.0333 / mean, (1 / 0.027 + 1 / 0.030) / 2 / mean])
    assert [speed and speed.unsteady for speed in speeds] == [[], [], []]
    assert [speed and round(speed.error, 3) for speed in speeds] == [0.0, 0.0, 0.019]
    jumpy = Machine([level(3, *[0.02, 0.03] * 5)])
    assert [speed and speed.unsteady for speed in map(jumpy.of, jumpy.levels)] == [[3]]


def test_the_error_of_several_levels_is_less_than_that_of_one() -> None:
    machine = Machine([level(index, *[0.02, 0.03] * 5) for index in range(4)])
    one, all_of_them = machine.of(machine.levels[0]), machine.of_all(machine.levels)
    assert one is not None
    assert all_of_them is not None
    assert all_of_them.value == pytest.approx(one.value) == pytest.approx(1.0)
    assert all_of_them.error == pytest.approx(one.error / 2)
    assert all_of_them.unsteady == [0, 1, 2, 3]


def test_only_times_in_the_window_count() -> None:
    early = [ReferenceTime(at=-1.0, seconds=9.0), ReferenceTime(at=10.0, seconds=9.0)]
    one = level(0, *[0.03] * 5)
    more = msgspec.structs.replace(one, reference=[*one.reference, *early])
    assert Machine([more]).of(more) == Machine([one]).of(one)


def test_a_level_with_too_few_times_has_no_speed() -> None:
    machine = Machine([level(0, *[0.03] * 10), level(1, 0.03, 0.03, 0.03)])
    assert machine.of(machine.levels[1]) is None
    assert machine.of_all(machine.levels) is None
    assert Machine([level(0)]).of_all([level(0)]) is None


# --- goodput against its peak ----------------------------------------------------------------------------------------

MAP = Settings(
    calibrate=4.0,
    warm_up=4.0,
    window=16.0,
    beyond=16.0,
    ladder=(0.5, 0.87, 0.93, 1.1, 1.3),
    repeats=1,
    multiples=(1.2, 1.5, 3.0),
    slo_levels=0,
    bends=0,
    most_concurrency=16,
)


async def mapped(folder: Path, machine: Drift, refusal: float = 0.0) -> Reading:
    return Reading(await synthetic_map(folder, server(machine, refusal=refusal), settings=MAP))


@pytest.mark.parametrize("seed", [1, 2])
async def test_goodput_holds_while_the_machine_drifts(tmp_path: Path, seed: int) -> None:
    measures = (await mapped(tmp_path / "map", Drift(seed))).summary.measures
    error = measures["goodput_share_at_3_error"]
    assert abs(measures["goodput_share_at_3"] - 1.0) < 2 * error
    assert measures["machine_fastest"] - measures["machine_slowest"] > BY
    assert 0.01 < error < 0.1


async def test_goodput_that_really_falls_is_told(tmp_path: Path) -> None:
    """At 3 times the knee some 45 requests a second are refused, which is nearly a tenth of the time, and at the peak
    some are, too: 0.93 is left, give or take what lengths of requests differ by, on a machine that does not drift."""
    shares = []
    for seed in range(1, 5):
        measures = (await mapped(tmp_path / str(seed), Drift(seed, STEADY), refusal=0.1 / 50)).summary.measures
        shares.append(measures["goodput_share_at_3"])
        lengths = 0.35 / 400**0.5  # of requests, of a window that completes 400
        assert abs(shares[-1] - 0.93) < 2 * math.sqrt(2) * lengths
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
    full = (45.5 + 49.0 + 45.2) / 3
    assert peak_of(sweep).value == pytest.approx(full)
    measures = measures_of(sweep, sweep, None)
    assert measures["goodput_share_at_3"] == pytest.approx(44.5 / full)
    assert measures["best_goodput_share_at_3"] == pytest.approx(44.5 / 49.0)


def test_a_fall_right_behind_the_knee_is_not_hidden_by_what_lies_beyond_it() -> None:
    sweep = [verdict(45, 45, KEEPS)]
    sweep += [verdict(rate, 40.0, FULL) for rate in (46, 47, 50, 54, 67.5)] + [verdict(135, 40, FULL, multiple=3.0)]
    assert measures_of(sweep, sweep, None)["goodput_share_at_3"] == pytest.approx(40 / 45)


def test_goodput_is_as_measured_whatever_the_reference_says_and_its_error_that_of_windows_like_it() -> None:
    """A reference that runs beside an overload says little of it: over it, three maps of one service on cores that
    drift by 4 % differed more than without (6.3 and 4.9 %, 26 saturated levels)."""
    sweep = [verdict(45, 45, KEEPS, 1.05), verdict(135, 40, FULL, 0.96, multiple=3.0)]
    assert "goodput_share_at_3_error" not in measures_of(sweep, sweep, None)
    windows = [
        Window(rate=rate, seconds=60.0, arrivals=round(60 * rate), completed=round(60 * served), in_flight=4.0)
        for rate, served in ((43.0, 43.0), (46.0, 43.5), (46.0, 44.5), (46.5, 45.0))
    ]
    mean = mean_knee(windows)
    assert mean is not None
    measures = measures_of(sweep, sweep, None, mean)
    assert measures["goodput_share_at_3"] == pytest.approx(40 / 45)
    seconds = sweep[0].measures.seconds
    error = mean.scatter * math.sqrt(2 * TYPICAL / seconds)
    assert measures["goodput_share_at_3_error"] == pytest.approx(40 / 45 * error)


def test_the_overload_before_recovery_is_one_more_window_at_its_rate() -> None:
    beyond, back = (verdict(135, goodput, FULL, 1.0, multiple=3.0) for goodput in (40, 42))
    back = msgspec.structs.replace(back, group="recovery:3", phase=Phase.RECOVERY)
    sweep = [verdict(45, 45, KEEPS), beyond]
    measures = measures_of(sweep, [*sweep, back], None)
    assert measures["goodput_share_at_3"] == pytest.approx(41 / 45)
    assert measures["best_goodput_share_at_3"] == pytest.approx(41 / 45)


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
    assert f"machine's speed: {share(found.correction.ratio)}" in machine_line(found)


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
    """By a third for three seconds in every six, in all alike."""
    times = [
        msgspec.structs.replace(time, seconds=time.seconds * (1.3 if int(time.at) // 3 % 2 else 0.9))
        for time in one.reference
    ]
    return msgspec.structs.replace(one, reference=times)


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
    drift = Drift(1, noise=0.2)
    reading = Reading(await synthetic_map(tmp_path / "map", server(drift), settings=MAP))
    speed, *knee = machine_notes(reading.run, reading.summary)
    assert "of its mean speed" in speed
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
