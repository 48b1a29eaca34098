"""Two runs on a machine that was not equally fast: what its speed did to each of their levels.

Speeds of both runs are relative to the first one's mean, so they say how fast the machine was at a level of either
against one and the same. What is left is that the reference is not the service: a machine that is 8 % slower for one
may be 6 or 10 % slower for the other, which the margin of a comparison has to cover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.judgements import Interval
from loadtest.machine import Machine, why_uncorrected
from loadtest.measure import LevelRows
from loadtest.reading import Reading


@dataclass(frozen=True)
class Correction:
    """`why`: there is none; then all speeds are 1. `ratio`: how fast the machine was in the second run, relative to
    the first (means)."""

    machines: tuple[Machine, Machine]
    why: str
    ratio: float = 1.0

    @classmethod
    def between(cls, first: Reading, second: Reading) -> Correction:
        machines = Machine(first.levels), Machine(second.levels)
        why = _why(first, second)
        one, other = (machine.seconds for machine in machines)
        if why or one is None or other is None:
            return cls(machines, why or "no level was measured between two reference times")
        return cls(machines, "", one / other)

    def speeds(self, side: int, parts: Sequence[LevelRows]) -> list[float]:
        """At each level. side: 0 or 1, of the run."""
        known = [None if self.why else self.machines[side].of(part.level) for part in parts]
        scale = self.ratio if side else 1.0
        return [1.0 if speed is None else speed.value * scale for speed in known]

    def error(self, side: int, parts: Sequence[LevelRows]) -> float:
        """Of their mean; relative, one standard deviation."""
        speed = None if self.why else self.machines[side].of_all(part.level for part in parts)
        return 0.0 if speed is None else speed.error

    def knees(self, first: Reading, second: Reading) -> tuple[Interval | None, Interval | None]:
        """Of both, at the machine's mean speed in the first."""
        one, other = first.summary.corrected_knee, second.summary.corrected_knee
        if self.why or one is None or other is None:
            return first.summary.knee, second.summary.knee
        return one, Interval(low=other.low / self.ratio, high=other.high / self.ratio)


def _why(first: Reading, second: Reading) -> str:
    """Why there is no correction; empty if there is one."""
    for name, reading in (("first", first), ("second", second)):
        if found := why_uncorrected(reading.run):
            return f"of the {name}, {found}"
    if first.run.reference != second.run.reference:
        return f"their references differ, {first.run.reference} and {second.run.reference}"
    return ""
