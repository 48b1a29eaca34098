"""How much KV cache the running sequences will need before they end, and what is learned from those before them.

Admitting by what is free now lets too many in: they all grow, and some must be preempted. Reserving every sequence's
limit lets too few in. Between the two lies the peak of what is to come: when a sequence ends its blocks are free again,
so at any moment only those still running count.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np

from engine.kv.block_table import BlockTables
from engine.schedule.sequence import Sequence

_SMOOTHING = 0.05


def peak_tokens(held: Rows[int], remaining: Rows[int]) -> int:
    """The most that sequences holding `held[i]` tokens, with `remaining[i]` still to come, one a step each, hold
    together at any later moment. Just before the k-th longest ends, the k longest are left, each grown by that much."""
    if not held:
        return 0
    order = np.argsort(-np.asarray(remaining), kind="stable")
    sizes = np.cumsum(np.asarray(held)[order])
    growth = np.asarray(remaining)[order] * np.arange(1, len(order) + 1)
    return int((sizes + growth).max())


def own_tokens(sequence: Sequence, block_size: int, coming: int = 0) -> int:
    """Room in the blocks that a sequence holds or will hold, less those that others computed, in tokens; `coming`: once
    it has so many more."""
    rounded = -(-(sequence.num_tokens + coming) // block_size) * block_size
    return max(0, rounded - sequence.shared_tokens)


@dataclass(slots=True)
class OutputForecast:
    """Learns how long outputs are. Until a request has ended, and beyond what was learned, a sequence is expected to
    run to its own limit, or `first_guess` tokens if that is less."""

    first_guess: int = 512
    mean: float = 0.0
    observed: int = 0

    def observe(self, generated: int) -> None:
        self.observed += 1
        weight = max(_SMOOTHING, 1 / self.observed)
        self.mean += (generated - self.mean) * weight

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that the sequence is expected to add to those it has."""
        limit = sequence.max_tokens_total - sequence.num_tokens
        expected = self.mean if self.observed else self.first_guess
        output = sequence.num_tokens - sequence.num_prompt
        return max(0, min(limit, round(max(expected - output, expected / 4, 1))))


@dataclass(slots=True)
class PromptForecast:
    """Learns how much of their prompts requests find computed when their turn comes."""

    share: float = 0.0
    observed: int = 0

    def observe(self, found: int, tokens: int) -> None:
        self.observed += 1
        self.share += (found / tokens - self.share) * max(_SMOOTHING, 1 / self.observed)

    def found(self, tokens: int) -> int:
        """Of so many tokens of prompts, those that will not have to be computed."""
        return int(tokens * self.share)


@dataclass(slots=True)
class Demand:
    """The expected peak of the running sequences against the pool, in tokens. Blocks that several share count once."""

    forecast: OutputForecast
    pool: int
    block_size: int
    live: int  # tokens of live blocks at the start of the plan
    _held: list[int] = field(default_factory=list)
    _remaining: list[int] = field(default_factory=list)
    _sum_held: int = 0
    _sum_remaining: int = 0

    @classmethod
    def of(cls, forecast: OutputForecast | None, tables: BlockTables, resident: Iterable[Sequence]) -> Demand | None:
        """Of the sequences that hold blocks; None without a forecast."""
        if forecast is None:
            return None
        size, allocator = tables.block_size, tables.allocator
        demand = cls(forecast, allocator.num_blocks * size, size, allocator.num_live * size)
        for sequence in resident:
            demand.add(sequence)
        return demand

    def add(self, sequence: Sequence) -> None:
        """Counts a sequence that runs."""
        held, remaining = own_tokens(sequence, self.block_size), self.forecast.remaining(sequence)
        self._held.append(held)
        self._remaining.append(remaining)
        self._sum_held += held
        self._sum_remaining += remaining

    def fits(self, sequence: Sequence) -> bool:
        """Whether the peak stays within the pool with one more, all of whose tokens count as its own until it is
        admitted."""
        room = self.pool - max(0, self.live - self._sum_held)
        held, remaining = own_tokens(sequence, self.block_size), self.forecast.remaining(sequence)
        if self._sum_held + held + self._sum_remaining + remaining <= room:
            return True  # even if they all ended at the same moment
        return peak_tokens([*self._held, held], [*self._remaining, remaining]) <= room
