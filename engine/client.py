"""The one interface the service sees of an engine, whether it lives in this process, in another, or in a test
script."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.types import CacheChange, CachePiece, EngineInfo, EngineStats, Event, GenerationRequest

EventSink = Callable[[Sequence[Event]], None]


class EngineState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"  # process died or stopped making progress; every live request got a RequestFailed
    STOPPED = "stopped"


class EngineClient(Protocol):
    """All methods are called on one asyncio loop, and sinks are called on it: one call per step and live request, with
    that request's events in order. The last event of a request is RequestFinished or RequestFailed; nothing follows."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot; its `heartbeat` tells how old it is."""
        ...

    @property
    def state(self) -> EngineState: ...

    @property
    def problem(self) -> str:
        """What ended the engine, in a line; empty while it lives."""
        ...

    async def start(self) -> EngineInfo:
        """Loads and warms the model. Raises ConfigurationError with one clear line."""
        ...

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        """Hands a request over; every outcome, refusals too, comes through `sink`. Raises EngineDiedError."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Ends a request wherever it is; False if it is not live. Its blocks are free within one step. The sink gets
        RequestFinished(cancelled=True) unless the request ended by itself first."""
        ...

    def stop_candidate(self, request_id: str, candidate: int) -> None:
        """Ends one candidate whose text met a stop string. No further tokens of it are delivered; the request goes on
        until its other candidates end. Unknown ids are ignored."""
        ...

    def on_stats(self, listener: Callable[[EngineStats, EngineState], None]) -> None:
        """Calls `listener` after every frame or heartbeat and on every change of state."""
        ...

    async def read_cache(self, start: int) -> CachePiece:
        """What the prefix cache holds from this place on, without what has a cache salt. From the first call on
        `on_cache_changes` tells of every change. Raises EngineDiedError."""
        ...

    def on_cache_changes(self, listener: Callable[[Sequence[CacheChange]], None]) -> None:
        """Calls `listener` with changes of the prefix cache, in order, before any read that was asked for later is
        answered."""
        ...

    async def stop(self) -> None:
        """Ends the engine; live requests fail with ENGINE_DIED. Idempotent."""
        ...
