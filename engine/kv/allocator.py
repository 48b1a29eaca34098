"""The block allocator's contract, and the choice of implementation. Ids only: it knows nothing of what blocks hold.

A block is in one of three states: live (reference count > 0), cached (count 0, findable under its published key) or
free. Order is part of the contract, so that the native allocator and the oracle can be compared step by step:

- Block 0 is scratch and never handed out. At start blocks 1..num_blocks-1 are free, in ascending order.
- `allocate` takes from the front of the free queue; when that is empty it evicts the least recently released cached
  block (front of the cached queue) and drops its key.
- `release` lowers counts in the order given. A block that reaches 0 goes to the back of the cached queue if it is
  published, else to the back of the free queue.
- Callers release a sequence's blocks last to first, so that a prefix outlives its continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.config import AllocatorKind

Int32Array = NDArray[np.int32]


class BlockAllocator(Protocol):
    @property
    def num_blocks(self) -> int:
        """Usable blocks, without the scratch block."""
        ...

    @property
    def num_free(self) -> int: ...

    @property
    def num_cached(self) -> int: ...

    @property
    def num_live(self) -> int: ...

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with reference count 1. Raises OutOfBlocksError, having allocated nothing, if free + cached <
        count."""
        ...

    def retain(self, blocks: Sequence[int]) -> None:
        """Raises counts by one; a cached block becomes live and keeps its key. Raises ValueError on a free block."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """Lowers counts by one. Raises ValueError on a block that is not live, having changed nothing."""
        ...

    def ref_count(self, block: int) -> int: ...

    def publish(self, block: int, key: int) -> int:
        """Makes a live block findable under `key` (64 bits, unsigned). Returns the block that holds the key: `block`,
        or the earlier one if the key is taken (then `block` stays unpublished)."""
        ...

    def publish_all(self, blocks: Sequence[int], keys: Sequence[int]) -> int:
        """`publish` of each pair in order, up to the first whose key another block holds. Returns how many came before
        that one. Raises ValueError if there are not as many keys as blocks."""
        ...

    def find(self, key: int) -> int:
        """The live or cached block published under `key`, or -1. Does not change any count."""
        ...

    def grow_tables(self, tables: Int32Array, lengths: Int32Array, rows: Int32Array, wanted: Int32Array) -> int:
        """One call a step. For each i in order, extends row `rows[i]` of `tables` [slots, max_blocks] to `wanted[i]`
        blocks, updating `lengths` [slots] in place (a row already as long is left alone). Stops at the first row that
        cannot be extended fully, without changing it. Returns how many rows were served. Raises ValueError if wanted >
        max_blocks."""
        ...

    def release_row(self, tables: Int32Array, lengths: Int32Array, row: int) -> None:
        """Releases a row's blocks last to first, zeroes its entries and its length."""
        ...

    def reset(self) -> None:
        """Back to the state at start. Only when nothing is live (raises ValueError)."""
        ...

    def check(self) -> None:
        """Raises RuntimeError naming the fault if counts, queues and keys disagree: live + cached + free = num_blocks,
        every queued block has count 0, every key points to its block."""
        ...


def make_allocator(kind: AllocatorKind, num_blocks: int) -> BlockAllocator:
    """`num_blocks` usable blocks (ids 1..num_blocks) of the given kind."""
    from engine import _runtime

    native: BlockAllocator = _runtime.BlockAllocator(num_blocks)
    if kind is AllocatorKind.NATIVE:
        return native
    from engine.kv.oracle import OracleBlockAllocator

    if kind is AllocatorKind.ORACLE:
        return OracleBlockAllocator(num_blocks)
    from engine.kv.checked import CheckedBlockAllocator

    return CheckedBlockAllocator(native, OracleBlockAllocator(num_blocks))
