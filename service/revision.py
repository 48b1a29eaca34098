"""A counter that tasks can wait on: the newest value wins, none is queued."""

from __future__ import annotations

import asyncio


class Revision:
    def __init__(self) -> None:
        self.value = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def advance(self) -> None:
        self.value += 1
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_beyond(self, seen: int, seconds: float | None = None) -> bool:
        """Waits until the value is above `seen`. False after so many seconds without."""
        if self.value > seen:
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            return self.value > seen
        finally:
            self._waiters.discard(waiter)
        return True
