"""The block allocator's contract, on the native allocator, the oracle and the two in lock-step."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.config import AllocatorKind
from engine.errors import OutOfBlocksError
from engine.kv.allocator import BlockAllocator, make_allocator
from engine.kv.checked import AllocatorMismatchError, CheckedBlockAllocator
from engine.kv.oracle import OracleBlockAllocator


@pytest.fixture(params=list(AllocatorKind))
def kind(request: pytest.FixtureRequest) -> AllocatorKind:
    return AllocatorKind(request.param)


def counts(allocator: BlockAllocator) -> tuple[int, int, int]:
    return allocator.num_free, allocator.num_cached, allocator.num_live


def tables(slots: int, max_blocks: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return np.zeros((slots, max_blocks), np.int32), np.zeros(slots, np.int32)


def int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def test_hands_out_ascending_ids_without_the_scratch_block(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 4)
    assert allocator.num_blocks == 4
    assert allocator.allocate(4) == [1, 2, 3, 4]
    assert allocator.allocate(0) == []
    assert counts(allocator) == (0, 0, 4)


def test_refuses_more_than_there_is_and_allocates_nothing(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 4)
    allocator.allocate(2)
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 available"):
        allocator.allocate(3)
    assert allocator.allocate(2) == [3, 4]
    with pytest.raises(ValueError, match="negative"):
        allocator.allocate(-1)


def test_released_blocks_come_back_in_the_order_of_release(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 4)
    allocator.allocate(4)
    allocator.release([3, 1])
    allocator.release([4])
    assert allocator.allocate(3) == [3, 1, 4]


def test_counts_hold_a_block_until_its_last_release(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 2)
    allocator.allocate(1)
    allocator.retain([1, 1])
    assert allocator.ref_count(1) == 3
    allocator.release([1, 1])
    assert counts(allocator) == (1, 0, 1)
    allocator.release([1])
    assert (counts(allocator), allocator.ref_count(1)) == ((2, 0, 0), 0)


def test_a_block_released_twice_in_one_call_retires_at_the_second(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 3)
    allocator.allocate(3)
    allocator.retain([1])
    allocator.release([1, 2, 1])
    assert allocator.allocate(2) == [2, 1]


@pytest.mark.parametrize("blocks", [[1, 3], [1, 1], [1, 0], [1, -1], [1, 99]])
def test_a_wrong_release_changes_nothing(kind: AllocatorKind, blocks: list[int]) -> None:
    allocator = make_allocator(kind, 4)
    allocator.allocate(2)
    with pytest.raises(ValueError, match="block"):
        allocator.release(blocks)
    assert (counts(allocator), allocator.ref_count(1)) == ((2, 0, 2), 1)
    allocator.check()


@pytest.mark.parametrize("blocks", [[1, 3], [1, 0], [1, 99]])
def test_a_wrong_retain_changes_nothing(kind: AllocatorKind, blocks: list[int]) -> None:
    allocator = make_allocator(kind, 4)
    allocator.allocate(2)
    with pytest.raises(ValueError, match="block"):
        allocator.retain(blocks)
    assert allocator.ref_count(1) == 1


def test_a_published_block_is_cached_found_and_revived(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 2)
    allocator.allocate(1)
    assert allocator.find(7) == -1
    assert allocator.publish(1, 7) == 1
    allocator.release([1])
    assert (counts(allocator), allocator.find(7)) == ((1, 1, 0), 1)
    allocator.retain([1])
    assert (counts(allocator), allocator.find(7), allocator.ref_count(1)) == ((1, 0, 1), 1, 1)


def test_eviction_takes_the_least_recently_released_and_drops_its_key(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 3)
    allocator.allocate(3)
    for block in (1, 2, 3):
        allocator.publish(block, 100 + block)
    allocator.release([2, 1])
    allocator.retain([2])
    allocator.release([2])  # now younger than 1
    assert allocator.allocate(1) == [1]
    assert [allocator.find(100 + block) for block in (1, 2, 3)] == [-1, 2, 3]
    assert allocator.publish(1, 101) == 1


def test_free_blocks_go_before_cached_ones(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 3)
    allocator.allocate(2)
    allocator.publish(1, 5)
    allocator.release([1, 2])
    assert allocator.allocate(3) == [3, 2, 1]


def test_a_taken_key_stays_with_its_first_holder(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 3)
    allocator.allocate(2)
    assert allocator.publish(1, 5) == 1
    assert allocator.publish(1, 5) == 1
    assert allocator.publish(2, 5) == 1
    allocator.release([2])
    assert counts(allocator) == (2, 0, 1)  # 2 was not published, so it is free, not cached
    assert allocator.find(5) == 1
    assert sorted(allocator.allocate(2)) == [2, 3]  # whoever has its block now does not have its key
    assert (allocator.find(5), allocator.ref_count(1)) == (1, 1)
    allocator.release([1])
    assert (counts(allocator), allocator.find(5)) == ((0, 1, 2), 1)


def test_publish_refuses_what_it_cannot_keep(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 2)
    with pytest.raises(ValueError, match="not live"):
        allocator.publish(1, 5)
    allocator.allocate(1)
    allocator.publish(1, 2**64 - 1)
    assert allocator.find(2**64 - 1) == 1
    with pytest.raises(ValueError, match="another key"):
        allocator.publish(1, 5)
    with pytest.raises(TypeError):
        allocator.find(2**64)


def test_tables_grow_in_place_and_in_order(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 6)
    ids, lengths = tables(3, 4)
    assert allocator.grow_tables(ids, lengths, int32(2, 0), int32(2, 1)) == 2
    assert allocator.grow_tables(ids, lengths, int32(0, 2), int32(3, 1)) == 2
    assert ids.tolist() == [[3, 4, 5, 0], [0, 0, 0, 0], [1, 2, 0, 0]]
    assert lengths.tolist() == [3, 0, 2]


def test_growth_stops_at_the_first_row_that_does_not_fit(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 4)
    ids, lengths = tables(3, 4)
    assert allocator.grow_tables(ids, lengths, int32(0, 1, 2), int32(2, 3, 1)) == 1
    assert lengths.tolist() == [2, 0, 0]
    assert not ids[1:].any()
    assert counts(allocator) == (2, 0, 2)


@pytest.mark.parametrize(("row", "wanted"), [(3, 1), (-1, 1), (0, 5), (0, -1)])
def test_growth_outside_the_tables_is_refused_before_any_row(kind: AllocatorKind, row: int, wanted: int) -> None:
    allocator = make_allocator(kind, 4)
    ids, lengths = tables(3, 4)
    with pytest.raises(ValueError, match="row"):
        allocator.grow_tables(ids, lengths, int32(1, row), int32(1, wanted))
    assert (counts(allocator), lengths.tolist()) == ((4, 0, 0), [0, 0, 0])


def test_a_row_is_released_last_to_first(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 3)
    ids, lengths = tables(2, 4)
    allocator.grow_tables(ids, lengths, int32(1), int32(3))
    allocator.release_row(ids, lengths, 1)
    assert not ids.any()
    assert lengths.tolist() == [0, 0]
    assert allocator.allocate(3) == [3, 2, 1]


@pytest.mark.parametrize("kind", [AllocatorKind.NATIVE, AllocatorKind.CHECKED])
def test_tables_are_never_written_through_a_copy(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 4)
    ids, lengths = tables(3, 4)
    for wrong in (ids.astype(np.int64), ids[:, ::2], np.asfortranarray(ids)):
        with pytest.raises((TypeError, AllocatorMismatchError)):
            allocator.grow_tables(wrong, lengths, int32(0), int32(1))  # type: ignore[arg-type]


def test_reset_goes_back_to_the_start_once_nothing_is_live(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 3)
    allocator.allocate(3)
    allocator.publish(2, 9)
    with pytest.raises(ValueError, match="block 1 is live"):
        allocator.reset()
    allocator.release([3, 2, 1])
    allocator.reset()
    assert (counts(allocator), allocator.find(9)) == ((3, 0, 0), -1)
    assert allocator.allocate(3) == [1, 2, 3]


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31])
def test_an_impossible_size_is_refused(kind: AllocatorKind, num_blocks: int) -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        make_allocator(kind, num_blocks)


class LastInFirstOut(OracleBlockAllocator):
    """A faulty allocator: right counts, wrong order."""

    def release(self, blocks: object) -> None:
        super().release(blocks)  # type: ignore[arg-type]
        self._free.rotate(1)


class Generous(OracleBlockAllocator):
    """A faulty allocator: a wrong release passes."""

    def release(self, blocks: object) -> None:
        super().release([block for block in blocks if self.ref_count(block)])  # type: ignore[attr-defined]


def test_checked_mode_raises_at_the_first_wrong_order() -> None:
    allocator = CheckedBlockAllocator(LastInFirstOut(4), OracleBlockAllocator(4))
    allocator.allocate(1)
    allocator.release([1])
    with pytest.raises(AllocatorMismatchError, match=r"returned \[1\], expected \[2\]"):
        allocator.allocate(1)


def test_checked_mode_raises_when_only_one_refuses() -> None:
    allocator = CheckedBlockAllocator(Generous(4), OracleBlockAllocator(4))
    with pytest.raises(AllocatorMismatchError, match="expected ValueError"):
        allocator.release([1])


def test_checked_mode_raises_when_counts_differ() -> None:
    with pytest.raises(AllocatorMismatchError, match="start"):
        CheckedBlockAllocator(OracleBlockAllocator(3), OracleBlockAllocator(4))


def test_the_oracle_finds_its_own_damage() -> None:
    allocator = OracleBlockAllocator(3)
    allocator.allocate(2)
    allocator.publish(1, 5)
    allocator.check()
    for damage in (
        lambda broken: broken._free.append(3),
        lambda broken: broken._free.append(1),
        lambda broken: broken._ref_counts.update({1: 0}),
        lambda broken: broken._block_of.clear(),
        lambda broken: broken._cached.update({3: None}),
    ):
        broken = OracleBlockAllocator(3)
        broken.allocate(2)
        broken.publish(1, 5)
        damage(broken)  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError):
            broken.check()


def test_blocks_that_lose_their_last_owner_are_noted() -> None:
    """Released, dropped with a row, or handed out by eviction; not those that are shared or stay findable."""
    allocator = CheckedBlockAllocator(make_allocator(AllocatorKind.NATIVE, 4), OracleBlockAllocator(4))
    rows, lengths = tables(1, 4)
    allocator.allocate(2)
    allocator.take_freed()
    allocator.retain([1])
    allocator.publish(2, 7)
    allocator.release([2, 1])
    assert allocator.take_freed() == []
    allocator.release([1])
    assert allocator.take_freed() == [1]
    allocator.grow_tables(rows, lengths, int32(0), int32(4))
    assert sorted(allocator.take_freed()) == [1, 2, 3, 4]  # block 2 lost its key to this row
    allocator.release_row(rows, lengths, 0)
    assert sorted(allocator.take_freed()) == [1, 2, 3, 4]
    assert allocator.take_freed() == []
    allocator.release(blocks := allocator.allocate(1))
    assert allocator.take_freed() == blocks  # once


def test_publishing_many_stops_where_another_holds_the_key(kind: AllocatorKind) -> None:
    allocator = make_allocator(kind, 6)
    allocator.allocate(6)
    allocator.publish(6, 13)
    assert allocator.publish_all([1, 2, 3, 4], [11, 12, 13, 14]) == 2
    assert [allocator.find(key) for key in (11, 12, 13, 14)] == [1, 2, 6, -1]
    assert allocator.publish_all([1, 2, 4], [11, 12, 14]) == 3  # its own keys are not another's
    assert allocator.publish_all([], []) == 0
    with pytest.raises(ValueError, match="differ in length"):
        allocator.publish_all([5], [])
    allocator.release([5])
    with pytest.raises(ValueError, match="not live"):
        allocator.publish_all([3, 5], [33, 55])
    assert allocator.find(33) == 3
