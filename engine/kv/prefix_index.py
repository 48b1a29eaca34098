"""Finds blocks whose K and V an earlier request computed for the same tokens.

A block's key is a hash over its parent's key and its own tokens, starting from the salt, so equal keys mean equal
prefixes; since hashes may collide, a hit counts only if the stored tokens, salt and parent are equal too. A colliding
block or another salt's can therefore never be taken. The allocator keeps the map from key to block and evicts; this
index keeps what verifies a hit, one entry a block, so it never outgrows the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import numpy as np

from engine.kv.allocator import BlockAllocator
from engine.types import BlockRemoved, BlockStored, CacheChange, CachePiece

HashFunction = Callable[[bytes], int]

_ROOT_SERIAL = 0
_BLOCKS_AT_ONCE = 16  # whose tokens are converted together


def hash64(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """What a published block holds. `serial` is new with every publication: a child names its parent's, so a child of
    an evicted block cannot be reached through another block that has the same key. (A msgspec struct, since a prompt
    has a hundred of them, made between its step and its first token.)"""

    key: int
    parent_key: int | None
    serial: int
    parent_serial: int
    tokens: bytes
    salt: str

    @property
    def public(self) -> bool:
        """A tenant's blocks are nobody else's business, not even that they exist."""
        return not self.salt

    def stored(self) -> BlockStored:
        return BlockStored(self.key, self.parent_key, np.frombuffer(self.tokens, dtype=np.int32).tolist())


@dataclass(slots=True)
class Chain:
    """How far a sequence's blocks are published, and the block the next one continues. `broken`: its key was taken by
    other tokens, so nothing behind it can be found. `ahead`: keys and tokens of the blocks behind it, as far as they
    are hashed."""

    salt: str
    blocks: int = 0
    key: int = 0
    serial: int = _ROOT_SERIAL
    broken: bool = False
    ahead: deque[tuple[int, bytes]] = field(default_factory=deque)


class PrefixIndex:
    def __init__(self, allocator: BlockAllocator, block_size: int, hash_function: HashFunction = hash64) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._hash = hash_function
        self._entries: list[_Entry | None] = [None] * (allocator.num_blocks + 1)
        self._serials = _ROOT_SERIAL
        self._changes: list[CacheChange] | None = None  # None: nobody follows

    def start(self, salt: str) -> Chain:
        """An empty chain. The salt's length is part of what is hashed, so no salt can imitate another's tokens."""
        encoded = salt.encode()
        return Chain(salt, key=self._hash(len(encoded).to_bytes(8, "little") + encoded))

    def match(self, token_ids: Sequence[int], salt: str) -> tuple[list[int], Chain]:
        """The longest run of blocks, from the first, that hold these tokens. Counts are not changed: retain before
        anything is allocated."""
        chain, blocks = self.start(salt), []
        for index, (key, tokens) in enumerate(
            self._hashed(chain.key, token_ids, 0, len(token_ids) // self._block_size)
        ):
            block = self._allocator.find(key)
            entry = self._entries[block] if block > 0 else None
            if entry is None or not self._same(entry, key, chain, tokens):
                break
            blocks.append(block)
            chain.blocks, chain.key, chain.serial = index + 1, key, entry.serial
        return blocks, chain

    def keys(self, token_ids: Sequence[int], salt: str) -> Iterator[int]:
        """Of the whole blocks, in order, published or not: who begins with the same tokens has the same keys."""
        blocks = self._hashed(self.start(salt).key, token_ids, 0, len(token_ids) // self._block_size)
        return (key for key, _ in blocks)

    def hash_ahead(self, chain: Chain, token_ids: Sequence[int], count: int) -> None:
        """Hashes what `publish` will need of the first `count` blocks of `token_ids`: to be called while there is time,
        as when a device computes those blocks."""
        first = chain.blocks + len(chain.ahead)
        if chain.broken or first >= count:
            return
        key = chain.ahead[-1][0] if chain.ahead else chain.key
        chain.ahead.extend(self._hashed(key, token_ids, first, count))

    def publish(self, chain: Chain, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Makes findable the blocks behind the chain's end, `blocks[i]` holding the i-th block of `token_ids`, and
        moves the chain on. Only for blocks that are computed and never written again."""
        self.hash_ahead(chain, token_ids, len(blocks))
        while chain.blocks < len(blocks) and not chain.broken:
            key, tokens = chain.ahead.popleft()
            block = blocks[chain.blocks]
            holder = self._allocator.publish(block, key)
            if holder == block:
                entry: _Entry | None = self._enter(block, key, chain, tokens)
            else:
                entry = self._entries[holder]
            if entry is None or (holder != block and not self._same(entry, key, chain, tokens)):
                chain.broken = True
                chain.ahead.clear()
                return
            chain.blocks, chain.key, chain.serial = chain.blocks + 1, key, entry.serial

    def _enter(self, block: int, key: int, chain: Chain, tokens: bytes) -> _Entry:
        self._serials += 1
        parent = chain.key if chain.blocks else None
        entry = self._entries[block] = _Entry(key, parent, self._serials, chain.serial, tokens, chain.salt)
        if self._changes is not None and entry.public:
            self._changes.append(entry.stored())
        return entry

    # -- for whoever follows the cache from outside --------------------------------------------------------------------

    @property
    def followed(self) -> bool:
        return self._changes is not None

    def handed_out(self, blocks: Sequence[int]) -> None:
        """What these blocks held is gone, as they have a new owner: noted while somebody follows."""
        if self._changes is None:
            return
        for block in blocks:
            entry, self._entries[block] = self._entries[block], None
            if entry is not None and entry.public and self._allocator.find(entry.key) < 0:
                self._changes.append(BlockRemoved(entry.key))

    def take_changes(self) -> list[CacheChange]:
        """Since the last call, in order."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes

    def read(self, start: int, most: int) -> CachePiece:
        """What there is in `most` places from the one numbered `start` on. From the first call on changes are noted, so
        that pieces, and then every change since the first piece, give the whole."""
        if self._changes is None:
            self._changes = []
        end = min(start + most, len(self._entries))
        entries = [
            entry
            for block, entry in enumerate(self._entries[start:end], start)
            if entry is not None and entry.public and self._allocator.find(entry.key) == block
        ]
        return CachePiece(start, [entry.stored() for entry in entries], end if end < len(self._entries) else None)

    def _hashed(self, key: int, token_ids: Sequence[int], first: int, count: int) -> Iterator[tuple[int, bytes]]:
        """Keys and tokens of the blocks from `first` up to `count`; key: of the block before. Hashes what is taken."""
        size = self._block_size
        for begin in range(first, count, _BLOCKS_AT_ONCE):
            end = min(begin + _BLOCKS_AT_ONCE, count)
            data = np.asarray(token_ids[begin * size : end * size], dtype=np.int32).tobytes()
            for offset in range(0, len(data), 4 * size):
                tokens = data[offset : offset + 4 * size]
                key = self._hash(key.to_bytes(8, "little") + tokens)
                yield key, tokens

    def _same(self, entry: _Entry, key: int, chain: Chain, tokens: bytes) -> bool:
        return (
            entry.key == key
            and entry.parent_serial == chain.serial
            and entry.tokens == tokens
            and entry.salt == chain.salt
        )
