"""Two block allocators in lock-step: every call goes to both, and the first difference raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from engine.errors import OutOfBlocksError
from engine.kv.allocator import BlockAllocator, Int32Array
from engine.kv.oracle import OracleBlockAllocator

Result = TypeVar("Result")


class AllocatorMismatchError(RuntimeError):
    """Two allocators that must agree gave different results, errors, tables or counts."""


class CheckedBlockAllocator:
    """Answers with `subject`'s results, having compared them with `oracle`'s. Both start in the same state. Notes which
    blocks lose their last owner, so that their contents can be made unusable."""

    def __init__(self, subject: BlockAllocator, oracle: OracleBlockAllocator) -> None:
        self._subject = subject
        self._oracle = oracle
        self._freed: list[int] = []
        self._compare_counts("start")

    @property
    def num_blocks(self) -> int:
        return self._subject.num_blocks

    @property
    def num_free(self) -> int:
        return self._subject.num_free

    @property
    def num_cached(self) -> int:
        return self._subject.num_cached

    @property
    def num_live(self) -> int:
        return self._subject.num_live

    def take_freed(self) -> list[int]:
        """Blocks that were live or cached at the last call and have since been free, each once, whoever owns them now:
        one handed out by evicting it counts too."""
        freed, self._freed = self._freed, []
        return list(dict.fromkeys(freed))

    def allocate(self, count: int) -> list[int]:
        blocks = self._both(f"allocate({count})", lambda allocator: allocator.allocate(count))
        self._freed += blocks
        return blocks

    def retain(self, blocks: Sequence[int]) -> None:
        self._both(f"retain({blocks})", lambda allocator: allocator.retain(blocks))

    def release(self, blocks: Sequence[int]) -> None:
        self._both(f"release({blocks})", lambda allocator: allocator.release(blocks))
        self._note_free(blocks)

    def ref_count(self, block: int) -> int:
        return self._answer(f"ref_count({block})", lambda allocator: allocator.ref_count(block))

    def publish(self, block: int, key: int) -> int:
        return self._both(f"publish({block}, {key})", lambda allocator: allocator.publish(block, key))

    def publish_all(self, blocks: Sequence[int], keys: Sequence[int]) -> int:
        blocks, keys = list(blocks), list(keys)
        return self._both(f"publish_all({blocks}, {keys})", lambda allocator: allocator.publish_all(blocks, keys))

    def find(self, key: int) -> int:
        return self._answer(f"find({key})", lambda allocator: allocator.find(key))

    def grow_tables(self, tables: Int32Array, lengths: Int32Array, rows: Int32Array, wanted: Int32Array) -> int:
        before = lengths.copy()
        served = self._both_on_tables(
            f"grow_tables({rows.tolist()}, {wanted.tolist()})",
            lambda allocator, ids, sizes: allocator.grow_tables(ids, sizes, rows, wanted),
            tables,
            lengths,
        )
        for row in set(rows.tolist()):
            self._freed += tables[row, before[row] : lengths[row]].tolist()
        return served

    def release_row(self, tables: Int32Array, lengths: Int32Array, row: int) -> None:
        blocks = tables[row, : lengths[row]].tolist() if 0 <= row < len(tables) else []
        self._both_on_tables(
            f"release_row({row})",
            lambda allocator, ids, sizes: allocator.release_row(ids, sizes, row),
            tables,
            lengths,
        )
        self._note_free(blocks)

    def reset(self) -> None:
        self._both("reset()", lambda allocator: allocator.reset())

    def check(self) -> None:
        self._both("check()", lambda allocator: allocator.check())

    def _note_free(self, blocks: Sequence[int]) -> None:
        self._freed += [block for block in blocks if self._oracle.is_free(block)]

    def _both_on_tables(
        self,
        call: str,
        act: Callable[[BlockAllocator, Int32Array, Int32Array], Result],
        tables: Int32Array,
        lengths: Int32Array,
    ) -> Result:
        expected_tables, expected_lengths = tables.copy(), lengths.copy()

        def on_own_tables(allocator: BlockAllocator) -> Result:
            if allocator is self._oracle:
                return act(allocator, expected_tables, expected_lengths)
            return act(allocator, tables, lengths)

        result = self._both(call, on_own_tables)
        if not np.array_equal(tables, expected_tables) or not np.array_equal(lengths, expected_lengths):
            raise AllocatorMismatchError(f"{call}: tables differ")
        return result

    def _both(self, call: str, act: Callable[[BlockAllocator], Result]) -> Result:
        result, error = self._agreed(call, act)
        self._compare_counts(call)
        return _given(result, error)

    def _answer(self, call: str, act: Callable[[BlockAllocator], Result]) -> Result:
        """Of a question, which changes no counts."""
        return _given(*self._agreed(call, act))

    def _agreed(self, call: str, act: Callable[[BlockAllocator], Result]) -> tuple[Result | None, Exception | None]:
        """What both returned, or how both refused."""
        result, error = _outcome(act, self._subject)
        expected, expected_error = _outcome(act, self._oracle)
        if type(error) is not type(expected_error):
            raise AllocatorMismatchError(f"{call}: raised {error!r}, expected {expected_error!r}")
        if result != expected:
            raise AllocatorMismatchError(f"{call}: returned {result}, expected {expected}")
        return result, error

    def _compare_counts(self, call: str) -> None:
        counts, expected = _counts(self._subject), _counts(self._oracle)
        if counts != expected:
            raise AllocatorMismatchError(f"{call}: (blocks, free, cached, live) are {counts}, expected {expected}")


def _outcome(
    act: Callable[[BlockAllocator], Result], allocator: BlockAllocator
) -> tuple[Result | None, Exception | None]:
    """What the call returned, or how it was refused. A RuntimeError is a broken allocator and passes through."""
    try:
        return act(allocator), None
    except (OutOfBlocksError, ValueError, TypeError) as error:
        return None, error


def _given(result: Result | None, error: Exception | None) -> Result:
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _counts(allocator: BlockAllocator) -> tuple[int, int, int, int]:
    return allocator.num_blocks, allocator.num_free, allocator.num_cached, allocator.num_live
