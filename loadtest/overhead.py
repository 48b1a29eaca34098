"""`overhead`: what the service costs around the forward pass, measured with a model whose forward pass is next to
nothing: CPU a token and a request, tokens/s a core and a GB, and what regime each offered load is."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from loadtest.drive import ServiceDriver, idle_floor
from loadtest.fleet import FleetError
from loadtest.judgements import OverheadRow, Regime
from loadtest.mapping import judge
from loadtest.measure import LevelRows
from loadtest.mix import Form, RequestClass
from loadtest.plan import LevelPlan
from loadtest.progress import RunProgress
from loadtest.records import Hypothesis, Outcome, Phase, RunKind
from loadtest.result import Result
from loadtest.session import Record, SessionOptions, machine_of, session, until_interrupted
from loadtest.telemetry import scrape
from loadtest.tiny_model import write_tiny_model

PROMPT, OUTPUT = 16, 64
MIX = {"short": RequestClass(Form.TOKENS, (PROMPT, PROMPT), (OUTPUT, OUTPUT))}
SHARES = (0.25, 0.5, 0.75, 0.9, 1.1, 1.5)
CONCURRENCY = 128  # of the calibration
KEEPS_UP = 0.98
HYPOTHESES = tuple(
    Hypothesis(id=name, text=text, measure=measure, relation=relation, bound=bound)
    for name, text, measure, relation, bound in (
        ("counts", "Every token that was asked for comes, and is counted once", "counts_differ", "==", 0.0),
        ("keeps-up", "It keeps up with 0.85 of the most that it serves", "kept_up_share", ">=", 0.85),
        ("no-drift", "Where it keeps up, first tokens get later by less than 1 ms/s", "lag_drift", "<=", 0.001),
        ("front-end", "A token costs the front end less than 30 us", "frontend_us", "<=", 30.0),
    )
)
SETTLE = 0.5  # seconds for the service's counters to be told
PATIENCE = 5.0  # seconds for those of a service that is busy
SAME_STAMP = 1.5e-6  # seconds
COUNTERS = {"generated_tokens_total", "steps_total"}


async def run_overhead(options: SessionOptions, seconds: float, warm_up: float, progress: RunProgress) -> Result:
    """seconds: of each level's window, after `warm_up`. Raises as `session`. Without an address, the tiny model is
    served."""
    machine = await machine_of()
    with tempfile.TemporaryDirectory() as folder:
        if not options.address:
            model = await asyncio.to_thread(write_tiny_model, Path(folder) / "tiny")
            flags = ["--model", str(model), "--load-format", "dummy", "--served-model-name", "tiny"]
            options = replace(options, serve_arguments=[*flags, *options.serve_arguments])
        record = Record(
            options, RunKind.OVERHEAD, HYPOTHESES, parameters={"prompt_tokens": PROMPT, "output_tokens": OUTPUT}
        )
        async with session(record, machine, MIX, progress) as opened:
            notes: list[str] = []
            rows: list[OverheadRow] = []
            try:
                await until_interrupted(measure_all(opened.driver, seconds, warm_up, options.seed, rows, progress))
            except asyncio.CancelledError:
                notes.append("interrupted")
            except FleetError as error:
                notes.append(str(error))
            result = opened.driver.result
            result.write_overhead(rows)
            minutes = (time.monotonic() - record.origin) / 60
            judge(result, complete=not notes, notes=notes, minutes=minutes)
            return result


async def measure_all(
    driver: ServiceDriver, seconds: float, warm_up: float, seed: int, rows: list[OverheadRow], progress: RunProgress
) -> None:
    """Fills `rows`: closed loop for the bound, then open-loop levels at shares of it."""

    def plan(index: int, rate: float | None) -> LevelPlan:
        return LevelPlan(
            phase=Phase.OVERHEAD,
            rate=rate,
            concurrency=CONCURRENCY if rate is None else None,
            warm_up=warm_up,
            window=seconds,
            drain_limit=60.0,
            seed=seed * 1000 + index,
            label="closed" if rate is None else f"{rate:.4g}",
        )

    async def run(index: int, rate: float | None) -> LevelRows:
        ahead = [warm_up + seconds + 2.0] * (len(SHARES) - index)
        progress.on_plan(plan(index, rate), ahead)
        before = counted(driver)
        part = await driver.run(plan(index, rate))
        grown = await growth(driver, before, sum(row.tokens for row in part.rows))
        found = overhead_rows(part, grown)
        rows.extend(found)
        for row in found:
            progress.say(line(row))
        return part

    driver.floor = await idle_floor(driver.address, driver.vocabulary)  # its tokens are no level's
    await asyncio.sleep(SETTLE)
    closed = await run(0, None)
    bound = sum(row.outcome is Outcome.COMPLETED for row in closed.ended) / closed.seconds
    for index, share in enumerate(SHARES, start=1):
        await run(index, float(f"{bound * share:.4g}"))


async def growth(driver: ServiceDriver, before: float | None, expected: int) -> float | None:
    """Of the service's counter since `before`, once it has grown as expected or has had its time."""
    until = time.monotonic() + PATIENCE
    await asyncio.sleep(SETTLE)
    while (after := counted(driver)) is not None and before is not None:
        if after - before >= expected or time.monotonic() >= until:
            return after - before
        await asyncio.sleep(SETTLE)
    return None


def counted(driver: ServiceDriver) -> float | None:
    """Tokens that the service says it has generated."""
    return scrape(driver.metrics_url).get("generated_tokens_total") if driver.metrics_url else None


def overhead_rows(part: LevelRows, counted_tokens: float | None) -> list[OverheadRow]:
    """One row for the window, and one for the drain of a level that was left with work."""
    level = part.level
    offered = sum(row.asked_tokens for row in part.arrived) / part.seconds
    consumed = part.tokens / part.seconds
    if level.concurrency is not None:
        offered = consumed
    keeps_up = consumed >= KEEPS_UP * offered
    matching = matches(part, counted_tokens)
    regime = Regime.KEEP_UP if keeps_up and level.concurrency is None else Regime.SATURATED
    rows = [overhead_row(part, part.begin, part.end, offered, regime, matching)]
    if not keeps_up and level.end - part.end >= 1.0:
        rows.append(overhead_row(part, part.end, level.end, 0.0, Regime.DRAINING, matching))
    return rows


def overhead_row(
    part: LevelRows, begin: float, end: float, offered: float, regime: Regime, matching: bool
) -> OverheadRow:
    seconds = end - begin
    tokens = sum(count for at, count in part.stamps() if begin <= at < end)
    ended = sum(row.outcome is Outcome.COMPLETED and begin <= (row.finish or 0.0) < end for row in part.rows)
    telemetry = [row for row in part.telemetry if begin < row.at <= end]
    server = mean([row.server_cpu for row in telemetry if row.server_cpu is not None])
    engine = mean([row.engine_cpu for row in telemetry if row.engine_cpu is not None])
    client = sum(report.cpu for report in part.level.clients) if regime is not Regime.DRAINING else 0.0
    pss = max((row.server_pss for row in telemetry if row.server_pss is not None), default=0)
    rate = tokens / seconds
    messages = messages_between(part, begin, end)
    drift = part.ttft_slope.value if part.ttft_slope is not None and regime is not Regime.DRAINING else 0.0
    return OverheadRow(
        level=part.level.index,
        offered=offered,
        consumed=rate,
        regime=regime,
        lag_drift=drift,
        frontend_us_per_token=per(server - engine, rate),
        engine_us_per_token=per(engine, rate),
        client_us_per_token=per(client, rate),
        server_us_per_request=per(server, ended / seconds),
        tokens_per_second_per_core=rate / server if server else 0.0,
        pss=pss,
        per_gb=rate / (pss / 1e9) if pss else 0.0,
        counts_match=matching,
        tokens_per_message=tokens / messages if messages else 0.0,
        tokens_per_step=tokens_per_step([row.metrics for row in telemetry]),
    )


def messages_between(part: LevelRows, begin: float, end: float) -> int:
    """Messages with tokens: what came in one has one stamp, but for its rounding."""
    stamps = sorted(at for at, _ in part.stamps() if begin <= at < end)
    return sum(later - at > SAME_STAMP for at, later in pairwise([-1.0, *stamps]))


def tokens_per_step(metrics: Sequence[Mapping[str, float]]) -> float | None:
    """By the service's counters, between the first and the last row that has them."""
    known = [row for row in metrics if row.keys() >= COUNTERS]
    if len(known) < 2:
        return None
    tokens, steps = (known[-1][name] - known[0][name] for name in ("generated_tokens_total", "steps_total"))
    return tokens / steps if steps else None


def matches(part: LevelRows, counted_tokens: float | None) -> bool:
    """Every request that completed got what it asked for, and the service counted as many tokens as all got."""
    done = [row for row in part.rows if row.outcome is Outcome.COMPLETED]
    each = all(row.tokens == row.asked_tokens == row.completion_tokens for row in done)
    return each and (counted_tokens is None or counted_tokens == sum(row.tokens for row in part.rows))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def per(cores: float, rate: float) -> float:
    """Microseconds of CPU for each of so many a second."""
    return cores * 1e6 / rate if rate else 0.0


def line(row: OverheadRow) -> str:
    steps = "" if row.tokens_per_step is None else f", {row.tokens_per_step:.1f} a step"
    sanity = "counts match" if row.counts_match else "[red]COUNTS DIFFER[/red]"
    return (
        f"{row.regime:>9}: {row.offered:.0f} tokens/s offered, {row.consumed:.0f} consumed, lag "
        f"{row.lag_drift * 1e3:+.1f} ms/s; CPU a token: front end {row.frontend_us_per_token:.0f} us, engine "
        f"{row.engine_us_per_token:.0f} us, client {row.client_us_per_token:.0f} us; a request "
        f"{row.server_us_per_request:.0f} us; {row.tokens_per_message:.1f} tokens a message{steps}; "
        f"{row.tokens_per_second_per_core:.0f} tokens/s a core, {row.per_gb:.0f} "
        f"a GB ({row.pss / 1e6:.0f} MB); {sanity}"
    )
