"""How many tokens of the prompts that wait must be computed at the least: what several begin with alike counts once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from engine.schedule.residency import Residency
from engine.schedule.sequence import Sequence

MOST_AHEAD = 256  # of those that wait the first so many are asked: who comes behind more is told by the queue's delay
_MOST_BEGINNINGS = 1 << 18  # the keys of so many blocks are kept
_MOST_NEW_TOKENS = 4096  # of prompts that one request looks at for the first time, beyond the first of them

_Key = tuple[int, int]  # arrival number of the request, candidate


class QueuedWork:
    """Looks at every prompt once, when somebody with a deadline first comes behind it. A prompt whose beginning was
    another's that has left meanwhile counts too little rather than too much; one that nobody has had the time to look
    at counts nothing. A request costs some tenths of a millisecond, however many wait."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._seen: set[int] = set()
        self._tokens: dict[_Key, int] = {}  # of those that wait or run

    def ahead_of(self, priority: int, resident: Iterable[Sequence], waiting: Iterable[Sequence], most: int) -> int:
        """Of waiting prompts that a new one of this priority does not overtake, all with at most so many tokens to
        compute. resident: those that are being computed."""
        if len(self._seen) > _MOST_BEGINNINGS:
            self._seen.clear()
            self._tokens.clear()
        known, tokens, total, new = self._tokens, dict[_Key, int](), 0, 0
        for sequence in chain(resident, islice(waiting, MOST_AHEAD)):
            key = sequence.group.order, sequence.candidate
            own = known.get(key)
            if own is None:
                if new > _MOST_NEW_TOKENS:
                    continue
                own, new = self._look_at(sequence), new + sequence.num_prompt
            tokens[key] = own
            if own <= most and sequence.group.request.priority >= priority and sequence.awaits_first_turn:
                total += own
        self._tokens = tokens
        if not tokens:
            self._seen.clear()
        return total

    def _look_at(self, sequence: Sequence) -> int:
        request = sequence.group.request
        if not self._residency.reads_cache(request):
            return sequence.queued_prompt
        if sequence.shares_prompt:
            return 0
        size = self._residency.tables.block_size
        found, new = self._residency.cached_tokens(request) // size, 0
        for block, key in enumerate(self._residency.block_keys(request)):
            if key not in self._seen:
                self._seen.add(key)
                new += block >= found
        return new * size + sequence.num_prompt % size
