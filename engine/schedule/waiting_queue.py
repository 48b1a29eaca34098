"""Who waits for a slot and blocks."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from itertools import islice

from engine.schedule.policy import Policy
from engine.schedule.sequence import Sequence
from engine.schedule.shedding import may_give_way


class WaitingQueue:
    """Sequences in the policy's order. `prompt_tokens`: of all their prompts together, each that is shared once."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._sequences: list[Sequence] = []
        self._low: dict[int, int] = {}  # priorities of those that may give way
        self.prompt_tokens = 0

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def first(self, count: int) -> list[Sequence]:
        return list(islice(self._sequences, count))

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=self._policy.key)
        self.prompt_tokens += sequence.queued_prompt
        if may_give_way(sequence.group):
            self._low[id(sequence)] = sequence.group.request.priority

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self.prompt_tokens -= sequence.queued_prompt
        self._low.pop(id(sequence), None)

    @property
    def least_priority(self) -> int:
        """Of those that may give way; 0 if there are none."""
        return min(self._low.values(), default=0)
