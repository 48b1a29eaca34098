"""How fast the machine was, and whether what the service serves goes up and down with it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from loadtest.judge import FULL
from loadtest.machine import UNSTEADY, Machine
from loadtest.plots.figure import Axis, Figure, Format, Panel, Rule, Series
from loadtest.quantity import share
from loadtest.reading import Reading
from loadtest.records import Level, Outcome


def speed(reading: Reading) -> Figure | None:
    """The reference over the run, and the throughput of full levels with it and over it."""
    machine = Machine(reading.levels)
    measured = [level for level in reading.levels if machine.of(level) is not None]
    if len(measured) < 2:
        return None
    speeds = [found for level in measured if (found := machine.of(level)) is not None]
    reference = Series(
        name="reference",
        x=[(level.window_start + level.window_end) / 120 for level in measured],
        y=[speed.value for speed in speeds],
        colour="purple",
        labels=[f"± {share(speed.error)}" for speed in speeds],
    )
    full = [level for level in measured if _is_full(reading, level)]
    raw = [_completed(reading, level) for level in full]
    fair = [rate / found.value for level, rate in zip(full, raw, strict=True) if (found := machine.of(level))]
    served = [_served("completed, as measured", "amber", full, raw), _served("over the speed", "blue", full, fair)]
    unsteady = sum(bool(speed.unsteady) for speed in speeds)
    return Figure(
        id="15-machine",
        title="The machine's speed",
        caption="Line: a fixed piece of work, timed twice a second, in each level's window. "
        "Marks: requests/s of levels beyond the knee, which are full, relative to their median. If the reference "
        "speaks for the service, they lie nearer to 100 % over its speed than as measured.",
        finding=_finding(times_spread(reference.y), raw, fair, unsteady),
        panels=[
            Panel(
                x=Axis(label="since the run began", unit="min", low=0.0),
                y=Axis(label="of the mean", format=Format.SHARE),
                series=[reference, *(served if len(full) > 1 else [])],
                rules=[Rule(label="", y=1.0, colour="grey")],
            )
        ],
        wide=True,
    )


def times_spread(speeds: Sequence[float | None]) -> tuple[float, float]:
    known = [value for value in speeds if value is not None]
    return min(known), max(known)


def _finding(ends: tuple[float, float], raw: Sequence[float], fair: Sequence[float], unsteady: int) -> str:
    found = f"The machine ran at {share(ends[0])} to {share(ends[1])} of its mean speed"
    if len(raw) > 1:
        found += f"; full levels vary by {share(_variation(raw))} as measured, {share(_variation(fair))} over its speed"
    return f"{found}. Of {unsteady} levels it is known no better than to {share(UNSTEADY)}."


def _variation(rates: Sequence[float]) -> float:
    """Standard deviation over the mean."""
    return statistics.stdev(rates) / statistics.fmean(rates)


def _is_full(reading: Reading, level: Level) -> bool:
    knee = reading.summary.knee
    return knee is not None and level.rate is not None and level.rate >= FULL[0] * knee.low


def _completed(reading: Reading, level: Level) -> float:
    part = reading.parts[level.index]
    return sum(row.outcome is Outcome.COMPLETED for row in part.ended) / part.seconds


def _served(name: str, colour: str, levels: Sequence[Level], rates: Sequence[float]) -> Series:
    middle = statistics.median(rates) if rates else 1.0
    return Series(
        name=name,
        x=[(level.window_start + level.window_end) / 120 for level in levels],
        y=[rate / middle for rate in rates],
        colour=colour,
        joined=False,
        labels=[f"{level.rate:.4g}/s" for level in levels],
    )
