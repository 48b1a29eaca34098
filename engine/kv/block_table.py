"""The block tables of the running sequences: one row a slot, in one array that goes to the device as it is."""

from __future__ import annotations

import numpy as np

from engine.kv.allocator import BlockAllocator, Int32Array


class BlockTables:
    """`rows` [num_slots, max_blocks] and `lengths` [num_slots], int32. A slot belongs to one running sequence; entries
    behind a row's length are 0, the scratch block."""

    def __init__(self, allocator: BlockAllocator, num_slots: int, max_blocks: int, block_size: int) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.rows: Int32Array = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.lengths: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def acquire_slot(self) -> int:
        """The lowest free slot. Raises IndexError when every slot is taken."""
        return self._free_slots.pop()

    def release_slot(self, slot: int) -> None:
        """Releases the row's blocks and frees the slot."""
        self.allocator.release_row(self.rows, self.lengths, slot)
        self._free_slots.append(slot)
        self._free_slots.sort(reverse=True)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def grow(self, slots: list[int], num_tokens: list[int]) -> int:
        """Extends rows, in order, to hold so many tokens; returns how many rows were served."""
        wanted = [self.blocks_for(count) for count in num_tokens]
        return self.allocator.grow_tables(
            self.rows, self.lengths, np.asarray(slots, dtype=np.int32), np.asarray(wanted, dtype=np.int32)
        )
