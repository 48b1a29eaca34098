"""How many requests a second this replica ends."""

from __future__ import annotations

import math
import time


class RequestRate:
    """Requests and server faults a second, smoothed over about ten seconds."""

    SMOOTHING_SECONDS = 10.0

    def __init__(self) -> None:
        self.requests = 0.0
        self.faults = 0.0
        self._seen = (0, 0)
        self.updated_at = time.monotonic()

    def update(self, requests: int, faults: int, now: float) -> None:
        """Totals since start, at a `time.monotonic()` time."""
        elapsed = now - self.updated_at
        if elapsed <= 0:
            return
        weight = 1.0 - math.exp(-elapsed / self.SMOOTHING_SECONDS)
        self.requests += ((requests - self._seen[0]) / elapsed - self.requests) * weight
        self.faults += ((faults - self._seen[1]) / elapsed - self.faults) * weight
        self._seen = (requests, faults)
        self.updated_at = now
