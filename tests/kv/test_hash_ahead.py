"""Hashing before publishing: the same keys, and none of it left to do when the blocks are published."""

from __future__ import annotations

from engine.config import AllocatorKind
from engine.kv.allocator import make_allocator
from engine.kv.prefix_index import PrefixIndex, hash64

SIZE = 4
TOKENS = list(range(100, 130))


class CountingHash:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, data: bytes) -> int:
        self.calls += 1
        return hash64(data)


def published(ahead: list[int]) -> tuple[list[int], int]:
    """Blocks found for TOKENS after publishing seven in two pieces, and the hashes that publishing itself computed."""
    counting, allocator = CountingHash(), make_allocator(AllocatorKind.CHECKED, 20)
    index = PrefixIndex(allocator, SIZE, counting)
    chain, blocks = index.start(""), allocator.allocate(7)
    for count in ahead:
        index.hash_ahead(chain, TOKENS, count)
    before = counting.calls
    index.publish(chain, TOKENS, blocks[:3])
    index.publish(chain, TOKENS, blocks)
    spent = counting.calls - before
    found = index.match(TOKENS, "")[0]
    assert found == blocks
    return found, spent


def test_publishing_what_was_hashed_ahead_hashes_nothing() -> None:
    plain = published([])
    assert plain[1] == 7
    assert published([7]) == (plain[0], 0)
    assert published([2, 5, 5]) == (plain[0], 2)


def test_a_broken_chain_forgets_what_it_hashed() -> None:
    """All keys collide, so the second sequence's first block has its key taken by other tokens."""
    allocator = make_allocator(AllocatorKind.CHECKED, 20)
    index = PrefixIndex(allocator, SIZE, lambda data: 7)
    first, second = index.start(""), index.start("")
    index.publish(first, TOKENS[:4], allocator.allocate(1))
    index.hash_ahead(second, TOKENS[4:], 3)
    index.publish(second, TOKENS[4:], allocator.allocate(3))
    assert second.broken
    assert not second.ahead
    index.hash_ahead(second, TOKENS[4:], 3)
    assert not second.ahead
