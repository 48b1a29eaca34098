"""The queue's bounds are for those that wait for others: not for what the next step can take."""

from __future__ import annotations

import itertools

import pytest

from engine.loop import StepLoop
from engine.schedule.forecast import OutputForecast
from engine.types import FailureKind, RequestFailed, SamplingParameters, Scheduled
from tests.schedule.fake_model import make_loop, request, run_to_end

NUMBERS = itertools.count()


def refused_of(loop: StepLoop, lengths: list[int], max_tokens: int = 1, **fields: object) -> list[int]:
    """Prompts of so many tokens come at once; places of those that the queue has no room for."""
    names = [f"{next(NUMBERS)}" for _ in lengths]
    for name, length in zip(names, lengths, strict=True):
        loop.scheduler.submit(request(name, [1] * length, max_tokens, **fields), 0.0)
    failures = [event for event in loop.scheduler.take_events() if isinstance(event, RequestFailed)]
    assert {event.kind for event in failures} <= {FailureKind.QUEUE_FULL}
    return [names.index(event.request_id) for event in failures]


@pytest.mark.parametrize(("seqs", "bound", "taken"), [(16, 1, 17), (2, 2, 4), (1, 3, 4)])
def test_a_burst_takes_free_slots_and_then_the_queue(seqs: int, bound: int, taken: int) -> None:
    loop = make_loop(num_blocks=100, max_num_seqs=seqs, max_queued_requests=bound, max_batched_tokens=64)
    burst = taken + 3
    assert refused_of(loop, [1] * burst, max_tokens=3) == list(range(taken, burst))
    loop.step()
    stats = loop.stats()
    assert (stats.running_requests, stats.queued_requests, stats.starting_requests) == (seqs, bound, 0)
    assert refused_of(loop, [1]) == [0]
    run_to_end(loop)
    loop.scheduler.check_idle()


def test_what_a_steps_budget_leaves_behind_is_not_what_waits() -> None:
    loop = make_loop(num_blocks=100, max_num_seqs=8, max_queued_requests=1, max_batched_tokens=16)
    assert refused_of(loop, [10] * 4, max_tokens=3) == []
    loop.step()
    stats = loop.stats()
    assert stats.queued_requests == stats.starting_requests > 0
    assert stats.starting_prompt_tokens == stats.queued_prompt_tokens == 10 * stats.queued_requests
    assert refused_of(loop, [10] * 6) == [5]


def test_a_steps_budget_bounds_a_burst_as_slots_do() -> None:
    """No more sequences run than a step has tokens: two start, one waits."""
    loop = make_loop(num_blocks=100, max_num_seqs=8, max_queued_requests=1, max_batched_tokens=2)
    assert refused_of(loop, [1] * 5) == [3, 4]


def test_blocks_bound_a_burst_as_slots_do() -> None:
    """Ten blocks of four tokens: three prompts of ten tokens, each with room for the next one."""
    loop = make_loop(num_blocks=10, max_num_seqs=8, max_queued_requests=2, max_batched_tokens=64)
    assert refused_of(loop, [10] * 8) == [5, 6, 7]


def test_blocks_that_are_kept_free_are_nobodys_opening() -> None:
    """Three of ten blocks, but for who runs alone: the first takes three; the next, of five, waits."""
    loop = make_loop(num_blocks=10, max_num_seqs=8, max_queued_requests=1, max_batched_tokens=64, watermark_blocks=3)
    assert refused_of(loop, [12, 16, 16]) == [2]
    alone = make_loop(num_blocks=10, max_num_seqs=8, max_queued_requests=1, max_batched_tokens=64, watermark_blocks=3)
    assert refused_of(alone, [38, 1, 1]) == [2]


def test_candidates_behind_one_that_runs_are_no_requests_of_their_own() -> None:
    loop = make_loop(num_blocks=100, max_num_seqs=8, max_queued_requests=1, max_batched_tokens=8)
    loop.scheduler.submit(request("a", [1] * 20, 3, sampling=SamplingParameters(n=3)), 0.0)
    loop.step()
    assert len(loop.scheduler.sequences.waiting) == 2
    assert loop.scheduler.queue.starting == (0, 0)
    assert (loop.stats().running_requests, loop.stats().queued_requests) == (1, 0)


def test_whoever_is_alone_starts_whatever_is_expected_of_its_output() -> None:
    """In blocks it may come to need more than the pool has."""
    loop = make_loop(num_blocks=10, max_num_seqs=8, max_queued_requests=1, max_context=40, forecast=OutputForecast())
    assert refused_of(loop, [5] * 3, max_tokens=35) == [2]
    run_to_end(loop)
    loop.scheduler.check_idle()


def test_nobody_is_taken_for_one_that_starts_whom_the_forecast_holds_back() -> None:
    """One sequence may fill the pool: the second is not expected to fit beside it."""
    loop = make_loop(num_blocks=10, max_num_seqs=8, max_queued_requests=2, max_context=40, forecast=OutputForecast())
    assert refused_of(loop, [4] * 5, max_tokens=36) == [3, 4]
    loop.step()
    assert refused_of(loop, [4], max_tokens=36) == [0]


def test_a_place_that_is_given_back_is_free_at_once() -> None:
    loop = make_loop(num_blocks=100, max_num_seqs=2, max_queued_requests=1)
    loop.scheduler.submit(request("goes", [1], 1), 0.0)
    assert refused_of(loop, [1] * 3) == [2]
    loop.scheduler.cancel("goes", 0.0)
    assert refused_of(loop, [1] * 2) == [1]


def test_a_slot_that_a_running_one_gives_back_is_free_at_once() -> None:
    loop = make_loop(num_blocks=100, max_num_seqs=1, max_queued_requests=1)
    loop.scheduler.submit(request("runs", [1], 9), 0.0)
    loop.step()
    assert refused_of(loop, [1] * 2) == [1]
    loop.scheduler.cancel("runs", 0.0)
    assert refused_of(loop, [1] * 2) == [1]


def test_an_empty_queue_takes_one_prompt_of_any_length() -> None:
    loop = make_loop(num_blocks=200, max_num_seqs=1, max_queued_tokens=100)
    assert refused_of(loop, [250]) == []  # starts at once
    loop.step()
    assert refused_of(loop, [250, 250, 1]) == [1, 2]
    assert loop.stats().queued_prompt_tokens == 250
    run_to_end(loop)
    loop.scheduler.check_idle()


def test_a_refusal_names_what_waits_and_what_may() -> None:
    loop = make_loop(num_blocks=100, max_num_seqs=1, max_queued_requests=1, max_queued_tokens=50)
    for name in ("runs", "waits", "refused"):
        loop.scheduler.submit(request(name, [1] * 20, 1), 0.0)
    [failure] = [event for event in loop.scheduler.take_events() if isinstance(event, RequestFailed)]
    assert {name: value for name, value in failure.details.items() if name != "retry_after"} == {
        "waiting_requests": "1",
        "max_queued_requests": "1",
        "waiting_prompt_tokens": "20",
        "max_queued_tokens": "50",
    }
    assert "1 of at most 1 requests wait" in failure.message


@pytest.mark.parametrize("deadline", [None, 1e12])
def test_first_turn_is_told_to_who_waits_for_it(deadline: float | None) -> None:
    """Once, and of requests with a time in the queue alone."""
    loop = make_loop(num_blocks=100)
    loop.scheduler.submit(request("a", [1, 2, 3], 4, queue_deadline=deadline), 0.0)
    assert not [event for event in loop.scheduler.take_events() if isinstance(event, Scheduled)]
    told = [event for event in run_to_end(loop) if isinstance(event, Scheduled)]
    assert told == ([] if deadline is None else [Scheduled("a")])
