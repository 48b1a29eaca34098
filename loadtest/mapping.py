"""`map`: a result folder with the knee of a service, what it does beyond it, and how it comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadtest.drive import ServiceDriver
from loadtest.fleet import FleetError
from loadtest.judge import judge_levels, summarize
from loadtest.judgements import LevelClass, OverheadRow, Regime, Summary, Verdict
from loadtest.measure import LevelRows, by_level
from loadtest.mix import mix_of
from loadtest.progress import RunProgress
from loadtest.records import ArrivalProcess, Hypothesis, Limits, Run, RunKind, TelemetryRow
from loadtest.result import Result
from loadtest.search import Search, SearchError, Settings
from loadtest.session import Record, SessionOptions, machine_of, session, until_interrupted


@dataclass(frozen=True, kw_only=True)
class MapOptions(SessionOptions):
    """`settings`: of the search."""

    settings: Settings


def hypotheses(limits: Limits) -> list[Hypothesis]:
    """What a map is expected to show; written into the result before the first request."""
    rows = [
        ("knee-width", "The knee's interval is narrower than 5 %", "knee_width", "<=", 0.05),
        ("bounded-ttft", "At 3 x the knee accepted requests keep the TTFT limit", "ttft_p99_at_3", "<=", limits.ttft),
        ("fast-refusals", "At 3 x the knee refusals take less than 50 ms", "refusal_p99_at_3", "<=", 0.05),
        ("goodput", "At 3 x the knee goodput is at least 95 % of its peak", "goodput_share_at_3", ">=", 0.95),
        (
            "goodput-best",
            "The same of the best of all levels instead of the peak",
            "best_goodput_share_at_3",
            ">=",
            0.95,
        ),
        ("no-failures", "At 3 x the knee nothing fails but by refusal", "failed_at_3", "==", 0.0),
        ("recovery", "After 3 x the knee it is itself again within 5 s", "recovery", "<=", 5.0),
        ("no-hang", "No level hangs", "levels_hung", "==", 0.0),
        ("no-crash", "No level crashes", "levels_crashed", "==", 0.0),
        ("little", "Little's law holds within 5 % where it keeps up", "little_gap", "<=", 0.05),
        ("time", "The map takes less than 15 minutes", "minutes", "<=", 15.0),
    ]
    return [
        Hypothesis(id=name, text=text, measure=measure, relation=relation, bound=bound)
        for name, text, measure, relation, bound in rows
    ]


async def run_map(options: MapOptions, progress: RunProgress) -> Result:
    """Raises TargetError, LaunchError, FleetError, MixError. After Ctrl-C, and after a search that could not go on,
    what was measured is judged and kept."""
    mix = mix_of(options.mix)
    record = Record(options, RunKind.MAP, hypotheses(options.limits), arrivals_of(options.settings))
    async with session(record, await machine_of(), mix, progress) as opened:
        await search(opened.driver, opened.driver.result.run, options, progress)
        return opened.driver.result


def arrivals_of(settings: Settings) -> dict[str, str | float]:
    """What a result says of its arrivals."""
    found: dict[str, str | float] = {"process": str(settings.process)}
    if settings.process is ArrivalProcess.GAMMA:
        found["cv"] = settings.cv
    if settings.process is ArrivalProcess.BURST:
        found["burst_size"] = settings.size
    if settings.process is ArrivalProcess.REPLAY:
        found["trace_arrivals"] = len(settings.trace)
    return found


async def search(driver: ServiceDriver, run: Run, options: MapOptions, progress: RunProgress) -> None:
    """Runs the search and judges what it measured, however it ends."""

    def on_level(part: LevelRows, verdict: Verdict) -> None:
        progress.on_verdict(verdict)

    settings = replace(options.settings, most_concurrency=most_concurrency(options.settings, run))
    search = Search(
        driver,
        run.limits,
        settings,
        run.seed,
        on_level,
        progress.on_plan,
        lambda: time.monotonic() - run.started,
    )
    complete = False
    try:
        await until_interrupted(search.map())
        complete = True
    except asyncio.CancelledError:
        search.notes.append("interrupted")
    except (SearchError, FleetError) as error:
        search.notes.append(str(error))
    minutes = (time.monotonic() - run.started) / 60
    judge(driver.result, complete=complete, notes=search.notes, minutes=minutes)


def most_concurrency(settings: Settings, run: Run) -> int:
    """A closed loop needs no more in flight than twice what the service runs at once."""
    running = run.target.max_running_requests
    return min(settings.most_concurrency, 2 * running) if running else settings.most_concurrency


def level_rows(result: Result) -> list[LevelRows]:
    """Everything that a result holds, by level."""
    requests = by_level(result.requests)
    telemetry: dict[int, list[TelemetryRow]] = {}
    for row in result.telemetry:
        telemetry.setdefault(row.level, []).append(row)
    return [LevelRows(level, requests.get(level.index, []), telemetry.get(level.index, [])) for level in result.levels]


def judge(
    result: Result,
    *,
    complete: bool | None = None,
    notes: Sequence[str] | None = None,
    minutes: float | None = None,
) -> Summary:
    """Writes verdicts and summary from the raw rows. What only the run itself knew (whether it was complete, its notes,
    how long it took) is taken over from the summary that is there, unless given. `minutes`: a measure of complete runs
    only."""
    run = result.run
    verdicts = judge_levels(level_rows(result), run.limits)
    if complete is None:
        before = result.summary
        complete, notes, minutes = before.complete, before.notes, before.measures.get("minutes")
    extra = special_measures(result)
    if complete and minutes is not None:
        extra["minutes"] = minutes
    summary = summarize(run, verdicts, complete=complete, notes=notes or (), extra=extra)
    result.write_judgement(verdicts, summary)
    return summary


def special_measures(result: Result) -> dict[str, float]:
    """What hypotheses of fault matrices and of overhead speak of."""
    if result.run.kind is RunKind.FAULTS:
        cells = result.faults
        return {
            "cells_broken": sum(bool(cell.broken) for cell in cells),
            "cells_hung": sum(cell.level_class is LevelClass.HUNG for cell in cells),
        }
    rows = result.overhead if result.run.kind is RunKind.OVERHEAD else []
    return overhead_measures(rows) if rows else {}


def overhead_measures(rows: Sequence[OverheadRow]) -> dict[str, float]:
    """What is known whether anything was kept up with or not, and then what is known besides. rows: some."""
    found: dict[str, float] = {
        "counts_differ": sum(not row.counts_match for row in rows),
        "frontend_us": max(row.frontend_us_per_token for row in rows if row.regime is not Regime.DRAINING),
        **frontend_parts(rows),
    }
    keeping = [row for row in rows if row.regime is Regime.KEEP_UP]
    best = max((row.consumed for row in rows if row.regime is Regime.SATURATED), default=0.0)
    if keeping:
        found["lag_drift"] = max(row.lag_drift for row in keeping)
        if best:
            found["kept_up_share"] = max(row.consumed for row in keeping) / best
    return found


def frontend_parts(rows: Sequence[OverheadRow]) -> dict[str, float]:
    """What a token and what a message cost the front end, in microseconds of CPU: least squares over all loads, of
    which the low ones have few tokens a message and the high ones many."""
    known = [row for row in rows if row.tokens_per_message and row.regime is not Regime.DRAINING]
    if len({round(row.tokens_per_message, 3) for row in known}) < 3:
        return {}
    # Of a token's cost: a + b / tokens a message.
    shares = np.array([[1.0, 1 / row.tokens_per_message] for row in known])
    costs = np.array([row.frontend_us_per_token for row in known])
    (token, message), *_ = np.linalg.lstsq(shares, costs, rcond=None)
    return {"frontend_us_a_token": float(token), "frontend_us_a_message": float(message)}
