"""From host arrays to device tensors: one copy a step, at addresses that never change."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class _Layout(Generic[Made]):
    """Where arrays of given shapes lie: bytes from the start, and all of it on either side. made: of their views on the
    device."""

    offsets: list[int]
    device: torch.Tensor
    pinned: list[torch.Tensor]
    made: Made


class HostStaging:
    """On the CPU the arrays are the tensors."""

    def upload(self, arrays: Sequence[Array]) -> Views:
        return tuple(torch.from_numpy(array) for array in arrays)


class DeviceStaging(Generic[Made]):
    """Packs arrays into pinned memory and sends them in one asynchronous copy to a fixed device buffer, each once
    however often it is given.

    Their tensors are views of that buffer: arrays of the same shapes lie in the same place, so a captured graph can
    read them, and the next upload overwrites them (in stream order)."""

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        size = -(-capacity_bytes // _ALIGNMENT) * _ALIGNMENT
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(_RING)]
        self._bytes = [ring.numpy() for ring in self._pinned]
        self._sent = [torch.cuda.Event() for _ in range(_RING)]  # type: ignore[no-untyped-call]
        self._next = 0
        self._layouts: dict[Hashable, _Layout[Made]] = {}

    def upload(self, arrays: Sequence[Array], make: Callable[[Views], Made], *alike: Hashable) -> Made:
        """What `make` makes of the arrays' tensors, or made of others of the same shapes: views cost the host as much
        as launches, and most steps are shaped like others before them. alike: what else it depends on."""
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
        key = (*alike, *shapes)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) == _MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = self._lay_out(shapes, make)
        self._sent[turn].synchronize()
        pack(self._bytes[turn], distinct, layout.offsets)
        layout.device.copy_(layout.pinned[turn], non_blocking=True)
        self._sent[turn].record()
        return layout.made

    def _lay_out(self, shapes: list[_Shape | int], make: Callable[[Views], Made]) -> _Layout[Made]:
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
        return _Layout(offsets, self._device[:offset], [ring[:offset] for ring in self._pinned], make(tuple(views)))
