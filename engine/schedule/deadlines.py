"""When requests have to be begun or done with."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.schedule.live_requests import LiveRequests
from engine.schedule.sequence import RequestGroup
from engine.types import FailureKind


class Deadlines:
    """Of all requests so far; those that ended before are passed over when their time comes."""

    def __init__(self, live: LiveRequests) -> None:
        self._live = live
        self._heap: list[tuple[float, int, str]] = []  # (time, arrival number, request id)

    def add(self, group: RequestGroup) -> None:
        for limit in (group.request.deadline, group.request.queue_deadline):
            if limit is not None:
                heapq.heappush(self._heap, (limit, group.order, group.request_id))

    def missed(self, now: float) -> Iterator[tuple[str, FailureKind, str]]:
        """Live requests that are too late, and why."""
        while self._heap and self._heap[0][0] <= now:
            _, order, request_id = heapq.heappop(self._heap)
            group = self._live.get(request_id)
            if group is None or group.order != order:
                continue
            deadline = group.request.deadline
            if group.first_scheduled is None:
                yield request_id, FailureKind.EXPIRED_IN_QUEUE, "deadline passed in the queue"
            elif deadline is not None and now >= deadline:
                yield request_id, FailureKind.DEADLINE_EXCEEDED, "deadline passed while running"
