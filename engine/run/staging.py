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
_TORCH_DTYPES = {np.dtype("int32"): torch.int32, np.dtype("int64"): torch.int64, np.dtype("float32"): torch.float32}


class HostStaging:
    """On the CPU the arrays are the tensors."""

    def upload(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]


class DeviceStaging:
    """Packs arrays into pinned memory and sends them in one asynchronous copy to a fixed device buffer, each once
    however often it is given.

    The returned tensors are views of that buffer: arrays of the same shapes give the same addresses, so a captured
    graph can read them, and the next upload overwrites them (in stream order)."""

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        size = -(-capacity_bytes // _ALIGNMENT) * _ALIGNMENT
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(_RING)]
        # The same memory as numbers: it is cut up before every step's first kernel, so in as few calls as can be.
        self._device_as = {dtype: self._device.view(kind) for dtype, kind in _TORCH_DTYPES.items()}
        self._pinned_as = [{dtype: ring.numpy().view(dtype) for dtype in _TORCH_DTYPES} for ring in self._pinned]
        self._sent = [torch.cuda.Event() for _ in range(_RING)]  # type: ignore[no-untyped-call]
        self._next = 0

    def upload(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        turn, self._next = self._next, (self._next + 1) % _RING
        self._sent[turn].synchronize()
        host, views, offset = self._pinned_as[turn], dict[int, torch.Tensor](), 0
        for array in arrays:
            if id(array) in views:
                continue
            dtype = array.dtype
            place = slice(offset // dtype.itemsize, offset // dtype.itemsize + array.size)
            host[dtype][place] = array.reshape(-1)
            numbers = self._device_as[dtype][place]
            views[id(array)] = numbers if array.ndim == 1 else numbers.view(array.shape)
            offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._device[:offset].copy_(self._pinned[turn][:offset], non_blocking=True)
        self._sent[turn].record()
        return [views[id(array)] for array in arrays]
