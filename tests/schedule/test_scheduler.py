"""The scheduler and step loop against a model without weights: every request's tokens are known beforehand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import (
    Admitted,
    FailureKind,
    FinishReason,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParameters,
    Scheduled,
    StopCriteria,
    Timing,
    TokensGenerated,
)
from tests.schedule.fake_model import expected, finished, make_loop, request, run_to_end, tokens_of


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start * 131 + index * 7) % 1000 for index in range(length)]


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("beside", [0, 1, 3])
@pytest.mark.parametrize("budget", [*range(1, 41), 100])
def test_chunk_size_does_not_change_tokens(budget: int, beside: int, lookahead: bool) -> None:
    """Of a prompt that runs alone, or in steps with others' decodes."""
    loop = make_loop(num_blocks=80, max_batched_tokens=budget, lookahead=lookahead)
    outputs = {str(index): 40 for index in range(beside)} | {"a": 10}
    prompts = {str(index): prompt(2, index + 1) for index in range(beside)} | {"a": prompt(37)}
    events = []
    for name, count in outputs.items():
        loop.scheduler.submit(request(name, prompts[name], count), 0.0)
        events += loop.step().events
    events += run_to_end(loop)
    for name, count in outputs.items():
        assert tokens_of(events, name) == expected(prompts[name], count)
    loop.scheduler.check_idle()


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12),
    num_blocks=st.integers(13, 30),
    budget=st.integers(1, 40),
    seqs=st.integers(1, 8),
    lookahead=st.booleans(),
)
def test_company_does_not_matter(
    lengths: list[tuple[int, int]], num_blocks: int, budget: int, seqs: int, lookahead: bool
) -> None:
    """In any company, with any pool and any chunks, preempted or not, each request gives the tokens it gives alone."""
    loop = make_loop(num_blocks=num_blocks, max_batched_tokens=budget, max_num_seqs=seqs, lookahead=lookahead)
    for index, (length, count) in enumerate(lengths):
        loop.scheduler.submit(request(str(index), prompt(length, index), count), 0.0)
    events = run_to_end(loop)
    for index, (length, count) in enumerate(lengths):
        assert tokens_of(events, str(index)) == expected(prompt(length, index), count)
        assert len(finished(events, str(index))) == 1
    loop.scheduler.check_idle()


@pytest.mark.parametrize("lookahead", [False, True])
def test_preemption_happens_and_ends(lookahead: bool) -> None:
    """Requests that each fit alone, in a pool for one and a half: bounded steps, the oldest never yields."""
    loop = make_loop(num_blocks=12, max_batched_tokens=64, lookahead=lookahead)
    for index in range(4):
        loop.scheduler.submit(request(str(index), prompt(8, index), 24), 0.0)
    events = run_to_end(loop, max_steps=400)
    assert loop.scheduler.counters.preemptions > 0
    for index in range(4):
        assert tokens_of(events, str(index)) == expected(prompt(8, index), 24)
        assert finished(events, str(index))[0].timing.preemptions <= 8
    assert finished(events, "0")[0].timing.preemptions == 0
    loop.scheduler.check_idle()


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_preempted_at_a_block_boundary(blocks: int, extra: int) -> None:
    length = 4 * blocks + extra
    loop = make_loop(num_blocks=8, max_batched_tokens=64)
    loop.scheduler.submit(request("old", prompt(16), 15), 0.0)
    loop.scheduler.submit(request("young", prompt(length, 1), 12), 0.0)
    events = run_to_end(loop)
    assert tokens_of(events, "old") == expected(prompt(16), 15)
    assert tokens_of(events, "young") == expected(prompt(length, 1), 12)


def test_decodes_go_on_beside_a_long_prefill() -> None:
    loop = make_loop(num_blocks=60, max_batched_tokens=8)
    loop.scheduler.submit(request("a", prompt(4), 30), 0.0)
    loop.step()
    loop.scheduler.submit(request("b", prompt(100, 1), 2), 0.0)
    for _ in range(10):
        tokens = [event for event in loop.step().events if isinstance(event, TokensGenerated)]
        assert [event.request_id for event in tokens] == ["a"]


def test_context_limit_of_a_pool_smaller_than_the_request() -> None:
    """Asked for more than the pool holds, a request ends with the length reason and the queue behind it goes on."""
    loop = make_loop(num_blocks=4)
    loop.scheduler.submit(request("big", prompt(10), 1000), 0.0)
    loop.scheduler.submit(request("small", prompt(3, 1), 4), 0.0)
    events = run_to_end(loop)
    reasons = {e.request_id: e.finish.reason for e in events if isinstance(e, TokensGenerated) and e.finish}
    assert reasons == {"big": FinishReason.CONTEXT_LIMIT, "small": FinishReason.MAX_TOKENS}
    assert tokens_of(events, "big") == expected(prompt(10), 6)


@pytest.mark.parametrize(("length", "accepted"), [(14, True), (15, True), (16, False), (17, False)])
def test_prompt_that_can_never_fit_is_refused_with_the_numbers(length: int, accepted: bool) -> None:
    loop = make_loop(num_blocks=4)
    loop.scheduler.submit(request("a", prompt(length), 1), 0.0)
    loop.scheduler.submit(request("b", prompt(2), 1), 0.0)
    events = run_to_end(loop)
    assert tokens_of(events, "b") == expected(prompt(2), 1)
    refusals = [event for event in events if isinstance(event, RequestFailed)]
    assert len(refusals) == (not accepted)
    if not accepted:
        assert refusals[0].kind is FailureKind.PROMPT_TOO_LONG
        assert refusals[0].details == {
            "prompt_tokens": str(length),
            "max_prompt_tokens": "15",
            "max_context_tokens": "16",
        }


def test_refusals_name_the_field() -> None:
    loop = make_loop(num_blocks=8)
    loop.scheduler.submit(request("empty", [], 1), 0.0)
    loop.scheduler.submit(request("zero", [1], 0), 0.0)
    loop.scheduler.submit(request("none", [1], 1, sampling=SamplingParameters(n=0)), 0.0)
    loop.scheduler.submit(request("twice", [1], 1), 0.0)
    loop.scheduler.submit(request("twice", [1], 1), 0.0)
    failures = [(e.request_id, e.field) for e in run_to_end(loop) if isinstance(e, RequestFailed)]
    assert failures == [
        ("empty", "prompt"),
        ("zero", "stop.max_tokens"),
        ("none", "sampling.n"),
        ("twice", "request_id"),
    ]


def test_queue_bounds_in_requests_and_in_tokens() -> None:
    loop = make_loop(num_blocks=8, max_num_seqs=1, max_queued_requests=2, max_queued_tokens=100)
    for index in range(4):
        loop.scheduler.submit(request(str(index), [index], 1), 0.0)
    full = [event for event in loop.scheduler.take_events() if isinstance(event, RequestFailed)]
    assert [event.request_id for event in full] == ["3"]
    assert full[0].kind is FailureKind.QUEUE_FULL
    loop = make_loop(num_blocks=8, max_num_seqs=1, max_queued_tokens=5)
    for name in "abc":
        loop.scheduler.submit(request(name, prompt(3), 1), 0.0)
    kinds = [event.kind for event in loop.scheduler.take_events() if isinstance(event, RequestFailed)]
    assert kinds == [FailureKind.QUEUE_FULL]


@pytest.mark.parametrize(("separate", "queued"), [(False, 3), (True, 9)])
def test_a_prompt_that_candidates_share_is_queued_once(separate: bool, queued: int) -> None:
    loop = make_loop(num_blocks=20, max_num_seqs=1, max_queued_tokens=10, separate=separate)
    loop.scheduler.submit(request("runs", prompt(3), 4), 0.0)
    loop.step()
    loop.scheduler.submit(request("a", prompt(3), 4, sampling=SamplingParameters(n=3)), 0.0)
    assert loop.scheduler.sequences.waiting.prompt_tokens == queued
    loop.scheduler.submit(request("b", prompt(3, 1), 4), 0.0)
    full = [event.kind for event in loop.scheduler.take_events() if isinstance(event, RequestFailed)]
    assert full == ([FailureKind.QUEUE_FULL] if separate else [])
    run_to_end(loop)
    loop.scheduler.check_idle()


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("steps", range(6))
def test_cancel_at_every_point(steps: int, lookahead: bool) -> None:
    """Queued, prefilling, decoding: blocks are free at once, one terminal event, nothing after it, others unharmed."""
    loop = make_loop(num_blocks=20, max_batched_tokens=6, lookahead=lookahead)
    loop.scheduler.submit(request("a", prompt(14), 8), 0.0)
    loop.scheduler.submit(request("b", prompt(9, 1), 8), 0.0)
    events = []
    for _ in range(steps):
        events += loop.step().events
    live = loop.scheduler.tables.allocator.num_live
    assert loop.scheduler.cancel("a", 0.0)
    assert loop.scheduler.tables.allocator.num_live < live or live == 0
    assert not loop.scheduler.cancel("a", 0.0)
    assert not loop.scheduler.cancel("never", 0.0)
    events += run_to_end(loop)
    ends = finished(events, "a")
    assert [end.cancelled for end in ends] == [True]
    last = max(i for i, event in enumerate(events) if event.request_id == "a")
    assert events[last] is ends[0]
    assert ends[0].usage.completion_tokens == len(tokens_of(events, "a"))
    assert tokens_of(events, "b") == expected(prompt(9, 1), 8)
    loop.scheduler.check_idle()


@pytest.mark.parametrize("lookahead", [False, True])
def test_end_of_sequence_and_stop_ids(lookahead: bool) -> None:
    tokens = expected(prompt(5), 12)
    eos = frozenset({tokens[4]})
    loop = make_loop(num_blocks=20, eos=eos, lookahead=lookahead)
    loop.scheduler.submit(request("eos", prompt(5), 12), 0.0)
    ignoring = StopCriteria(max_tokens=12, ignore_eos=True, token_ids=[tokens[8]])
    loop.scheduler.submit(request("ignored", prompt(5)).__class__("ignored", prompt(5), stop=ignoring), 0.0)
    events = run_to_end(loop)
    assert tokens_of(events, "eos") == tokens[: tokens.index(tokens[4]) + 1]
    assert tokens_of(events, "ignored") == tokens[: tokens.index(tokens[8]) + 1]
    reasons = {e.request_id: e.finish for e in events if isinstance(e, TokensGenerated) and e.finish}
    assert reasons["eos"].reason is FinishReason.END_OF_SEQUENCE
    assert (reasons["ignored"].reason, reasons["ignored"].token_id) == (FinishReason.STOP, tokens[8])
    loop.scheduler.check_idle()


def test_no_end_counts_before_the_least_number_of_tokens() -> None:
    """Whatever is drawn: the ninth token is the first that may end an output of nine at least."""
    tokens = expected(prompt(5), 12)
    ends = [tokens[2], tokens[8]]
    assert tokens.index(tokens[8]) == 8
    loop = make_loop(num_blocks=20, eos=frozenset({tokens[5]}))
    item = GenerationRequest("a", prompt(5), stop=StopCriteria(max_tokens=12, min_tokens=9, token_ids=ends))
    loop.scheduler.submit(item, 0.0)
    assert tokens_of(run_to_end(loop), "a") == tokens[:9]


def test_stop_candidate_ends_one_of_several() -> None:
    loop = make_loop(num_blocks=20)
    loop.scheduler.submit(request("a", prompt(5), 10, sampling=SamplingParameters(n=2)), 0.0)
    events = loop.step().events + loop.step().events
    loop.scheduler.stop_candidate("a", 0, 0.0)
    loop.scheduler.stop_candidate("a", 0, 0.0)
    loop.scheduler.stop_candidate("a", 9, 0.0)
    loop.scheduler.stop_candidate("b", 0, 0.0)
    events += run_to_end(loop)
    assert tokens_of(events, "a", 0) == expected(prompt(5), 2)
    assert tokens_of(events, "a", 1) == expected(prompt(5), 10, candidate=1)
    assert len(finished(events, "a")) == 1
    loop.scheduler.check_idle()


def test_deadlines() -> None:
    """Passed in the queue: never prefilled. Passed while running: ended with its usage."""
    loop = make_loop(num_blocks=20, max_num_seqs=1)
    loop.scheduler.submit(request("running", prompt(4), 50, deadline=5.0), 0.0)
    loop.scheduler.submit(request("queued", prompt(4), 5, deadline=2.0), 0.0)
    loop.scheduler.submit(request("impatient", prompt(4), 5, queue_deadline=3.0), 0.0)
    loop.scheduler.plan(0.0)
    loop.scheduler.plan(6.0)
    failures = {e.request_id: e for e in loop.scheduler.take_events() if isinstance(e, RequestFailed)}
    assert {name: event.kind for name, event in failures.items()} == {
        "queued": FailureKind.EXPIRED_IN_QUEUE,
        "impatient": FailureKind.EXPIRED_IN_QUEUE,
        "running": FailureKind.DEADLINE_EXCEEDED,
    }
    loop.scheduler.check_idle()


def test_a_time_for_the_queue_is_over_once_a_request_runs() -> None:
    loop = make_loop(num_blocks=20)
    loop.scheduler.submit(request("a", prompt(4), 5, queue_deadline=3.0), 0.0)
    assert loop.scheduler.plan(0.0) is not None
    assert loop.scheduler.plan(4.0) is not None
    assert [type(event) for event in loop.scheduler.take_events()] == [Admitted, Scheduled]
    loop.scheduler.cancel("a", 4.0)


def test_a_deadline_is_not_that_of_a_later_request_of_the_same_name() -> None:
    loop = make_loop(num_blocks=20)
    loop.scheduler.submit(request("a", prompt(4), 2, deadline=5.0), 0.0)
    loop.scheduler.cancel("a", 1.0)
    loop.scheduler.take_events()
    loop.scheduler.submit(request("a", prompt(4), 2), 1.0)
    assert loop.scheduler.plan(6.0) is not None
    assert [type(event) for event in loop.scheduler.take_events()] == [Admitted]
    loop.scheduler.cancel("a", 6.0)


def test_events_of_a_request_are_in_order_and_complete() -> None:
    loop = make_loop(num_blocks=20)
    loop.scheduler.submit(request("a", prompt(6), 3), 0.0)
    events = run_to_end(loop)
    assert isinstance(events[0], Admitted)
    assert events[0].prompt_tokens == 6
    assert all(isinstance(event, TokensGenerated) for event in events[1:-1])
    assert isinstance(events[-1], RequestFinished)
    assert (events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens) == (6, 3)


def test_times_count_from_the_submission() -> None:
    loop = make_loop(num_blocks=20)
    scheduler = loop.scheduler
    scheduler.submit(request("a", prompt(6), 3), 1.0)
    for planned, committed in ((3.0, 4.0), (5.0, 6.0), (6.0, 7.5)):
        plan = scheduler.plan(planned)
        assert plan is not None
        scheduler.commit(plan, loop.runner.launch(plan).wait(), committed)
    [end] = finished(scheduler.take_events(), "a")
    assert end.timing == Timing(queued=2.0, time_to_first_token=3.0, total=6.5)


def test_one_failed_row_fails_its_request_alone() -> None:
    loop = make_loop(num_blocks=20)
    loop.scheduler.submit(request("good", prompt(6), 3), 0.0)
    loop.scheduler.submit(request("bad", prompt(6, 1), 3), 0.0)
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    outcome = loop.runner.launch(plan).wait()
    outcome.failures[1] = "non-finite logits"
    loop.scheduler.commit(plan, outcome, 0.0)
    events = loop.scheduler.take_events() + run_to_end(loop)
    failures = [event for event in events if isinstance(event, RequestFailed)]
    assert [(event.request_id, event.kind) for event in failures] == [("bad", FailureKind.ENGINE_ERROR)]
    assert tokens_of(events, "good") == expected(prompt(6), 3)
    loop.scheduler.check_idle()


@pytest.mark.parametrize(
    ("sampling", "awaits"),
    [
        (SamplingParameters(), False),
        (SamplingParameters(logit_bias={1: 2.0}), False),  # changes logits, whatever the tokens before
        (SamplingParameters(repetition_penalty=1.1), True),
        (SamplingParameters(presence_penalty=0.1), True),
        (SamplingParameters(frequency_penalty=0.1), True),
    ],
)
def test_steps_await_tokens_of_those_that_run_and_depend_on_them(sampling: SamplingParameters, awaits: bool) -> None:
    loop = make_loop(num_blocks=20)
    loop.scheduler.submit(request("a", prompt(6), 3, sampling=sampling), 0.0)
    assert not loop.scheduler.awaits_tokens
    loop.step()
    assert loop.scheduler.awaits_tokens is awaits
    run_to_end(loop)
    assert not loop.scheduler.awaits_tokens


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    loop = make_loop(num_blocks=20)
    biased = SamplingParameters(logit_bias={1: 2.0})
    for name in ("ends", "cancelled"):
        loop.scheduler.submit(request(name, prompt(6), 3, sampling=biased, prompt_top_logprobs=1), 0.0)
    loop.step()
    loop.scheduler.cancel("cancelled", 0.0)
    run_to_end(loop)
    assert not [kept for kept in vars(loop.scheduler.requests).values() if isinstance(kept, dict | set) and kept]


def test_abandon_fails_everything_and_leaves_nothing() -> None:
    loop = make_loop(num_blocks=20, max_num_seqs=1, lookahead=True)
    loop.scheduler.submit(request("a", prompt(6), 3), 0.0)
    loop.scheduler.submit(request("b", prompt(6), 3), 0.0)
    loop.step()
    events = loop.abandon(FailureKind.ENGINE_ERROR, "broken").events
    assert [event.request_id for event in events if isinstance(event, RequestFailed)] == ["a", "b"]
    loop.scheduler.check_idle()


@pytest.mark.parametrize("lost", ["block", "slot", "host block"])
def test_what_is_lost_shows_in_the_figures_once_work_has_drained(lost: str) -> None:
    loop = make_loop(num_blocks=20, swap_blocks=4)
    residency = loop.scheduler.residency
    for name, errors in (("good", 0), ("bad", 1), ("later", 2)):
        loop.scheduler.submit(request(name, prompt(6), 3), 0.0)
        if name == "bad" and lost == "block":
            residency.tables.allocator.allocate(1)
        elif name == "bad" and lost == "slot":
            residency.tables.acquire_slot()
        elif name == "bad" and residency.swap is not None:
            residency.swap.take(1)
        run_to_end(loop)
        loop.step()
        assert loop.stats().integrity_errors == errors


def test_a_cancelled_request_drains_too() -> None:
    loop = make_loop(num_blocks=20)
    loop.scheduler.submit(request("a", prompt(6), 30), 0.0)
    loop.step()
    loop.scheduler.tables.allocator.allocate(1)
    loop.scheduler.cancel("a", 0.0)
    loop.step()
    assert loop.stats().integrity_errors == 1
