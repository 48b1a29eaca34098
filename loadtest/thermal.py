"""A gate before each level: on a GPU that was too hot for its clocks, the next level waits until it is cool again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from loadtest.records import GpuSample, TelemetryRow
from loadtest.telemetry import gpu_samples

# NVML's reasons for lower clocks that are heat: software thermal, hardware slowdown, hardware thermal.
HEAT = 0x20 | 0x8 | 0x40
MARGIN = 5.0  # degrees C above the coolest that was seen
LONGEST = 180.0  # seconds of waiting; then the level runs hot, and its telemetry says so
PERIOD = 2.0


class ThermalGate:
    """`read`: the GPUs' present samples."""

    def __init__(self, read: Callable[[], Awaitable[list[GpuSample]]] = gpu_samples, period: float = PERIOD) -> None:
        self._read = read
        self._period = period
        self._coolest: list[float] = []
        self._hot = False

    def note(self, telemetry: Sequence[TelemetryRow]) -> None:
        """A level's rows: whether it throttled, and how cool it was at its coolest."""
        samples = [row.gpus for row in telemetry if row.gpus]
        for gpus in samples:
            self._see(gpus)
        self._hot = any(gpu.throttle & HEAT for gpus in samples for gpu in gpus)

    async def cool(self) -> float:
        """Waits if the last level throttled. Returns the seconds."""
        begin = time.monotonic()
        while self._hot and time.monotonic() - begin < LONGEST:
            gpus = await self._read()
            self._see(gpus)
            self._hot = any(
                gpu.throttle & HEAT or gpu.temperature > coolest + MARGIN
                for gpu, coolest in zip(gpus, self._coolest, strict=False)
            )
            if self._hot:
                await asyncio.sleep(self._period)
        return time.monotonic() - begin

    def _see(self, gpus: Sequence[GpuSample]) -> None:
        now = [gpu.temperature for gpu in gpus]
        self._coolest = [min(pair) for pair in zip(now, self._coolest, strict=False)] if self._coolest else now
