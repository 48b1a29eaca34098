"""How late an event loop is: what it adds to the stamps of everything that it receives."""

from __future__ import annotations

import asyncio
import time

PERIOD = 0.01


class LoopLag:
    """Wakes up every 10 ms in [begin, end) and notes by how much too late; and the CPU time of the process there."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin = begin
        self._end = end
        self._lags: list[float] = []
        self._cpu: list[tuple[float, float]] = []

    async def watch(self) -> None:
        while (now := time.monotonic()) < self._end:
            await asyncio.sleep(PERIOD)
            woken = time.monotonic()
            if woken >= self._begin:
                self._lags.append(max(0.0, woken - now - PERIOD))
                self._note(woken)

    def _note(self, now: float) -> None:
        """The first and the newest reading."""
        reading = (now, time.process_time())
        self._cpu = [self._cpu[0], reading] if self._cpu else [reading]

    @property
    def cpu_share(self) -> float:
        """Of one core."""
        if len(self._cpu) < 2:
            return 0.0
        (begin, used), (end, used_then) = self._cpu
        return (used_then - used) / max(1e-9, end - begin)

    def quantile(self, share: float) -> float:
        ordered = sorted(self._lags)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
