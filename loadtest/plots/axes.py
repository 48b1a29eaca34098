"""What the charts of a sweep share: its axes, the knee's band, the strip of classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadtest.judgements import Distribution, LevelClass, Measures, Quantile, Verdict
from loadtest.plots.figure import Axis, Band, Format, Mark, Scale, Series
from loadtest.quantity import interval, number
from loadtest.reading import Reading

OFFERED = Axis(label="offered", unit="requests/s", low=0.0)
QUANTILES = ("p50", "p95", "p99")


def rate(label: str) -> Axis:
    return Axis(label=label, unit="requests/s", low=0.0)


def time(label: str, *, log: bool = True) -> Axis:
    return Axis(label=label, scale=Scale.LOG if log else Scale.LINEAR, format=Format.SECONDS, low=None if log else 0.0)


def knee(reading: Reading) -> list[Band]:
    found = reading.summary.knee
    return [] if found is None else [Band(low=found.low, high=found.high, label=f"knee {interval(found, '')}")]


def strip(verdicts: Sequence[Verdict]) -> list[Mark]:
    return [
        Mark(x=verdict.rate, level_class=verdict.level_class, label=name(verdict))
        for verdict in verdicts
        if verdict.rate is not None
    ]


def name(verdict: Verdict) -> str:
    """A group in a reader's words."""
    if verdict.rate is None:
        return verdict.group if verdict.concurrency is None else f"{verdict.concurrency} in flight"
    times = f" ({verdict.multiple:g} × knee)" if verdict.multiple is not None else ""
    return f"{number(verdict.rate)}/s{times}"


def quantiles(
    verdicts: Sequence[Verdict], of: Callable[[Measures], Distribution | None], x: Callable[[Verdict], float]
) -> list[Series]:
    """p50, p95 and p99 of a distribution of each group."""
    found = [(verdict, measured) for verdict in verdicts if (measured := of(verdict.measures)) is not None]
    return [
        Series(
            name=share,
            x=[x(verdict) for verdict, _ in found],
            y=[_quantile(measured, share).value for _, measured in found],
            censored=[_quantile(measured, share).censored for _, measured in found],
            colour=share,
            labels=[name(verdict) for verdict, _ in found],
        )
        for share in QUANTILES
    ]


def _quantile(measured: Distribution, share: str) -> Quantile:
    found: Quantile = getattr(measured, share)
    return found


def offered(verdict: Verdict) -> float:
    """Of an open-loop group."""
    return verdict.rate or 0.0


def classes(verdicts: Sequence[Verdict]) -> list[LevelClass]:
    return [verdict.level_class for verdict in verdicts]
