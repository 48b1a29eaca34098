"""Who goes first, and who yields when blocks run out."""

from __future__ import annotations

from typing import Protocol

from engine.schedule.sequence import Sequence

Key = tuple[int, int, int]


class Policy(Protocol):
    def key(self, sequence: Sequence) -> Key:
        """Total order of sequences, first served first. The last by this order is the victim of a preemption, so the
        first always runs to its end and preemption cannot livelock."""
        ...


class FirstComeFirstServed:
    """By arrival, then candidate. A preempted sequence keeps its place."""

    def key(self, sequence: Sequence) -> Key:
        return (0, sequence.group.order, sequence.candidate)
