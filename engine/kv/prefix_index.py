"""Finds blocks whose K and V an earlier request computed for the same tokens.

A block's key is a hash over its parent's key and its own tokens, starting from the salt, so equal keys mean equal
prefixes; since hashes may collide, a hit counts only if the stored tokens, salt and parent are equal too. A colliding
block or another salt's can therefore never be taken. The allocator keeps the map from key to block and evicts; this
index keeps what verifies a hit, one entry a block, so it never outgrows the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import numpy as np

from engine.kv.allocator import BlockAllocator
from engine.step_arrays import ids_array
from engine.types import BlockRemoved, BlockStored, CacheChange, CachePiece

HashFunction = Callable[[bytes], int]

_ROOT_SERIAL = 0
_ALL = 2**63
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
    other tokens, so nothing behind it can be found. `ahead`: what the blocks behind it will hold, as far as they are
    hashed."""

    salt: str
    blocks: int = 0
    key: int = 0
    serial: int = _ROOT_SERIAL
    broken: bool = False
    ahead: list[_Entry] = field(default_factory=list)


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

    def match(self, token_ids: Sequence[int], salt: str, count: int = _ALL) -> tuple[list[int], Chain]:
        """The longest run of blocks, from the first, that hold these tokens, or the first `count` of them. Counts are
        not changed: retain before anything is allocated."""
        chain, blocks = self.start(salt), []
        whole = min(len(token_ids), count) // self._block_size
        for index, (key, tokens) in enumerate(self._hashed(chain.key, token_ids, 0, whole)):
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
        last = chain.ahead[-1] if chain.ahead else chain
        serial, parent = last.serial, last.key if first else None
        for key, tokens in self._hashed(last.key, token_ids, first, count):
            self._serials += 1
            chain.ahead.append(_Entry(key, parent, self._serials, serial, tokens, chain.salt))
            parent, serial = key, self._serials

    def publish(self, chain: Chain, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Makes findable the blocks behind the chain's end, `blocks[i]` holding the i-th block of `token_ids`, and
        moves the chain on. Only for blocks that are computed and never written again."""
        self.hash_ahead(chain, token_ids, len(blocks))
        while chain.blocks < len(blocks) and not chain.broken:
            self._publish_own(chain, blocks)
            if chain.blocks < len(blocks):
                self._join(chain, blocks[chain.blocks])

    def _publish_own(self, chain: Chain, blocks: Sequence[int]) -> None:
        """As `publish`, up to the first block whose key another holds."""
        entries = chain.ahead[: len(blocks) - chain.blocks]
        own = blocks[chain.blocks : len(blocks)]
        published = self._allocator.publish_all(own, [entry.key for entry in entries])
        if not published:
            return
        if entries[0].parent_serial != chain.serial:  # hashed before the block before was another's
            entries[0] = msgspec.structs.replace(entries[0], parent_serial=chain.serial)
        for block, entry in zip(own[:published], entries, strict=False):
            self._entries[block] = entry
        if self._changes is not None and not chain.salt:
            self._changes += [entry.stored() for entry in entries[:published]]
        last = entries[published - 1]
        chain.blocks, chain.key, chain.serial = chain.blocks + published, last.key, last.serial
        del chain.ahead[:published]

    def _join(self, chain: Chain, block: int) -> None:
        """Another's block goes on for this one, whose key it holds, if it holds the same tokens."""
        mine = chain.ahead.pop(0)
        theirs = self._entries[self._allocator.publish(block, mine.key)]
        if theirs is None or not self._same(theirs, mine.key, chain, mine.tokens):
            chain.broken = True
            chain.ahead.clear()
            return
        chain.blocks, chain.key, chain.serial = chain.blocks + 1, theirs.key, theirs.serial

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
            data = ids_array(token_ids, begin * size, end * size).tobytes()
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
