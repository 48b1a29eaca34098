"""An engine on a thread of this process: for tests, notebooks and debugging."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence

from engine.client import EngineState
from engine.config import EngineConfig
from engine.dispatched_client import DispatchedClient
from engine.engine import Engine, ProgressCallback
from engine.errors import EngineError
from engine.serve import serve
from engine.types import EngineInfo, StepFrame
from engine.wire import Command, Shutdown


class LocalEngineClient(DispatchedClient):
    """EngineClient over a step thread. The same frames as between processes, handed over as objects."""

    def __init__(self, config: EngineConfig, progress: ProgressCallback | None = None) -> None:
        super().__init__()
        self._config = config
        self._progress = progress
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

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

    async def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._commands.put(Shutdown())
            await asyncio.to_thread(thread.join)
            self._end(EngineState.STOPPED, "engine was stopped")

    def _send(self, command: Command) -> None:
        self._commands.put(command)

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
