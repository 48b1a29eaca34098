"""Thousands of simulated workloads, most of them more than fits: everybody ends with the right tokens, few are
preempted more than once, and the oldest request always gets on."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest

from engine.config import PreemptionMode
from engine.loop import StepLoop
from engine.schedule.forecast import OutputForecast
from engine.schedule.scheduler import Scheduler
from engine.types import Event, GenerationRequest, RequestFinished, StopCriteria
from tests.schedule.fake_model import expected, finished, make_loop, request, run_to_end, tokens_of

MOST_PREEMPTIONS = 6
MOST_SMALL = 16  # tokens of a prompt, and of an output


class Workload:
    """Requests that come over thirty steps into a loop of random limits. Everybody fits the pool alone."""

    def __init__(self, seed: int, *, separate: bool = False) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.max_num_seqs = self.random.randint(1, 8)
        self.loop = make_loop(
            num_blocks=self.random.randint(8, 24),
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=pick([4, 8, 16, 64]),
            swap_blocks=pick([0, 0, 5, 60]),
            mode=pick(list(PreemptionMode)),
            prefix_caching=pick([False, True]) and not separate,
            lookahead=pick([False, True]),
            forecast=pick([None, None, OutputForecast()]),
            separate=separate,
        )
        self.coming = sorted((self.random.randint(0, 30), index) for index in range(14))
        self.requests = {
            str(index): request(
                str(index),
                [self.random.randrange(3) * 7 + position for position in range(self.random.randint(1, MOST_SMALL))],
                self.random.randint(1, MOST_SMALL),
            )
            for index in range(14)
        }
        self.events: list[Event] = []
        self.longest_standstill = 0  # steps in which the oldest live request did not run

    def run(self) -> None:
        standstill = 0
        for step in count():
            while self.coming and self.coming[0][0] <= step:
                self.loop.scheduler.submit(self.requests[str(self.coming.pop(0)[1])], float(step))
            if not self.coming and not self.loop.has_work:
                return
            standstill = 0 if self._step() else standstill + 1
            self.longest_standstill = max(self.longest_standstill, standstill)
            assert step < 1000, "livelock"

    def _step(self) -> bool:
        """Whether the oldest request ran, or there was nothing for it to run."""
        scheduler, runner = self.loop.scheduler, self.loop.runner
        oldest = next((group.sequences[0] for group in scheduler.requests), None)
        done = oldest is None or oldest.num_tokens >= oldest.max_tokens_total
        before = len(runner.plans)  # type: ignore[attr-defined]
        self.events += self.loop.step().events
        plans = runner.plans[before:]  # type: ignore[attr-defined]
        return done or any(entry.sequence is oldest for plan in plans for entry in plan.scheduled)


def check(seeds: range, *, separate: bool = False) -> None:
    preemptions: Counter[int] = Counter()
    for seed in seeds:
        workload = Workload(seed, separate=separate)
        workload.run()
        workload.loop.scheduler.check_idle()
        for name, item in workload.requests.items():
            answer = expected(item.prompt_token_ids, item.stop.max_tokens or 0)
            assert tokens_of(workload.events, name) == answer, f"seed {seed}, request {name}"
        ends = [event.timing.preemptions for event in workload.events if isinstance(event, RequestFinished)]
        preemptions.update(ends)
        # It may find that smaller ones went first and hold the blocks: those end, and nobody passes it any more.
        # Separate steps take turns with others: twice as long.
        most = (2 * MOST_SMALL + workload.max_num_seqs) * (2 if separate else 1)
        assert workload.longest_standstill <= most, f"seed {seed}"
    assert max(preemptions) <= MOST_PREEMPTIONS
    assert sum(preemptions.values()) == 14 * len(seeds)
    more_than_once = sum(times for number, times in preemptions.items() if number > 1)
    assert 0 < more_than_once < 0.25 * sum(times for number, times in preemptions.items() if number)


def test_hundreds_of_workloads() -> None:
    check(range(400))


def test_workloads_in_separate_steps() -> None:
    check(range(100), separate=True)


@pytest.mark.slow
def test_thousands_of_workloads() -> None:
    check(range(400, 2400))
    check(range(100, 600), separate=True)


def waiting(scheduler: Scheduler) -> list[str]:
    """In the order in which their turns come. No public way tells it."""
    return [sequence.group.request_id for sequence in scheduler.sequences.waiting]


def run_until_preempted(loop: StepLoop, events: list[Event]) -> str:
    """The one that had to yield first."""
    while not loop.scheduler.counters.preemptions:
        events += loop.step().events
    return waiting(loop.scheduler)[0]


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
@pytest.mark.parametrize("lookahead", [False, True])
def test_who_had_to_yield_comes_back_before_anything_new(mode: PreemptionMode, lookahead: bool) -> None:
    """Small new prompts that would fit wait behind it, however many come."""
    loop = make_loop(num_blocks=12, swap_blocks=50, mode=mode, max_batched_tokens=64, lookahead=lookahead)
    for index in range(3):
        loop.scheduler.submit(request(str(index), [index * 50 + position for position in range(8)], 24), 0.0)
    events: list[Event] = []
    yielded = run_until_preempted(loop, events)
    for index in range(20):
        loop.scheduler.submit(request(f"new{index}", [900, index], 2), 1.0)
    came_back = False
    while not came_back:
        events += loop.step().events
        plan = loop.runner.plans[-1]  # type: ignore[attr-defined]
        names = {entry.sequence.group.request_id for entry in plan.scheduled}
        came_back = yielded in names
        assert came_back or not any(name.startswith("new") for name in names)
    events += run_to_end(loop)
    assert tokens_of(events, yielded) == expected([int(yielded) * 50 + position for position in range(8)], 24)
    loop.scheduler.check_idle()


@pytest.mark.parametrize("budget", [4, 8, 16])
def test_short_prompts_behind_a_long_one_and_the_long_one_itself_start_in_time(budget: int) -> None:
    """Steps to the first token of each: those that half of a step's budget finishes start at once; nobody later than
    the tokens of all prompts take, with a decode a step for each that has started."""
    loop = make_loop(num_blocks=80, max_batched_tokens=budget, max_num_seqs=4)
    lengths = {"long": 100, "short": 6, "shorter": 3}
    for index, (name, length) in enumerate(lengths.items()):
        loop.scheduler.submit(request(name, [index * 200 + position for position in range(length)], 40), 0.0)
    first, step = {}, 0
    while len(first) < 3:
        step += 1
        for event in loop.step().events:
            if tokens_of([event], event.request_id):
                first.setdefault(event.request_id, step)
    for name, length in lengths.items():
        whole = -(-sum(lengths.values()) // (budget - 2)) + 1
        assert first[name] <= (3 if length <= budget // 2 else whole)


def test_prefills_get_on_in_every_step_beside_as_many_decodes_as_there_is_budget_for() -> None:
    """Decodes come first, but never take the whole budget while a prompt is under way."""
    loop = make_loop(num_blocks=80, max_batched_tokens=4, max_num_seqs=8)
    for index in range(3):
        loop.scheduler.submit(request(str(index), [index], 60), 0.0)
    loop.scheduler.submit(request("prompt", [900 + position for position in range(20)], 2), 0.0)
    loop.scheduler.submit(request("next", [700 + position for position in range(20)], 2), 0.0)
    run = 0
    for _ in range(40):
        loop.step()
        plan = loop.runner.plans[-1]  # type: ignore[attr-defined]
        prefilled = sum(e.count for e in plan.scheduled if e.sequence.group.request_id in ("prompt", "next"))
        run += prefilled
        assert prefilled or run >= 40
        assert sum(entry.count for entry in plan.scheduled) <= 4
    assert run >= 40


def test_an_endless_stream_of_higher_priority_delays_by_its_worth_only() -> None:
    """A step of priority is worth ten seconds: whoever waited so long is served before newer ones of more priority."""
    loop = make_loop(num_blocks=40, max_num_seqs=1)
    loop.scheduler.submit(request("low", [1, 2], 2), 0.0)
    now, served = 0.0, False
    while not served:
        high = GenerationRequest(f"high{now}", [5, round(now)], stop=StopCriteria(max_tokens=1), priority=1)
        loop.scheduler.submit(high, now)
        served = bool(tokens_of(loop.step().events, "low"))
        now += 0.5
    assert 10.0 <= now <= 11.0


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_who_had_to_yield_to_more_important_ones_ends_while_they_keep_coming(mode: PreemptionMode) -> None:
    """One a step, and each has ten seconds of precedence: the one that yields to them waits for those of its first ten
    seconds, which run two at a time at least."""
    loop = make_loop(num_blocks=12, swap_blocks=50, mode=mode, max_num_seqs=4, max_batched_tokens=64)
    prompt, seconds_a_step, before = list(range(8)), 0.5, 20
    loop.scheduler.submit(request("low", prompt, 24), 0.0)
    events: list[Event] = []
    for step in count():
        high = GenerationRequest(f"high{step}", [50 + step] * 5, stop=StopCriteria(max_tokens=5), priority=1)
        loop.scheduler.submit(high, seconds_a_step * step)
        events += loop.step().events
        if finished(events, "low"):
            break
        assert step < before * 5 // 2 + 24, "starved"
    assert finished(events, "low")[0].timing.preemptions > 0
    assert tokens_of(events, "low") == expected(prompt, 24)
