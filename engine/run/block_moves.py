"""Makes a plan's block moves: swap out, swap in, copies inside the pool.

Swaps run beside the steps, on a stream of their own. Whoever touches a block that is still being moved waits for that
move and no longer: a step that writes to a block being copied out, or that runs a sequence being copied in.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine import ops
from engine.kv.block_table import BlockTables
from engine.run.streams import CudaStreams, Mark, OneQueue, Streams
from engine.schedule.plan import Pairs, StepPlan

Tensor = torch.Tensor

_PIECE = 16  # blocks copied out between two marks: what a step that needs one of them waits for at most


def contiguous_runs(pairs: Pairs) -> Iterator[tuple[int, int, int]]:
    """(source, target, count) of neighbouring pairs whose ids both go up by one: each is one copy."""
    begin = 0
    for index in range(1, len(pairs) + 1):
        previous = pairs[index - 1]
        if index == len(pairs) or pairs[index] != (previous[0] + 1, previous[1] + 1):
            yield (*pairs[begin], index - begin)
            begin = index


def written_blocks(plan: StepPlan, tables: BlockTables) -> set[int]:
    """Blocks that the plan's step writes to, in the copies inside the pool and in its computing."""
    size, rows = tables.block_size, tables.rows
    decodes = [entry for entry in plan.scheduled if entry.count == 1]
    slots = np.fromiter((entry.slot for entry in decodes), dtype=np.int64, count=len(decodes))
    starts = np.fromiter((entry.start for entry in decodes), dtype=np.int64, count=len(decodes))
    blocks = set(rows[slots, starts // size].tolist())
    for entry in plan.scheduled:
        if entry.count > 1:
            blocks.update(rows[entry.slot, entry.start // size : -(-(entry.start + entry.count) // size)].tolist())
    blocks.update(target for _, target in plan.moves.copies)
    return blocks


@dataclass(frozen=True, slots=True)
class _Swap:
    """Copies that compute has not waited for yet. step: whose plan asked for them."""

    serial: int
    step: int
    inward: bool
    device_blocks: list[int]
    mark: Mark


class BlockMover:
    """Between the KV pool and `num_host_blocks` blocks of host memory (page-locked beside a GPU), claimed at start."""

    def __init__(self, kv_pool: Tensor, num_host_blocks: int, streams: Streams | None = None) -> None:
        """streams: None takes the pool's device's own."""
        self.num_host_blocks = num_host_blocks
        self._pool = kv_pool
        self._host: Tensor | None = None
        if num_host_blocks:
            shape = (num_host_blocks + 1, *kv_pool.shape[1:])
            self._host = torch.empty(shape, dtype=kv_pool.dtype, pin_memory=kv_pool.is_cuda).zero_()
        self._streams = streams or (CudaStreams(kv_pool.device) if kv_pool.is_cuda else OneQueue())
        self._swaps: deque[_Swap] = deque()
        self._serial_of: dict[int, int] = {}  # device block -> its newest swap
        self._serial = 0
        self._newest_step = 0

    @property
    def moved(self) -> int:
        """The newest step whose sequences have all been copied in, and those of every step before."""
        self._forget_done()
        return min((swap.step - 1 for swap in self._swaps if swap.inward), default=self._newest_step)

    def apply(self, plan: StepPlan, tables: BlockTables) -> None:
        """Comes before the step computes, with the tables as the step will read them."""
        moves, self._newest_step = plan.moves, plan.step
        if moves.out:
            self._swap_out(plan.step, moves.out)
        if moves.freed:
            self._hold_compute(moves.freed)
            self._streams.compute(lambda: self._poison(moves.freed))
        if moves.back:
            self._swap_in(plan.step, moves.back)
        if self._swaps:
            self._forget_done()
        if self._swaps:
            self._hold_compute(_touched(plan, tables))
        if moves.copies:
            self._streams.compute(lambda: self._copy_inside(moves.copies))

    def measure_rate(self, repeats: int = 5) -> float:
        """Bytes a second between pool and host, each way counted once; 0 without host blocks. Leaves the scratch blocks
        as they were but for their content."""
        if self._host is None:
            return 0.0
        seconds = []
        for _ in range(repeats):
            self._synchronize()
            begin = time.perf_counter()
            for _ in range(8):
                self._streams.copy(self._host[:1], self._pool[:1])
                self._streams.copy(self._pool[:1], self._host[:1])
            self._synchronize()
            seconds.append(time.perf_counter() - begin)
        return 16 * self._pool[0].nbytes / min(seconds)

    def _swap_out(self, step: int, pairs: Pairs) -> None:
        """Last blocks first, as they are handed out again. The steps given before may still write to them."""
        assert self._host is not None, "swap moves without host blocks"
        self._streams.copies_wait()
        for end in range(len(pairs), 0, -_PIECE):
            piece = pairs[max(0, end - _PIECE) : end]
            for source, target, count in contiguous_runs(piece):
                self._streams.copy(self._host[target : target + count], self._pool[source : source + count])
            self._remember(step, False, [source for source, _ in piece])

    def _swap_in(self, step: int, pairs: Pairs) -> None:
        """The steps given before may still use the blocks for whoever had them."""
        assert self._host is not None, "swap moves without host blocks"
        self._streams.copies_wait()
        for source, target, count in contiguous_runs(pairs):
            self._streams.copy(self._pool[target : target + count], self._host[source : source + count])
        self._remember(step, True, [target for _, target in pairs])

    def _remember(self, step: int, inward: bool, blocks: list[int]) -> None:
        self._serial += 1
        self._swaps.append(_Swap(self._serial, step, inward, blocks, self._streams.mark_copies()))
        self._serial_of.update(dict.fromkeys(blocks, self._serial))

    def _forget_done(self) -> None:
        while self._swaps and self._swaps[0].mark.done():
            self._forget_oldest()

    def _forget_oldest(self) -> _Swap:
        swap = self._swaps.popleft()
        for block in swap.device_blocks:
            if self._serial_of.get(block) == swap.serial:
                del self._serial_of[block]
        return swap

    def _hold_compute(self, blocks: Iterable[int]) -> None:
        """Copies are made in order, so waiting for the newest that matters is waiting for all before it."""
        newest = max((self._serial_of.get(block, 0) for block in blocks), default=0)
        swap = None
        while self._swaps and self._swaps[0].serial <= newest:
            swap = self._forget_oldest()
        if swap is not None:
            self._streams.compute_waits(swap.mark)

    def _copy_inside(self, copies: Pairs) -> None:
        pairs = torch.tensor(copies, dtype=torch.int64)
        ops.copy_blocks(self._pool, pairs.to(self._pool.device) if self._pool.is_cuda else pairs)

    def _poison(self, blocks: list[int]) -> None:
        self._pool[torch.tensor(blocks, device=self._pool.device)] = math.nan

    def _synchronize(self) -> None:
        if self._pool.is_cuda:
            torch.cuda.synchronize(self._pool.device)


def _touched(plan: StepPlan, tables: BlockTables) -> set[int]:
    """What the step writes, the sources of its copies, and the first block of every sequence it runs: one that is being
    copied in is copied in whole, and nobody else reads it."""
    firsts = tables.rows[[entry.slot for entry in plan.scheduled], 0].tolist() if plan.scheduled else []
    return written_blocks(plan, tables).union(firsts, (source for source, _ in plan.moves.copies))
