"""What a request that comes now waits: against queues whose end is known, and in the scheduler's figures."""

from __future__ import annotations

import pytest

from engine.loop import StepLoop
from engine.schedule.forecast import own_tokens
from engine.schedule.plan import StepOutcome, StepPlan
from engine.schedule.queue_delay import Need, Pace, queue_delay
from engine.schedule.scheduler import Scheduler
from engine.types import FailureKind, RequestFailed
from tests.schedule.fake_model import FakePending, make_loop, preempt, request, run_to_end

PACE = Pace(prefill_rate=100.0, step_seconds=0.1)


@pytest.mark.parametrize(
    ("running", "waiting", "slots", "blocks", "seconds"),
    [
        ([], [], 4, 10, 0.0),
        ([Need(5, 0, 20)], [], 1, 10, 0.0),
        ([Need(5, 0, 20), Need(5, 0, 30)], [], 0, 10, 2.0),  # the first slot is free after 20 steps
        ([Need(5, 0, 20)], [], 3, 0, 2.0),  # and so is the first block
        ([], [Need(2, 50, 7), Need(2, 150, 7)], 4, 10, 2.0),  # two prefills, one after the other
        ([Need(5, 0, 20)], [Need(2, 100, 40)], 0, 10, 7.0),  # waits 2, prefills 1, decodes 4
        ([Need(5, 0, 20)], [Need(2, 100, 40)], 1, 10, 2.0),  # starts at once; the other ends first
        ([Need(5, 0, 20)], [Need(2, 300, 40)], 1, 10, 3.0),  # prefills 3, and the other has ended meanwhile
        ([Need(8, 100, 20)], [Need(7, 100, 0)], 3, 2, 4.0),  # waits for blocks: a prefill of 1 s and 20 steps
    ],
)
def test_known_queues(running: list[Need], waiting: list[Need], slots: int, blocks: int, seconds: float) -> None:
    assert queue_delay(running, waiting, slots, blocks, PACE) == pytest.approx(seconds)


def test_unknown_pace_is_no_delay() -> None:
    assert queue_delay([Need(5, 0, 20)], [Need(5, 100, 20)], 0, 0, Pace()) == 0.0


def test_a_long_queue_is_extrapolated() -> None:
    one = Need(1, 100, 0)
    assert queue_delay([], [one] * 1000, 1000, 10_000, PACE) == pytest.approx(1000.0)


def steps_to_its_turn(loop: StepLoop, prefill_rate: float) -> tuple[float, int]:
    """What the scheduler expects of a request that comes now, in seconds, where a step takes one; and what it takes."""
    scheduler = loop.scheduler
    scheduler.waiting_time.estimate(Pace(prefill_rate=prefill_rate, step_seconds=1.0))
    estimate, steps = scheduler.waiting_time.queue_delay, 0
    scheduler.submit(request("last", [1], 5), 0.0)
    last = scheduler.requests.get("last")
    assert last is not None
    while last.first_scheduled is None:
        loop.step()
        steps += 1
    return estimate, steps


def test_the_estimate_is_about_what_a_queue_takes() -> None:
    """One slot, ten requests of ten tokens each: a simulated second a step, learned from one that ended."""
    loop = make_loop(num_blocks=40, max_num_seqs=1, max_batched_tokens=8)
    scheduler = loop.scheduler
    scheduler.submit(request("first", [1] * 8, 10), 0.0)
    run_to_end(loop)
    for index in range(10):
        scheduler.submit(request(str(index), [index] * 8, 10), 0.0)
    loop.step()
    estimate, steps = steps_to_its_turn(loop, prefill_rate=8.0)
    assert 0.8 * steps <= estimate <= 1.2 * steps
    run_to_end(loop)
    assert loop.stats().queue_delay_seconds == 0.0


def test_prompts_that_will_be_found_computed_delay_nobody() -> None:
    """A dozen behind a long beginning that all have in common, of which the pool holds three without sharing."""
    loop = make_loop(num_blocks=60, max_num_seqs=4, max_batched_tokens=16, prefix_caching=True)
    scheduler, common = loop.scheduler, list(range(80))
    scheduler.submit(request("first", common, 8), 0.0)
    run_to_end(loop)
    for index in range(12):
        scheduler.submit(request(str(index), [*common, *range(100 + 4 * index, 104 + 4 * index)], 8), 0.0)
    for _ in range(3):
        loop.step()
    stats = loop.stats()
    assert stats.queued_prompt_tokens == 84 * stats.queued_requests > 0
    assert 4 * stats.queued_requests <= stats.queued_uncached_tokens <= 20 * stats.queued_requests
    estimate, steps = steps_to_its_turn(loop, prefill_rate=16.0)
    assert 0.8 * steps <= estimate <= 1.4 * steps


def test_before_a_first_output_has_ended_limits_are_what_outputs_take() -> None:
    """For hints; deadlines are judged by what is sure."""
    loop = make_loop(num_blocks=200, max_num_seqs=1, max_batched_tokens=16)
    scheduler = loop.scheduler
    scheduler.submit(request("runs", [1] * 8, 101), 0.0)
    loop.step()  # and has one of its tokens
    scheduler.submit(request("waits", [2] * 8, 50), 0.0)
    scheduler.waiting_time.estimate(Pace(prefill_rate=8.0, step_seconds=0.1))
    prefills = 1 / 8 + 1.0
    assert scheduler.waiting_time.queue_delay == pytest.approx(prefills + 100 * 0.1 + 50 * 0.1)
    assert scheduler.waiting_time.least_delay == pytest.approx(prefills)
    stats = loop.stats()
    assert stats.queue_delay_seconds == scheduler.waiting_time.queue_delay
    assert stats.least_delay_seconds == scheduler.waiting_time.least_delay
    run_to_end(loop)
    scheduler.submit(request("next", [3] * 8, 50), 0.0)
    scheduler.waiting_time.estimate(Pace(prefill_rate=8.0, step_seconds=0.1))
    assert scheduler.waiting_time.queue_delay == scheduler.waiting_time.least_delay > 1.0


def test_without_limits_a_first_output_counts_as_long_as_a_forecast_says() -> None:
    loop = make_loop(num_blocks=400, max_num_seqs=1, max_batched_tokens=16)
    loop.scheduler.submit(request("runs", [1] * 8, None), 0.0)
    loop.step()
    loop.scheduler.waiting_time.estimate(Pace(prefill_rate=8.0, step_seconds=0.1))
    assert loop.scheduler.waiting_time.queue_delay == pytest.approx(1 / 8 + 511 * 0.1)


def test_a_refusal_says_when_to_come_again() -> None:
    loop = make_loop(num_blocks=40, max_num_seqs=1, max_queued_requests=2)
    scheduler = loop.scheduler
    scheduler.submit(request("runs", [1], 10), 0.0)
    loop.step()
    for index in range(2):
        scheduler.submit(request(str(index), [index] * 8, 10), 0.0)
    scheduler.waiting_time.estimate(Pace(prefill_rate=4.0))
    scheduler.submit(request("refused", [1], 1), 0.0)
    scheduler.waiting_time.queue_delay = 1000.0
    scheduler.submit(request("refused, too", [1], 1), 0.0)
    failures = [event for event in scheduler.take_events() if isinstance(event, RequestFailed)]
    assert [event.kind for event in failures] == [FailureKind.QUEUE_FULL] * 2
    assert [event.details["retry_after"] for event in failures] == ["4.250", "30.000"]


def test_what_expired_before_its_first_plan_is_never_computed() -> None:
    loop = make_loop(num_blocks=40)
    loop.scheduler.submit(request("late", [1] * 8, 10, deadline=1.0), 0.0)
    assert loop.scheduler.plan(1.5) is None
    failures = [event for event in loop.scheduler.take_events() if isinstance(event, RequestFailed)]
    assert [event.kind for event in failures] == [FailureKind.EXPIRED_IN_QUEUE]
    assert loop.scheduler.counters.computed_tokens == 0


def six_of_one_prompt(num_blocks: int) -> Scheduler:
    """Six run that begin with the same eight blocks, with the delay estimated."""
    loop = make_loop(num_blocks=num_blocks, prefix_caching=True, max_batched_tokens=64)
    scheduler, prompt = loop.scheduler, list(range(32))
    scheduler.submit(request("first", prompt, 8), 0.0)
    run_to_end(loop)
    for index in range(6):
        scheduler.submit(request(str(index), [*prompt, 100 + index], 8), 0.0)
    loop.step()
    assert scheduler.queue.num_running_requests == 6
    scheduler.waiting_time.estimate(PACE)
    return scheduler


def test_blocks_that_running_requests_share_count_once() -> None:
    """Six that would need more than the pool, each with a copy of the prompt, leave room in it: nobody waits for it."""
    scheduler = six_of_one_prompt(num_blocks=40)
    assert scheduler.waiting_time.queue_delay == 0.0
    scheduler.submit(request("hopeless", [7] * 70, 8), 0.0)
    scheduler.waiting_time.estimate(PACE)
    assert scheduler.waiting_time.queue_delay > 0.0


def test_blocks_that_running_requests_share_are_held_by_no_one_of_them() -> None:
    """Eight are shared and three each one's own: 26 in all, and the next request waits for one of the six to end."""
    scheduler = six_of_one_prompt(num_blocks=26)
    assert scheduler.waiting_time.queue_delay > 0.0


def test_what_a_prompt_finds_is_learned_from_those_that_look_for_it() -> None:
    loop = make_loop(num_blocks=60, prefix_caching=True)
    prompts = loop.scheduler.waiting_time.prompts
    for name in ("first", "again"):
        loop.scheduler.submit(request(name, list(range(20)), 2), 0.0)
        run_to_end(loop)
    assert (prompts.observed, prompts.share) == (2, pytest.approx(19 / 40))
    loop.scheduler.submit(request("bypasses", list(range(20)), 2, cache_bypass=True), 0.0)
    run_to_end(loop)
    assert prompts.observed == 2


def test_one_that_had_to_yield_computes_all_of_its_tokens_again() -> None:
    """What prompts are found of the cache is learned from first turns."""
    loop = make_loop(num_blocks=60, prefix_caching=True, max_batched_tokens=64)
    for name in ("first", "again", "yields"):
        loop.scheduler.submit(request(name, list(range(20)), 6), 0.0)
        for _ in range(3 if name == "yields" else 10):
            loop.step()
    preempt(loop, "yields")
    [sequence] = loop.scheduler.sequences.waiting
    assert own_tokens(sequence, 4) == 4 * -(-sequence.num_tokens // 4)  # and shares no block
    loop.scheduler.waiting_time.estimate(Pace(prefill_rate=1.0))
    assert loop.scheduler.waiting_time.queue_delay == sequence.num_uncomputed == sequence.num_tokens


def test_outputs_that_end_by_a_stop_string_are_learned_from() -> None:
    """Their text met it outside of the scheduler."""
    loop = make_loop(num_blocks=40, max_num_seqs=1)
    scheduler = loop.scheduler
    scheduler.submit(request("first", [1] * 8, 100), 0.0)
    for _ in range(5):
        loop.step()
    scheduler.stop_candidate("first", 0, 0.0)
    for index in range(2):
        scheduler.submit(request(str(index), [index] * 8, 100), 0.0)
    loop.step()
    scheduler.waiting_time.estimate(Pace(step_seconds=1.0))
    assert 5.0 <= scheduler.waiting_time.queue_delay <= 12.0


def test_a_step_that_only_moves_blocks_says_nothing_of_the_pace() -> None:
    loop = make_loop(num_blocks=40)
    loop.scheduler.submit(request("a", [1] * 8, 10), 0.0)
    run_to_end(loop)
    rate = loop.stats().decode_tokens_per_second
    assert rate > 0.0
    loop._commit(StepPlan(99, [], []), FakePending(StepOutcome([])))
    assert loop.stats().decode_tokens_per_second == rate
