"""How fast the machine is while the service is idle: a fixed piece of work, timed before and after every level.

Cores of a virtual machine drift, by several per cent within a minute, and a level or a whole run is then faster or
slower for it. The work is like an engine's: products of weights that no cache keeps with a few rows, in fp32, on all
cores at once, and a stretch of pure Python. It is this file's own, so that no change of the service changes it.
"""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.records import ReferenceTime, ReferenceWork

NAME = "products-1"  # another one for another work: times of different works are not comparable
ROUNDS = 11
PASSES = 2  # over the weights, in a round
MOST_THREADS = 8
SLABS, MATRICES = 16, 64  # 32 MiB of weights for each thread
ROWS, INNER, COLUMNS = 64, 128, 32  # as large as numpy's library still multiplies in the calling thread
LOOPS = 60_000
SEED = 20

Floats = NDArray[np.float32]


class Reference:
    """`take` blocks for about 0.4 s on an idle machine. Its memory stays its own until `close`."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))[:MOST_THREADS]
        generator = np.random.default_rng(SEED)
        self._shares = [_Share(core, generator) for core in self._cores]
        self._pool = ThreadPoolExecutor(len(self._cores), thread_name_prefix="reference")

    @property
    def work(self) -> ReferenceWork:
        weights = sum(slab.nbytes for share in self._shares for slab in share.slabs)
        return ReferenceWork(name=NAME, threads=len(self._cores), bytes=weights, numpy=np.__version__)

    def take(self, origin: float) -> ReferenceTime:
        """origin: CLOCK_MONOTONIC of the run's start."""
        at = time.monotonic() - origin
        self._round()  # wakes the cores and fills what caches hold
        rounds = [self._round() for _ in range(ROUNDS)]
        products, loop = (statistics.median(times) for times in zip(*rounds, strict=True))
        low, _, high = statistics.quantiles([sum(times) for times in rounds], n=4)
        return ReferenceTime(
            at=round(at, 3),
            seconds=round(products + loop, 7),
            python=round(loop, 7),
            spread=round((high - low) / (products + loop), 4),
        )

    def close(self) -> None:
        self._pool.shutdown()

    def _round(self) -> tuple[float, float]:
        """Seconds until the last core is done with its products, and of the loop."""
        begin = time.perf_counter()
        for done in [self._pool.submit(share.multiply) for share in self._shares]:
            done.result()
        middle = time.perf_counter()
        _count()
        return middle - begin, time.perf_counter() - middle


class _Share:
    """What one core does."""

    def __init__(self, core: int, generator: np.random.Generator) -> None:
        self._core = core
        self.slabs = [_normal(generator, MATRICES, ROWS, INNER) for _ in range(SLABS)]
        self._inputs = _normal(generator, INNER, COLUMNS)
        self._out: Floats = np.empty((MATRICES, ROWS, COLUMNS), np.float32)

    def multiply(self) -> None:
        os.sched_setaffinity(0, {self._core})  # of this thread, one of the pool's
        for _ in range(PASSES):
            for slab in self.slabs:
                np.matmul(slab, self._inputs, out=self._out)


def _normal(generator: np.random.Generator, *shape: int) -> Floats:
    drawn: Any = generator.standard_normal(shape, dtype=np.float32)
    return np.asarray(drawn, np.float32)


def _count() -> int:
    value = 0
    for index in range(LOOPS):
        value = (value * 31 + index) & 0xFFFF
    return value
