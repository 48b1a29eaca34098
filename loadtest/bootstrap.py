"""Intervals by resampling stretches of time.

Requests of a level are no independent draws: those near in time share a queue. So what is drawn again, with
replacement, are whole batches of a level's window (`LevelRows.batches`), and all that arrived or ended in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from loadtest.measure import BATCHES, LevelRows, Points

DRAWS = 4000

Samples = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Batches:
    """The batches of a group's levels, drawn `DRAWS` times. `counts`: draws x batches, how often each came up.
    `speeds`: of the machine at each level; times are given as if they had passed at speed 1."""

    parts: Sequence[LevelRows]
    counts: npt.NDArray[np.int64]
    speeds: Sequence[float]

    @classmethod
    def draw(
        cls, parts: Sequence[LevelRows], generator: np.random.Generator, speeds: Sequence[float] | None = None
    ) -> Batches:
        """Of one group alone. speeds: of its levels; None: 1."""
        total = BATCHES * len(parts)
        counts = generator.multinomial(total, np.full(total, 1 / total), size=DRAWS)
        return cls(parts, counts, speeds or [1.0] * len(parts))

    def alongside(self, parts: Sequence[LevelRows], speeds: Sequence[float] | None = None) -> Batches:
        """The same draws of another group, whose levels are as many and have the same arrivals: what the arrivals do to
        both is then in both."""
        return Batches(parts, self.counts, speeds or [1.0] * len(parts))

    @property
    def once(self) -> Batches:
        """Each batch once, which is the levels as they were."""
        return replace(self, counts=np.ones((1, BATCHES * len(self.parts)), dtype=np.int64))

    @cached_property
    def widths(self) -> Samples:
        """Seconds."""
        pairs = zip(self.parts, self.speeds, strict=True)
        return np.array([(high - low) * speed for part, speed in pairs for low, high in part.batches()])

    def rates(self, events: Callable[[LevelRows, float], Points]) -> Samples:
        """Of events (times, how many) in the window, a second. events: of a level and the machine's speed at it."""
        sums = np.zeros(len(self.widths))
        for position, speed in enumerate(self.speeds):
            inside, counts = self._inside(position, *events(self.parts[position], speed))
            sums += np.bincount(inside, counts, len(sums))
        return np.asarray(self.counts @ sums / (self.counts @ self.widths))

    def _inside(self, position: int, times: Samples, values: Samples) -> tuple[npt.NDArray[np.int64], Samples]:
        """Batches and values of what lies in the window of the part at this position."""
        part = self.parts[position]
        inside = (part.begin <= times) & (times < part.end)
        shares = (times[inside] - part.begin) / part.seconds
        return position * BATCHES + np.minimum(BATCHES - 1, (shares * BATCHES).astype(np.int64)), values[inside]

    def quantiles(self, values: Callable[[LevelRows], Points], share: float) -> Samples:
        """Nearest rank, as `measure.distribution` has it, of values (times, values). Empty if there are none."""
        found = [self._inside(position, *values(part)) for position, part in enumerate(self.parts)]
        batch = np.concatenate([batches for batches, _ in found])
        if not len(batch):
            return np.array([])
        ordered = np.concatenate([some * speed for (_, some), speed in zip(found, self.speeds, strict=True)])
        order = np.argsort(ordered, kind="stable")
        ordered, batch = ordered[order], batch[order]
        # Of each batch: how many of its values are among the first 1, 2, ... of all.
        below = np.cumsum(batch[:, None] == np.arange(len(self.widths)), axis=0)
        totals = self.counts @ below[-1]
        ranks = np.maximum(1, np.ceil(share * totals))
        low, high = np.zeros(len(ranks), dtype=np.int64), np.full(len(ranks), len(batch) - 1)
        while np.any(low < high):  # all draws' binary searches at once
            middle = (low + high) // 2
            reached = np.einsum("db,db->d", self.counts, below[middle]) >= ranks
            low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
        # A draw may have missed every batch with a value: it says nothing, and its search ran off the end.
        return np.where(totals > 0, ordered[np.minimum(low, len(batch) - 1)], np.nan)


def interval(samples: Samples, confidence: float) -> tuple[float, float] | None:
    """Percentile interval; None if fewer than half of the draws say something."""
    known = samples[np.isfinite(samples)]
    if len(known) * 2 < len(samples) or not len(known):
        return None
    tail = (1 - confidence) / 2
    low, high = np.quantile(known, [tail, 1 - tail])
    return (float(low), float(high)) if math.isfinite(low) and math.isfinite(high) else None
