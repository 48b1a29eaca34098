"""Whoever reads the prefix cache once and then follows its changes knows at any time what it holds."""

from __future__ import annotations

import random

import pytest

from engine.config import AllocatorKind
from engine.kv.prefix_index import PrefixIndex, hash64
from engine.loop import StepLoop
from engine.types import BlockRemoved, BlockStored, CacheChange, GenerationRequest, SamplingParameters, StopCriteria
from tests.schedule.fake_model import make_loop, request, run_to_end

PIECE = 3


class Follower:
    """Reads piece by piece while the cache goes on changing, as a process beside the engine does."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.known: dict[int, BlockStored] = {}
        self.next_start: int | None = 0
        self._behind: list[CacheChange] = []  # since the first piece, to be applied behind the last

    def advance(self) -> None:
        changes = self.index.take_changes()
        if self.next_start is None:
            self.apply(changes)
            return
        self._behind += changes
        piece = self.index.read(self.next_start, PIECE)
        self.apply(piece.blocks)
        self.next_start = piece.next_start
        if self.next_start is None:
            self.apply(self._behind)

    def apply(self, changes: list[BlockStored] | list[CacheChange]) -> None:
        for change in changes:
            if isinstance(change, BlockStored):
                self.known[change.hash] = change
            else:
                self.known.pop(change.hash, None)


def truth(loop: StepLoop) -> dict[int, BlockStored]:
    """What can be found now, by the index's own account."""
    index = loop.scheduler.residency.prefix_index
    assert index is not None
    allocator = loop.scheduler.tables.allocator
    entries = [
        entry.stored()
        for block, entry in enumerate(index._entries)  # no public way gives it in one piece
        if entry is not None and not entry.salt and allocator.find(entry.key) == block
    ]
    return {entry.hash: entry for entry in entries}


@pytest.mark.parametrize("seed", range(12))
def test_the_follower_knows_what_the_cache_holds(seed: int) -> None:
    generator = random.Random(seed)
    loop = make_loop(
        num_blocks=generator.choice([16, 40]),
        max_num_seqs=5,
        prefix_caching=True,
        swap_blocks=generator.choice([0, 20]),
        lookahead=generator.random() < 0.5,
        kind=AllocatorKind.CHECKED,
        hash_function=(lambda data: hash64(data) % 64) if seed % 3 == 0 else hash64,
    )
    index = loop.scheduler.residency.prefix_index
    assert index is not None
    follower, begin, removed = Follower(index), generator.randrange(60), 0
    for step in range(300):
        if generator.random() < 0.3:
            family = generator.randrange(4)
            prompt = [family * 7 + position for position in range(generator.randint(1, 30))]
            item = GenerationRequest(
                str(step),
                prompt,
                SamplingParameters(n=generator.choice([1, 1, 2])),
                StopCriteria(max_tokens=generator.randint(1, 20)),
                cache_salt=generator.choice(["", "", "tenant"]),
            )
            loop.scheduler.submit(item, 0.0)
        loop.step()
        if step >= begin:
            before = len(follower.known)
            follower.advance()
            removed += len(follower.known) < before
            if follower.next_start is None:
                assert follower.known == truth(loop)
    assert follower.next_start is None
    assert removed > 0


def test_nothing_is_noted_while_nobody_follows() -> None:
    loop = make_loop(num_blocks=20, prefix_caching=True)
    index = loop.scheduler.residency.prefix_index
    assert index is not None
    loop.scheduler.submit(request("a", list(range(10)), 3), 0.0)
    run_to_end(loop)
    assert not index.followed
    assert index.take_changes() == []
    piece = index.read(0, 100)
    assert [stored.token_ids for stored in piece.blocks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, *truth_tail(loop)]]
    loop.scheduler.submit(request("b", [50] * 70, 3), 0.0)
    run_to_end(loop)
    kinds = [type(change) for change in index.take_changes()]
    assert kinds.count(BlockRemoved) == 1
    assert kinds.count(BlockStored) == 18


def truth_tail(loop: StepLoop) -> list[int]:
    """The tokens that followed the prompt of ten, in its third block."""
    return next(entry.token_ids[2:] for entry in truth(loop).values() if entry.token_ids[:2] == [8, 9])
