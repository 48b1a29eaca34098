"""A device without hardware: two queues, run in an order drawn at random as far as their waits allow, as late as
possible or not; and a runner that uses them through the engine's own BlockMover."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch

from engine.kv.block_table import BlockTables
from engine.run.block_moves import BlockMover
from engine.schedule.plan import ScheduledSequence, StepOutcome, StepPlan
from tests.schedule.fake_model import next_token


class Event:
    def __init__(self) -> None:
        self.passed = False

    def done(self) -> bool:
        return self.passed

    def record(self) -> None:
        self.passed = True


Action = Callable[[], None] | Event  # an Event here is one to wait for


class ScriptedStreams:
    def __init__(self, source: random.Random) -> None:
        self._random = source
        self._queues: list[deque[Action]] = [deque(), deque()]  # computing, copies

    def compute(self, action: Callable[[], None]) -> None:
        self._queues[0].append(action)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for to_row, from_row in zip(target, source, strict=True):
            self._queues[1].append(lambda to_row=to_row, from_row=from_row: to_row.copy_(from_row))

    def copies_wait(self) -> None:
        self._queues[1].append(self._mark(0))

    def mark_copies(self) -> Event:
        return self._mark(1)

    def mark_compute(self) -> Event:
        return self._mark(0)

    def compute_waits(self, mark: Event) -> None:
        self._queues[0].append(mark)

    def run_until(self, event: Event) -> None:
        while not event.passed:
            assert self.advance(), "both queues wait for ever"

    def advance(self, queue: int | None = None) -> bool:
        """Runs the first action of a queue drawn at random, or of the one given; False if none can run."""
        ready = [index for index in (0, 1) if queue in (None, index) and self._ready(self._queues[index])]
        if not ready:
            return False
        action = self._queues[self._random.choice(ready)].popleft()
        if not isinstance(action, Event):
            action()
        return True

    def _mark(self, queue: int) -> Event:
        event = Event()
        self._queues[queue].append(event.record)
        return event

    def _ready(self, queue: deque[Action]) -> bool:
        return bool(queue) and (not isinstance(queue[0], Event) or queue[0].passed)


class _Pending:
    def __init__(self, streams: ScriptedStreams, done: Event, tokens: list[int]) -> None:
        self._streams, self._done, self._tokens = streams, done, tokens

    def wait(self) -> StepOutcome:
        self._streams.run_until(self._done)
        return StepOutcome(self._tokens)


class StreamRunner:
    """As FakeRunner, but a step's effects come when its turn in the queue of computing has come. A cell that was never
    written, or is poisoned, is NaN and no token."""

    lookahead = True

    def __init__(self, tables: BlockTables, swap_blocks: int, source: random.Random) -> None:
        self.plans: list[StepPlan] = []
        self.streams = ScriptedStreams(source)
        self._random = source
        self._tables = tables
        self._pool = torch.full((tables.allocator.num_blocks + 1, 1, 2, 1, tables.block_size, 1), torch.nan)
        self._cells = self._pool[:, 0, 0, 0, :, 0]  # K of the only layer, head and dimension holds the token
        self._mover = BlockMover(self._pool, swap_blocks, self.streams)
        self._last_token: dict[int, int] = {}
        self._blocks: list[set[int]] = []

    def ran_in(self, plan: StepPlan, blocks: set[int]) -> bool:
        """Whether the plan's step ran a sequence that begins in one of the blocks."""
        return bool(self._blocks[self.plans.index(plan)] & blocks)

    @property
    def moved(self) -> int:
        for _ in range(self._random.choice([0, 0, 3, 30])):
            self.streams.advance()
        return self._mover.moved

    def launch(self, plan: StepPlan) -> _Pending:
        self.plans.append(plan)
        self._blocks.append({int(self._tables.rows[entry.slot, 0]) for entry in plan.scheduled})
        self._mover.apply(plan, self._tables)
        tokens: list[int] = []
        for entry in plan.scheduled:
            self._compute(entry, tokens)
        return _Pending(self.streams, self.streams.mark_compute(), tokens)

    def _compute(self, entry: ScheduledSequence, tokens: list[int]) -> None:
        size, name = self._tables.block_size, id(entry.sequence)
        row, known = self._tables.rows[entry.slot].tolist(), list(entry.sequence.token_ids)
        places = [(row[position // size], position % size) for position in range(entry.start + entry.count)]
        assert all(block for block, _ in places), "a token without a block"

        def run() -> None:
            for position in range(entry.start, entry.start + entry.count):
                self._cells[places[position]] = known[position] if position < len(known) else self._last_token[name]
            if entry.samples:
                context = [int(self._cells[place]) for place in places]
                self._last_token[name] = next_token(context, entry.sequence.candidate)
                tokens.append(self._last_token[name])

        self.streams.compute(run)
