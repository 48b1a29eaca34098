"""The part of an engine client that is the same wherever its engine runs."""

from __future__ import annotations

from abc import ABC, abstractmethod

from engine.client import EngineState, EventSink
from engine.dispatch import CacheListener, Dispatcher, StatsListener
from engine.errors import EngineError
from engine.types import CachePiece, EngineInfo, EngineStats, FailureKind, GenerationRequest
from engine.wire import Cancel, Command, ReadCache, StopCandidate, Submit


class DispatchedClient(ABC):
    """EngineClient without start and stop: commands go out by `_send`, and what comes back goes to `_dispatcher`."""

    def __init__(self) -> None:
        self.problem = ""  # what ended the engine
        self._dispatcher = Dispatcher()
        self._info: EngineInfo | None = None

    @abstractmethod
    def _send(self, command: Command) -> None: ...

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("engine is not started")
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._dispatcher.stats

    @property
    def state(self) -> EngineState:
        return self._dispatcher.state

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        if self._dispatcher.register(request.request_id, sink):
            self._send(Submit(request))

    def cancel(self, request_id: str) -> bool:
        live = self._dispatcher.is_live(request_id)
        if live:
            self._send(Cancel(request_id))
        return live

    def stop_candidate(self, request_id: str, candidate: int) -> None:
        self._dispatcher.mute_candidate(request_id, candidate)
        self._send(StopCandidate(request_id, candidate))

    def on_stats(self, listener: StatsListener) -> None:
        self._dispatcher.add_listener(listener)

    async def read_cache(self, start: int) -> CachePiece:
        piece = self._dispatcher.expect_piece()
        self._send(ReadCache(start))
        return await piece

    def on_cache_changes(self, listener: CacheListener) -> None:
        self._dispatcher.add_cache_listener(listener)

    def _end(self, state: EngineState, message: str) -> None:
        """The engine is gone, and its live requests fail. Only the first end counts."""
        if self.state in (EngineState.FAILED, EngineState.STOPPED):
            return
        if state is EngineState.FAILED:
            self.problem = message
        self._dispatcher.set_state(state)
        self._dispatcher.fail_all(FailureKind.ENGINE_DIED, message)
