"""Swaps on their own stream: a device kept busy on one stream shows who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.kv.block_table import BlockTables
from engine.kv.oracle import OracleBlockAllocator
from engine.run.block_moves import BlockMover
from engine.run.streams import CudaStreams
from engine.schedule.plan import BlockMoves, ScheduledSequence, StepPlan
from engine.schedule.sequence import RequestGroup, Sequence
from engine.types import GenerationRequest

pytestmark = pytest.mark.gpu

BLOCKS, SIZE, HOST = 64, 16, 40
SLEEP_CYCLES = 300_000_000  # some 0.15 s


class Pool:
    """Block i holds i. Blocks are 1 MiB, so that a copy takes its time."""

    def __init__(self) -> None:
        device = torch.device("cuda")
        shape = (BLOCKS + 1, 16, 2, 8, SIZE, 128)
        self.pool = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self.pool[:] = torch.arange(BLOCKS + 1, device=device).view(-1, 1, 1, 1, 1, 1)
        self.streams = CudaStreams(device)
        self.mover = BlockMover(self.pool, HOST, self.streams)
        self.tables = BlockTables(OracleBlockAllocator(BLOCKS), 8, 4, SIZE)
        self.pool[0].fill_(0)  # a kernel's first use loads it, which waits for every stream
        self.hold_copies(cycles=1000)
        torch.cuda.synchronize()

    def launch(self, step: int, moves: BlockMoves, *writes: int) -> torch.cuda.Event:
        """A step that writes 100 + step to whole blocks; the event passes when it has run."""
        scheduled = []
        for slot, block in enumerate(writes):
            self.tables.rows[slot, 0] = block
            group = RequestGroup(GenerationRequest(str(slot), [1]), slot, 0.0)
            scheduled.append(ScheduledSequence(Sequence(group, 0, 0, [1], 2), slot, 0, 1, True))
        self.mover.apply(StepPlan(step, scheduled, scheduled, moves), self.tables)
        for block in writes:
            self.pool[block].fill_(100 + step)
        done = torch.cuda.Event()
        done.record()
        return done

    def hold_copies(self, cycles: int = SLEEP_CYCLES) -> None:
        with torch.cuda.stream(self.streams.copies):
            torch.cuda._sleep(cycles)

    def host(self, *blocks: int) -> list[float]:
        torch.cuda.synchronize()
        assert self.mover._host is not None
        return self._values(self.mover._host, blocks)

    def device(self, *blocks: int) -> list[float]:
        torch.cuda.synchronize()
        return self._values(self.pool, blocks)

    @staticmethod
    def _values(tensor: torch.Tensor, blocks: tuple[int, ...]) -> list[float]:
        least = [float(tensor[block].float().min()) for block in blocks]
        assert least == [float(tensor[block].float().max()) for block in blocks]
        return least


@pytest.fixture
def pool() -> Iterator[Pool]:
    yield Pool()
    torch.cuda.synchronize()


def test_a_step_that_needs_no_moved_block_does_not_wait(pool: Pool) -> None:
    pool.hold_copies()
    pool.launch(1, BlockMoves(out=[(block, block) for block in range(1, 33)]), 40, 41)
    pool.launch(2, BlockMoves(back=[(1, 50)]), 42).synchronize()
    assert pool.mover.moved == 1  # the copies are still held, and the step has run
    assert not pool.streams.mark_copies().done()
    assert pool.host(*range(1, 33)) == list(range(1, 33))
    assert pool.device(40, 41, 42, 50) == [101, 101, 102, 1]
    assert pool.mover.moved == 2


def test_blocks_on_their_way_out_are_written_after_their_copy(pool: Pool) -> None:
    """The last of them at once, the others a step later; without the waits the host would get what is written then."""
    pool.hold_copies()
    pool.launch(1, BlockMoves(out=[(block, block) for block in range(1, 33)]), 32, 31)
    pool.launch(2, BlockMoves(), *range(1, 9))
    assert pool.host(*range(1, 33)) == list(range(1, 33))
    assert pool.device(32, 31, 1, 8, 9) == [101, 101, 102, 102, 9]


def test_what_leaves_or_arrives_waits_for_the_steps_before(pool: Pool) -> None:
    pool.launch(1, BlockMoves(out=[(9, 1)]))
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    pool.launch(2, BlockMoves(), 3, 4)
    pool.launch(3, BlockMoves(out=[(3, 2)]), 20)
    pool.launch(4, BlockMoves(back=[(1, 4)]), 21)
    assert pool.host(2) == [102]
    assert pool.device(4) == [9]


def test_a_sequence_run_on_its_way_in_is_waited_for(pool: Pool) -> None:
    pool.launch(1, BlockMoves(out=[(9, 1)]))
    torch.cuda.synchronize()
    pool.hold_copies()
    pool.launch(2, BlockMoves(back=[(1, 5)]), 5)
    assert pool.device(5) == [102]


def test_freed_blocks_are_nan_behind_their_copies(pool: Pool) -> None:
    pool.hold_copies()
    pool.launch(1, BlockMoves(out=[(7, 1), (8, 2)], freed=[7, 8]), 20)
    pool.launch(2, BlockMoves(back=[(1, 8)]), 21)
    assert pool.host(1, 2) == [7, 8]
    assert pool.device(8) == [7]
    assert pool.pool[7].isnan().all()
