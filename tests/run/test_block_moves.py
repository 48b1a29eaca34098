"""Swaps beside the steps: whatever order a device runs two streams in, nobody sees a block too early or too late."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.config import AllocatorKind, PreemptionMode
from engine.kv.block_table import BlockTables
from engine.kv.oracle import OracleBlockAllocator
from engine.loop import StepLoop
from engine.run.block_moves import BlockMover, written_blocks
from engine.schedule.forecast import OutputForecast
from engine.schedule.plan import BlockMoves, ScheduledSequence, StepPlan
from engine.schedule.sequence import Phase, RequestGroup, Sequence
from engine.types import SamplingParameters
from tests.run.scripted_streams import ScriptedStreams, StreamRunner
from tests.schedule.fake_model import expected, make_loop, request, run_to_end, tokens_of

BLOCKS, SIZE = 12, 2


class Device:
    """A pool whose block i holds i, four host blocks, and a mover over two scripted streams."""

    def __init__(self) -> None:
        self.streams = ScriptedStreams(random.Random(0))
        self.pool = torch.arange(BLOCKS + 1.0).view(-1, 1, 1, 1, 1, 1).repeat(1, 1, 2, 1, SIZE, 4)
        self.mover = BlockMover(self.pool, 4, self.streams)
        self.tables = BlockTables(OracleBlockAllocator(BLOCKS), 4, 4, SIZE)

    def launch(self, step: int, moves: BlockMoves, *writes: int) -> None:
        """A step that runs a sequence of one token in each of the blocks `writes`."""
        scheduled = []
        for slot, block in enumerate(writes):
            self.tables.rows[slot, 0] = block
            group = RequestGroup(request(str(slot), [1]), slot, 0.0)
            scheduled.append(ScheduledSequence(Sequence(group, 0, 0, [1], 2), slot, 0, 1, True))
        self.mover.apply(StepPlan(step, scheduled, scheduled, moves), self.tables)
        for block in writes:
            self.streams.compute(lambda block=block: self.pool[block].fill_(100 + step))

    def run_compute(self) -> None:
        while self.streams.advance(0):
            pass

    def run_all(self) -> None:
        while self.streams.advance():
            pass


def block(tensor: torch.Tensor, index: int) -> float:
    values = tensor[index].unique().tolist()
    assert len(values) == 1
    return float(values[0])


def host(device: Device, index: int) -> float:
    assert device.mover._host is not None
    return block(device.mover._host, index)


def test_a_step_does_not_wait_for_swaps_of_blocks_that_it_leaves_alone() -> None:
    device = Device()
    device.launch(1, BlockMoves(out=[(3, 1), (4, 2)]), 5)
    device.launch(2, BlockMoves(back=[(3, 7)]), 6)
    device.run_compute()
    assert (block(device.pool, 5), block(device.pool, 6)) == (101, 102)
    assert (host(device, 1), block(device.pool, 7)) == (0, 7)  # no copy has been made
    device.run_all()
    assert (host(device, 1), host(device, 2), block(device.pool, 7)) == (3, 4, 0)


def test_a_block_being_copied_out_is_written_after_it() -> None:
    device = Device()
    device.launch(1, BlockMoves(out=[(3, 1), (4, 2)]), 4)
    device.run_compute()
    assert block(device.pool, 4) == 4
    device.run_all()
    assert (host(device, 1), host(device, 2), block(device.pool, 4)) == (3, 4, 101)


def test_a_later_step_waits_too_but_not_for_what_was_asked_after() -> None:
    """Block 3 leaves in step 1 and is written in step 3; what step 2 moves is not waited for."""
    device = Device()
    device.launch(1, BlockMoves(out=[(3, 1)]), 5)
    device.launch(2, BlockMoves(out=[(8, 2)]), 6)
    device.launch(3, BlockMoves(), 3)
    device.run_compute()
    assert block(device.pool, 3) == 3
    while host(device, 1) == 0:
        assert device.streams.advance(1)
    while device.streams.advance(0) or (block(device.pool, 3) == 3 and device.streams.advance(1)):
        pass
    assert (block(device.pool, 3), host(device, 2)) == (103, 0)


def test_a_block_of_two_sequences_may_leave_twice_at_once() -> None:
    device = Device()
    device.launch(1, BlockMoves(out=[(3, 1), (3, 2)]), 5)
    device.launch(2, BlockMoves(), 3)
    device.run_all()
    device.launch(3, BlockMoves(out=[(4, 3)]), 3)
    device.run_all()
    assert [host(device, index) for index in (1, 2, 3)] == [3, 3, 4]


def test_what_leaves_is_what_the_steps_before_wrote() -> None:
    device = Device()
    device.launch(1, BlockMoves(), 3)
    device.launch(2, BlockMoves(out=[(3, 1)]), 5)
    while device.streams.advance(1):  # copies as early as they may
        pass
    device.run_all()
    assert host(device, 1) == 101


def test_what_comes_in_does_not_overtake_the_steps_before() -> None:
    """Block 3 is written by a step that is still running when its next owner's contents are asked for."""
    device = Device()
    device.launch(1, BlockMoves(out=[(9, 1)]))
    device.launch(2, BlockMoves(), 3)
    device.launch(3, BlockMoves(back=[(1, 3)]), 5)
    while device.streams.advance(1):
        pass
    device.run_all()
    assert block(device.pool, 3) == 9


def test_a_sequence_that_is_run_on_its_way_in_is_waited_for() -> None:
    device = Device()
    device.launch(1, BlockMoves(out=[(9, 1)]))
    device.launch(2, BlockMoves(back=[(1, 3)]), 3)
    device.run_compute()
    assert block(device.pool, 3) == 3
    device.run_all()
    assert block(device.pool, 3) == 102


def test_moved_is_the_newest_step_without_arrivals_on_their_way() -> None:
    device = Device()
    device.launch(1, BlockMoves(out=[(9, 1), (8, 2)]), 5)
    assert device.mover.moved == 1  # what leaves keeps nobody from running
    device.launch(2, BlockMoves(back=[(1, 3)]), 5)
    device.launch(3, BlockMoves(back=[(2, 4)]), 5)
    device.launch(4, BlockMoves(), 5)
    assert device.mover.moved == 1
    while block(device.pool, 3) != 9:
        assert device.streams.advance()
    while device.mover.moved == 1:
        assert device.streams.advance(1)
    assert device.mover.moved == 2
    device.run_all()
    assert device.mover.moved == 4


def test_freed_blocks_are_poisoned_behind_their_copies_and_before_what_comes_in() -> None:
    device = Device()
    device.launch(1, BlockMoves(out=[(3, 1), (4, 2)], freed=[3, 4, 6]), 5)
    device.launch(2, BlockMoves(back=[(1, 4)], copies=[(5, 6)]), 7)
    device.run_all()
    assert (host(device, 1), host(device, 2)) == (3, 4)
    assert device.pool[3].isnan().all()
    assert (block(device.pool, 4), block(device.pool, 6)) == (3, 101)


def test_blocks_that_a_step_writes() -> None:
    tables = BlockTables(OracleBlockAllocator(BLOCKS), 2, 4, SIZE)
    tables.rows[:] = np.asarray([[1, 2, 3, 0], [4, 5, 6, 7]])
    sequence = Sequence(RequestGroup(request("a", [1]), 0, 0.0), 0, 0, [1] * 7, 8)
    decode = ScheduledSequence(sequence, 0, 4, 1, True)
    chunk = ScheduledSequence(sequence, 1, 3, 3, False)
    plan = StepPlan(1, [decode, chunk], [decode], BlockMoves(copies=[(9, 10)]))
    assert written_blocks(plan, tables) == {3, 5, 6, 10}


def overlapping_loop(seed: int, num_blocks: int = 12, **options: object) -> StepLoop:
    source = random.Random(seed)
    swap_blocks = int(options.get("swap_blocks", 100))  # type: ignore[call-overload]
    defaults: dict[str, object] = {
        "swap_blocks": swap_blocks,
        "mode": PreemptionMode.SWAP,
        "max_batched_tokens": 64,
        "kind": AllocatorKind.CHECKED,
        "make_runner": lambda tables: StreamRunner(tables, swap_blocks, source),
    }
    return make_loop(num_blocks=num_blocks, **{**defaults, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(60))
def test_tokens_are_those_of_a_run_alone_in_any_order_of_two_streams(seed: int) -> None:
    source = random.Random(1000 + seed)
    loop = overlapping_loop(
        seed,
        num_blocks=source.randint(12, 24),
        swap_blocks=source.choice([0, 1, 7, 40, 100]),
        mode=source.choice([PreemptionMode.SWAP, PreemptionMode.SWAP, PreemptionMode.AUTO]),
        max_batched_tokens=source.choice([3, 12, 40]),
        prefix_caching=source.random() < 0.6,
        forecast=OutputForecast() if source.random() < 0.3 else None,
    )
    requests = [
        request(
            str(index),
            [source.randrange(3) * 7 + position for position in range(source.randint(1, 25))],
            source.randint(1, 22),
            sampling=SamplingParameters(n=source.choice([1, 1, 1, 2])),
        )
        for index in range(12)
    ]
    cancelled = {str(index) for index in range(12) if source.random() < 0.15}
    for item in requests:
        loop.scheduler.submit(item, 0.0)
    events = []
    for name in cancelled:
        for _ in range(source.randint(0, 15)):
            events += loop.step().events
        loop.scheduler.cancel(name, 0.0)
    events += run_to_end(loop)
    loop.scheduler.check_idle()
    for item in requests:
        for candidate in range(item.sampling.n):
            tokens = tokens_of(events, item.request_id, candidate)
            whole = expected(item.prompt_token_ids, item.stop.max_tokens or 0, candidate=candidate)
            assert tokens == (whole[: len(tokens)] if item.request_id in cancelled else whole)


PROMPTS = {str(index): [index * 50 + position for position in range(8)] for index in range(6)}
OUTPUTS = {"0": 24, "1": 9, "2": 14, "3": 5, "4": 20, "5": 11}


def crowd(seed: int) -> StepLoop:
    """Six requests of different lengths in a pool for two or three."""
    loop = overlapping_loop(seed, num_blocks=16)
    for name, prompt in PROMPTS.items():
        loop.scheduler.submit(request(name, prompt, OUTPUTS[name]), 0.0)
    return loop


def test_others_run_while_a_sequence_comes_back() -> None:
    """It joins when it is there; until then the steps go on without it, and it is never in the step that asks for it
    unless nobody else is."""
    beside = 0
    for seed in range(10):
        loop = crowd(seed)
        events = run_to_end(loop)
        assert all(tokens_of(events, name) == expected(prompt, OUTPUTS[name]) for name, prompt in PROMPTS.items())
        runner = loop.runner
        assert isinstance(runner, StreamRunner)
        asking = [plan for plan in runner.plans if plan.moves.back]
        assert all(plan.scheduled for plan in asking)
        beside += sum(not runner.ran_in(plan, {target for _, target in plan.moves.back}) for plan in asking)
    assert beside > 0


def test_a_sequence_on_its_way_in_may_be_cancelled() -> None:
    """Its blocks are free at once; their next owner waits for the copy that is still under way."""
    times = 0
    for seed in range(20):
        loop, events, gone = crowd(seed), [], ""
        while loop.has_work:
            events += loop.step().events
            arriving = loop.scheduler.sequences.arriving
            if arriving and not gone:
                gone = arriving[0].group.request_id
                loop.scheduler.cancel(gone, 0.0)
        loop.scheduler.check_idle()
        assert all(
            tokens_of(events, name) == expected(PROMPTS[name], OUTPUTS[name]) for name in PROMPTS.keys() - {gone}
        )
        times += bool(gone)
    assert times >= 5


def test_a_sequence_on_its_way_in_may_have_to_leave_again() -> None:
    """The last to come is the first to yield, also before it has arrived."""
    loop = crowd(0)
    scheduler = loop.scheduler
    while not scheduler.sequences.arriving:
        loop.step()
    sequence = scheduler.sequences.arriving[0]
    before = sequence.preemptions
    scheduler.residency.begin_plan()
    scheduler._preempt(sequence)  # as the plan does that finds no blocks
    assert (sequence.preemptions, sequence.phase, scheduler.sequences.arriving) == (before + 1, Phase.WAITING, [])
    moves = scheduler.residency.end_plan()
    assert [source for source, _ in moves.out]
    loop.runner.launch(StepPlan(1000, [], [], moves))
    events = run_to_end(loop)
    name = sequence.group.request_id
    answer = expected(PROMPTS[name], OUTPUTS[name])
    assert answer[-len(tokens_of(events, name)) :] == tokens_of(events, name)
    scheduler.check_idle()
