"""Sequences that are not finished, by their phase."""

from __future__ import annotations

import bisect
from collections.abc import Collection

from engine.schedule.policy import Policy
from engine.schedule.sequence import Phase, Sequence
from engine.schedule.waiting_queue import WaitingQueue


class LiveSequences:
    """Who waits, whose contents are on their way from host memory, and who runs. `waiting` and `running` are in the
    policy's order."""

    def __init__(self, policy: Policy) -> None:
        self._key = policy.key
        self.waiting = WaitingQueue(policy)
        self.arriving: list[Sequence] = []
        self.running: list[Sequence] = []
        self._residents: dict[int, int] = {}  # orders of requests, and how many of their sequences are resident

    @property
    def resident(self) -> list[Sequence]:
        """Those that hold a slot and blocks."""
        return self.running + self.arriving

    @property
    def num_resident(self) -> int:
        return len(self.running) + len(self.arriving)

    @property
    def resident_requests(self) -> Collection[int]:
        """Orders of the requests of those."""
        return self._residents.keys()

    @property
    def last_resident(self) -> Sequence:
        """The first to yield when blocks run out. Raises IndexError if there is none."""
        if not self.arriving:
            return self.running[-1]
        return max(self.running[-1:] + self.arriving, key=self._key)

    def wait(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        self.waiting.add(sequence)

    def arrive(self, sequence: Sequence, step: int) -> None:
        """step: whose moves bring it back."""
        sequence.phase = Phase.ARRIVING
        sequence.arrival_step = step
        self.arriving.append(sequence)
        self._count(sequence, 1)

    def run(self, sequence: Sequence) -> None:
        sequence.phase = Phase.RUNNING
        bisect.insort(self.running, sequence, key=self._key)
        self._count(sequence, 1)

    def land(self, moved: int | None) -> None:
        """Lets those run that have been copied in by the step `moved`; None: all of them."""
        for sequence in [one for one in self.arriving if moved is None or one.arrival_step <= moved]:
            self.remove(sequence)
            self.run(sequence)

    def remove(self, sequence: Sequence) -> None:
        """From where it is. What it holds is the caller's to give back."""
        match sequence.phase:
            case Phase.WAITING:
                self.waiting.remove(sequence)
            case Phase.ARRIVING:
                self.arriving.remove(sequence)
                self._count(sequence, -1)
            case Phase.RUNNING:
                self.running.remove(sequence)
                self._count(sequence, -1)

    def _count(self, sequence: Sequence, change: int) -> None:
        order = sequence.group.order
        count = self._residents.pop(order, 0) + change
        if count:
            self._residents[order] = count
