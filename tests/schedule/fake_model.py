"""A model without weights: the next token is a function of all tokens before it, as a real model's is, and of the
candidate, as with a seed of its own."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable

from engine.config import AllocatorKind, PreemptionMode
from engine.kv.allocator import make_allocator
from engine.kv.block_table import BlockTables
from engine.kv.prefix_index import HashFunction, PrefixIndex, hash64
from engine.kv.swap import SwapSpace
from engine.loop import Runner, StepLoop
from engine.schedule.admission import SchedulerLimits
from engine.schedule.composition import SeparateSteps
from engine.schedule.forecast import OutputForecast
from engine.schedule.plan import Pairs, StepOutcome, StepPlan
from engine.schedule.policy import Policy
from engine.schedule.preemption import PreemptionCost
from engine.schedule.residency import Residency
from engine.schedule.scheduler import Scheduler
from engine.types import Event, GenerationRequest, RequestFinished, StopCriteria, TokensGenerated

VOCABULARY = 1000

NOTHING = -1  # in a block's place that no token was written to
Cells = dict[int, list[int]]  # of each block, its tokens


def next_token(token_ids: list[int], candidate: int) -> int:
    return (zlib.crc32(array("i", token_ids)) + candidate) % VOCABULARY


class FakePending:
    def __init__(self, outcome: StepOutcome) -> None:
        self._outcome = outcome

    def wait(self) -> StepOutcome:
        return self._outcome


class FakeRunner:
    """Moves blocks before it computes, as the CPU's runner does. Keeps what each block slot holds and computes the next
    token from what it reads back through the block table, so that a wrong table, a block freed too early or a token
    skipped gives a wrong token. With lookahead, tokens still pending on the host are kept here, as a device would."""

    moved = None

    def __init__(self, tables: BlockTables, lookahead: bool = False) -> None:
        self.lookahead = lookahead
        self.plans: list[StepPlan] = []
        self._tables = tables
        self._empty = [NOTHING] * tables.block_size
        self._cells: Cells = {}
        self._host: Cells = {}
        self._last_token: dict[int, int] = {}

    def _move(self, plan: StepPlan) -> None:
        moves = plan.moves
        self._copy(moves.out, self._cells, self._host)
        for block in moves.freed:
            self._cells.pop(block, None)
        self._copy(moves.back, self._host, self._cells)
        self._copy(moves.copies, self._cells, self._cells)

    def _copy(self, pairs: Pairs, source: Cells, target: Cells) -> None:
        for from_block, to_block in pairs:
            target[to_block] = list(source.get(from_block, self._empty))

    def _write(self, row: list[int], position: int, token: int) -> None:
        size = self._tables.block_size
        block = row[position // size]
        assert block != 0, "a token without a block"
        if block not in self._cells:
            self._cells[block] = list(self._empty)
        self._cells[block][position % size] = token

    def _read(self, row: list[int], stop: int) -> list[int]:
        """The first `stop` tokens of a row of the table."""
        blocks = row[: -(-stop // self._tables.block_size)]
        context = [token for block in blocks for token in self._cells[block]][:stop]
        assert NOTHING not in context, "a token that was not written"
        return context

    def launch(self, plan: StepPlan) -> FakePending:
        self.plans.append(plan)
        self._move(plan)
        tokens = []
        for entry in plan.scheduled:
            row = self._tables.rows[entry.slot].tolist()
            known = entry.sequence.token_ids
            for position in range(entry.start, entry.start + entry.count):
                pending = self._last_token.get(id(entry.sequence), -1)
                token = known[position] if position < len(known) else pending
                self._write(row, position, token)
            if entry.samples:
                context = self._read(row, entry.start + entry.count)
                tokens.append(next_token(context, entry.sequence.candidate))
                self._last_token[id(entry.sequence)] = tokens[-1]
        return FakePending(StepOutcome(tokens))


def make_loop(
    *,
    num_blocks: int,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_batched_tokens: int = 16,
    max_context: int | None = None,
    lookahead: bool = False,
    kind: AllocatorKind = AllocatorKind.NATIVE,
    eos: frozenset[int] = frozenset(),
    max_queued_requests: int = 1000,
    max_queued_tokens: int = 10**6,
    prefix_caching: bool = False,
    swap_blocks: int = 0,
    mode: PreemptionMode = PreemptionMode.AUTO,
    policy: Policy | None = None,
    hash_function: HashFunction = hash64,
    forecast: OutputForecast | None = None,
    make_runner: Callable[[BlockTables], Runner] | None = None,
    separate: bool = False,
    watermark_blocks: int = 0,
) -> StepLoop:
    """make_runner: None takes a FakeRunner. separate: SeparateSteps, and nothing shared, as batch invariance needs."""
    allocator = make_allocator(kind, num_blocks)
    limit = num_blocks * block_size if max_context is None else max_context
    tables = BlockTables(allocator, max_num_seqs, -(-limit // block_size), block_size)
    queue = max_queued_requests, max_queued_tokens
    limits = SchedulerLimits(max_num_seqs, max_batched_tokens, limit, *queue, watermark_blocks)
    residency = Residency(
        tables,
        PrefixIndex(allocator, block_size, hash_function) if prefix_caching else None,
        SwapSpace(make_allocator(kind, swap_blocks)) if swap_blocks else None,
        PreemptionCost(mode),
        shares=not separate,
    )
    composition = SeparateSteps(max_batched_tokens) if separate else None
    runner = FakeRunner(tables, lookahead) if make_runner is None else make_runner(tables)
    return StepLoop(Scheduler(residency, limits, eos, policy, forecast, composition), runner)


def request(name: str, prompt: list[int], max_tokens: int | None = 8, **fields: object) -> GenerationRequest:
    stop = StopCriteria(max_tokens=max_tokens)
    return GenerationRequest(name, prompt, stop=stop, **fields)  # type: ignore[arg-type]


def expected(prompt: list[int], max_tokens: int, eos: frozenset[int] = frozenset(), candidate: int = 0) -> list[int]:
    """What a request's candidate gives when it runs alone, by definition."""
    checksum, tokens = zlib.crc32(array("i", prompt)), []
    while len(tokens) < max_tokens:
        tokens.append((checksum + candidate) % VOCABULARY)
        checksum = zlib.crc32(array("i", tokens[-1:]), checksum)
        if tokens[-1] in eos:
            break
    return tokens


def run_to_end(loop: StepLoop, max_steps: int = 10_000) -> list[Event]:
    events: list[Event] = []
    for _ in range(max_steps):
        events += loop.step().events
        if not loop.has_work:
            return events
    raise AssertionError(f"work left after {max_steps} steps")


def preempt(loop: StepLoop, name: str, candidate: int = 0) -> None:
    """Makes a running candidate yield now, wherever it is, as a plan without blocks would."""
    scheduler, key = loop.scheduler, (name, candidate)
    [sequence] = [one for one in scheduler.sequences.running if (one.group.request_id, one.candidate) == key]
    scheduler.residency.begin_plan()
    scheduler._preempt(sequence)
    moves = scheduler.residency.end_plan()
    scheduler.residency.take_freed(moves)
    loop.runner.launch(StepPlan(0, [], [], moves))


def tokens_of(events: list[Event], name: str, candidate: int = 0) -> list[int]:
    return [
        token
        for event in events
        if isinstance(event, TokensGenerated) and (event.request_id, event.candidate) == (name, candidate)
        for token in event.token_ids
    ]


def finished(events: list[Event], name: str) -> list[RequestFinished]:
    return [event for event in events if isinstance(event, RequestFinished) and event.request_id == name]
