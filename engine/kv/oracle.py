"""The block allocator in plain Python: the truth that the native one is compared with, order of reuse included."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from engine.errors import OutOfBlocksError
from engine.kv.allocator import Int32Array

MAX_BLOCKS = 2**31 - 2
MAX_KEY = 2**64 - 1


class OracleBlockAllocator:
    """Implements `engine.kv.allocator.BlockAllocator`; see there for the contract."""

    def __init__(self, num_blocks: int) -> None:
        if not 1 <= num_blocks <= MAX_BLOCKS:
            raise ValueError(f"num_blocks must be at least 1 and below 2^31 - 1, got {num_blocks}")
        self._num_blocks = num_blocks
        self._free: deque[int] = deque()
        self._cached: dict[int, None] = {}  # insertion order is the order of release
        self._ref_counts: dict[int, int] = {}  # live blocks only
        self._key_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self.reset()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_live(self) -> int:
        return len(self._ref_counts)

    def allocate(self, count: int) -> list[int]:
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        available = self.num_free + self.num_cached
        if count > available:
            raise OutOfBlocksError(f"{count} blocks wanted, {available} available")
        return [self._take() for _ in range(count)]

    def retain(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.is_free(block):
                raise ValueError(f"block {block} is free")
        for block in blocks:
            self._cached.pop(block, None)
            self._ref_counts[block] = self.ref_count(block) + 1

    def release(self, blocks: Sequence[int]) -> None:
        for block, times in Counter(blocks).items():
            if self.ref_count(block) < times:
                raise ValueError(f"block {block} is not live")
        for block in blocks:
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._retire(block)

    def ref_count(self, block: int) -> int:
        self._check_exists(block)
        return self._ref_counts.get(block, 0)

    def is_free(self, block: int) -> bool:
        """Whether nobody holds the block and no key finds it."""
        return self.ref_count(block) == 0 and block not in self._cached

    def publish(self, block: int, key: int) -> int:
        if self.ref_count(block) == 0:
            raise ValueError(f"block {block} is not live")
        holder = self.find(key)
        if holder >= 0:
            return holder
        if block in self._key_of:
            raise ValueError(f"block {block} is published under another key")
        self._key_of[block] = key
        self._block_of[key] = block
        return block

    def publish_all(self, blocks: Sequence[int], keys: Sequence[int]) -> int:
        if len(blocks) != len(keys):
            raise ValueError("blocks and keys differ in length")
        for count, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            if self.publish(block, key) != block:
                return count
        return len(blocks)

    def find(self, key: int) -> int:
        if not 0 <= key <= MAX_KEY:
            raise TypeError(f"a key is an unsigned 64-bit number, got {key}")
        return self._block_of.get(key, -1)

    def grow_tables(self, tables: Int32Array, lengths: Int32Array, rows: Int32Array, wanted: Int32Array) -> int:
        if len(rows) != len(wanted):
            raise ValueError("rows and wanted differ in length")
        for row, goal in zip(rows.tolist(), wanted.tolist(), strict=True):
            self._check_row(tables, lengths, row)
            if not 0 <= goal <= tables.shape[1]:
                raise ValueError(f"row {row}: {goal} blocks wanted, a row holds {tables.shape[1]}")
        for served, (row, goal) in enumerate(zip(rows.tolist(), wanted.tolist(), strict=True)):
            length = int(lengths[row])
            if goal <= length:
                continue
            if goal - length > self.num_free + self.num_cached:
                return served
            tables[row, length:goal] = self.allocate(goal - length)
            lengths[row] = goal
        return len(rows)

    def release_row(self, tables: Int32Array, lengths: Int32Array, row: int) -> None:
        self._check_row(tables, lengths, row)
        length = int(lengths[row])
        self.release(tables[row, :length][::-1].tolist())
        tables[row, :length] = 0
        lengths[row] = 0

    def reset(self) -> None:
        if self._ref_counts:
            raise ValueError(f"block {min(self._ref_counts)} is live")
        for state in (self._free, self._cached, self._key_of, self._block_of):
            state.clear()
        self._free.extend(range(1, self._num_blocks + 1))

    def check(self) -> None:
        free, cached, live = set(self._free), set(self._cached), set(self._ref_counts)
        if len(free) != self.num_free or free | cached | live != set(range(1, self._num_blocks + 1)):
            raise RuntimeError("a block is in no state, or queued twice")
        if self.num_free + self.num_cached + self.num_live != self._num_blocks:
            raise RuntimeError("a block is in two states")
        if min(self._ref_counts.values(), default=1) < 1:
            raise RuntimeError("a live block has no count")
        if {key: block for block, key in self._key_of.items()} != self._block_of:
            raise RuntimeError("keys and blocks disagree")
        if not cached <= set(self._key_of) <= cached | live:
            raise RuntimeError("the cached queue and the published blocks disagree")

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block = next(iter(self._cached))
            del self._cached[block]
            del self._block_of[self._key_of.pop(block)]
        self._ref_counts[block] = 1
        return block

    def _retire(self, block: int) -> None:
        del self._ref_counts[block]
        if block in self._key_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _check_exists(self, block: int) -> None:
        if not 1 <= block <= self._num_blocks:
            raise ValueError(f"block {block} does not exist")

    def _check_row(self, tables: Int32Array, lengths: Int32Array, row: int) -> None:
        if len(lengths) != len(tables):
            raise ValueError("tables and lengths differ in rows")
        if not 0 <= row < len(tables):
            raise ValueError(f"row {row} does not exist")
        if not 0 <= lengths[row] <= tables.shape[1]:
            raise ValueError(f"row {row} has length {lengths[row]}")
