"""The soonest that a new request's first token can come: a bound, for deadlines that cannot be met."""

from __future__ import annotations

import math
from collections.abc import Iterable

from engine.schedule.sequence import Sequence
from engine.types import GenerationRequest

TELLING_TOKENS = 256  # what a step of fewer prompt tokens takes says little of a long prompt
FADING_SECONDS = 10.0


class PrefillBound:
    """The fastest that prompts were computed of late, in tokens a second. What is known fades, to twice the rate in
    FADING_SECONDS: a machine that was slow once must not go on refusing what it then never tries."""

    def __init__(self, telling_tokens: int = TELLING_TOKENS) -> None:
        self._telling = telling_tokens
        self._rate = 0.0
        self._seen_at = 0.0

    def observe(self, tokens: int, seconds: float, now: float) -> None:
        """A step with so many prompt tokens."""
        if tokens >= self._telling:
            self._rate, self._seen_at = max(tokens / max(seconds, 1e-9), 0.9 * self._rate), now

    @property
    def known(self) -> bool:
        return self._rate > 0

    def seconds(self, tokens: int, now: float) -> float:
        """What so many prompt tokens take at least; 0 while nothing is known."""
        if not self._rate:
            return 0.0
        fading = math.exp2(max(0.0, now - self._seen_at) / FADING_SECONDS)
        return tokens / (self._rate * fading)


def common_tokens(request: GenerationRequest, others: Iterable[Sequence], block_size: int) -> int:
    """How many of the first tokens of a prompt are computed for one of `others`, in whole blocks."""
    mine, salt, best = request.prompt_token_ids, request.cache_salt, 0
    next_block = mine[:block_size]
    for other in others:
        if len(next_block) < block_size:
            break  # nobody could have more of it
        theirs = other.token_ids
        if theirs[best : best + block_size] != next_block:
            continue  # no more than the best so far: most are told by this one comparison
        their_request = other.group.request
        if their_request.cache_salt != salt or their_request.cache_bypass or theirs[:best] != mine[:best]:
            continue
        while len(next_block) == block_size and theirs[best : best + block_size] == next_block:
            best += block_size
            next_block = mine[best : best + block_size]
    return best
