"""Latency against load."""

from __future__ import annotations

from itertools import pairwise

from msgspec.structs import replace

from loadtest.judgements import Verdict
from loadtest.measure import LevelRows, measure
from loadtest.plots import axes
from loadtest.plots.figure import Axis, Cell, Figure, Panel, Rule, Scale, Series, drawn
from loadtest.quantity import number, quantile, quantile_of, seconds
from loadtest.reading import Reading

PROMPTS = (0, 64, 256, 1024, 4096, 16384)  # tokens: edges of the heat map's rows


def first_token(reading: Reading) -> Figure | None:
    """Time to first token against offered rate."""
    sweep = [verdict for verdict in reading.sweep if verdict.measures.ttft is not None]
    if not sweep:
        return None
    limit = reading.run.limits.ttft
    panel = Panel(
        x=axes.OFFERED,
        y=axes.time("time to first token"),
        series=axes.quantiles(sweep, lambda measures: measures.ttft, axes.offered),
        bands=axes.knee(reading),
        rules=[Rule(label=f"limit {seconds(limit)}", y=limit)],
        strip=axes.strip(sweep),
    )
    low, high = sweep[0].measures.ttft, sweep[-1].measures.ttft
    return Figure(
        id="01-ttft",
        title="Time to first token against offered rate",
        caption="From the time at which the schedule wanted a request sent, so waiting in the client counts. Accepted "
        "requests only; an open mark is a lower bound (some still waited when the level was cut off).",
        finding=f"p99 goes from {quantile_of(low, 'p99')} at {axes.name(sweep[0])} to {quantile_of(high, 'p99')} "
        f"at {axes.name(sweep[-1])}.",
        panels=[panel],
    )


def per_token(reading: Reading) -> Figure | None:
    """Time per output token and gaps between tokens against offered rate."""
    sweep = [verdict for verdict in reading.sweep if verdict.measures.tpot is not None]
    if not sweep:
        return None
    limit = reading.run.limits.tpot
    mean = Panel(
        title="Mean time per output token of each request (TPOT)",
        x=axes.OFFERED,
        y=axes.time("time per output token"),
        series=axes.quantiles(sweep, lambda measures: measures.tpot, axes.offered),
        bands=axes.knee(reading),
        rules=[Rule(label=f"limit {seconds(limit)}", y=limit)],
        strip=axes.strip(sweep),
    )
    gaps = Panel(
        title="Single gaps between tokens (ITL)",
        x=axes.OFFERED,
        y=axes.time("gap between tokens"),
        series=_positive(axes.quantiles(sweep, lambda measures: measures.itl, axes.offered)),
        bands=axes.knee(reading),
        strip=axes.strip(sweep),
    )
    low, high = sweep[0].measures.tpot, sweep[-1].measures.tpot
    return Figure(
        id="02-tpot",
        title="Time per output token against offered rate",
        caption="Above, each request's mean after its first token; below, every gap by itself: what a reader of the "
        "stream sees as stutter. Tokens that came in one message have a gap of 0, which a log axis leaves out.",
        finding=f"TPOT p99 goes from {quantile_of(low, 'p99')} at {axes.name(sweep[0])} to "
        f"{quantile_of(high, 'p99')} at {axes.name(sweep[-1])}.",
        panels=[panel for panel in (mean, gaps) if drawn(panel.series)],
        wide=True,
    )


def hockey_stick(reading: Reading) -> Figure | None:
    """End-to-end latency against what was completed."""
    sweep = [verdict for verdict in reading.sweep if verdict.measures.e2e is not None]
    if not sweep:
        return None
    most = max(verdict.measures.completion_rate for verdict in sweep)
    series = axes.quantiles(sweep, lambda measures: measures.e2e, lambda verdict: verdict.measures.completion_rate)
    ends = [one for one in series if one.name != "p95"]
    panel = Panel(x=axes.rate("completed"), y=axes.time("request latency, end to end"), series=ends)
    return Figure(
        id="05-latency-throughput",
        title="Latency against throughput",
        caption="Each mark is a level, joined in order of offered rate. Past the knee the line turns up or back: more "
        "load buys waiting, and no more work.",
        finding=f"No level completed more than {number(most)} requests/s.",
        panels=[panel],
    )


def pareto(reading: Reading) -> Figure | None:
    """Speed for each user against work for all."""
    groups = [
        ("closed loop", "purple", [v for v in reading.closed if v.measures.tpot is not None]),
        ("open loop", "blue", [v for v in reading.sweep if v.measures.tpot is not None]),
    ]
    series = [
        Series(
            name=name,
            colour=colour,
            x=[verdict.measures.token_rate for verdict in verdicts],
            y=[_speed(verdict) for verdict in verdicts],
            classes=axes.classes(verdicts),
            joined=name == "closed loop",
            labels=[axes.name(verdict) for verdict in verdicts],
        )
        for name, colour, verdicts in groups
        if verdicts
    ]
    if not drawn(series):
        return None
    alone = max(value for one in series for value in one.y if value is not None)
    most = max(value for one in series for value in one.x)
    return Figure(
        id="13-pareto",
        title="Speed per user against tokens in all",
        caption="Tokens/s that one user sees (1 / median TPOT) against tokens/s of all users together. Up and to the "
        "right is better; the outer edge is what can be had.",
        finding=f"One user alone sees {number(alone)} tokens/s; all together get at most {number(most)} tokens/s.",
        panels=[
            Panel(
                x=Axis(label="output of all users", unit="tokens/s", low=0.0),
                y=Axis(label="output per user", unit="tokens/s", low=0.0),
                series=series,
            )
        ],
    )


def prompts(reading: Reading) -> Figure | None:
    """Heat map: prompt length and rate against p99 TTFT."""
    rows = [row for verdict in reading.sweep for part in reading.parts_of(verdict) for row in part.arrived]
    edges = [*PROMPTS, 1 << 62]
    buckets = [(low, high) for low, high in pairwise(edges) if any(low <= row.prompt_tokens < high for row in rows)]
    if len(buckets) < 2:
        return None
    cells = []
    for column, verdict in enumerate(reading.sweep):
        for line, (low, high) in enumerate(buckets):
            found = measure([_only(part, low, high) for part in reading.parts_of(verdict)], reading.run.limits).ttft
            if found is not None:
                text, note = quantile(found.p99), f"n = {found.count}"
                cells.append(Cell(x=column, y=line, text=text, value=found.p99.value, note=note))
    slowest = max(cells, key=lambda cell: cell.value or 0.0)
    lengths = [_bucket(low, high) for low, high in buckets]
    rates = [number(verdict.rate) for verdict in reading.sweep]
    return Figure(
        id="08-prompt-length",
        title="Prompt length and rate against time to first token",
        caption="p99 of the time to first token, by prompt tokens (rows) and offered rate (columns).",
        finding=f"Slowest: {slowest.text} with {lengths[slowest.y]} prompt tokens at {rates[slowest.x]} requests/s.",
        panels=[
            Panel(
                x=Axis(label="offered", unit="requests/s", scale=Scale.CATEGORY, categories=rates),
                y=Axis(label="prompt", unit="tokens", scale=Scale.CATEGORY, categories=lengths),
                cells=cells,
            )
        ],
        wide=True,
    )


def _only(part: LevelRows, low: int, high: int) -> LevelRows:
    """The level as if only prompts of these lengths had been sent."""
    return LevelRows(part.level, [row for row in part.rows if low <= row.prompt_tokens < high], part.telemetry)


def _bucket(low: int, high: int) -> str:
    return f"≥ {low}" if high == 1 << 62 else f"< {high}" if low == 0 else f"{low} to {high - 1}"


def _speed(verdict: Verdict) -> float | None:
    tpot = verdict.measures.tpot
    return 1 / tpot.p50.value if tpot is not None and tpot.p50.value > 0 else None


def _positive(series: list[Series]) -> list[Series]:
    """For a log axis."""
    return [replace(one, y=[value or None for value in one.y]) for one in series]
