"""Random operation sequences: native, oracle and a plain dictionary of counts must tell one story."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine import _runtime
from engine.errors import OutOfBlocksError
from engine.kv.checked import CheckedBlockAllocator
from engine.kv.oracle import OracleBlockAllocator

SLOTS, MAX_BLOCKS = 4, 6


class Story:
    """An allocator in lock-step with the oracle, and beside both the plainest model: held blocks and their counts."""

    def __init__(self, num_blocks: int) -> None:
        self.native = _runtime.BlockAllocator(num_blocks)
        self.allocator = CheckedBlockAllocator(self.native, OracleBlockAllocator(num_blocks))
        self.tables = np.zeros((SLOTS, MAX_BLOCKS), np.int32)
        self.lengths = np.zeros(SLOTS, np.int32)
        self.loose: list[int] = []  # one entry per reference held outside the tables
        self.keys: dict[int, int] = {}  # key -> block, for live blocks only

    def counts(self) -> dict[int, int]:
        held = self.loose + [int(b) for row, n in zip(self.tables, self.lengths, strict=True) for b in row[:n]]
        return dict(Counter(held))

    def allocate(self, count: int) -> None:
        try:
            blocks = self.allocator.allocate(count)
        except OutOfBlocksError:
            assert count > self.allocator.num_blocks - len(self.counts())
            return
        assert not set(blocks) & set(self.counts())
        self._forget_evicted()
        self.loose += blocks

    def retain(self, position: int) -> None:
        if self.loose:
            block = self.loose[position % len(self.loose)]
            self.allocator.retain([block])
            self.loose.append(block)

    def revive(self, key: int) -> None:
        block = self.allocator.find(key)
        assert self.keys.get(key, block) == block
        if block >= 0:
            self.allocator.retain([block])
            self.loose.append(block)

    def release(self, positions: list[int]) -> None:
        chosen = {position % len(self.loose) for position in positions} if self.loose else set()
        self.allocator.release([self.loose[i] for i in sorted(chosen)])
        self.loose = [block for i, block in enumerate(self.loose) if i not in chosen]

    def publish(self, position: int, key: int) -> None:
        if not self.loose:
            return
        block = self.loose[position % len(self.loose)]
        try:
            holder = self.allocator.publish(block, key)
        except ValueError:
            assert block in self.keys.values() or block != self.allocator.find(key)
            return
        assert self.allocator.find(key) == holder
        self.keys[key] = holder

    def grow(self, wanted: list[int]) -> None:
        before = self.lengths.copy()
        rows = np.arange(len(wanted), dtype=np.int32)
        served = self.allocator.grow_tables(self.tables, self.lengths, rows, np.array(wanted, np.int32))
        self._forget_evicted()
        for row, goal in enumerate(wanted):
            assert self.lengths[row] == (max(before[row], goal) if row < served else before[row])

    def drop_row(self, row: int) -> None:
        self.allocator.release_row(self.tables, self.lengths, row)

    def misuse(self, block: int) -> None:
        if block not in self.counts():
            with pytest.raises(ValueError, match="block"):
                self.allocator.release([block])

    def check(self) -> None:
        counts = self.counts()
        assert self.allocator.num_live == len(counts)
        for block in range(1, self.allocator.num_blocks + 1):
            assert self.allocator.ref_count(block) == counts.get(block, 0)
        self.allocator.check()

    def _forget_evicted(self) -> None:
        self.keys = {key: block for key, block in self.keys.items() if self.allocator.find(key) == block}


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 24))
    def start(self, num_blocks: int) -> None:
        self.story = Story(num_blocks)

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        self.story.allocate(count)

    @rule(position=st.integers(0, 30))
    def retain(self, position: int) -> None:
        self.story.retain(position)

    @rule(key=st.integers(0, 9))
    def revive(self, key: int) -> None:
        self.story.revive(key)

    @rule(positions=st.lists(st.integers(0, 30), max_size=6))
    def release(self, positions: list[int]) -> None:
        self.story.release(positions)

    @rule(position=st.integers(0, 30), key=st.integers(0, 9))
    def publish(self, position: int, key: int) -> None:
        self.story.publish(position, key)

    @rule(wanted=st.lists(st.integers(0, MAX_BLOCKS), max_size=SLOTS))
    def grow(self, wanted: list[int]) -> None:
        self.story.grow(wanted)

    @rule(row=st.integers(0, SLOTS - 1))
    def drop_row(self, row: int) -> None:
        self.story.drop_row(row)

    @rule(block=st.integers(1, 24))
    def misuse(self, block: int) -> None:
        self.story.misuse(block)

    @invariant()
    def one_story(self) -> None:
        if hasattr(self, "story"):
            self.story.check()


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_random_operations = AllocatorMachine.TestCase


@pytest.mark.slow
def test_a_hundred_thousand_operations_agree() -> None:
    random_source = random.Random(20250111)
    story = Story(200)
    draw = random_source.randrange
    operations: list[Callable[[], None]] = [
        lambda: story.allocate(draw(12)),
        lambda: story.retain(draw(1000)),
        lambda: story.revive(draw(300)),
        lambda: story.release([draw(1000) for _ in range(draw(12))]),
        lambda: story.publish(draw(1000), draw(300)),
        lambda: story.grow([draw(MAX_BLOCKS + 1) for _ in range(SLOTS)]),
        lambda: story.drop_row(draw(SLOTS)),
        lambda: story.misuse(1 + draw(200)),
    ]
    for step in range(100_000):
        random_source.choice(operations)()
        if step % 500 == 0:
            story.check()
    story.check()
