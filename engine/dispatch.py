"""Hands each request's events to its sink: the part that every engine client shares."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from engine.client import EngineState, EventSink
from engine.errors import EngineDiedError
from engine.types import (
    CacheChange,
    CachePiece,
    EngineStats,
    Event,
    FailureKind,
    RequestFailed,
    RequestFinished,
    StepFrame,
    TokensGenerated,
)

_LAST = (RequestFinished, RequestFailed)

StatsListener = Callable[[EngineStats, EngineState], None]
CacheListener = Callable[[Sequence[CacheChange]], None]


class Dispatcher:
    """Lives on one asyncio loop's thread. Nothing of a request is delivered after its last event."""

    def __init__(self) -> None:
        self.state = EngineState.STARTING
        self.stats = EngineStats()
        self._sinks: dict[str, EventSink] = {}
        self._stopped: set[tuple[str, int]] = set()
        self._listeners: list[StatsListener] = []
        self._cache_listeners: list[CacheListener] = []
        self._cache_reads: deque[asyncio.Future[CachePiece]] = deque()  # in the order asked, which is that of answers

    def add_listener(self, listener: StatsListener) -> None:
        self._listeners.append(listener)

    def add_cache_listener(self, listener: CacheListener) -> None:
        self._cache_listeners.append(listener)

    def expect_piece(self) -> asyncio.Future[CachePiece]:
        """Of the read of the cache that is sent next. Raises EngineDiedError if no engine is there to answer."""
        self._check_ready()
        future: asyncio.Future[CachePiece] = asyncio.get_running_loop().create_future()
        self._cache_reads.append(future)
        return future

    def set_state(self, state: EngineState) -> None:
        if state is not self.state:
            self.state = state
            self._notify()

    def register(self, request_id: str, sink: EventSink) -> bool:
        """False if the id is live already; then the sink was told so and the request must not be sent. Raises
        EngineDiedError if no engine is there to serve it."""
        self._check_ready()
        if request_id in self._sinks:
            sink([RequestFailed(request_id, FailureKind.INVALID, "request id is already live", field="request_id")])
            return False
        self._sinks[request_id] = sink
        return True

    def is_live(self, request_id: str) -> bool:
        return request_id in self._sinks

    def mute_candidate(self, request_id: str, candidate: int) -> None:
        """Drops further tokens of a candidate that its text layer has ended."""
        if request_id in self._sinks:
            self._stopped.add((request_id, candidate))

    def dispatch(self, frame: StepFrame) -> None:
        self.stats = frame.stats
        by_request: dict[str, list[Event]] = {}
        for event in frame.events:
            events = by_request.get(event.request_id)
            if events is None:
                by_request[event.request_id] = [event]
            else:
                events.append(event)
        for request_id, events in by_request.items():
            self._deliver(request_id, events)
        self._dispatch_cache(frame)
        self._notify()

    def _dispatch_cache(self, frame: StepFrame) -> None:
        if frame.cache_changes:
            for listener in self._cache_listeners:
                listener(frame.cache_changes)
        for piece in frame.cache_pieces:
            read = self._cache_reads.popleft()
            if not read.done():
                read.set_result(piece)

    def _check_ready(self) -> None:
        if self.state is not EngineState.READY:
            raise EngineDiedError(f"engine is {self.state}")

    def beat(self, at: float) -> None:
        """The step that runs advances."""
        self.stats = msgspec.structs.replace(self.stats, heartbeat=at, progressed=at)
        self._notify()

    def fail_all(self, kind: FailureKind, message: str) -> None:
        while self._cache_reads:
            read = self._cache_reads.popleft()
            if not read.done():
                read.set_exception(EngineDiedError(message))
        for request_id in list(self._sinks):
            self._deliver(request_id, [RequestFailed(request_id, kind, message)])

    def _deliver(self, request_id: str, events: list[Event]) -> None:
        sink = self._sinks.get(request_id)
        if sink is None:
            return
        wanted = [event for event in events if not self._is_muted(event)] if self._stopped else events
        if type(events[-1]) in _LAST:  # nothing of a request comes after those
            del self._sinks[request_id]
            self._stopped = {key for key in self._stopped if key[0] != request_id}
        if wanted:
            sink(wanted)

    def _is_muted(self, event: Event) -> bool:
        return isinstance(event, TokensGenerated) and (event.request_id, event.candidate) in self._stopped

    def _notify(self) -> None:
        for listener in self._listeners:
            listener(self.stats, self.state)
