"""The log probabilities of one request's prompt, on their way out."""

from __future__ import annotations

from collections.abc import Sequence

from engine import Tokenizer, TokenLogprob
from service.pending import PendingBytes, logprob_bytes

SCORES_AT_ONCE = 1 << 14  # in one event, alternatives included


class PromptOutput:
    """Those of the tokens from the second on that were not sent yet.

    top: alternatives of each token. They count in `pending`.
    """

    def __init__(self, top: int, tokenizer: Tokenizer, pending: PendingBytes) -> None:
        self._at_once = max(1, SCORES_AT_ONCE // (1 + top))
        self._tokenizer = tokenizer
        self._pending = pending
        self._scores: list[TokenLogprob] = []
        self._sizes: list[int] = []  # bytes of each, roughly

    def __len__(self) -> int:
        return len(self._scores)

    def add(self, scores: Sequence[TokenLogprob]) -> None:
        sizes = [logprob_bytes(score, self._tokenizer) for score in scores]
        self._scores += scores
        self._sizes += sizes
        self._count(sum(sizes))

    def take(self) -> list[TokenLogprob]:
        """The next ones, as many as one event may have."""
        return self._take(self._at_once)

    def take_all(self) -> list[TokenLogprob]:
        return self._take(len(self))

    def drop(self) -> None:
        self.take_all()

    def _take(self, count: int) -> list[TokenLogprob]:
        taken, self._scores = self._scores[:count], self._scores[count:]
        sizes, self._sizes = self._sizes[:count], self._sizes[count:]
        self._count(-sum(sizes))
        return taken

    def _count(self, size: int) -> None:
        self._pending.total += size
        self._pending.prompts += size
