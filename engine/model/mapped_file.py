"""A file of weights in memory that the system reads when it is touched and takes back when it is not."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigurationError


class MappedFile:
    """`data` is the file, uint8 [bytes]. It may be written, which torch wants of memory, and nothing of that would ever
    reach the file."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError with one line."""
        self._map: mmap.mmap | None = None
        self.data: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        try:
            with path.open("rb") as file:
                if path.stat().st_size:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from None
        if self._map is not None:
            self.data = np.frombuffer(self._map, np.uint8)

    def release(self, view: npt.NDArray[np.uint8]) -> None:
        """Gives back the memory of a part of `data` that has been copied, so that a model is not held twice while it
        loads. Reading it again would be right, and slow."""
        start = view.ctypes.data - self.data.ctypes.data
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
