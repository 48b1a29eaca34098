"""From host arrays to device tensors: one copy a step, at addresses that never change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]

_RING = 3  # a step being built, one in flight, one just finished
_ALIGNMENT = 16
_TORCH_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class HostStaging:
    """On the CPU the arrays are the tensors."""

    def upload(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]


class DeviceStaging:
    """Packs arrays into pinned memory and sends them in one asynchronous copy to a fixed device buffer.

    The returned tensors are views of that buffer: arrays of the same shapes give the same addresses, so a captured
    graph can read them, and the next upload overwrites them (in stream order)."""

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        self._device = torch.zeros(capacity_bytes, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(capacity_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_RING)]
        self._sent = [torch.cuda.Event() for _ in range(_RING)]  # type: ignore[no-untyped-call]
        self._next = 0

    def upload(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        turn, self._next = self._next, (self._next + 1) % _RING
        self._sent[turn].synchronize()
        host = self._pinned[turn].numpy()
        views, offset = [], 0
        for array in arrays:
            host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            piece = self._device[offset : offset + array.nbytes]
            views.append(piece.view(_TORCH_DTYPES[array.dtype.name]).view(array.shape))
            offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._device[:offset].copy_(self._pinned[turn][:offset], non_blocking=True)
        self._sent[turn].record()
        return views
