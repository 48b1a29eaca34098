"""Results of every kind that a report must show, without a service."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from msgspec.structs import replace

from loadtest.judge import summarize
from loadtest.judgements import FaultCell, LevelClass, OverheadRow, Regime
from loadtest.measure import by_level
from loadtest.plan import LevelPlan
from loadtest.reading import Reading
from loadtest.records import Gpu, GpuSample, Phase, RequestRow, RunKind, TelemetryRow
from loadtest.result import Result
from tests.loadtest.simulated import WORK, Drift, SteppingServer
from tests.loadtest.synthetic import run_record, synthetic_map

PROMPTS = (20, 100, 700, 3000)
GPU = Gpu(name="A GPU <x>", driver="1", memory=1 << 37, max_sm_clock=1980, max_memory_clock=3201, power_limit=700.0)


def plain_map(folder: Path, seed: int = 1, server: SteppingServer | None = None) -> Result:
    """On a machine that wavers a little."""
    server = server or SteppingServer(queue=20, machine=Drift(5, by=0.03))
    return asyncio.run(synthetic_map(folder, server, seed))


def rich_map(source: Result, folder: Path) -> Result:
    """The same map with prompts of several lengths, partly cached, a GPU, one voided level; and text that is no
    HTML."""
    run = source.run
    hostile = replace(run.target, model="</script><b>model</b>", address="127.0.0.1:1")
    fingerprint = replace(run.fingerprint, gpus=[GPU], load_average=1.5)
    run = replace(run, target=hostile, fingerprint=fingerprint)
    result = Result.create(folder, run)
    requests, levels = by_level(source.requests), source.levels
    telemetry = source.telemetry
    late = next(level for level in reversed(levels) if level.phase is Phase.LADDER)
    for level in levels:
        rows = [_varied(row) for row in requests[level.index]]
        if level is late:
            rows = [replace(row, sent=None if row.sent is None else row.sent + 0.2) for row in rows]
        seen = [_with_gpu(row) for row in telemetry if row.level == level.index]
        result.append_level(replace(level, schedule=""), rows, seen)
    verdicts = Reading(result).verdicts
    result.write_judgement(verdicts, summarize(run, verdicts, complete=False, notes=["the budget was spent <early>"]))
    return result


def faults(folder: Path) -> Result:
    result = Result.create(folder, replace(run_record(), kind=RunKind.FAULTS))
    found = (
        ("engine killed", LevelClass.CRASHED, []),
        ("engine frozen", LevelClass.HUNG, ["a probe within 5 s"]),
        ("burst", LevelClass.SATURATED_STABLE, []),
    )
    cells = [
        FaultCell(
            fault=fault,
            kind=kind,
            level=0,
            outcomes={"completed": 3, "ENGINE_DIED": 2},
            level_class=level_class,
            expected=["every stream ends"],
            broken=broken,
            recovery=1.25,
            ttft_p99=0.2,
        )
        for fault, level_class, broken in found
        for kind in ("running", "queued", "new")
    ]
    result.write_faults(cells)
    return _judged(result)


def overhead(folder: Path) -> Result:
    result = Result.create(folder, replace(run_record(), kind=RunKind.OVERHEAD))
    regimes = (Regime.KEEP_UP, Regime.KEEP_UP, Regime.SATURATED, Regime.DRAINING)
    rows = [
        OverheadRow(
            level=index,
            offered=5000.0 * (index + 1),
            consumed=min(5000.0 * (index + 1), 14000.0),
            regime=regime,
            lag_drift=0.01 * index,
            frontend_us_per_token=40.0 - index,
            engine_us_per_token=20.0,
            client_us_per_token=30.0,
            server_us_per_request=900.0,
            tokens_per_second_per_core=7000.0,
            pss=1 << 29,
            per_gb=28000.0,
            counts_match=True,
        )
        for index, regime in enumerate(regimes)
    ]
    result.write_overhead(rows)
    return _judged(result)


def _judged(result: Result) -> Result:
    result.write_judgement([], summarize(result.run, [], complete=True))
    return result


def _varied(row: RequestRow) -> RequestRow:
    prompt = PROMPTS[row.index % len(PROMPTS)]
    return replace(row, prompt_tokens=prompt, cached_prompt_tokens=prompt * (row.index % 5) // 5)


def _with_gpu(row: TelemetryRow) -> TelemetryRow:
    sample = GpuSample(temperature=61.0, power=420.0, sm_clock=1980.0, memory_clock=3201.0, utilization=98.0)
    return replace(row, gpus=[sample])


async def _levels(server: SteppingServer, plans: list[LevelPlan], result: Result) -> None:
    for plan in plans:
        part = await server.run(plan)
        result.append_level(part.level, part.rows, part.telemetry)


def levels(
    folder: Path,
    server: SteppingServer,
    seed: int,
    *,
    closed: tuple[int, ...] = (1, 4, 16),
    rates: tuple[float, ...] = (12.0, 20.0),
    beyond: tuple[tuple[float, float], ...] = ((2.0, 80.0),),
) -> Result:
    """A few levels of a server, without a search. beyond: (multiple, rate)."""
    result = Result.create(folder, run_record(seed, None if server.machine is None else WORK))
    times = {"warm_up": 5.0, "window": 30.0, "drain_limit": 30.0}
    plans = [LevelPlan(phase=Phase.CALIBRATE, concurrency=count, seed=0, **times) for count in closed]
    plans += [LevelPlan(phase=Phase.LADDER, rate=rate, seed=0, **times) for rate in rates]
    plans += [LevelPlan(phase=Phase.BEYOND, rate=rate, multiple=by, seed=0, **times) for by, rate in beyond]
    plans = [dataclasses.replace(plan, seed=seed * 1000 + index) for index, plan in enumerate(plans)]
    asyncio.run(_levels(server, plans, result))
    return result
