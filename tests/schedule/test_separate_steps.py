"""Steps for batch invariance: what runs of a request, and in what company, is a function of the request alone.

The model here is more exacting than any kernel: what it keeps of a token, and so every later token, depends on the step
in which the token was computed. Of prompts, on all that ran in it; behind prompts, on whether anything but single
tokens did.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from engine.config import AllocatorKind, PreemptionMode
from engine.kv.block_table import BlockTables
from engine.loop import StepLoop
from engine.schedule.composition import SeparateSteps, is_of_prompt
from engine.schedule.forecast import OutputForecast
from engine.schedule.plan import ScheduledSequence, StepOutcome, StepPlan
from engine.schedule.policy import PriorityWithAgeing
from engine.schedule.sequence import RequestGroup, Sequence
from engine.types import Event, FailureKind, GenerationRequest, SamplingParameters, StopCriteria
from tests.schedule.fake_model import VOCABULARY, FakePending, FakeRunner, make_loop, preempt, run_to_end, tokens_of

MOST = 20  # tokens of a prompt, and of an output


def mixed_in(*values: int) -> int:
    return zlib.crc32(np.asarray(values, dtype=np.int64).tobytes())


class StepSensitiveRunner(FakeRunner):
    """As FakeRunner, with what a step was mixed into all that it computes."""

    def launch(self, plan: StepPlan) -> FakePending:
        self.plans.append(plan)
        self._move(plan)
        tokens = []
        prompts = any(is_of_prompt(entry) for entry in plan.scheduled)
        step = mixed_in(*(number for entry in plan.scheduled for number in (entry.start, entry.count)))
        for entry in plan.scheduled:
            row, known = self._tables.rows[entry.slot].tolist(), entry.sequence.token_ids
            manner = step if prompts else 0
            for position in range(entry.start, entry.start + entry.count):
                pending = self._last_token.get(id(entry.sequence), -1)
                token = known[position] if position < len(known) else pending
                before = self._read(row, position)[-1] if position else 0
                self._write(row, position, mixed_in(token, before, manner))
            if entry.samples:
                tokens.append(self._read(row, entry.start + entry.count)[-1] % VOCABULARY)
                self._last_token[id(entry.sequence)] = tokens[-1]
        return FakePending(StepOutcome(tokens))


def runner(lookahead: bool = False) -> type[FakeRunner]:
    class Made(StepSensitiveRunner):
        def __init__(self, tables: BlockTables) -> None:
            super().__init__(tables, lookahead)

    return Made


def plans_of(loop: StepLoop) -> list[StepPlan]:
    return loop.runner.plans  # type: ignore[attr-defined, no-any-return]


class Crowd:
    """A random loop, mostly too small, and requests of random sizes that come over thirty steps."""

    def __init__(self, seed: int, *, separate: bool = True) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.budget = pick([1, 3, 8, 16, 64])
        self.lookahead = pick([False, True])
        self.loop = make_loop(
            num_blocks=self.random.randint(10, 24),
            max_num_seqs=self.random.randint(2, 8),
            max_batched_tokens=self.budget,
            swap_blocks=pick([0, 0, 5, 60]),
            mode=pick(list(PreemptionMode)),
            lookahead=self.lookahead,
            kind=AllocatorKind.CHECKED,
            policy=PriorityWithAgeing(5.0),
            forecast=pick([None, None, OutputForecast()]),
            separate=separate,
            make_runner=runner(self.lookahead),
        )
        self.coming = sorted((self.random.randint(0, 30), str(index)) for index in range(12))
        self.requests = {name: self._request(name) for _, name in self.coming}
        self.events: list[Event] = []

    def _request(self, name: str) -> GenerationRequest:
        generator = self.random
        return GenerationRequest(
            name,
            [generator.randrange(3) * 7 + position for position in range(generator.randint(1, MOST))],
            SamplingParameters(n=generator.choice([1, 1, 1, 2])),
            StopCriteria(max_tokens=generator.randint(1, MOST)),
            priority=generator.choice([0, 0, 1]),
        )

    def steps(self) -> Iterator[None]:
        """One after each step."""
        for step in range(20_000):
            while self.coming and self.coming[0][0] <= step:
                self.loop.scheduler.submit(self.requests[self.coming.pop(0)[1]], float(step))
            if not self.coming and not self.loop.has_work:
                return
            self.events += self.loop.step().events
            yield
        raise AssertionError("work left")

    def alone(self, request: GenerationRequest) -> list[list[int]]:
        """Each candidate's tokens when there is room for all, and nobody else."""
        loop = make_loop(num_blocks=1000, max_batched_tokens=self.budget, separate=True, make_runner=runner())
        loop.scheduler.submit(request, 0.0)
        events = run_to_end(loop)
        return [tokens_of(events, request.request_id, candidate) for candidate in range(request.sampling.n)]


def chunks(plans: list[StepPlan]) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """(start, count) of every piece of a prompt, in order, by request and candidate."""
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for entry in (entry for plan in plans for entry in plan.scheduled if is_of_prompt(entry)):
        key = entry.sequence.group.request_id, entry.sequence.candidate
        found.setdefault(key, []).append((entry.start, entry.count))
    return found


def passes(pieces: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """A prompt that lost its blocks is begun again."""
    begun: list[list[tuple[int, int]]] = []
    for start, count in pieces:
        if start == 0:
            begun.append([])
        begun[-1].append((start, count))
    return begun


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_tokens_are_those_of_each_alone(first: int) -> None:
    preemptions = 0
    for seed in range(first, first + 25):
        crowd = Crowd(seed)
        for _ in crowd.steps():
            pass
        crowd.loop.scheduler.check_idle()
        preemptions += crowd.loop.scheduler.counters.preemptions
        for name, request in crowd.requests.items():
            for candidate, tokens in enumerate(crowd.alone(request)):
                assert tokens_of(crowd.events, name, candidate) == tokens, f"seed {seed}, request {name}"
    assert preemptions > 50


def test_mixed_steps_do_not_pass_for_separate_ones() -> None:
    """The same comparison of ordinary steps finds differences: it can fail."""
    crowd = Crowd(3, separate=False)
    for _ in crowd.steps():
        pass
    assert any(tokens_of(crowd.events, name) != crowd.alone(one)[0] for name, one in crowd.requests.items())


def check_step(scheduled: list[ScheduledSequence]) -> None:
    """One chunk of one prompt, or single tokens, those that are drawn from first."""
    if any(is_of_prompt(entry) for entry in scheduled):
        assert len(scheduled) == 1
        return
    assert all(entry.count == 1 for entry in scheduled)
    samples = [entry.samples for entry in scheduled]
    assert samples == sorted(samples, reverse=True)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_a_step_is_one_chunk_or_single_tokens_and_chunks_depend_on_the_prompt(first: int) -> None:
    repeated = 0
    for seed in range(first, first + 25):
        crowd = Crowd(seed)
        for _ in crowd.steps():
            pass
        plans = plans_of(crowd.loop)
        for plan in plans:
            check_step(plan.scheduled)
            repeated += sum(not entry.samples and not is_of_prompt(entry) for entry in plan.scheduled)
        for (name, _), pieces in chunks(plans).items():
            length = len(crowd.requests[name].prompt_token_ids)
            whole = [(start, min(crowd.budget, length - start)) for start in range(0, length, crowd.budget)]
            for one in passes(pieces):
                assert one == whole[: len(one)]
    assert repeated > 50


def test_prompts_and_outputs_take_turns() -> None:
    """Of two chunks in a row the second kept nobody waiting who was behind his prompt; of two other steps the second
    kept no prompt waiting that had blocks."""
    pairs = {True: 0, False: 0}
    for seed in range(60):
        crowd = Crowd(seed)
        kinds: list[bool | None] = []  # whether it was a chunk; None: only moves
        ready: dict[Sequence, int] = {}  # after the last step, with their preemptions
        for _ in crowd.steps():
            plans = plans_of(crowd.loop)
            if len(plans) > len(kinds):
                last = plans[-1].scheduled
                kinds.append(is_of_prompt(last[0]) if last else None)
                if len(kinds) > 1 and kinds[-1] == kinds[-2] is not None:
                    pairs[kinds[-1]] += 1
                    stayed = {one for one in ready if ready[one] == one.preemptions}
                    ran = {entry.sequence for entry in last}
                    assert all(in_prompt(one) == kinds[-1] for one in stayed - ran), f"seed {seed}"
            running = crowd.loop.scheduler.sequences.running
            ready = {one: one.preemptions for one in running if not ended(one)}
    assert min(pairs.values()) > 50


def in_prompt(sequence: Sequence) -> bool:
    return sequence.num_computed < sequence.num_prompt


def ended(sequence: Sequence) -> bool:
    """Whether its last token is on its way, so that there is nothing left to run."""
    return sequence.num_tokens >= sequence.max_tokens_total and sequence.num_uncomputed == 1


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
@pytest.mark.parametrize("lookahead", [False, True])
def test_whoever_yields_at_any_moment_gets_the_same_tokens(mode: PreemptionMode, lookahead: bool) -> None:
    """In its prompt, behind it, and while its output is fed in again."""
    prompt = list(range(100, 111))
    alone = make_loop(num_blocks=40, max_batched_tokens=4, separate=True, make_runner=runner())
    alone.scheduler.submit(GenerationRequest("a", prompt, stop=StopCriteria(max_tokens=10)), 0.0)
    tokens = tokens_of(run_to_end(alone), "a")
    moments_of = [(1,), (2,), (3,), (4,), (9,), (2, 5), (6, 11)]
    if mode is PreemptionMode.RECOMPUTE:
        moments_of.append((7, 12, 17))  # twice more while the output is fed in again
    for moments in moments_of:
        loop = make_loop(
            num_blocks=40,
            max_batched_tokens=4,
            swap_blocks=40,
            mode=mode,
            separate=True,
            lookahead=lookahead,
            make_runner=runner(lookahead),
        )
        loop.scheduler.submit(GenerationRequest("a", prompt, stop=StopCriteria(max_tokens=10)), 0.0)
        events: list[Event] = []
        for step in range(1, 1 + max(moments)):
            events += loop.step().events
            if step in moments:
                preempt(loop, "a")
        assert tokens_of(events + run_to_end(loop), "a") == tokens
        assert loop.scheduler.counters.preemptions == len(moments)
        loop.scheduler.check_idle()


def test_prompts_of_one_token_and_candidates_are_nobody_elses() -> None:
    """Every candidate computes the prompt itself, and a prompt of one token is a step of its own."""
    loop = make_loop(num_blocks=40, separate=True, max_batched_tokens=8)
    item = GenerationRequest("a", [5] * 9, SamplingParameters(n=3), StopCriteria(max_tokens=4))
    loop.scheduler.submit(item, 0.0)
    loop.scheduler.submit(GenerationRequest("b", [5], stop=StopCriteria(max_tokens=4)), 0.0)
    run_to_end(loop)
    of_prompts = [plan for plan in plans_of(loop) if is_of_prompt(plan.scheduled[0])]
    assert chunks(of_prompts) == {("a", index): [(0, 8), (8, 1)] for index in range(3)} | {("b", 0): [(0, 1)]}
    assert all(len(plan.scheduled) == 1 and not plan.moves.copies for plan in of_prompts)


def test_before_a_prompt_come_those_of_others_and_not_their_outputs() -> None:
    """Of one six of ten tokens are left; the other has its prompt behind it."""
    groups = [RequestGroup(GenerationRequest(str(size), [1] * size), size, 0.0) for size in (10, 4)]
    in_it = Sequence(groups[0], 0, 0, [1] * 10, 20, num_computed=4)
    behind = Sequence(groups[1], 0, 0, [1] * 12, 20, num_computed=11)
    assert SeparateSteps(16).ahead([in_it, behind], 5) == 6


def test_a_prompt_waits_for_nobody_who_has_left() -> None:
    """A chunk was the last step, whose request is gone: there is nobody to take turns with."""
    loop = make_loop(num_blocks=40, separate=True, max_batched_tokens=8)
    loop.scheduler.submit(GenerationRequest("goes", [5] * 9), 0.0)
    loop.step()
    loop.scheduler.cancel("goes", 0.0)
    loop.scheduler.submit(GenerationRequest("comes", [6] * 9, stop=StopCriteria(max_tokens=2)), 0.0)
    assert loop.scheduler.plan(0.0) is not None
    loop.abandon(FailureKind.ENGINE_ERROR, "the end of this test")
