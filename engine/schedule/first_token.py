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
    return max((_common(request, other, block_size) for other in others), default=0)


def _common(request: GenerationRequest, other: Sequence, size: int) -> int:
    mine, theirs = request.prompt_token_ids, other.token_ids
    if other.group.request.cache_salt != request.cache_salt or other.group.request.cache_bypass:
        return 0
    end = 0
    while end + size <= min(len(mine), len(theirs)) and mine[end : end + size] == theirs[end : end + size]:
        end += size
    return end
