"""Blocks in host memory for preempted sequences: the same allocator over another pool."""

from __future__ import annotations

from engine.errors import OutOfBlocksError
from engine.kv.allocator import BlockAllocator


class SwapSpace:
    """Ids only; the copies are the runner's. They run in the order they were planned, so a host block may be handed out
    again as soon as its copy back is planned."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator

    @property
    def num_blocks(self) -> int:
        return self._allocator.num_blocks

    @property
    def num_used(self) -> int:
        return self._allocator.num_live

    def take(self, count: int) -> list[int] | None:
        """Host blocks for `count` device blocks, or None if there are too few."""
        try:
            return self._allocator.allocate(count)
        except OutOfBlocksError:
            return None

    def give_back(self, blocks: list[int]) -> None:
        self._allocator.release(blocks)

    def check(self) -> None:
        self._allocator.check()
