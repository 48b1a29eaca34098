"""What the services of one replica share: the engine, the model's text, live requests, and whether it is ready."""

from __future__ import annotations

import asyncio
import enum
import itertools
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from engine import EngineClient, EngineInfo, EngineState, EngineStats, Tokenizer
from service.cache_feed import CacheFeed
from service.config import ServiceConfig
from service.convert.model import ServedModel
from service.live import LiveRequests, OpenStreams
from service.metrics import Metrics
from service.quota import Quotas
from service.rate import RequestRate
from service.revision import Revision
from service.spans import Spans

WATCH_SECONDS = 0.1


class ReplicaState(enum.IntEnum):
    """Values equal `octavo.v1.ReplicaState`."""

    STARTING = 1
    READY = 2
    DRAINING = 3
    FAILED = 4


class Replica:
    """Lives on one asyncio loop. The engine is started already."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        config: ServiceConfig,
        spans: Spans,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.spans = spans
        self.quotas = Quotas()
        self.live = LiveRequests(self.quotas)
        self.rate = RequestRate()
        self.streams = OpenStreams()
        self.metrics = Metrics(engine, lambda: self.ready)
        self.changes = Revision()
        self.cache_feed = CacheFeed(engine)
        self.draining = False
        self._stop = asyncio.Event()
        self.tokenizer_threads = ThreadPoolExecutor(config.tokenizer_threads, "octavo-tokenizer")
        self.max_prompt_bytes = engine.info.max_prompt_tokens * longest_token(tokenizer)
        self._ids = itertools.count(1)
        self._id_prefix = secrets.token_hex(4)
        self._ready_at = time.monotonic()
        self._engine_state = engine.state
        self._was_ready = False
        self._figures: tuple[int, ...] = ()
        self._watch: asyncio.Task[None] | None = None
        engine.on_stats(self._on_stats)

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def model(self) -> ServedModel:
        return ServedModel(self.info.model, self.info, self.config.model_aliases)

    @property
    def state(self) -> ReplicaState:
        if self.draining:
            return ReplicaState.DRAINING
        match self.engine.state:
            case EngineState.STARTING:
                return ReplicaState.STARTING
            case EngineState.READY if not self.is_stalled:
                return ReplicaState.READY
            case _:
                return ReplicaState.FAILED

    @property
    def ready(self) -> bool:
        """Whether a request sent now is served (or queued)."""
        return self.state is ReplicaState.READY

    @property
    def alive(self) -> bool:
        """Whether this process can still do its work, now or once it has recovered."""
        return self.engine.state not in (EngineState.FAILED, EngineState.STOPPED) or self.draining

    @property
    def problem(self) -> str:
        """What ended the engine, as far as it can tell."""
        return getattr(self.engine, "problem", "")

    @property
    def is_stalled(self) -> bool:
        """The engine gives no sign of life, or its work does not advance. A step may take as long as it likes while
        its parts are done one after the other."""
        since = max(min(self.engine.stats.heartbeat, self.engine.stats.progressed), self._ready_at)
        return time.monotonic() - since > self.config.heartbeat_timeout

    @property
    def last_sign_of_life(self) -> float:
        """The newest heartbeat, or when the engine became ready if it gave none since; `time.monotonic()`."""
        return max(self.engine.stats.heartbeat, self._ready_at)

    def new_engine_id(self) -> str:
        return f"{self._id_prefix}-{next(self._ids):x}"

    def start_watching(self) -> None:
        self._watch = asyncio.create_task(self._watch_forever())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        self.tokenizer_threads.shutdown(wait=False, cancel_futures=True)

    def begin_drain(self) -> None:
        """New requests are refused from now on, and health says so."""
        self.draining = True
        self.refresh()

    def begin_stop(self) -> None:
        """Watches end."""
        self._stop.set()
        self.changes.advance()
        self.cache_feed.revision.advance()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def sleep(self, seconds: float) -> None:
        """Sleeps, but not beyond the stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    def refresh(self) -> None:
        """Tells watchers if readiness changed."""
        ready = self.ready
        if ready is not self._was_ready or self.draining:
            self._was_ready = ready
            self.changes.advance()

    async def _watch_forever(self) -> None:
        while True:
            now = time.monotonic()
            self.streams.check_stalls(now)
            self.live.check_deadlines(now, stalled=self.is_stalled)
            self.rate.update(self.metrics.ended, self.metrics.faults, now)
            self.refresh()
            await asyncio.sleep(WATCH_SECONDS)

    def _on_stats(self, stats: EngineStats, state: EngineState) -> None:
        if state is EngineState.READY and self._engine_state is not EngineState.READY:
            self._ready_at = time.monotonic()
        self._engine_state = state
        self.metrics.on_stats(stats)
        figures = (
            stats.step,
            stats.running_requests,
            stats.queued_requests,
            stats.free_blocks,
            stats.cached_blocks,
            hash(state),
        )
        if figures != self._figures:
            self._figures = figures
            self.changes.advance()


def longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the vocabulary's longest token: no text of more than this times the token limit can fit."""
    return max((len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.size)), default=1)
