"""An engine on a thread of this process: for tests, notebooks and debugging."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence

from engine.client import EngineState, EventSink
from engine.config import EngineConfig
from engine.dispatch import CacheListener, Dispatcher, StatsListener
from engine.engine import Engine, ProgressCallback
from engine.errors import EngineError
from engine.serve import serve
from engine.types import CachePiece, EngineInfo, EngineStats, FailureKind, GenerationRequest, StepFrame
from engine.wire import Cancel, Command, ReadCache, Shutdown, StopCandidate, Submit


class LocalEngineClient:
    """EngineClient over a step thread. The same frames as between processes, handed over as objects."""

    def __init__(self, config: EngineConfig, progress: ProgressCallback | None = None) -> None:
        self._config = config
        self._progress = progress
        self.problem = ""  # what ended the engine
        self._dispatcher = Dispatcher()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._info: EngineInfo | None = None

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

    async def start(self) -> EngineInfo:
        engine = await asyncio.to_thread(Engine, self._config, self._progress)
        self._info = engine.info
        self._thread = threading.Thread(
            target=self._run, args=(engine, asyncio.get_running_loop()), name="octavo-step", daemon=True
        )
        self._thread.start()
        self._dispatcher.stats = engine.stats
        self._dispatcher.set_state(EngineState.READY)
        return engine.info

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        if self._dispatcher.register(request.request_id, sink):
            self._commands.put(Submit(request))

    def cancel(self, request_id: str) -> bool:
        live = self._dispatcher.is_live(request_id)
        if live:
            self._commands.put(Cancel(request_id))
        return live

    def stop_candidate(self, request_id: str, candidate: int) -> None:
        self._dispatcher.mute_candidate(request_id, candidate)
        self._commands.put(StopCandidate(request_id, candidate))

    def on_stats(self, listener: StatsListener) -> None:
        self._dispatcher.add_listener(listener)

    async def read_cache(self, start: int) -> CachePiece:
        piece = self._dispatcher.expect_piece()
        self._commands.put(ReadCache(start))
        return await piece

    def on_cache_changes(self, listener: CacheListener) -> None:
        self._dispatcher.add_cache_listener(listener)

    async def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._commands.put(Shutdown())
            await asyncio.to_thread(thread.join)
            self._end(EngineState.STOPPED, "engine was stopped")

    def _end(self, state: EngineState, message: str) -> None:
        if state is EngineState.FAILED:
            self.problem = message
        self._dispatcher.set_state(state)
        self._dispatcher.fail_all(FailureKind.ENGINE_DIED, message)

    def _run(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        def send(frame: StepFrame) -> None:
            loop.call_soon_threadsafe(self._dispatcher.dispatch, frame)

        def beat(at: float) -> None:
            loop.call_soon_threadsafe(self._dispatcher.beat, at)

        try:
            serve(engine, self._receive, send, beat)
        except EngineError as error:
            loop.call_soon_threadsafe(self._end, EngineState.FAILED, str(error))
        except BaseException as error:
            loop.call_soon_threadsafe(self._end, EngineState.FAILED, f"step thread died: {error!r}")
            raise

    def _receive(self, timeout: float) -> Sequence[Command]:
        commands: list[Command] = []
        try:
            commands.append(self._commands.get(timeout=timeout) if timeout else self._commands.get_nowait())
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands
