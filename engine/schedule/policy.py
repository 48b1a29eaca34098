"""Who goes first, and who yields when blocks run out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.schedule.sequence import Sequence

Key = tuple[float, int, int]


class Policy(Protocol):
    def key(self, sequence: Sequence) -> Key:
        """Total order of sequences, first served first. The last by this order is the victim of a preemption, so the
        first always runs to its end and preemption cannot livelock."""
        ...


@dataclass(frozen=True)
class PriorityWithAgeing:
    """A step of priority is worth `ageing_seconds` of waiting: a request of higher priority overtakes those that came
    at most so much earlier, and nobody is overtaken for ever. Equal priorities are first come, first served."""

    ageing_seconds: float = 10.0

    def key(self, sequence: Sequence) -> Key:
        group = sequence.group
        return (group.arrival - self.ageing_seconds * group.request.priority, group.order, sequence.candidate)
