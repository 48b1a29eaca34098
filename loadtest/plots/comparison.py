"""Two results in one chart each."""

from __future__ import annotations

from msgspec.structs import replace

from loadtest.compare import MARGIN, Comparison, Finding
from loadtest.judgements import Verdict
from loadtest.plots import axes
from loadtest.plots.figure import Axis, Band, Figure, Format, Panel, Rule, Scale, Series
from loadtest.quantity import interval, share
from loadtest.reading import Reading

FIRST, SECOND = "grey", "blue"
COLOURS = {Finding.FASTER: "green", Finding.SLOWER: "red", Finding.SAME: "grey", Finding.CANNOT_TELL: "amber"}


def figures(comparison: Comparison) -> list[Figure]:
    made = [changes(comparison), served(comparison), first_token(comparison)]
    return [figure for figure in made if figure is not None]


def changes(comparison: Comparison) -> Figure | None:
    """Each figure's gain with its interval."""
    known = [change for change in comparison.overall if change.speed is not None]
    if not known:
        return None
    series = [
        Series(
            name=f"second is {finding}" if finding is not Finding.CANNOT_TELL else "cannot tell",
            x=[float(index) for index, change in enumerate(known) if change.finding is finding],
            y=[_gain(change.speed) for change in known if change.finding is finding],
            low=[_gain(change.low) for change in known if change.finding is finding],
            high=[_gain(change.high) for change in known if change.finding is finding],
            colour=colour,
            joined=False,
        )
        for finding, colour in COLOURS.items()
        if any(change.finding is finding for change in known)
    ]
    panel = Panel(
        x=Axis(label="figure", scale=Scale.CATEGORY, categories=[change.figure for change in known]),
        y=Axis(label="second faster than first by", format=Format.SHARE),
        series=series,
        rules=[
            Rule(label="", y=0.0, colour="grey"),
            Rule(label=f"margin {share(MARGIN)}", y=MARGIN, colour="grey"),
            Rule(label="", y=1 / (1 + MARGIN) - 1, colour="grey"),
        ],
    )
    return Figure(
        id="12-comparison",
        title="How much faster the second is",
        caption="Each figure over all pairs of levels that can show it: geometric mean of the ratios, with a bootstrap "
        "interval that holds for all figures at once. Up is better, for latencies too.",
        finding=f"The second is {comparison.finding}: {comparison.reason}."
        if comparison.finding is not Finding.CANNOT_TELL
        else f"It cannot be told: {comparison.reason}.",
        panels=[panel],
        wide=True,
    )


def served(comparison: Comparison) -> Figure | None:
    """Completed against offered, of both."""
    if not all(reading.sweep for reading in (comparison.first, comparison.second)):
        return None
    lines = [
        Series(
            name=f"{name}: completed",
            x=[axes.offered(verdict) for verdict in reading.sweep],
            y=[verdict.measures.completion_rate for verdict in reading.sweep],
            colour=colour,
            classes=axes.classes(reading.sweep),
            labels=[axes.name(verdict) for verdict in reading.sweep],
        )
        for name, colour, reading in _both(comparison)
    ]
    knees = [interval(reading.summary.knee) for _, _, reading in _both(comparison)]
    return Figure(
        id="12-served",
        title="Served against offered, of both",
        caption="Each mark is a level, coloured by its class. Shaded: the knees.",
        finding=f"Knees: {knees[0]}, and {knees[1]}.",
        panels=[
            Panel(
                x=axes.OFFERED,
                y=Axis(label="completed", unit="requests/s", low=0.0),
                series=lines,
                bands=_knees(comparison),
                rules=[Rule(label="y = x", diagonal=True, colour="grey")],
            )
        ],
    )


def first_token(comparison: Comparison) -> Figure | None:
    """p50 and p99 TTFT against offered rate, of both."""
    lines = [
        replace(one, name=f"{name}: {one.name}", colour=colour, dashed=one.name == "p50")
        for name, colour, reading in _both(comparison)
        for one in axes.quantiles(_answering(reading), lambda measures: measures.ttft, axes.offered)
        if one.name != "p95"
    ]
    if not any(one.x for one in lines):
        return None
    return Figure(
        id="12-ttft",
        title="Time to first token, of both",
        caption="Solid: p99. Dashed: p50. Shaded: the knees.",
        finding="Against the offered rate; open marks are lower bounds.",
        panels=[Panel(x=axes.OFFERED, y=axes.time("time to first token"), series=lines, bands=_knees(comparison))],
    )


def _answering(reading: Reading) -> list[Verdict]:
    return [verdict for verdict in reading.sweep if verdict.measures.ttft is not None]


def _both(comparison: Comparison) -> list[tuple[str, str, Reading]]:
    return [("first", FIRST, comparison.first), ("second", SECOND, comparison.second)]


def _knees(comparison: Comparison) -> list[Band]:
    return [
        Band(low=knee.low, high=knee.high, label=f"knee of the {name} {interval(knee, '')}", colour=colour)
        for name, colour, knee in (
            ("first", "window", comparison.first.summary.knee),
            ("second", "knee", comparison.second.summary.knee),
        )
        if knee is not None
    ]


def _gain(speed: float | None) -> float | None:
    return None if speed is None else speed - 1
