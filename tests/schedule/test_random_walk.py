"""A long random life of a scheduler: submit, step, cancel, stop, yield, run dry, with the oracle and the native
allocator in lock-step and every block accounted for after every step."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.config import AllocatorKind, PreemptionMode
from engine.kv.checked import CheckedBlockAllocator
from engine.loop import StepLoop
from engine.schedule.forecast import OutputForecast
from engine.schedule.policy import PriorityWithAgeing
from engine.types import Event, GenerationRequest, RequestFailed, RequestFinished, SamplingParameters, StopCriteria
from tests.schedule.fake_model import expected, make_loop, preempt, tokens_of

VOCABULARY_OF_PROMPTS = 3  # few different prompts, so that prefixes are shared


def check_blocks(loop: StepLoop) -> None:
    """Counts equal the rows that hold a block; live, cached and free are everything; the swap space likewise."""
    residency = loop.scheduler.residency
    tables, allocator = residency.tables, residency.tables.allocator
    lengths, rows = tables.lengths.tolist(), tables.rows.tolist()
    held = Counter(block for row, length in zip(rows, lengths, strict=True) for block in row[:length])
    assert 0 not in held
    assert isinstance(allocator, CheckedBlockAllocator)
    for one in (allocator._subject, allocator._oracle):
        assert [one.ref_count(block) for block in held] == list(held.values())
    assert allocator.num_live == len(held)
    assert allocator.num_live + allocator.num_cached + allocator.num_free == allocator.num_blocks
    allocator.check()
    if residency.swap is not None:
        swapped = sum(len(sequence.swapped_blocks) for sequence in loop.scheduler.sequences.waiting)
        assert residency.swap.num_used == swapped


class Walk:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        separate = seed % 4 == 3
        self.loop = make_loop(
            num_blocks=24,
            swap_blocks=self.random.choice([0, 5, 40]),
            mode=self.random.choice(list(PreemptionMode)),
            max_batched_tokens=self.random.choice([3, 12, 40]),
            max_num_seqs=5,
            prefix_caching=self.random.random() < 0.7 and not separate,
            lookahead=self.random.random() < 0.5,
            kind=AllocatorKind.CHECKED,
            policy=PriorityWithAgeing(5.0),
            forecast=OutputForecast() if self.random.random() < 0.3 else None,
            separate=separate,
        )
        self.requests: dict[str, GenerationRequest] = {}
        self.live: list[str] = []
        self.events: dict[str, list[Event]] = {}
        self.touched: set[str] = set()
        self.now = 0.0
        self.count = 0

    def submit(self) -> None:
        family, length = self.random.randrange(VOCABULARY_OF_PROMPTS), self.random.randint(1, 30)
        name = str(self.count)
        self.count += 1
        request = GenerationRequest(
            name,
            [family * 7 + position for position in range(length)],
            SamplingParameters(n=self.random.choice([1, 1, 1, 2, 3])),
            StopCriteria(max_tokens=self.random.randint(1, 25)),
            priority=self.random.choice([0, 0, 1]),
            cache_salt=self.random.choice(["", "tenant"]),
        )
        self.requests[name], self.events[name] = request, []
        self.live.append(name)
        self.loop.scheduler.submit(request, self.now)

    def disturb(self) -> None:
        name = self.random.choice(self.live)
        self.touched.add(name)
        if self.random.random() < 0.6:
            self.loop.scheduler.cancel(name, self.now)
        else:
            self.loop.scheduler.stop_candidate(name, self.random.randrange(3), self.now)

    def preempt(self) -> None:
        """Anybody who runs, the oldest too, whom no plan would choose."""
        if self.loop.scheduler.sequences.running:
            sequence = self.random.choice(self.loop.scheduler.sequences.running)
            preempt(self.loop, sequence.group.request_id, sequence.candidate)

    def step(self) -> None:
        for event in self.loop.step().events:
            self.events[event.request_id].append(event)
            if isinstance(event, RequestFinished | RequestFailed):
                self.live.remove(event.request_id)
                self.finish(event.request_id)
        self.now += 0.1

    def finish(self, name: str) -> None:
        request, events = self.requests.pop(name), self.events.pop(name)
        ends = [event for event in events if isinstance(event, RequestFinished | RequestFailed)]
        assert len(ends) == 1
        assert events[-1] is ends[0]
        assert isinstance(ends[0], RequestFinished)
        assert ends[0].timing.preemptions <= 60
        for candidate in range(request.sampling.n):
            tokens = tokens_of(events, name, candidate)
            whole = expected(request.prompt_token_ids, request.stop.max_tokens or 0, candidate=candidate)
            assert tokens == (whole[: len(tokens)] if name in self.touched else whole)
        self.touched.discard(name)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.random.random() < 0.25 and len(self.live) < 12:
                self.submit()
            if self.live and self.random.random() < 0.05:
                self.disturb()
            if self.random.random() < 0.05:
                self.preempt()
            self.step()
            check_blocks(self.loop)
        for _ in range(5000):
            if not self.loop.has_work:
                break
            self.step()
        self.loop.scheduler.check_idle()
        assert not self.live


@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_random_steps(seed: int) -> None:
    Walk(seed).run(1000)


@pytest.mark.slow
def test_a_hundred_thousand_random_steps() -> None:
    for seed in range(100, 120):
        Walk(seed).run(5000)


def test_nobody_starves_in_random_overload() -> None:
    """Hundreds of workloads, a request a step: only those that may overtake the first one (higher priority, within the
    time that is worth) delay it, so it ends in as many steps as their tokens and its own can take."""
    ageing, seconds_a_step = 2.0, 0.1
    for seed in range(400):
        generator = random.Random(seed)
        budget = generator.randint(4, 20)
        loop = make_loop(
            num_blocks=generator.randint(8, 20),
            max_num_seqs=generator.randint(1, 5),
            max_batched_tokens=budget,
            swap_blocks=generator.choice([0, 30]),
            policy=PriorityWithAgeing(ageing),
        )
        first = GenerationRequest("first", [1] * generator.randint(1, 20), stop=StopCriteria(max_tokens=8))
        loop.scheduler.submit(first, 0.0)
        before, step, ended = 28, 0, False
        while not ended:
            priority = generator.choice([0, 1, 3])
            late = GenerationRequest(
                f"late{step}",
                [step] * generator.randint(1, 20),
                stop=StopCriteria(max_tokens=generator.randint(1, 8)),
                priority=priority,
            )
            if step < 200:
                loop.scheduler.submit(late, seconds_a_step * step)
            if seconds_a_step * step < ageing * priority:
                before += len(late.prompt_token_ids) // budget + (late.stop.max_tokens or 0) + 2
            ended = any(isinstance(e, RequestFinished) and e.request_id == "first" for e in loop.step().events)
            step += 1
            assert step <= 2 * before, f"seed {seed}: the first request did not end in {step} steps"
