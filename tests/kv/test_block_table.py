"""Slots of the block tables, and the rows behind them."""

from __future__ import annotations

import pytest

from engine.kv.block_table import BlockTables
from engine.kv.oracle import OracleBlockAllocator


def test_the_lowest_free_slot_is_taken() -> None:
    tables = BlockTables(OracleBlockAllocator(8), num_slots=4, max_blocks=3, block_size=4)
    assert [tables.acquire_slot() for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        tables.acquire_slot()
    for slot in (1, 3, 0):
        tables.release_slot(slot)
    assert tables.num_free_slots == 3
    assert [tables.acquire_slot() for _ in range(3)] == [0, 1, 3]


def test_rows_grow_by_whole_blocks_and_are_empty_once_released() -> None:
    tables = BlockTables(OracleBlockAllocator(5), num_slots=2, max_blocks=3, block_size=4)
    assert [tables.blocks_for(tokens) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    assert tables.grow([1, 0], [5, 9]) == 2
    assert tables.rows.tolist() == [[3, 4, 5], [1, 2, 0]]
    assert tables.grow([1], [9]) == 0
    tables.acquire_slot()
    tables.release_slot(0)
    assert tables.rows.tolist() == [[0, 0, 0], [1, 2, 0]]
    assert tables.grow([1], [9]) == 1
