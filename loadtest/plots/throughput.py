"""What came out against what went in."""

from __future__ import annotations

from loadtest.classify import LITTLE
from loadtest.judge import served_goodput
from loadtest.judgements import UslFit, Verdict
from loadtest.plots import axes
from loadtest.plots.figure import Axis, Figure, Format, Panel, Rule, Series
from loadtest.quantity import interval, number, share
from loadtest.reading import Reading

CURVE = 60  # points of a fitted curve


def offered_and_completed(reading: Reading) -> Figure | None:
    """Completed and good requests against offered ones."""
    sweep = reading.sweep
    if not sweep:
        return None
    x = [axes.offered(verdict) for verdict in sweep]
    labels = [axes.name(verdict) for verdict in sweep]
    completed = Series(
        name="completed",
        x=x,
        y=[verdict.measures.completion_rate for verdict in sweep],
        classes=axes.classes(sweep),
        labels=labels,
    )
    good_rates = [served_goodput(verdict.measures) for verdict in sweep]
    good = Series(
        name="goodput (within limits)",
        x=x,
        y=[*good_rates],
        colour="green",
        dashed=True,
        marks=False,
        labels=labels,
    )
    refused = Series(
        name="refused",
        x=x,
        y=[verdict.measures.refused / verdict.measures.seconds for verdict in sweep],
        colour="grey",
        marks=False,
        labels=labels,
    )
    panel = Panel(
        x=axes.OFFERED,
        y=Axis(label="served", unit="requests/s", low=0.0),
        series=[completed, good, *([refused] if any(refused.y) else [])],
        bands=axes.knee(reading),
        rules=[Rule(label="y = x", diagonal=True, colour="grey")],
        strip=axes.strip(sweep),
    )
    return Figure(
        id="03-offered-completed",
        title="Served against offered",
        caption="On the diagonal all that comes in goes out. Marks are coloured by the level's class; goodput counts "
        "what was completed within both limits.",
        finding=f"The knee lies at {interval(reading.summary.knee)}; goodput peaks at "
        f"{number(max(good_rates))} requests/s."
        if reading.summary.knee
        else f"No knee was bracketed; goodput peaks at {number(max(good_rates))} requests/s.",
        panels=[panel],
        wide=True,
    )


def concurrency(reading: Reading) -> Figure | None:
    """Output against requests in flight, with the Universal Scalability Law where it could be fitted."""
    closed = reading.closed
    if len(closed) < 2:
        return None
    tokens = [("closed loop", "purple", closed), ("open loop", "blue", reading.sweep)]
    output = Panel(
        title="Tokens",
        x=Axis(label="in flight, time average", low=0.0),
        y=Axis(label="output", unit="tokens/s", low=0.0),
        series=[
            Series(
                name=name,
                x=[verdict.measures.in_flight for verdict in verdicts],
                y=[verdict.measures.token_rate for verdict in verdicts],
                colour=colour,
                labels=[axes.name(verdict) for verdict in verdicts],
            )
            for name, colour, verdicts in tokens
            if verdicts
        ],
    )
    usl = reading.summary.usl
    requests = Panel(
        title="Requests, closed loop",
        x=Axis(label="in flight", low=0.0),
        y=Axis(label="completed", unit="requests/s", low=0.0),
        series=[_measured(closed), *([_curve(usl, closed)] if usl else [])],
        rules=_peak(usl, closed),
    )
    return Figure(
        id="04-concurrency",
        title="Output against concurrency",
        caption="The curve is the Universal Scalability Law, fitted for the reader; no verdict depends on it. "
        "Contention bends it, coherency turns it down.",
        finding=_fit_words(usl),
        panels=[output, requests],
        wide=True,
    )


def little(reading: Reading) -> Figure | None:
    """Little's law at each level."""
    sweep = [verdict for verdict in reading.sweep if verdict.measures.little_gap is not None]
    if not sweep:
        return None
    gaps = [verdict.measures.little_gap for verdict in sweep]
    panel = Panel(
        x=axes.OFFERED,
        y=Axis(label="|L − λW| / L", format=Format.SHARE, low=0.0, high=max(1.5 * LITTLE, *(gap or 0 for gap in gaps))),
        series=[
            Series(
                name="gap",
                x=[axes.offered(verdict) for verdict in sweep],
                y=gaps,
                colour="grey",
                classes=axes.classes(sweep),
                labels=[axes.name(verdict) for verdict in sweep],
            )
        ],
        bands=axes.knee(reading),
        rules=[Rule(label=f"{share(LITTLE)}", y=LITTLE)],
    )
    kept = sum((gap or 0.0) <= LITTLE for gap in gaps)
    return Figure(
        id="14-little",
        title="Little's law",
        caption="Requests in flight (L) must equal arrival rate times time in the system (λW) while nothing piles up: "
        "a check of the instrument. A gap at a level that keeps up would mean lost events.",
        finding=f"{kept} of {len(gaps)} levels agree within {share(LITTLE)}.",
        panels=[panel],
    )


def _measured(closed: list[Verdict]) -> Series:
    return Series(
        name="measured",
        x=[float(verdict.concurrency or 0) for verdict in closed],
        y=[verdict.measures.completion_rate for verdict in closed],
        colour="purple",
        labels=[axes.name(verdict) for verdict in closed],
    )


def _curve(usl: UslFit, closed: list[Verdict]) -> Series:
    most = max(verdict.concurrency or 1 for verdict in closed)
    x = [1 + (most - 1) * step / (CURVE - 1) for step in range(CURVE)]
    y: list[float | None] = [rate_at(usl, n) for n in x]
    return Series(name="USL fit", x=x, y=y, colour="orange", dashed=True, marks=False)


def rate_at(usl: UslFit, n: float) -> float:
    """Requests/s with n in flight, by the fit."""
    return usl.rate * n / (1 + usl.contention * (n - 1) + usl.coherency * n * (n - 1))


def _peak(usl: UslFit | None, closed: list[Verdict]) -> list[Rule]:
    """Where it lies within what was measured."""
    if usl is None or usl.peak is None or usl.peak > max(verdict.concurrency or 1 for verdict in closed):
        return []
    return [Rule(label=f"most at {number(usl.peak)}", x=usl.peak, colour="grey")]


def _fit_words(usl: UslFit | None) -> str:
    if usl is None:
        return "Too few closed-loop levels for a fit."
    peak = f", most throughput at {number(usl.peak)} in flight" if usl.peak else ", no peak"
    return (
        f"Fit: contention {share(usl.contention)}, coherency {share(usl.coherency)}{peak}; "
        f"largest residual {share(usl.residual)} of {usl.points} points."
    )
