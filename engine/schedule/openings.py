"""Who of those that wait need not: slots and blocks are there for them, and a step soon takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.schedule.forecast import Demand
from engine.schedule.sequence import Sequence


@dataclass(slots=True)
class Openings:
    """Counts waiting sequences, in order, into what is free, up to the first that it does not suffice for: that one and
    all behind it wait. Blocks that a sequence would share count as its own, so these are too few rather than too many.

    slots, blocks: free now. alone: nothing runs. running: orders of the requests of which something does, which are
    nowhere counted as queued. make_demand: called once, and only if there is room by slots and blocks."""

    slots: int
    blocks: int
    watermark: int
    block_size: int
    alone: bool
    running: frozenset[int]
    make_demand: Callable[[], Demand | None]
    closed: bool = False
    prompt_tokens: int = 0
    _demand: Demand | None = None
    _demand_known: bool = False
    _requests: set[int] = field(default_factory=set)

    @property
    def requests(self) -> int:
        return len(self._requests)

    def take(self, sequence: Sequence) -> bool:
        """Counts one more, if it can run at once."""
        if self.closed:
            return False
        wanted = -(-(sequence.num_tokens + (not self.alone)) // self.block_size)
        reserve = 0 if self.alone else self.watermark
        if self.slots < 1 or self.blocks < wanted + reserve or not self._expected_to_fit(sequence):
            self.closed = True
            return False
        self.slots -= 1
        self.blocks -= wanted
        self.alone = False
        self.prompt_tokens += sequence.queued_prompt
        if sequence.group.order not in self.running:
            self._requests.add(sequence.group.order)
        return True

    def _expected_to_fit(self, sequence: Sequence) -> bool:
        if not self._demand_known:
            self._demand, self._demand_known = self.make_demand(), True
        if self._demand is None:
            return True
        fits = self.alone or self._demand.fits(sequence)
        if fits:
            self._demand.add(sequence)
        return fits


def no_openings() -> Openings:
    return Openings(0, 0, 0, 1, False, frozenset(), lambda: None, closed=True)
