"""Which tokens may come next in one candidate's output."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from engine.grammar.problem import problem

Int32Array = NDArray[np.int32]

# What a mask may cost is the library's to bound, by work it counts (checker.parser_limits): the same on every machine
# and in any company. This much processor time, which so much a mask pays back, only ends what hangs all the same:
# common grammars take 0.03 ms a mask, ambiguous ones at the limits mostly 1 to 2, some 20 at most.
BACKSTOP_SECONDS = 5.0
BACKSTOP_SECONDS_A_MASK = 0.02


class GrammarConstraint:
    """Follows a list of output tokens that only grows. Not for several threads at once."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._read = 0
        self._seconds_left = BACKSTOP_SECONDS

    def copy(self) -> GrammarConstraint:
        """For another candidate: what this one has read so far stays read. Copies share a lexer, whose states only grow
        up to a limit, so they are for candidates of one request."""
        copied = GrammarConstraint(self._matcher.deep_copy(), 32 * self._words)
        copied._read = self._read
        return copied

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
        left = min(self._seconds_left + BACKSTOP_SECONDS_A_MASK, BACKSTOP_SECONDS)
        self._seconds_left = left - (time.thread_time() - began)
        if self._matcher.is_error() or self._seconds_left < 0:
            bits[:] = 0
        return bits
