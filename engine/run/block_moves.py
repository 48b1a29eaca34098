"""Makes a plan's block moves: swap out, swap in, copies inside the pool, in that order, before the step computes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from engine import ops
from engine.schedule.plan import BlockMoves, Pairs

Tensor = torch.Tensor


def contiguous_runs(pairs: Pairs) -> Iterator[tuple[int, int, int]]:
    """(source, target, count) of neighbouring pairs whose ids both go up by one: each is one copy."""
    begin = 0
    for index in range(1, len(pairs) + 1):
        previous = pairs[index - 1]
        if index == len(pairs) or pairs[index] != (previous[0] + 1, previous[1] + 1):
            yield (*pairs[begin], index - begin)
            begin = index


class BlockMover:
    """Between the KV pool and `num_host_blocks` blocks of host memory (page-locked beside a GPU), claimed at start.

    On a GPU the swaps run on a stream of their own. They begin when the steps launched before have run, since those may
    still write what is swapped out, and the step waits for them, since it may write where they read from.
    """

    def __init__(self, kv_pool: Tensor, num_host_blocks: int) -> None:
        self.num_host_blocks = num_host_blocks
        self._pool = kv_pool
        self._host: Tensor | None = None
        if num_host_blocks:
            shape = (num_host_blocks + 1, *kv_pool.shape[1:])
            self._host = torch.empty(shape, dtype=kv_pool.dtype, pin_memory=kv_pool.is_cuda).zero_()
        self._stream = None
        if kv_pool.is_cuda and num_host_blocks:
            self._stream = torch.cuda.Stream(kv_pool.device)  # type: ignore[no-untyped-call]

    def apply(self, moves: BlockMoves) -> None:
        if moves.out or moves.back:
            self._swap(moves)
        if moves.copies:
            pairs = torch.tensor(moves.copies, dtype=torch.int64)
            ops.copy_blocks(self._pool, pairs.to(self._pool.device) if self._pool.is_cuda else pairs)

    def measure_rate(self, repeats: int = 5) -> float:
        """Bytes a second between pool and host, each way counted once; 0 without host blocks. Leaves the scratch blocks
        as they were but for their content."""
        if self._host is None:
            return 0.0
        moves = BlockMoves(out=[(0, 0)], back=[(0, 0)])
        seconds = []
        for _ in range(repeats):
            self._synchronize()
            begin = time.perf_counter()
            for _ in range(8):
                self._swap(moves)
            self._synchronize()
            seconds.append(time.perf_counter() - begin)
        return 16 * self._pool[0].nbytes / min(seconds)

    def _swap(self, moves: BlockMoves) -> None:
        if self._stream is None:
            self._copy(moves)
            return
        compute = torch.cuda.current_stream(self._pool.device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            self._copy(moves)
        compute.wait_stream(self._stream)

    def _copy(self, moves: BlockMoves) -> None:
        assert self._host is not None, "swap moves without host blocks"
        for source, target, count in contiguous_runs(moves.out):
            self._host[target : target + count].copy_(self._pool[source : source + count], non_blocking=True)
        for source, target, count in contiguous_runs(moves.back):
            self._pool[target : target + count].copy_(self._host[source : source + count], non_blocking=True)

    def _synchronize(self) -> None:
        if self._pool.is_cuda:
            torch.cuda.synchronize(self._pool.device)
