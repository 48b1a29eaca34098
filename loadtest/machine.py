"""What the reference says of a run: how fast the machine was at each level, relative to its median over the run.

A level's speed is the mean of the two times taken before and after it. How far the machine may have strayed between
them is not known; what is known is by how much it moves in the time of a level.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from loadtest.judgements import MachineSpeed, Verdict
from loadtest.records import Level, ReferenceTime, Run

UNSTEADY = 0.04  # by which before and after differ
# Of a speed that jumps by D at any moment between the two times, or wanders by D on average from one to the other, the
# mean is off theirs by D / sqrt(12).
BRIDGE = 1 / math.sqrt(12)


@dataclass(frozen=True)
class Machine:
    """Of the levels of one run."""

    levels: Sequence[Level]

    @cached_property
    def times(self) -> list[ReferenceTime]:
        return [time for level in self.levels for time in (level.before, level.after) if time is not None]

    @cached_property
    def seconds(self) -> float | None:
        """What speed 1 takes: the median."""
        return statistics.median(time.seconds for time in self.times) if self.times else None

    def at(self, time: ReferenceTime) -> float:
        assert self.seconds is not None
        return self.seconds / time.seconds

    @cached_property
    def wander(self) -> float:
        """By how much it changes in the time of a level (root mean square, relative)."""
        changes = [changed for level in self.levels if (changed := change(level)) is not None]
        return math.sqrt(statistics.fmean(value**2 for value in changes)) if changes else 0.0

    def of(self, level: Level) -> MachineSpeed | None:
        changed = change(level)
        if changed is None or level.before is None or level.after is None:
            return None
        value = (self.at(level.before) + self.at(level.after)) / 2
        error = max(changed, self.wander) * BRIDGE
        return MachineSpeed(value=value, error=error, unsteady=[level.index] if changed > UNSTEADY else [])

    def of_all(self, levels: Iterable[Level]) -> MachineSpeed | None:
        """Over the windows of several levels; None if one of them has none."""
        chosen = list(levels)
        known = [speed for level in chosen if (speed := self.of(level)) is not None]
        if not known or len(known) < len(chosen):
            return None
        seconds = [level.window_end - level.window_start for level in chosen]
        shares = [value / sum(seconds) for value in seconds]
        return MachineSpeed(
            value=sum(share * speed.value for share, speed in zip(shares, known, strict=True)),
            error=math.sqrt(sum((share * speed.error) ** 2 for share, speed in zip(shares, known, strict=True))),
            unsteady=[index for speed in known for index in speed.unsteady],
        )

    def with_speed(self, verdict: Verdict) -> Verdict:
        """Of its levels that count."""
        counted = [
            level for level in self.levels if level.index in verdict.levels and str(level.index) not in verdict.void
        ]
        return replace(verdict, machine=self.of_all(counted))


def change(level: Level) -> float | None:
    """Between before and after, relative."""
    if level.before is None or level.after is None:
        return None
    return abs(level.after.seconds / level.before.seconds - 1)


def why_uncorrected(run: Run) -> str:
    """Empty if the machine's speed was measured."""
    if run.reference is not None:
        return ""
    if run.target.device and run.target.device != "cpu":
        return f"the service runs on {run.target.device}, whose speed no reference of ours measures"
    if not run.target.command:
        return "the service was there before the run, on a machine whose speed was not measured"
    return "this result has no reference times"
