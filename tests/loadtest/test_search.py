"""The search finds knees that are known, on simulated servers and on a real one."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest import classify
from loadtest.classify import grade
from loadtest.drive import ServiceDriver, setups
from loadtest.fleet import Fleet
from loadtest.judge import Bracket, bracket, contradictions, in_order, judge_levels, keeps_up, knee_of, measures_of
from loadtest.judgements import Interval, LevelClass, MachineSpeed, Verdict
from loadtest.measure import LevelRows
from loadtest.mix import SHORT
from loadtest.plan import LevelPlan
from loadtest.records import ArrivalProcess, Limits, Phase, RunKind
from loadtest.result import Result
from loadtest.search import Search, SearchError, Settings, bend
from tests.loadtest.known_server import Behaviour
from tests.loadtest.playing import IDS, known_service
from tests.loadtest.simulated import Drift, SteppingServer
from tests.loadtest.synthetic import LIMITS, run_record, synthetic_map

SETTINGS = Settings(calibrate=4.0, warm_up=4.0, window=15.0, beyond=5.0)


def stepping(queue: int = 1_000_000) -> SteppingServer:
    """68 requests a second of three tokens."""
    return SteppingServer(base=0.03, each=0.003, tokens=(2, 4), queue=queue)


def search_of(server: SteppingServer, seed: int = 1, settings: Settings = SETTINGS) -> Search:
    return Search(server, LIMITS, settings, seed, lambda part, verdict: None)


async def knee(search: Search) -> Interval:
    await search.ladder(await search.calibrate())
    await search.knee()
    found = knee_of(in_order(search.verdicts.values()))
    assert found is not None
    return found


@pytest.mark.slow
async def test_a_known_knee_is_inside_the_interval_in_ten_of_ten_seeds() -> None:
    for seed in range(10):
        server = stepping()
        found = await knee(search_of(server, seed))
        assert found.low <= server.capacity <= found.high, seed
        assert found.width < 0.05, seed


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [22.0, 50.0])
@pytest.mark.parametrize("drift", [None, 0.08])
async def test_a_knee_with_a_short_queue_is_found_within_a_budget(capacity: float, drift: float | None) -> None:
    """Settings and time of `make load`: a queue no longer than a second, which bursts fill below the knee, on a machine
    that drifts or does not."""
    step = 8 / (4 * capacity)
    inside = 0
    for seed in range(5):
        machine = None if drift is None else Drift(seed, drift)
        server = SteppingServer(base=0.4 * step, each=0.075 * step, seats=8, tokens=(2, 6), queue=24, machine=machine)
        settings = Settings(calibrate=6.0, warm_up=6.0, most_concurrency=16, budget=870.0)
        search = search_of(server, seed, settings)
        search.clock = lambda server=server: server.now + 2.0 * server.next_level  # type: ignore[misc]
        found = await knee(search)
        speeds = [1.0 if machine is None else machine.speed(float(at)) for at in range(int(server.now))]
        inside += found.low <= capacity * sum(speeds) / len(speeds) <= found.high and found.width < 0.05
        assert search.clock() < 870.0 - 5 * 30.0
    assert inside >= LEAST_INSIDE[capacity, drift]


LEAST_INSIDE = {(22.0, None): 4, (50.0, None): 5, (22.0, 0.08): 3, (50.0, 0.08): 4}  # of five


async def test_the_search_looks_first_beside_what_a_saturated_level_completed() -> None:
    server = stepping(queue=40)
    search = search_of(server)
    for rate in (30.0, 90.0):
        await search.run(search._open(Phase.LADDER, rate))
    await search.bisect(keeps_up, Phase.BISECT, 2, 0.02)
    looked = [verdict.rate for verdict in search.verdicts.values() if verdict.phase is Phase.BISECT]
    assert looked == [pytest.approx(server.capacity, rel=0.05)] * 2


async def test_an_end_that_completions_contradict_is_looked_at_again() -> None:
    """By luck it keeps up with more than what a fuller one completes."""
    server = stepping(queue=40)
    search = search_of(server, 4, settings=replace(SETTINGS, completions=0))
    for rate in (30.0, 1.02 * server.capacity, 1.3 * server.capacity):
        await search.run(search._open(Phase.LADDER, rate))
    again = f"rate:{1.02 * server.capacity:.4g}"
    assert search._bracket().low == search.verdicts[again].rate
    await search.bisect(keeps_up, Phase.BISECT, 1, 0.02)
    assert search.verdicts[again].measures.windows == 2


@pytest.mark.parametrize("share", [0.1, 5.0])
async def test_a_wrong_calibration_moves_nothing_but_the_beginning(share: float) -> None:
    server = stepping()
    search = search_of(server)
    await search.ladder(server.capacity * share)
    await search.knee()
    found = knee_of(in_order(search.verdicts.values()))
    assert found is not None
    assert found.low <= server.capacity <= found.high
    assert found.width < 0.05


async def test_a_whole_map_is_judged_again_from_its_rows_alone(tmp_path: Path) -> None:
    result = await synthetic_map(tmp_path, stepping(queue=40))
    summary = result.summary
    assert summary.complete
    phases = [verdict.phase for verdict in result.verdicts]
    assert set(phases) >= {Phase.CALIBRATE, Phase.LADDER, Phase.BISECT, Phase.BEYOND, Phase.RECOVERY}
    classes = {verdict.multiple: verdict.level_class for verdict in result.verdicts if verdict.phase is Phase.BEYOND}
    assert classes == dict.fromkeys((1.2, 1.5, 2.0, 3.0), LevelClass.SATURATED_STABLE)
    assert result.verdicts[-1].level_class is LevelClass.RECOVERED
    assert {score.hypothesis: score.holds for score in summary.scores} == {"fast-refusal": True, "slow-queue": False}
    assert summary.measures["goodput_share_at_3"] > 0.9
    for level in result.levels:
        assert level.concurrency or len(result.schedule(level)) == round(
            level.rate * (level.window_start - level.start)  # type: ignore[operator]
        ) + round(level.rate * (level.window_end - level.window_start))  # type: ignore[operator]


@cache
def filled() -> Verdict:
    part = asyncio.run(stepping().run(LevelPlan(phase=Phase.BISECT, rate=60.0, **FILLING)))
    return grade([part], LIMITS)


def level(rate: float, level_class: LevelClass, machine: MachineSpeed | None = None) -> Verdict:
    return msgspec.structs.replace(filled(), rate=rate, level_class=level_class, machine=machine)


KEEPS, FULL, CANNOT = LevelClass.KEEPS_UP, LevelClass.SATURATED_STABLE, LevelClass.CANNOT_TELL


def test_a_level_that_cannot_tell_does_not_move_the_knee() -> None:
    sweep = [level(58.0, KEEPS), level(60.0, FULL), level(85.0, FULL)]
    knee = knee_of(sweep)
    assert knee is not None
    assert knee.high == 60.0
    for rate in (50.0, 70.0):
        assert knee_of(in_order([*sweep, level(rate, CANNOT)])) == knee
    assert knee_of(in_order([*sweep, level(70.0, KEEPS)])) != knee
    assert knee_of(in_order([*sweep, level(50.0, FULL)])) != knee


def test_what_a_level_that_cannot_tell_has_all_the_same_counts() -> None:
    sweep = [level(50.0, KEEPS), level(58.0, CANNOT), level(60.0, FULL)]

    def bracketed(*good: float) -> Bracket:
        return bracket(sweep, lambda verdict: verdict.rate in good)

    assert bracketed(50.0, 58.0) == Bracket(58.0, 60.0)
    assert bracketed(50.0) == Bracket(50.0, 60.0)


def test_a_knee_begins_lower_if_the_machine_was_surely_faster() -> None:
    lows = []
    for speed, error in ((0.97, 0.01), (1.05, 0.03), (1.05, 0.01)):
        knee = knee_of([level(58.0, KEEPS, MachineSpeed(value=speed, error=error)), level(60.0, FULL)])
        assert knee is not None
        lows.append(knee.low)
    assert lows[0] == lows[1] == pytest.approx(1.03 * lows[2])


def test_contradictions_are_what_a_lower_rate_lacks_and_a_higher_has() -> None:
    sweep = [level(50.0, KEEPS), level(54.0, FULL), level(56.0, CANNOT), level(58.0, KEEPS), level(60.0, FULL)]
    assert [verdict.rate for verdict in contradictions(sweep, keeps_up)] == [54.0, 58.0]
    assert not contradictions([sweep[0], sweep[2], sweep[4]], keeps_up)


async def test_verdicts_that_contradict_each_other_are_looked_at_again() -> None:
    """A short window of a machine that is slow just then falls behind at half of what the service can do."""
    server = stepping(queue=40)
    search = search_of(server)
    for rate in (30.0, 60.0, 90.0):
        await search.run(search._open(Phase.LADDER, rate))
    search.driver = replace(server, base=2 * server.base, each=2 * server.each)
    await search.run(search._open(Phase.LADDER, 45.0, 4.0))
    search.driver, search.settings = server, replace(SETTINGS, window=60.0)
    assert search._bracket() == Bracket(30.0, 90.0)
    await search.bisect(keeps_up, Phase.BISECT, 1, 0.02)
    assert search.verdicts["rate:45"].measures.windows == 2
    assert search.verdicts["rate:45"].level_class is LevelClass.KEEPS_UP
    assert search._bracket() == Bracket(60.0, 90.0)


def test_goodput_is_of_what_was_served() -> None:
    """A queue that fills up takes in more than is served in the window."""
    part = asyncio.run(SteppingServer(queue=200).run(LevelPlan(phase=Phase.BEYOND, rate=60.0, multiple=1.5, **FILLING)))
    verdict = grade([part], Limits(ttft=30.0, tpot=1.0))
    assert verdict.measures.goodput > 1.2 * verdict.measures.completion_rate
    measures = measures_of([verdict], [verdict], None)
    assert measures["peak_goodput"] == verdict.measures.completion_rate
    assert measures["goodput_share_at_1.5"] == 1.0


FILLING: dict[str, Any] = {"warm_up": 1.0, "window": 8.0, "drain_limit": 30.0, "seed": 1}


async def test_without_a_bounded_queue_an_overload_grows() -> None:
    search = search_of(stepping())
    await search.map()
    beyond = [verdict for verdict in search.verdicts.values() if verdict.phase is Phase.BEYOND]
    assert {verdict.level_class for verdict in beyond} <= {LevelClass.SATURATED_GROWING, LevelClass.COLLAPSING}


@dataclass
class Spoiling:
    """Passes levels on, changed."""

    server: SteppingServer
    change: Callable[[LevelRows], LevelRows]
    runs: int = 0

    async def run(self, plan: LevelPlan) -> LevelRows:
        self.runs += 1
        return self.change(await self.server.run(plan))


async def test_a_void_level_is_run_again_and_does_not_count() -> None:
    def late(part: LevelRows) -> LevelRows:
        if part.level.index != 9:
            return part
        rows = [
            type(row)(**{**{name: getattr(row, name) for name in row.__struct_fields__}, "sent": row.intended + 0.5})
            for row in part.rows
        ]
        return LevelRows(part.level, rows, part.telemetry)

    search = search_of(stepping())
    search.driver = Spoiling(stepping(), late)
    found = await knee(search)
    assert found.low <= stepping().capacity <= found.high
    spoiled = [verdict for verdict in search.verdicts.values() if "9" in verdict.void]
    assert len(spoiled) == 1
    assert len(spoiled[0].levels) >= 2
    assert "late" in spoiled[0].void["9"]
    assert spoiled[0].level_class is not LevelClass.VOID


@dataclass
class Disturbed:
    """A server that is four times slower at a rate's first level: something else had the machine."""

    server: SteppingServer
    rates: list[float]

    async def run(self, plan: LevelPlan) -> LevelRows:
        if plan.repeat or plan.rate not in self.rates:
            return await self.server.run(plan)
        slow = replace(self.server, base=4 * self.server.base, each=4 * self.server.each)
        part = await slow.run(plan)
        self.server.now, self.server.next_level = slow.now, slow.next_level
        return part


@pytest.mark.parametrize("disturbed", [1, 2])
async def test_one_rung_far_below_that_falls_behind_does_not_end_the_ladder(disturbed: int) -> None:
    server = stepping(queue=40)
    bound = 1.1 ** round(math.log(server.capacity, 1.1))
    shares = [0.3, 0.6, 0.7, 0.9, 1.2]
    search = search_of(server, settings=replace(SETTINGS, ladder=tuple(shares)))
    search.driver = Disturbed(server, [float(f"{bound * share:.4g}") for share in shares[1 : 1 + disturbed]])
    await search.ladder(bound)
    rates = [(verdict.rate or 0.0) / bound for verdict in in_order(search.verdicts.values())]
    assert rates == pytest.approx(shares if disturbed == 1 else shares[:3], rel=1e-3)


async def test_a_service_that_serves_nothing_ends_the_search() -> None:
    search = search_of(SteppingServer(queue=0))
    with pytest.raises(SearchError, match="nothing completed"):
        await search.calibrate()


async def test_the_budget_stops_refinement_and_says_so() -> None:
    server = stepping()
    search = search_of(server, settings=replace(SETTINGS, budget=200.0))
    search.clock = lambda: server.now
    await search.map()
    assert any("budget" in note for note in search.notes)
    assert any(verdict.phase is Phase.RECOVERY for verdict in search.verdicts.values())


async def test_a_window_is_long_enough_for_its_requests() -> None:
    """The lowest rate has 200 arrivals; where requests take long, five times the p95 of what they took."""
    server = SteppingServer(base=0.09, each=0.01, tokens=(30, 50), seats=64)
    search = search_of(server, settings=replace(SETTINGS, ladder=(0.3, 0.6, 0.8), completions=40))
    await search.ladder(2.5)
    first, second, *_ = sorted((parts[0] for parts in search.parts.values()), key=lambda part: part.level.index)
    assert first.seconds == pytest.approx(40 / (first.level.rate or 0.0), abs=0.1)
    slow = search.verdicts[first.level.group].measures.e2e
    assert slow is not None
    assert second.seconds == pytest.approx(5 * slow.p95.value, abs=0.1)
    assert second.level.window_start - second.level.start == pytest.approx(3 * slow.p95.value, abs=0.1)


async def test_a_map_looks_closer_where_the_curve_bends() -> None:
    server = SteppingServer(tokens=(2, 4))
    search = search_of(server, settings=replace(SETTINGS, bends=1))
    for rate in (60.0, 120.0, 160.0, 190.0):
        await search.run(search._open(Phase.LADDER, rate))
    await search.bends()
    rates = [verdict.rate for verdict in in_order(search.verdicts.values())]
    assert rates == [60.0, 120.0, 140.0, 160.0, 190.0] or rates == [60.0, 120.0, 160.0, 175.0, 190.0]
    assert bend(in_order(search.verdicts.values())[:2]) is None


async def test_a_map_has_the_arrivals_that_it_was_asked_for() -> None:
    search = search_of(SteppingServer(tokens=(2, 4)), settings=replace(SETTINGS, process=ArrivalProcess.BURST, size=5))
    await search.ladder(60.0)
    levels = [part.level for parts in search.parts.values() for part in parts]
    assert {level.process for level in levels} == {ArrivalProcess.BURST}
    part = next(iter(search.parts.values()))[0]
    counts = Counter(row.intended for row in part.arrived)
    assert counts.most_common()[0][1] == counts.most_common()[-2][1] == 5


def test_a_bracket_spans_verdicts_that_are_not_in_order() -> None:
    verdicts = [level(rate, KEEPS) for rate in (50.0, 60.0, 70.0, 80.0)]

    def found(*good: float) -> tuple[float | None, float | None]:
        spanned = bracket(verdicts, lambda verdict: verdict.rate in good)
        return spanned.low, spanned.high

    assert found(50.0, 60.0) == (60.0, 70.0)
    assert found(50.0, 70.0) == (50.0, 80.0)
    assert found() == (None, 50.0)
    assert found(50.0, 60.0, 70.0, 80.0) == (80.0, None)


REAL_KNEE = 75.0  # requests a second: steps of 40 ms for up to 12 requests of 4 tokens


@pytest.mark.slow
async def test_the_known_knee_of_a_real_server_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Search, client processes and server together. How exact a search is, simulated servers show: a few seconds of a
    real one are coarse, and other work on this machine makes it slower than it says, and the client late."""
    monkeypatch.setattr(classify, "LATENESS", 1.0)
    found = await knee_of_real_server(tmp_path / "result")
    assert found.high >= REAL_KNEE / 2
    assert found.low <= REAL_KNEE * 1.1
    assert found.width < 1.5


async def knee_of_real_server(folder: Path) -> Interval:
    behaviour = Behaviour(mode="step", base=0.04, seats=12)
    mix = {"short": replace(SHORT, output=(4, 4))}
    settings = Settings(
        calibrate=0.5,
        most_concurrency=16,
        warm_up=0.5,
        window=2.5,
        ladder=(0.5, 1.6),
        repeats=1,
        completions=0,
        full=0,
        width=0.8,
        knee_width=1.5,
    )
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(known_service(behaviour))
        run = run_record()
        assert run.kind is RunKind.MAP
        result = Result.create(folder, run)
        fleet = await stack.enter_async_context(Fleet(setups(1, service.address, IDS, 4096, run.started)))
        driver = ServiceDriver(fleet, result, mix, service.address, IDS, run.started, pid=service.pid)
        search = Search(driver, LIMITS, settings, 1, lambda part, verdict: None)
        await search.ladder(await search.calibrate())
        await search.knee()
    verdicts: list[Verdict] = judge_levels([part for parts in search.parts.values() for part in parts], LIMITS)
    found = knee_of(in_order(verdicts))
    assert found is not None
    assert result.levels[0].concurrency == 1
    assert all(row.server_pss for row in result.telemetry)
    return found
