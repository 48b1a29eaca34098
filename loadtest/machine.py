"""What the reference says of a run: how fast the machine was in each level's window, relative to its mean over all."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from loadtest.judgements import MachineSpeed
from loadtest.records import Level, ReferenceTime, Run

UNSTEADY = 0.03  # a standard deviation of a level's speed, from which on it is known badly
LEAST_TIMES = 4
STRETCHES = 10  # of a window, whose means are nearly independent


@dataclass(frozen=True)
class Machine:
    """Of the levels of one run."""

    levels: Sequence[Level]

    @cached_property
    def times(self) -> list[ReferenceTime]:
        return [time for level in self.levels for time in in_window(level)]

    @cached_property
    def seconds(self) -> float | None:
        """What speed 1 takes: with it the mean speed is 1."""
        return statistics.harmonic_mean(time.seconds for time in self.times) if self.times else None

    def at(self, time: ReferenceTime) -> float:
        assert self.seconds is not None
        return self.seconds / time.seconds

    def of(self, level: Level) -> MachineSpeed | None:
        speeds = [self.at(time) for time in in_window(level)]
        if len(speeds) < LEAST_TIMES:
            return None
        count = min(STRETCHES, len(speeds))
        ends = [round(index * len(speeds) / count) for index in range(count + 1)]
        means = [statistics.fmean(speeds[low:high]) for low, high in itertools.pairwise(ends)]
        error = statistics.stdev(means) / math.sqrt(count)
        return MachineSpeed(
            value=statistics.fmean(speeds), error=error, unsteady=[level.index] if error > UNSTEADY else []
        )

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


def in_window(level: Level) -> list[ReferenceTime]:
    return [time for time in level.reference if level.window_start <= time.at < level.window_end]


def why_uncorrected(run: Run) -> str:
    """Empty if the machine's speed was measured."""
    if run.reference is not None:
        return ""
    if run.target.device and run.target.device != "cpu":
        return f"the service runs on {run.target.device}, whose speed no reference of ours measures"
    if not run.target.command:
        return "the service was there before the run, on a machine whose speed was not measured"
    return "this result has no reference times"
