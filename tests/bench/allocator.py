"""What the native allocator buys over the pure-Python one, and what crossing from Python into C++ costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from engine import _runtime
from engine.config import AllocatorKind
from engine.kv.allocator import BlockAllocator, make_allocator

SEQUENCES = 256
MAX_BLOCKS = 64
BATCH = 16
ROUNDS = 300


def measure() -> dict[str, float]:
    """Medians: microseconds of a call, nanoseconds of a crossing, and oracle over native (how many times faster)."""
    native = _measure(AllocatorKind.NATIVE)
    oracle = _measure(AllocatorKind.ORACLE)
    figures = {f"allocator_{name}_us_native": value for name, value in native.items()}
    figures |= {f"allocator_{name}_us_oracle": value for name, value in oracle.items()}
    figures |= {f"allocator_native_over_oracle_{name}": oracle[name] / native[name] for name in native}
    figures["boundary_crossing_ns"] = _crossing_nanoseconds()
    return figures


def _measure(kind: AllocatorKind) -> dict[str, float]:
    return {
        "allocate_release_16": _microseconds(_allocate_and_release(kind)),
        "publish_find": _microseconds(_publish_and_find(kind)),
        "step256": _microseconds(_step(kind)),
    }


def _microseconds(act: Callable[[], None], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        act()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def _allocate_and_release(kind: AllocatorKind) -> Callable[[], None]:
    allocator = make_allocator(kind, 4096)
    return lambda: allocator.release(allocator.allocate(BATCH)[::-1])


def _publish_and_find(kind: AllocatorKind) -> Callable[[], None]:
    allocator = make_allocator(kind, 4096)
    key = 0

    def act() -> None:
        nonlocal key
        key += 1
        blocks = allocator.allocate(1)
        allocator.publish(blocks[0], key)
        allocator.find(key)
        allocator.release(blocks)

    return act


def _step(kind: AllocatorKind) -> Callable[[], None]:
    """A decode step: every one of 256 sequences asks for its next token's block, and one in sixteen needs a new one. A
    sequence whose row is full ends, and another takes its place."""
    allocator: BlockAllocator = make_allocator(kind, SEQUENCES * MAX_BLOCKS)
    tables = np.zeros((SEQUENCES, MAX_BLOCKS), np.int32)
    lengths = np.zeros(SEQUENCES, np.int32)
    rows = np.arange(SEQUENCES, dtype=np.int32)
    tokens = (np.arange(SEQUENCES) * 7 % 512).astype(np.int64)

    def act() -> None:
        wanted = (tokens // 16 + 1).astype(np.int32)
        allocator.grow_tables(tables, lengths, rows, wanted)
        np.add(tokens, 1, out=tokens)
        for row in np.flatnonzero(tokens >= MAX_BLOCKS * 16).tolist():
            allocator.release_row(tables, lengths, row)
            tokens[row] = 0

    act()
    return act


def _crossing_nanoseconds(calls: int = 10_000) -> float:
    """A call that does nothing, less the loop around it."""

    def loop(function: Callable[[], object] | None) -> float:
        begin = time.perf_counter_ns()
        if function is None:
            for _ in range(calls):
                pass
        else:
            for _ in range(calls):
                function()
        return (time.perf_counter_ns() - begin) / calls

    return statistics.median(loop(_runtime.has_cuda) - loop(None) for _ in range(9))
