"""A full queue makes room for what is more important, by those who said that they may be shed."""

from __future__ import annotations

import pytest

from engine.loop import StepLoop
from engine.types import Admitted, Event, FailureKind, RequestFailed, SamplingParameters
from tests.schedule.fake_model import make_loop, request, run_to_end


def full_loop(*priorities: int) -> StepLoop:
    """One runs; those of `priorities` wait, named by their order, and no other may."""
    loop = make_loop(num_blocks=100, max_num_seqs=1, max_queued_requests=len(priorities))
    loop.scheduler.submit(request("runs", [1] * 4, 4), 0.0)
    loop.step()
    for index, priority in enumerate(priorities):
        loop.scheduler.submit(request(str(index), [1] * 4, 4, priority=priority), 0.0)
    loop.scheduler.take_events()
    return loop


def come(loop: StepLoop, priority: int, prompt: int = 4, name: str = "newcomer") -> list[Event]:
    loop.scheduler.submit(request(name, [2] * prompt, 4, priority=priority), 0.0)
    return loop.scheduler.take_events()


def shed_in(events: list[Event]) -> list[str]:
    assert isinstance(events[-1], Admitted), events
    failures = [event for event in events if isinstance(event, RequestFailed)]
    assert all(event.kind is FailureKind.SHED and float(event.details["retry_after"]) > 0 for event in failures)
    assert all(event.details["max_queued_requests"] for event in failures)
    return [event.request_id for event in failures]


@pytest.mark.parametrize(
    ("waiting", "newcomer", "shed"),
    [
        ((0, -1, 0), 0, ["1"]),
        ((-1, -3, -2), 5, ["1"]),  # the least important
        ((-1, -1, 1), 0, ["1"]),  # of those the newest
        ((-2, -1, -3), -2, ["2"]),
    ],
)
def test_the_least_important_gives_way(waiting: tuple[int, ...], newcomer: int, shed: list[str]) -> None:
    loop = full_loop(*waiting)
    assert loop.scheduler.sequences.waiting.least_priority == min(waiting)
    events = come(loop, newcomer)
    assert shed_in(events) == shed
    assert events[-1] == Admitted("newcomer", 4, len(waiting) - 1)
    run_to_end(loop)
    assert loop.scheduler.sequences.waiting.least_priority == 0
    assert loop.stats().integrity_errors == 0


@pytest.mark.parametrize(("waiting", "newcomer"), [((0, 0), 9), ((-1, 0), -1), ((-1, 0), -2)])
def test_nobody_gives_way_to_an_equal_or_without_having_said_so(waiting: tuple[int, ...], newcomer: int) -> None:
    events = come(full_loop(*waiting), newcomer)
    assert [(event.request_id, event.kind) for event in events if isinstance(event, RequestFailed)] == [
        ("newcomer", FailureKind.QUEUE_FULL)
    ]


def full_of_tokens() -> StepLoop:
    """One runs; three of a priority below 0 wait, with the 12 prompt tokens that may."""
    loop = make_loop(num_blocks=100, max_num_seqs=1, max_queued_tokens=12)
    loop.scheduler.submit(request("runs", [1] * 4, 4), 0.0)
    loop.step()
    for index in range(3):
        loop.scheduler.submit(request(str(index), [1] * 4, 4, priority=-1), 0.0)
    loop.scheduler.take_events()
    return loop


def test_as_many_give_way_as_prompt_tokens_need_and_none_in_vain() -> None:
    loop = full_of_tokens()
    assert shed_in(come(loop, 0, prompt=8)) == ["2", "1"]
    [refused] = come(loop, 1, prompt=13, name="another")  # for which all would have to go, and the first newcomer stays
    assert isinstance(refused, RequestFailed)
    assert refused.kind is FailureKind.QUEUE_FULL


def test_all_give_way_to_one_prompt_beyond_the_bound() -> None:
    """An empty queue takes it."""
    loop = full_of_tokens()
    assert shed_in(come(loop, 0, prompt=13)) == ["2", "1", "0"]


@pytest.mark.parametrize(("prompt", "shed"), [(8, ["1"]), (9, ["1", "0"])])
def test_who_gives_way_makes_room_for_its_prompt_once(prompt: int, shed: list[str]) -> None:
    loop = make_loop(num_blocks=100, max_num_seqs=3, max_queued_tokens=12)
    loop.scheduler.submit(request("runs", [1] * 4, 4, sampling=SamplingParameters(n=3)), 0.0)
    loop.step()
    loop.step()
    for index in range(2):
        sampling = SamplingParameters(n=3)
        loop.scheduler.submit(request(str(index), [1] * 4, 4, priority=-1, sampling=sampling), 0.0)
    loop.scheduler.take_events()
    assert shed_in(come(loop, 0, prompt=prompt)) == shed


def test_what_was_begun_stays() -> None:
    """Its tokens are with its client."""
    loop = make_loop(num_blocks=100, max_num_seqs=1, max_queued_requests=1)
    loop.scheduler.submit(request("begun", [1] * 4, 8, priority=-5), 0.0)
    loop.step()
    loop.scheduler._preempt(loop.scheduler.sequences.running[0])
    loop.scheduler.submit(request("takes its slot", [1] * 4, 4), 0.0)
    loop.scheduler.take_events()
    assert loop.scheduler.sequences.waiting.least_priority == 0
    [refused] = come(loop, 5)
    assert isinstance(refused, RequestFailed)
    assert refused.kind is FailureKind.QUEUE_FULL


def test_nobody_gives_way_to_what_is_refused_anyway() -> None:
    loop = full_loop(-1, -1)
    loop.scheduler.waiting_time.prefill.observe(16, 1.6, 0.0)
    loop.scheduler.submit(request("late", [2] * 40, 4, deadline=0.5), 0.0)
    assert [event.request_id for event in loop.scheduler.take_events()] == ["late"]
