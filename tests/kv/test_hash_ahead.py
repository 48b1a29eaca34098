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


def test_what_was_hashed_ahead_goes_on_behind_another_sequence_s_block() -> None:
    """Two sequences compute the same tokens at once, and each publishes some first: both chains lead to the end."""
    allocator = make_allocator(AllocatorKind.CHECKED, 20)
    index = PrefixIndex(allocator, SIZE)
    one, other = index.start(""), index.start("")
    mine, theirs = allocator.allocate(7), allocator.allocate(7)
    index.hash_ahead(one, TOKENS, 7)
    index.hash_ahead(other, TOKENS, 7)
    index.publish(other, TOKENS, theirs[:2])
    index.publish(one, TOKENS, mine[:4])
    index.publish(other, TOKENS, theirs[:5])
    index.publish(one, TOKENS, mine)
    index.publish(other, TOKENS, theirs)
    assert index.match(TOKENS, "")[0] == [*theirs[:2], *mine[2:4], theirs[4], *mine[5:]]
    assert not one.broken
    assert not other.broken


def test_the_first_tokens_alone_are_matched() -> None:
    allocator = make_allocator(AllocatorKind.CHECKED, 20)
    index = PrefixIndex(allocator, SIZE)
    blocks = allocator.allocate(7)
    index.publish(index.start(""), TOKENS, blocks)
    assert index.match(TOKENS, "", 11)[0] == blocks[:2]
    assert index.match(TOKENS, "", 999)[0] == blocks
