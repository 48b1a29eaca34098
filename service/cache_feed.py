"""The newest changes of the engine's prefix cache, numbered, for any number of watchers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine import BlockStored, CacheChange, EngineClient
from service.revision import Revision

MOST_KEPT = 65_536


class ChangesLostError(Exception):
    """What a watcher asks for is not there: older than what is kept, of another instance, or not yet."""


class CacheFeed:
    """Keeps the last `most_kept` changes of the engine's present instance; the first has sequence 1. So a watcher that
    reads slowly costs nothing, and one that was too slow is told."""

    def __init__(self, engine: EngineClient, most_kept: int = MOST_KEPT) -> None:
        self.revision = Revision()
        self._engine = engine
        self._changes: deque[CacheChange] = deque(maxlen=most_kept)
        self._instance_id = ""
        self._newest = 0
        engine.on_cache_changes(self._on_changes)

    @property
    def newest(self) -> int:
        """The sequence of the newest change; 0 before the first."""
        self._check_instance()
        return self._newest

    def after(self, sequence: int, most: int) -> list[CacheChange]:
        """Up to `most` changes behind this one, in order. Raises ChangesLostError."""
        self._check_instance()
        behind = self._newest - sequence
        if not 0 <= behind <= len(self._changes):
            raise ChangesLostError(f"change {sequence + 1} is not kept; the newest is {self._newest}")
        first = len(self._changes) - behind
        return [self._changes[index] for index in range(first, min(first + most, len(self._changes)))]

    async def read(self, start: int = 0) -> tuple[list[BlockStored], int | None]:
        """A piece of what the cache holds, and where the next one starts. Raises EngineDiedError."""
        piece = await self._engine.read_cache(start)
        return piece.blocks, piece.next_start

    def _on_changes(self, changes: Sequence[CacheChange]) -> None:
        self._check_instance()
        self._changes.extend(changes)
        self._newest += len(changes)
        self.revision.advance()

    def _check_instance(self) -> None:
        if self._engine.info.instance_id != self._instance_id:
            self._instance_id = self._engine.info.instance_id
            self._changes.clear()
            self._newest = 0
