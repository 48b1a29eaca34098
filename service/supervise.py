"""Keeps an engine alive: ends one that hangs, and starts a new one where one died."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from engine import (
    CacheChange,
    CachePiece,
    EngineClient,
    EngineDiedError,
    EngineError,
    EngineInfo,
    EngineState,
    EngineStats,
    EventSink,
    GenerationRequest,
)

LOGGER = logging.getLogger(__name__)

WATCH_SECONDS = 0.25
FIRST_RESTART_SECONDS = 0.5
MOST_RESTART_SECONDS = 60.0
STABLE_SECONDS = 60.0
HANG_SECONDS = {"cpu": 10.0}
ACCELERATOR_HANG_SECONDS = 2.5


def engine_pid(engine: EngineClient) -> int | None:
    """The process of an engine that has one."""
    return getattr(engine, "pid", None)


def kill_process(engine: EngineClient) -> None:
    """Ends the process of an engine that has one."""
    pid = engine_pid(engine)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def blame(engine: EngineClient, cause: str) -> None:
    """Tells an engine that can tell others why it is about to be killed."""
    tell = getattr(engine, "blame", None)
    if tell is not None:
        tell(cause)


def cause_of_death(engine: EngineClient) -> str:
    """What an engine that can tell says of its end; empty of one that cannot."""
    return getattr(engine, "problem", "")


class SupervisedEngine:
    """An EngineClient over a sequence of engines, each with its own instance id.

    hang_timeout: an engine whose work has not advanced for so many seconds is killed; its requests fail as with any
    death. None: 2.5 s on accelerators, and 10 s on a CPU, where one part of a step of a large model may take a second.
    restart: a dead engine is replaced, after a pause that doubles each time.
    """

    def __init__(
        self,
        create: Callable[[], EngineClient],
        *,
        restart: bool,
        hang_timeout: float | None = None,
        kill: Callable[[EngineClient], None] = kill_process,
    ) -> None:
        self._create = create
        self._restart = restart
        self._hang_timeout = hang_timeout
        self._kill = kill
        self._engine = create()
        self._listeners: list[Callable[[EngineStats, EngineState], None]] = []
        self._cache_listeners: list[Callable[[Sequence[CacheChange]], None]] = []
        self._dead = False
        self._stopping = False
        self._started_at = 0.0
        self._pause = FIRST_RESTART_SECONDS
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def state(self) -> EngineState:
        return EngineState.STARTING if self._restarting else self._engine.state

    @property
    def pid(self) -> int | None:
        """The engine's process, if it has one."""
        return engine_pid(self._engine)

    @property
    def problem(self) -> str:
        return cause_of_death(self._engine) if self._dead else ""

    @property
    def _restarting(self) -> bool:
        return self._dead and self._restart

    async def start(self) -> EngineInfo:
        info = await self._start_engine(self._engine)
        self._tasks.append(asyncio.create_task(self._watch()))
        return info

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        if self._restarting:
            raise EngineDiedError("the engine is starting again")
        self._engine.submit(request, sink)

    def cancel(self, request_id: str) -> bool:
        return self._engine.cancel(request_id)

    def stop_candidate(self, request_id: str, candidate: int) -> None:
        self._engine.stop_candidate(request_id, candidate)

    def on_stats(self, listener: Callable[[EngineStats, EngineState], None]) -> None:
        self._listeners.append(listener)

    async def read_cache(self, start: int) -> CachePiece:
        return await self._engine.read_cache(start)

    def on_cache_changes(self, listener: Callable[[Sequence[CacheChange]], None]) -> None:
        self._cache_listeners.append(listener)

    async def stop(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engine.stop()

    async def _start_engine(self, engine: EngineClient) -> EngineInfo:
        info = await engine.start()
        self._engine = engine
        self._started_at = time.monotonic()
        engine.on_stats(lambda stats, state: self._on_stats(engine, stats, state))
        engine.on_cache_changes(lambda changes: self._on_cache_changes(engine, changes))
        return info

    def _on_stats(self, engine: EngineClient, stats: EngineStats, state: EngineState) -> None:
        if engine is not self._engine:
            return
        if state is EngineState.FAILED and not (self._dead or self._stopping):
            self._on_death(engine)
        self._notify(stats)

    def _on_cache_changes(self, engine: EngineClient, changes: Sequence[CacheChange]) -> None:
        if engine is self._engine:
            for listener in self._cache_listeners:
                listener(changes)

    def _on_death(self, engine: EngineClient) -> None:
        self._dead = True
        cause = {"instance_id": engine.info.instance_id, "problem": cause_of_death(engine)}
        if self._restart:
            LOGGER.error("engine died; starting another", extra=cause)
            self._tasks.append(asyncio.create_task(self._replace()))
        else:
            LOGGER.error("engine died; this service refuses requests until it is restarted itself", extra=cause)

    def _notify(self, stats: EngineStats) -> None:
        for listener in self._listeners:
            listener(stats, self.state)

    async def _replace(self) -> None:
        """Starts engines until one stands. A configuration that does not load any more is tried again, too: files may
        be on their way."""
        if time.monotonic() - self._started_at > STABLE_SECONDS:
            self._pause = FIRST_RESTART_SECONDS
        while True:
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, MOST_RESTART_SECONDS)
            await self._engine.stop()
            try:
                info = await self._start_engine(self._create())
            except EngineError as error:
                LOGGER.error("engine did not start", extra={"problem": str(error)})
                continue
            LOGGER.info("engine stands again", extra={"instance_id": info.instance_id})
            self._dead = False
            self._notify(self._engine.stats)
            return

    async def _watch(self) -> None:
        suspected = False
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            hang_timeout = self._hang_timeout or HANG_SECONDS.get(self.info.device, ACCELERATOR_HANG_SECONDS)
            suspect = self.state is EngineState.READY and self._seconds_without_progress > hang_timeout
            if suspect and suspected:
                extra = {"instance_id": self.info.instance_id, "seconds": round(self._seconds_without_progress, 3)}
                LOGGER.error("engine hangs; killing it", extra=extra)
                blame(self._engine, f"it made no progress for {self._seconds_without_progress:.1f} s and was ended")
                self._kill(self._engine)
                await asyncio.sleep(hang_timeout)
            # Only the second time counts: this loop itself may have been held up, and the engine's word not yet read.
            suspected = suspect

    @property
    def _seconds_without_progress(self) -> float:
        stats = self._engine.stats
        return time.monotonic() - max(min(stats.heartbeat, stats.progressed), self._started_at)
