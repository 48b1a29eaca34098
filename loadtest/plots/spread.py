"""Distributions at single levels, and latency against what the prefix cache held."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

from loadtest.judgements import Verdict
from loadtest.measure import LevelRows, measure, served
from loadtest.plots import axes
from loadtest.plots.figure import Axis, Figure, Format, Kind, Panel, Rule, Series, drawn
from loadtest.quantity import number, quantile, seconds, share
from loadtest.reading import Reading
from loadtest.records import RequestRow

POINTS = 240  # of a curve
PER_DECADE = 20  # bins
COLOURS = ("sky", "green", "orange", "red")
CACHED = (0.0, 1e-9, 0.25, 0.5, 0.75, 0.95, 1.0 + 1e-9)  # edges; the first bin is 0 alone


def distributions(reading: Reading) -> Figure | None:
    """TTFT CDF and ITL histogram of the levels around the knee, with the client's own lag."""
    picked = reading.around_knee
    curves = [_cdf(reading, verdict, COLOURS[index]) for index, verdict in enumerate(picked)]
    gaps = [_histogram(reading, verdict, COLOURS[index]) for index, verdict in enumerate(picked)]
    if not drawn(curves):
        return None
    lag = max(verdict.measures.lag_p99 for verdict in picked)
    rules = [Rule(label=f"client lag p99 {seconds(lag)}", x=lag, colour="grey")] if lag > 0 else []
    limits = reading.run.limits
    first = Panel(
        title="Time to first token: share of requests that waited at most so long",
        x=axes.time("time to first token"),
        y=Axis(label="requests", format=Format.SHARE, low=0.0, high=1.0),
        series=curves,
        rules=[*rules, Rule(label=f"limit {seconds(limits.ttft)}", x=limits.ttft)],
    )
    between = Panel(
        title="Gaps between messages with tokens",
        x=axes.time("gap"),
        y=Axis(label="gaps", format=Format.SHARE, low=0.0),
        series=drawn(gaps),
        rules=rules,
    )
    return Figure(
        id="07-distributions",
        title="Distributions below and beyond the knee",
        caption="A curve ends where requests that were cut off leave the rest unknown. The grey line is how late the "
        "client's own event loop woke up (p99): nothing left of it can be told from the client. Tokens of one message "
        "have no gap between them and are left out.",
        finding="Median time to first token: "
        + ", ".join(f"{quantile(v.measures.ttft.p50)} at {axes.name(v)}" for v in picked if v.measures.ttft)
        + ".",
        panels=[first, *([between] if between.series else [])],
        wide=True,
    )


def prefix_cache(reading: Reading) -> Figure | None:
    """Prefix-cache hit rate against TTFT, at rates that keep up."""
    parts = [part for verdict in reading.around_knee[:2] for part in reading.parts_of(verdict)]
    if not any(row.cached_prompt_tokens for part in parts for row in part.arrived):
        return None
    middles, found = [], []
    for low, high in pairwise(CACHED):
        measured = measure([_cached(part, low, high) for part in parts], reading.run.limits).service_ttft
        if measured is not None:
            middles.append(0.0 if low == 0.0 else (low + min(1.0, high)) / 2)
            found.append(measured)
    series = [
        Series(
            name=name,
            x=middles,
            y=[value.value for value in values],
            censored=[value.censored for value in values],
            colour=name,
            labels=[f"{measured.count} requests" for measured in found],
        )
        for name, values in (("p50", [m.p50 for m in found]), ("p95", [m.p95 for m in found]))
    ]
    return Figure(
        id="11-prefix-cache",
        title="Prefix-cache hits against time to first token",
        caption="Requests of the two lowest levels around the knee, by the share of their prompt that the service "
        "took from its cache; from the actual send.",
        finding=f"p50 is {quantile(found[0].p50)} at the least and {quantile(found[-1].p50)} at the most cached.",
        panels=[
            Panel(
                x=Axis(label="prompt taken from the cache", format=Format.SHARE, low=0.0, high=1.0),
                y=axes.time("time to first token", log=False),
                series=series,
            )
        ],
    )


def _cdf(reading: Reading, verdict: Verdict, colour: str) -> Series:
    """Of the same requests as the verdict's `ttft`: a quantile there lies on this curve."""
    rows = [row for part in reading.parts_of(verdict) for row in served(part.arrived)]
    known = sorted(row.ttft for row in rows if row.ttft is not None)
    waiting = [row.e2e for row in rows if row.ttft is None and row.e2e is not None]
    total = len(known) + len(waiting)
    sure = [value for value in known if value < min(waiting, default=math.inf) and value > 0]
    kept = sorted({round(step * (len(sure) - 1) / (POINTS - 1)) for step in range(POINTS)}) if sure else []
    skipped = len([value for value in known if value <= 0])
    return Series(
        name=axes.name(verdict),
        x=[sure[index] for index in kept],
        y=[(index + 1 + skipped) / total for index in kept],
        kind=Kind.STEP,
        colour=colour,
        marks=False,
    )


def _histogram(reading: Reading, verdict: Verdict, colour: str) -> Series:
    gaps = [gap for part in reading.parts_of(verdict) for gap in part.gaps.tolist() if gap > 0]
    bins = Counter(math.floor(math.log10(gap) * PER_DECADE) for gap in gaps)
    if not bins:
        return Series(name=axes.name(verdict), x=[], y=[])
    span = range(min(bins) - 1, max(bins) + 2)
    return Series(
        name=axes.name(verdict),
        x=[10 ** (index / PER_DECADE) for index in span],
        y=[bins[index] / len(gaps) for index in span],
        kind=Kind.BARS,
        colour=colour,
        marks=False,
        labels=[f"{number(float(bins[index]))} gaps, {share(bins[index] / len(gaps))}" for index in span],
    )


def _cached(part: LevelRows, low: float, high: float) -> LevelRows:
    """The level with only those requests that had such a share of their prompt cached."""
    return LevelRows(part.level, [row for row in part.rows if low <= _share(row) < high], part.telemetry)


def _share(row: RequestRow) -> float:
    return row.cached_prompt_tokens / row.prompt_tokens if row.prompt_tokens else 0.0
