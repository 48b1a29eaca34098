"""From host arrays to device tensors: one copy a step, at addresses that never change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.step_arrays import pack

Array = NDArray[Any]
Views = tuple[torch.Tensor, ...]

_RING = 3  # a step being built, one in flight, one just finished
_ALIGNMENT = 16
_MOST_LAYOUTS = 256
_TORCH_DTYPES = {np.dtype("int32"): torch.int32, np.dtype("int64"): torch.int64, np.dtype("float32"): torch.float32}


_Shape = tuple[str, tuple[int, ...]]  # numpy's character of the dtype, and the shape


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where arrays of given shapes lie: bytes from the start, their views on the device, and all of it on either
    side."""

    offsets: list[int]
    views: Views
    device: torch.Tensor
    pinned: list[torch.Tensor]


class HostStaging:
    """On the CPU the arrays are the tensors."""

    def upload(self, arrays: Sequence[Array]) -> Views:
        return tuple(torch.from_numpy(array) for array in arrays)


class DeviceStaging:
    """Packs arrays into pinned memory and sends them in one asynchronous copy to a fixed device buffer, each once
    however often it is given.

    The returned tensors are views of that buffer: arrays of the same shapes give the same views, so a captured graph
    can read them, and the next upload overwrites them (in stream order)."""

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        size = -(-capacity_bytes // _ALIGNMENT) * _ALIGNMENT
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(_RING)]
        self._bytes = [ring.numpy() for ring in self._pinned]
        self._sent = [torch.cuda.Event() for _ in range(_RING)]  # type: ignore[no-untyped-call]
        self._next = 0
        self._layouts: dict[tuple[_Shape | int, ...], _Layout] = {}

    def upload(self, arrays: Sequence[Array]) -> Views:
        """The tuple is the same, too, as long as its shapes are remembered."""
        turn, self._next = self._next, (self._next + 1) % _RING
        firsts = dict[int, int]()  # of each array, by id, where it was given first
        distinct, shapes = list[Array](), list[_Shape | int]()
        for index, array in enumerate(arrays):
            first = firsts.setdefault(id(array), index)
            if first == index:
                distinct.append(array)
                shapes.append((array.dtype.char, array.shape))
            else:
                shapes.append(first)
        layout = self._layouts.get(tuple(shapes)) or self._lay_out(shapes)
        self._sent[turn].synchronize()
        pack(self._bytes[turn], distinct, layout.offsets)
        layout.device.copy_(layout.pinned[turn], non_blocking=True)
        self._sent[turn].record()
        return layout.views

    def _lay_out(self, shapes: list[_Shape | int]) -> _Layout:
        """Kept, since views cost the host as much as launches, and most steps are shaped like others before them."""
        offsets, views, offset = list[int](), list[torch.Tensor](), 0
        for shape in shapes:
            if isinstance(shape, int):
                views.append(views[shape])
                continue
            dtype, sizes = np.dtype(shape[0]), shape[1]
            size = math.prod(sizes) * dtype.itemsize
            views.append(self._device[offset : offset + size].view(_TORCH_DTYPES[dtype]).view(sizes))
            offsets.append(offset)
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        if len(self._layouts) == _MOST_LAYOUTS:
            self._layouts.clear()
        pinned = [ring[:offset] for ring in self._pinned]
        layout = self._layouts[tuple(shapes)] = _Layout(offsets, tuple(views), self._device[:offset], pinned)
        return layout
