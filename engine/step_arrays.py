"""A step's numbers on their way to the device. The step thread handles them before a prompt's first kernel, so
natively: numpy takes ten times as long for a list, and twice for each small array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import _runtime

Int32Array = NDArray[np.int32]


def copy_ids(out: Int32Array, ids: Sequence[int], begin: int) -> None:
    """out [n] = ids[begin : begin + n]. Raises IndexError if there are fewer, OverflowError for ids beyond 32 bits."""
    _runtime.copy_token_ids(out, ids, begin)


def ids_array(ids: Sequence[int], begin: int, end: int) -> Int32Array:
    """ids[begin:end]. Raises as `copy_ids`."""
    out = np.empty(end - begin, dtype=np.int32)
    _runtime.copy_token_ids(out, ids, begin)
    return out


def pack(out: NDArray[np.uint8], arrays: Sequence[NDArray[Any]], offsets: list[int]) -> None:
    """Copies each array to its place in `out`, offsets[i] bytes from its start. Raises IndexError where it has no
    room."""
    _runtime.pack(out, arrays, offsets)
