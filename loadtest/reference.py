"""How fast the machine is while the service is under load: a small fixed piece of work, timed twice a second.

Cores of a virtual machine drift, by several per cent within half a minute, and a level or a whole run is then faster
or slower for it: what was timed before and after a level says little of what lay between. The work is like an engine's:
products of weights that no cache keeps with a few rows, in fp32. It is timed by the clock of its own thread, so that
waiting for a core that the service has does not count. It takes 6 ms of each second, in all levels alike. It is this
file's own, so that no change of the service changes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.records import ReferenceTime, ReferenceWork

NAME = "products-2"  # another one for another work: times of different works are not comparable
PERIOD = 0.5
SLABS, MATRICES = 16, 64  # 32 MiB of weights
PASS = 4  # slabs a time, the next ones each time
ROWS, INNER, COLUMNS = 64, 128, 8  # so small that numpy's library multiplies in the calling thread
SEED = 20

Floats = NDArray[np.float32]


class Reference:
    """`take` needs a core for about 3 ms."""

    def __init__(self) -> None:
        generator = np.random.default_rng(SEED)
        self.slabs = [_normal(generator, MATRICES, ROWS, INNER) for _ in range(SLABS)]
        self._inputs = _normal(generator, INNER, COLUMNS)
        self._out: Floats = np.empty((MATRICES, ROWS, COLUMNS), np.float32)
        self._next = 0

    @property
    def work(self) -> ReferenceWork:
        return ReferenceWork(name=NAME, bytes=sum(slab.nbytes for slab in self.slabs), numpy=np.__version__)

    def take(self, origin: float) -> ReferenceTime:
        """origin: CLOCK_MONOTONIC of the run's start."""
        at, begin = time.monotonic() - origin, time.thread_time()
        for index in range(self._next, self._next + PASS):
            np.matmul(self.slabs[index % SLABS], self._inputs, out=self._out)
        self._next += PASS
        return ReferenceTime(at=round(at, 3), seconds=round(time.thread_time() - begin, 7))

    @contextlib.asynccontextmanager
    async def watch(self, origin: float) -> AsyncIterator[list[ReferenceTime]]:
        """Times, one a period, until the block ends."""
        times: list[ReferenceTime] = []

        async def work() -> None:
            while True:
                times.append(await asyncio.to_thread(self.take, origin))
                await asyncio.sleep(PERIOD)

        task = asyncio.create_task(work())
        try:
            yield times
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _normal(generator: np.random.Generator, *shape: int) -> Floats:
    drawn: Any = generator.standard_normal(shape, dtype=np.float32)
    return np.asarray(drawn, np.float32)
