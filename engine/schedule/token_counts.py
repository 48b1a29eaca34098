"""Which tokens a candidate has had so far, for the penalties on repeating them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]


class TokenCounts:
    """Follows a list of tokens that only grows: a step costs what is new, however long the list has become."""

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._read = 0
        self._prompt: Int64Array = np.zeros(0, dtype=np.int64)
        self._output: dict[int, int] = {}

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes in what `token_ids`, prompt and output, has more than last time."""
        if not self._read:
            self._prompt = np.unique(np.asarray(token_ids[: self._num_prompt], dtype=np.int64))
            self._read = self._num_prompt
        for token in token_ids[self._read :]:
            self._output[token] = self._output.get(token, 0) + 1
        self._read = len(token_ids)

    @property
    def seen(self) -> Int64Array:
        """Every token of prompt and output, once."""
        return np.union1d(self._prompt, np.fromiter(self._output, dtype=np.int64, count=len(self._output)))

    @property
    def output(self) -> tuple[Int64Array, Float32Array]:
        """The output's tokens, each once, and how often they came."""
        count = len(self._output)
        ids = np.fromiter(self._output.keys(), dtype=np.int64, count=count)
        return ids, np.fromiter(self._output.values(), dtype=np.float32, count=count)
