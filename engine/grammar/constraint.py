"""Which tokens may come next in one candidate's output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from engine.grammar.problem import problem

Int32Array = NDArray[np.int32]

# What a candidate may cost of processor time: so much at once, which so much a mask pays back. Common grammars take
# 0.03 ms a mask; ambiguous ones that were made to, a thousand times that, in the step that everybody waits for.
FREE_SECONDS = 0.5
SECONDS_A_MASK = 0.005
# All copies share one lexer, whose states only grow, up to a limit at which all of them fail; texts whose length counts
# make some thirty with each token. Once so many masks have come of it, new requests get a lexer of their own.
MASKS_OF_ONE_LEXER = 5000


@dataclass(slots=True)
class _Wear:
    """What the copies of one matcher have in common."""

    masks: int = 0
    failed: bool = False


class GrammarConstraint:
    """Follows a list of output tokens that only grows. Not for several threads at once."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, wear: _Wear | None = None) -> None:
        """wear: for copies."""
        self._matcher = matcher
        self._wear = wear or _Wear()
        self._words = -(-vocab_size // 32)
        self._read = 0
        self._seconds_left = FREE_SECONDS

    def copy(self) -> GrammarConstraint:
        """For another candidate: what this one has read so far stays read."""
        copied = GrammarConstraint(self._matcher.deep_copy(), 32 * self._words, self._wear)
        copied._read = self._read
        return copied

    @property
    def worn(self) -> bool:
        """Whether it should be compiled anew rather than copied once more."""
        return self._wear.failed or self._wear.masks >= MASKS_OF_ONE_LEXER

    @property
    def error(self) -> str:
        """Why nothing may come any more; empty if all is well."""
        if self._seconds_left < 0:
            return "the grammar takes too much time to follow; try to make it less ambiguous"
        return problem("", "", self._matcher.get_error())

    def mask(self, output: Sequence[int]) -> Int32Array:
        """[words] of 32 bits, lowest first: bit i of word w is token 32 w + i. End-of-sequence tokens may come where
        the grammar is satisfied. All zero once it has failed: `output` does not follow it, or it costs too much."""
        bits = np.zeros(self._words, dtype=np.int32)
        new = list(output[self._read :])
        self._read = len(output)
        if self._seconds_left < 0:
            return bits
        began = time.thread_time()
        if (not new or self._matcher.consume_tokens(new)) and not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._seconds_left = min(self._seconds_left + SECONDS_A_MASK, FREE_SECONDS) - (time.thread_time() - began)
        self._wear.masks += 1
        if self._matcher.is_error() or self._seconds_left < 0:
            self._wear.failed = True
            bits[:] = 0
        return bits
