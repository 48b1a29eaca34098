"""Deadlines that a request's own prompt, or those that run, make unattainable: said at once, and only if it is sure."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from engine.loop import StepLoop
from engine.schedule import queued_work
from engine.schedule.first_token import FADING_SECONDS, PrefillBound, common_tokens
from engine.schedule.queued_work import MOST_AHEAD, QueuedWork
from engine.schedule.sequence import Sequence
from engine.types import Admitted, Event, FailureKind, GenerationRequest, RequestFailed, SamplingParameters
from tests.schedule.fake_model import make_loop, preempt, request, run_to_end

LONG = list(range(40))
NUMBERS = itertools.count()


def loop_of_ten_tokens_a_second(**options: object) -> StepLoop:
    loop = make_loop(num_blocks=100, **options)  # type: ignore[arg-type]
    loop.scheduler.waiting_time.prefill.observe(16, 1.6, 0.0)
    return loop


def answer(loop: StepLoop, name: str, prompt: list[int], max_tokens: int = 8, **fields: object) -> Event:
    loop.scheduler.submit(request(name, prompt, max_tokens, **fields), 0.0)
    return loop.scheduler.take_events()[-1]


def estimate(event: Event) -> int:
    """Milliseconds."""
    assert isinstance(event, RequestFailed), event
    assert event.kind is FailureKind.DEADLINE_UNATTAINABLE
    return int(event.details["estimated_ms"])


def test_its_own_prompt_counts_while_nothing_queues() -> None:
    loop = loop_of_ten_tokens_a_second()
    assert estimate(answer(loop, "late", LONG, deadline=3.9)) == 4000
    assert isinstance(answer(loop, "in time", LONG, deadline=4.1), Admitted)
    assert isinstance(answer(loop, "without", LONG), Admitted)


def test_so_do_prompts_that_run() -> None:
    loop = loop_of_ten_tokens_a_second(max_batched_tokens=16)
    answer(loop, "runs", LONG)
    assert loop.scheduler.plan(0.0) is not None
    left = sum(sequence.num_uncomputed for sequence in loop.scheduler.sequences.running)
    assert left > 1
    assert estimate(answer(loop, "late", [99] * 10, deadline=0.9)) == 100 * left + 1000


def test_a_short_one_waits_for_no_long_one_to_end() -> None:
    loop = loop_of_ten_tokens_a_second(max_batched_tokens=16)
    answer(loop, "runs", LONG)
    assert loop.scheduler.plan(0.0) is not None
    assert estimate(answer(loop, "late", [99] * 6, deadline=1.5)) == 1600
    assert isinstance(answer(loop, "in time", [99] * 6, deadline=1.7), Admitted)


def test_of_separate_steps_what_is_fed_in_again_delays_no_prompt() -> None:
    """Of a sequence that is computed again only its prompt comes before others."""
    loop = loop_of_ten_tokens_a_second(max_batched_tokens=16, separate=True)
    loop.scheduler.submit(request("again", [7] * 20, 40), 0.0)
    for _ in range(30):
        loop.step()
    loop.scheduler.take_events()
    loop.scheduler.waiting_time.prefill = PrefillBound(16)
    loop.scheduler.waiting_time.prefill.observe(16, 1.6, 0.0)
    preempt(loop, "again")
    assert loop.scheduler.plan(0.0) is not None  # the first chunk of two
    [again] = loop.scheduler.sequences.running
    assert again.num_uncomputed > 20
    assert estimate(answer(loop, "late", [99] * 10, deadline=1.3)) == 1400
    assert isinstance(answer(loop, "in time", [99] * 10, deadline=1.5), Admitted)


def test_and_its_turn() -> None:
    loop = loop_of_ten_tokens_a_second()
    loop.scheduler.waiting_time.least_delay = 7.0
    assert estimate(answer(loop, "late", LONG, deadline=10.9)) == 11_000
    assert isinstance(answer(loop, "in time", LONG, deadline=11.1), Admitted)


def test_a_deadline_that_has_passed_on_the_way_has_expired() -> None:
    loop = loop_of_ten_tokens_a_second()
    loop.scheduler.submit(request("late", LONG, deadline=1.0), 2.0)
    assert loop.scheduler.plan(2.0) is None
    kinds = [event.kind for event in loop.scheduler.take_events() if isinstance(event, RequestFailed)]
    assert kinds == [FailureKind.EXPIRED_IN_QUEUE]


def test_nobody_is_refused_by_guesses() -> None:
    loop = make_loop(num_blocks=100)
    assert isinstance(answer(loop, "unknown rate", LONG, deadline=0.001), Admitted)
    loop.scheduler.waiting_time.prefill.observe(3, 10.0, 0.0)  # a short prompt tells nothing of a long one
    assert isinstance(answer(loop, "still unknown", LONG, deadline=0.001), Admitted)


def test_a_time_in_the_queue_is_not_for_the_prompt() -> None:
    assert isinstance(answer(loop_of_ten_tokens_a_second(), "a", LONG, queue_deadline=0.1), Admitted)


@pytest.mark.parametrize("caching", [True, False])
def test_what_is_cached_takes_no_time(caching: bool) -> None:
    loop = loop_of_ten_tokens_a_second(prefix_caching=caching)
    loop.scheduler.submit(request("before", LONG, 4), 0.0)
    run_to_end(loop)
    loop.scheduler.waiting_time.prefill = PrefillBound(1)
    loop.scheduler.waiting_time.prefill.observe(10, 1.0, 0.0)
    assert estimate(answer(loop, "hasty", LONG, deadline=0.05)) == (100 if caching else 4000)  # its last token at least
    event = answer(loop, "again", LONG, deadline=1.0)
    assert isinstance(event, Admitted) if caching else estimate(event) == 4000


def test_what_another_computes_already_takes_no_time_of_its_own() -> None:
    loop = loop_of_ten_tokens_a_second(prefix_caching=True, max_batched_tokens=16)
    answer(loop, "first", LONG)
    assert isinstance(answer(loop, "same", LONG, deadline=1.0), Admitted)
    assert estimate(answer(loop, "salted", LONG, deadline=1.0, cache_salt="x")) == 8000  # behind the first


def burst(loop: StepLoop, prompts: list[list[int]], **fields: object) -> list[int]:
    """They come at once; places of those that are told that their deadline cannot be met."""
    events = [answer(loop, str(next(NUMBERS)), prompt, 4, **fields) for prompt in prompts]
    late = [event for event in events if isinstance(event, RequestFailed)]
    assert {event.kind for event in late} <= {FailureKind.DEADLINE_UNATTAINABLE}
    return [events.index(event) for event in late]


@pytest.mark.parametrize(("caching", "separate"), [(True, False), (False, False), (False, True)])
def test_a_burst_is_told_at_once(caching: bool, separate: bool) -> None:
    """Of thirty prompts of twenty tokens, at ten a second, four have a token within nine seconds."""
    loop = loop_of_ten_tokens_a_second(prefix_caching=caching, separate=separate)
    assert burst(loop, [[place] * 20 for place in range(30)], deadline=9.0) == list(range(4, 30))
    assert burst(loop, [[31] * 20], deadline=9.0, priority=1) == []  # goes before them


def test_of_a_burst_what_several_begin_with_counts_once() -> None:
    """Twenty tokens of which sixteen are the same: each but the first takes four tenths of a second, and may run beside
    that."""
    loop = loop_of_ten_tokens_a_second(prefix_caching=True)
    prompts = [[1] * 16 + [place] * 4 for place in range(30)]
    assert len(burst(loop, prompts, deadline=9.0)) == 30 - 23
    assert burst(loop_of_ten_tokens_a_second(prefix_caching=True), [[1] * 20] * 30, deadline=9.0) == []


def test_of_a_request_that_waits_with_candidates_the_prompt_counts_once() -> None:
    loop = loop_of_ten_tokens_a_second(prefix_caching=True)
    answer(loop, "first", [1] * 21, sampling=SamplingParameters(n=3))
    assert estimate(answer(loop, "late", [99] * 10, deadline=0.5)) == 3100


def test_who_has_left_has_computed_nothing_for_who_comes_after() -> None:
    loop = loop_of_ten_tokens_a_second(prefix_caching=True)
    for name in ("goes", "comes after"):
        answer(loop, name, LONG)
        assert estimate(answer(loop, f"behind {name}", [99] * 10, deadline=0.5)) == 5000
        loop.scheduler.cancel(name, 0.0)
        assert estimate(answer(loop, f"alone, {name} gone", [99] * 10, deadline=0.5)) == 1000


def test_of_prompts_that_wait_what_is_cached_takes_no_time() -> None:
    loop = loop_of_ten_tokens_a_second(prefix_caching=True)
    loop.scheduler.submit(request("before", LONG, 1), 0.0)
    run_to_end(loop)
    loop.scheduler.waiting_time.prefill = PrefillBound(1)
    loop.scheduler.waiting_time.prefill.observe(10, 1.0, 0.0)
    answer(loop, "waits", [*LONG, *[7] * 8])
    assert estimate(answer(loop, "late", [99] * 10, deadline=0.5)) == 1800


def test_what_is_kept_of_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twenty that come and go behind one that stays. What waits is then looked at anew, and counts as before."""
    monkeypatch.setattr(queued_work, "_MOST_BEGINNINGS", 12)
    loop = loop_of_ten_tokens_a_second(prefix_caching=True)
    answer(loop, "stays", [50] * 20)
    for place in range(20):
        answer(loop, str(place), [50] * 16 + [place] * 4)
        assert estimate(answer(loop, f"late {place}", [99] * 20, deadline=1.0)) == 4400
        loop.scheduler.cancel(str(place), 0.0)
        assert len(loop.scheduler.waiting_time._work._seen) <= 13


def test_a_short_one_of_a_burst_goes_beside_the_long_ones() -> None:
    loop = loop_of_ten_tokens_a_second()
    assert burst(loop, [[place] * 20 for place in range(4)]) == []
    assert burst(loop, [[99] * 6], deadline=1.5) == []


def test_what_a_deadline_costs_is_bounded_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """By counts: how many of those that wait are asked, and how many tokens of theirs are read for the first time."""
    loop = loop_of_ten_tokens_a_second(prefix_caching=True)
    assert burst(loop, [[place] * 20 for place in range(900)]) == []
    read: list[int] = []
    look_at = QueuedWork._look_at

    def noted(work: QueuedWork, sequence: Sequence) -> int:
        read.append(sequence.num_prompt)
        return look_at(work, sequence)

    monkeypatch.setattr(QueuedWork, "_look_at", noted)
    monkeypatch.setattr("engine.schedule.queued_work._MOST_NEW_TOKENS", 200)
    assert burst(loop, [[999] * 20], deadline=1e6) == []
    assert read == [20] * 11  # the first that is more than enough is the last
    for _ in range(100):
        assert burst(loop, [[999] * 20], deadline=1e6) == []
    assert len(read) == MOST_AHEAD
    assert burst(loop, [[998] * 20], deadline=20 * MOST_AHEAD / 10) == [0]  # behind so many it is surely late


def test_common_beginnings_are_those_of_the_best_of_all() -> None:
    """Against one by one, also where those that share more come first, last, or under another salt."""
    draw = random.Random(1)

    def one_by_one(mine: GenerationRequest, other: Sequence) -> int:
        theirs = other.group.request
        if theirs.cache_salt != mine.cache_salt or theirs.cache_bypass:
            return 0
        same = [a == b for a, b in zip(mine.prompt_token_ids, other.token_ids, strict=False)]
        return (same.index(False) if False in same else len(same)) // 4 * 4

    for _ in range(300):
        loop = make_loop(num_blocks=100)
        for name in range(6):
            prompt = [draw.randrange(4) == 0 for _ in range(draw.randrange(1, 20))]
            salt = draw.choice(["", "", "x"])
            answer(loop, str(name), [int(token) for token in prompt], cache_salt=salt, cache_bypass=draw.random() < 0.1)
        mine = request("mine", [int(draw.randrange(4) == 0) for _ in range(draw.randrange(1, 20))], 4)
        others = list(loop.scheduler.sequences.waiting)
        assert common_tokens(mine, others, 4) == max(one_by_one(mine, other) for other in others)


def test_bound_is_the_fastest_of_late_and_fades() -> None:
    bound = PrefillBound(16)
    assert bound.seconds(100, 0.0) == 0.0
    bound.observe(16, 1.6, 5.0)
    bound.observe(16, 16.0, 5.0)  # slower: a lower bound of time believes it reluctantly
    assert bound.seconds(90, 5.0) == pytest.approx(10.0)
    assert bound.seconds(90, 5.0 + FADING_SECONDS) == pytest.approx(5.0)
    bound.observe(16, 0.16, 6.0)
    assert bound.seconds(100, 6.0) == pytest.approx(1.0)


def test_steps_with_many_prompt_tokens_are_measured() -> None:
    loop = make_loop(num_blocks=100, max_batched_tokens=16)
    for prompt, known in (([1] * 7, False), ([2] * 8, True)):
        loop.scheduler.submit(request(str(prompt), prompt, 2), 0.0)
        run_to_end(loop)
        assert (loop.scheduler.waiting_time.prefill.seconds(1000, time.monotonic()) > 0.0) is known
