"""Prefix cache, copy-on-write, swap, priorities: whatever is shared or moved, the tokens are those of a run alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import AllocatorKind, PreemptionMode
from engine.kv.allocator import make_allocator
from engine.kv.prefix_index import PrefixIndex
from engine.loop import StepLoop
from engine.schedule.counters import Counters
from engine.schedule.forecast import OutputForecast, peak_tokens
from engine.schedule.policy import PriorityWithAgeing
from engine.types import Event, FailureKind, GenerationRequest, SamplingParameters, StopCriteria, TokensGenerated
from tests.schedule.fake_model import expected, finished, make_loop, preempt, request, run_to_end, tokens_of


@pytest.fixture(params=itertools.product([PreemptionMode.SWAP, PreemptionMode.RECOMPUTE], [False, True], [False, True]))
def make_preempting_loop(request: pytest.FixtureRequest) -> Callable[..., StepLoop]:
    """In each mode, with and without a prefix cache, with and without lookahead."""
    mode, caching, lookahead = request.param
    return functools.partial(
        make_loop, swap_blocks=40, mode=mode, prefix_caching=caching, lookahead=lookahead, kind=AllocatorKind.CHECKED
    )


def run(loop: StepLoop, *requests: GenerationRequest) -> list[Event]:
    for item in requests:
        loop.scheduler.submit(item, 0.0)
    events = run_to_end(loop)
    loop.scheduler.check_idle()
    return events


def cached(events: list[Event], name: str) -> int:
    return finished(events, name)[0].usage.cached_prompt_tokens


@pytest.mark.parametrize("length", [4, 5, 7, 8, 9, 12])
def test_a_repeated_prompt_computes_at_least_its_last_token(length: int) -> None:
    loop = make_loop(num_blocks=20, prefix_caching=True)
    prompt = list(range(100, 100 + length))
    for round_, hit in enumerate((0, length - length % 4, length - length % 4)):
        events = run(loop, request(str(round_), prompt, 6))
        assert tokens_of(events, str(round_)) == expected(prompt, 6)
        assert cached(events, str(round_)) == min(hit, length - 1)


def test_a_conversation_finds_its_own_answers() -> None:
    """Blocks filled by output tokens are shared too."""
    loop = make_loop(num_blocks=30, prefix_caching=True)
    prompt = list(range(10))
    answer = tokens_of(run(loop, request("1", prompt, 9)), "1")
    longer = [*prompt, *answer, 7, 8]
    events = run(loop, request("2", longer, 4))
    assert tokens_of(events, "2") == expected(longer, 4)
    assert cached(events, "2") == 16  # 18 of the 19 earlier tokens have K and V: four whole blocks


def test_where_a_block_lacks_for_a_copy_the_last_shared_one_is_computed_again() -> None:
    """Of eight blocks another has four. The prompt's three are cached: all of them, one to copy the last into and one
    for the next token would be five."""
    loop = make_loop(num_blocks=8, prefix_caching=True, max_batched_tokens=64)
    prompt = list(range(12))
    run(loop, request("first", prompt, 1))
    loop.scheduler.submit(request("other", [500 + index for index in range(13)], 3), 0.0)
    loop.step()
    loop.scheduler.submit(request("again", prompt, 1), 0.0)
    loop.step()
    events = run_to_end(loop)
    assert tokens_of(events, "other")[-1:] == expected([500 + index for index in range(13)], 3)[-1:]
    assert loop.scheduler.counters.preemptions == 0
    assert loop.scheduler.counters.cached_prompt_tokens == 8


def test_salts_never_share_and_bypass_neither_reads_nor_writes() -> None:
    loop = make_loop(num_blocks=30, prefix_caching=True)
    prompt = list(range(12))
    run(loop, request("a", prompt, 1, cache_salt="tenant"))
    assert cached(run(loop, request("b", prompt, 1)), "b") == 0
    assert cached(run(loop, request("c", prompt, 1, cache_salt="tenants")), "c") == 0
    assert cached(run(loop, request("d", prompt, 1, cache_salt="tenant")), "d") == 11
    assert cached(run(loop, request("e", prompt, 1, cache_salt="tenant", cache_bypass=True)), "e") == 0
    loop = make_loop(num_blocks=30, prefix_caching=True)
    run(loop, request("a", prompt, 1, cache_bypass=True))
    assert cached(run(loop, request("b", prompt, 1)), "b") == 0


@pytest.mark.parametrize("bits", [0, 1, 2])
def test_colliding_hashes_never_give_wrong_tokens(bits: int) -> None:
    """With a hash of so few bits nearly everything collides; the tokens are compared, so the answers stay right."""
    loop = make_loop(
        num_blocks=30, prefix_caching=True, hash_function=lambda data: sum(data) % (1 << bits), max_num_seqs=3
    )
    prompts = [[index % 3, *range(index, index + 11)] for index in range(8)]
    for round_ in range(3):
        names = [f"{round_}.{index}" for index in range(8)]
        events = run(loop, *(request(name, prompt, 5) for name, prompt in zip(names, prompts, strict=True)))
        for name, prompt in zip(names, prompts, strict=True):
            assert tokens_of(events, name) == expected(prompt, 5)


def test_colliding_hashes_never_share_between_salts_or_behind_other_prefixes() -> None:
    """One hash for everything: only what equals in salt, tokens and all that precedes them is found."""
    loop = make_loop(num_blocks=30, prefix_caching=True, hash_function=lambda data: 5)
    run(loop, request("a", [1, 2, 3, 4, 9], 1, cache_salt="tenant"))
    assert cached(run(loop, request("b", [1, 2, 3, 4, 9], 1, cache_salt="other")), "b") == 0
    assert cached(run(loop, request("c", [1, 2, 3, 5, 9], 1, cache_salt="tenant")), "c") == 0
    assert cached(run(loop, request("d", [1, 2, 3, 4, 8], 1, cache_salt="tenant")), "d") == 4
    # The block of [1, 2, 3, 4] has the one key, also as a second block behind itself.
    assert cached(run(loop, request("e", [1, 2, 3, 4, 1, 2, 3, 4, 9], 1, cache_salt="tenant")), "e") == 4


def test_salt_and_tokens_are_hashed_apart() -> None:
    """No salt spells another's beginning of tokens: the hash is told where the salt ends."""
    hashed: list[bytes] = []
    index = PrefixIndex(make_allocator(AllocatorKind.NATIVE, 4), 4, lambda data: hashed.append(data) or 0)
    for salt in ("a", "ab", "", "\0"):
        index.start(salt)
    assert len(set(hashed)) == 4
    assert not any(a != b and b.startswith(a) for a in hashed for b in hashed)


def test_full_churn_leaves_no_phantom_hits() -> None:
    loop = make_loop(num_blocks=10, prefix_caching=True)
    first = list(range(16))
    run(loop, request("a", first, 2))
    for index in range(6):
        run(loop, request(f"x{index}", [500 + index] * 20, 2))
    index, allocator = loop.scheduler.residency.prefix_index, loop.scheduler.tables.allocator
    assert index is not None
    assert len(index.read(0, 100).blocks) == allocator.num_cached
    events = run(loop, request("b", first, 2))
    assert cached(events, "b") == 0
    assert tokens_of(events, "b") == expected(first, 2)


def test_two_that_compute_the_same_prefix_at_once_keep_their_own_blocks() -> None:
    loop = make_loop(num_blocks=30, prefix_caching=True, kind=AllocatorKind.CHECKED)
    prompt = list(range(13))
    events = run(loop, request("a", prompt, 8), request("b", prompt, 8))
    assert tokens_of(events, "a") == tokens_of(events, "b") == expected(prompt, 8)
    assert cached(run(loop, request("c", prompt, 8)), "c") == 12


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_candidates_share_the_prompts_blocks(length: int, caching: bool, lookahead: bool) -> None:
    loop = make_loop(num_blocks=40, prefix_caching=caching, lookahead=lookahead, kind=AllocatorKind.CHECKED)
    prompt = list(range(40, 40 + length))
    item = request("a", prompt, 9, sampling=SamplingParameters(n=4))
    events = run(loop, item)
    for candidate in range(4):
        assert tokens_of(events, "a", candidate) == expected(prompt, 9, candidate=candidate)
    computed = loop.scheduler.counters.computed_tokens
    # The prompt once, its last token once more for each other candidate, then the outputs.
    assert computed <= length + 3 + 4 * 8 + (4 if lookahead else 0)


@settings(max_examples=200, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 25), st.integers(1, 15), st.integers(1, 3)), min_size=1, max_size=10
    ),
    num_blocks=st.integers(12, 26),
    swap_blocks=st.sampled_from([0, 1, 7, 40]),
    mode=st.sampled_from(list(PreemptionMode)),
    budget=st.integers(1, 40),
    seqs=st.integers(1, 6),
    caching=st.booleans(),
    lookahead=st.booleans(),
    forecast=st.booleans(),
    bits=st.sampled_from([2, 64]),
)
def test_company_sharing_and_moves_do_not_matter(
    groups: list[tuple[int, int, int, int]],
    num_blocks: int,
    swap_blocks: int,
    mode: PreemptionMode,
    budget: int,
    seqs: int,
    caching: bool,
    lookahead: bool,
    forecast: bool,
    bits: int,
) -> None:
    loop = make_loop(
        num_blocks=num_blocks,
        swap_blocks=swap_blocks,
        mode=mode,
        max_batched_tokens=budget,
        max_num_seqs=seqs,
        prefix_caching=caching,
        lookahead=lookahead,
        kind=AllocatorKind.CHECKED,
        hash_function=lambda data: hash(data) % (1 << bits),
        forecast=OutputForecast() if forecast else None,
    )
    requests = [
        (str(index), [family * 7 + position for position in range(length)], count, candidates)
        for index, (family, length, count, candidates) in enumerate(groups)
    ]
    events = run(
        loop,
        *(request(name, prompt, count, sampling=SamplingParameters(n=n)) for name, prompt, count, n in requests),
    )
    for name, prompt, count, candidates in requests:
        for candidate in range(candidates):
            assert tokens_of(events, name, candidate) == expected(prompt, count, candidate=candidate)


def run_in_a_tight_pool(swap_blocks: int, lookahead: bool) -> tuple[Counters, int]:
    """Four requests in a pool for one and a half: what the scheduler did, and the most blocks that were swapped."""
    loop = make_loop(
        num_blocks=12, swap_blocks=swap_blocks, mode=PreemptionMode.SWAP, max_batched_tokens=64, lookahead=lookahead
    )
    prompts = [[index * 50 + position for position in range(8)] for index in range(4)]
    for index, prompt in enumerate(prompts):
        loop.scheduler.submit(request(str(index), prompt, 24), 0.0)
    swap, events, most = loop.scheduler.residency.swap, [], 0
    while loop.has_work:
        events += loop.step().events
        most = max(most, swap.num_used if swap is not None else 0)
    for index, prompt in enumerate(prompts):
        assert tokens_of(events, str(index)) == expected(prompt, 24)
    loop.scheduler.check_idle()
    assert loop.scheduler.counters.preemptions > 0
    return loop.scheduler.counters, most


@pytest.mark.parametrize("lookahead", [False, True])
def test_swap_falls_back_to_recompute_and_ends_empty(lookahead: bool) -> None:
    """No space, one block, too few by one, exactly enough, plenty: every request gets its tokens, the host pool is
    empty after."""
    plenty, enough = run_in_a_tight_pool(100, lookahead)
    assert plenty.swaps == plenty.preemptions
    assert plenty.computed_tokens <= 4 * 31 + plenty.preemptions + 4  # nothing is computed twice
    assert run_in_a_tight_pool(enough, lookahead) == (plenty, enough)
    one_less, most = run_in_a_tight_pool(enough - 1, lookahead)
    assert 0 < one_less.swaps < one_less.preemptions
    assert most < enough
    for too_few in (0, 1):
        assert run_in_a_tight_pool(too_few, lookahead)[0].swaps == 0


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_candidates_share_a_prompt_whose_computation_was_interrupted(
    steps: int, make_preempting_loop: Callable[..., StepLoop]
) -> None:
    """Preempted with a part of the prompt computed: what of it is lost is computed again, once."""
    loop = make_preempting_loop(num_blocks=40, max_batched_tokens=8)
    prompt = list(range(30))
    loop.scheduler.submit(request("a", prompt, 4, sampling=SamplingParameters(n=3)), 0.0)
    for _ in range(steps):
        loop.step()
    preempt(loop, "a")
    events = run_to_end(loop)
    for candidate in range(3):
        assert tokens_of(events, "a", candidate) == expected(prompt, 4, candidate=candidate)
    counters = loop.scheduler.counters
    assert counters.preemptions == 1
    assert counters.computed_tokens <= 8 * steps + 30 + 2 + 3 * 3  # two share all of the prompt but its last token
    loop.scheduler.check_idle()


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 11, 12, 13])
def test_preempted_at_every_length_around_a_block_boundary(
    length: int, make_preempting_loop: Callable[..., StepLoop]
) -> None:
    """One short of a full block, full, one more; twice in a row, beside another that goes on."""
    loop = make_preempting_loop(num_blocks=20, max_batched_tokens=64)
    loop.scheduler.submit(request("other", [500, 501], 20), 0.0)
    loop.scheduler.submit(request("victim", [7, 8], 20), 0.0)
    events = []
    for again in range(2):
        while True:
            running = [s for s in loop.scheduler.sequences.running if s.group.request_id == "victim"]
            if running and running[0].num_tokens >= length:
                break
            events += loop.step().events
        assert running[0].num_tokens == length + again
        preempt(loop, "victim")
    events += run_to_end(loop)
    assert tokens_of(events, "victim") == expected([7, 8], 20)
    assert tokens_of(events, "other") == expected([500, 501], 20)
    assert finished(events, "victim")[0].timing.preemptions == 2
    loop.scheduler.check_idle()


@pytest.mark.parametrize("first", [3, 4, 5])
@pytest.mark.parametrize("second", [3, 4, 5])
@pytest.mark.parametrize("common", [3, 4, 5])
def test_prompts_about_as_long_as_a_block_in_pairs(first: int, second: int, common: int) -> None:
    """The first decode needs a new block; together and one after the other, with all their prefixes in common."""
    prompts = {"a": list(range(first)), "b": [*range(min(common, second)), 90, 91, 92][:second]}
    loop = make_loop(num_blocks=12, prefix_caching=True, kind=AllocatorKind.CHECKED)
    for round_ in range(3):
        items = [request(f"{name}{round_}", prompt, 10) for name, prompt in prompts.items()]
        batches = [items] if round_ == 1 else [[item] for item in items]
        for batch in batches:
            events = run(loop, *batch)
            for item in batch:
                assert tokens_of(events, item.request_id) == expected(item.prompt_token_ids, 10)


def test_cancelled_while_swapped_out_frees_the_host_blocks() -> None:
    loop = make_loop(num_blocks=12, swap_blocks=50, mode=PreemptionMode.SWAP, max_batched_tokens=64)
    for index in range(4):
        loop.scheduler.submit(request(str(index), [index * 50 + position for position in range(8)], 24), 0.0)
    swap = loop.scheduler.residency.swap
    assert swap is not None
    while not swap.num_used:
        loop.step()
    swapped = [one.group.request_id for one in loop.scheduler.sequences.waiting if one.swapped_blocks]
    assert swapped
    for name in swapped:
        loop.scheduler.cancel(name, 0.0)
    assert swap.num_used == 0
    run_to_end(loop)
    loop.scheduler.check_idle()


def test_higher_priority_goes_first_and_waiting_outweighs_it_in_the_end() -> None:
    loop = make_loop(num_blocks=20, max_num_seqs=1, policy=PriorityWithAgeing(ageing_seconds=10.0))

    def submit(name: str, priority: int, now: float) -> None:
        item = GenerationRequest(name, [1, 2, 3], stop=StopCriteria(max_tokens=2), priority=priority)
        loop.scheduler.submit(item, now)

    submit("low", 0, 0.0)
    submit("high", 1, 1.0)
    submit("low, late", 0, 2.0)
    submit("high, much later", 1, 13.0)
    order = [e.request_id for e in run_to_end(loop) if isinstance(e, TokensGenerated)][::2]
    assert order == ["high", "low", "low, late", "high, much later"]


def test_small_requests_pass_a_blocked_one_a_bounded_number_of_times() -> None:
    """A huge request waits for blocks beside a long-running one: small ones behind it go on, but not for ever."""
    loop = make_loop(num_blocks=20, max_num_seqs=4, max_batched_tokens=64)
    loop.scheduler.submit(request("running", [1] * 8, 60), 0.0)
    loop.step()
    loop.scheduler.submit(request("huge", [2] * 70, 2), 0.0)
    for index in range(60):
        loop.scheduler.submit(request(f"small{index}", [3, index], 2), 0.0)
    events = run_to_end(loop)
    finish_order = [e.request_id for e in events if isinstance(e, TokensGenerated) and e.finish]
    passed = finish_order.index("huge") - finish_order.count("running")
    assert 0 < passed <= 40
    assert finish_order[-1] != "huge"
    loop.scheduler.check_idle()


def in_running(loop: StepLoop) -> list[str]:
    return [sequence.group.request_id for sequence in loop.scheduler.sequences.running]


@pytest.mark.parametrize(("length", "runs"), [(15, True), (16, False)])
def test_some_blocks_stay_free_beside_whoever_runs(length: int, runs: bool) -> None:
    """Of ten blocks the first has three; four and the next token's fit beside it and the three that are kept."""
    loop = make_loop(num_blocks=10, max_batched_tokens=64, watermark_blocks=3)
    loop.scheduler.submit(request("first", [1] * 12, 2), 0.0)
    loop.scheduler.submit(request("second", [2] * length, 2), 0.0)
    assert loop.scheduler.plan(0.0) is not None
    assert in_running(loop) == (["first", "second"] if runs else ["first"])
    loop.abandon(FailureKind.ENGINE_ERROR, "the end of this test")
    loop.scheduler.submit(request("alone", [3] * 38, 2), 0.0)
    assert tokens_of(run_to_end(loop), "alone") == expected([3] * 38, 2)


@pytest.mark.parametrize(("kept", "comes_back"), [(3, True), (4, False)])
def test_some_blocks_stay_free_beside_whoever_comes_back(kept: int, comes_back: bool) -> None:
    loop = make_loop(
        num_blocks=10, swap_blocks=10, mode=PreemptionMode.SWAP, max_batched_tokens=64, watermark_blocks=kept
    )
    loop.scheduler.submit(request("first", [1] * 12, 20), 0.0)
    loop.step()
    loop.step()  # has four blocks now
    loop.scheduler.limits = replace(loop.scheduler.limits, watermark_blocks=0)
    loop.scheduler.submit(request("second", [2] * 8, 20), 0.0)
    loop.step()
    loop.scheduler.limits = replace(loop.scheduler.limits, watermark_blocks=kept)
    preempt(loop, "second")
    loop.step()
    assert in_running(loop) == (["first", "second"] if comes_back else ["first"])


def test_those_on_their_way_in_have_their_places_in_a_step() -> None:
    """Never more sequences hold blocks than a step has tokens, also while some are being copied in."""
    loop = make_loop(num_blocks=20, swap_blocks=20, mode=PreemptionMode.SWAP, max_batched_tokens=2)
    for name in ("comes back", "stays"):
        loop.scheduler.submit(request(name, [1], 20), 0.0)
        loop.step()
    preempt(loop, "comes back")
    loop.scheduler.submit(request("late", [2], 20), 0.0)
    plan = loop.scheduler.plan(0.0, moved=0)
    assert plan is not None
    sequences = loop.scheduler.sequences
    assert [one.group.request_id for one in sequences.arriving] == ["comes back"]
    assert [one.group.request_id for one in sequences.running] == ["stays"]
    loop.abandon(FailureKind.ENGINE_ERROR, "the end of this test")


def test_mode_auto_weighs_copying_against_computing() -> None:
    def swaps(transfer_rate: float, prefill_rate: float) -> tuple[int, int]:
        loop = make_loop(num_blocks=12, swap_blocks=100, max_batched_tokens=64)
        cost = loop.scheduler.residency.cost
        cost.block_bytes, cost.transfer_rate = 1000, transfer_rate
        loop._measure = lambda plan, seconds: setattr(cost, "prefill_rate", prefill_rate)  # type: ignore[method-assign]
        run(loop, *(request(str(i), [i * 50 + position for position in range(8)], 24) for i in range(4)))
        return loop.scheduler.counters.swaps, loop.scheduler.counters.preemptions

    swapped, preempted = swaps(transfer_rate=1e9, prefill_rate=1e3)
    assert swapped == preempted > 0
    swapped, preempted = swaps(transfer_rate=1e3, prefill_rate=1e9)
    assert swapped == 0 < preempted


@pytest.mark.parametrize(("candidates", "swaps"), [(1, 1), (2, 0)])
def test_mode_auto_counts_what_others_keep_as_computed(candidates: int, swaps: int) -> None:
    """Five blocks out and back take 10 ms. All 17 tokens would take 17, the one behind the prompt that a sibling keeps
    takes 1."""
    loop = make_loop(num_blocks=20, swap_blocks=20, max_batched_tokens=64)
    item = request("a", list(range(16)), 9, sampling=SamplingParameters(n=candidates))
    loop.scheduler.submit(item, 0.0)
    while len(loop.scheduler.sequences.running) < candidates or loop.scheduler.sequences.running[-1].num_generated < 2:
        loop.step()
    cost = loop.scheduler.residency.cost
    cost.block_bytes, cost.transfer_rate, cost.prefill_rate = 1000, 1e6, 1e3
    preempt(loop, "a", candidates - 1)
    assert (loop.scheduler.counters.preemptions, loop.scheduler.counters.swaps) == (1, swaps)
    run_to_end(loop)
    loop.scheduler.check_idle()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), max_size=8))
def test_peak_of_what_is_to_come(rows: list[tuple[int, int]]) -> None:
    """Against a simulation step by step: every running sequence grows by one, those that end leave."""
    held, remaining = [row[0] for row in rows], [row[1] for row in rows]
    peaks = [
        sum(size + step for size, left in zip(held, remaining, strict=True) if left >= step)
        for step in range(max(remaining, default=0) + 1)
    ]
    assert peak_tokens(held, remaining) == max(peaks, default=0)


def test_known_lengths_are_admitted_without_any_preemption() -> None:
    """A third more than the pool holds, all lengths known: as many run as fit at their full length, none is
    preempted."""
    loop = make_loop(num_blocks=100, max_num_seqs=64, max_batched_tokens=256, forecast=OutputForecast())
    prompts = [[index, *range(19)] for index in range(33)]
    events = run(loop, *(request(str(index), prompt, 12) for index, prompt in enumerate(prompts)))
    for index, prompt in enumerate(prompts):
        assert tokens_of(events, str(index)) == expected(prompt, 12)
    assert loop.scheduler.counters.preemptions == 0
    most = max(len(plan.scheduled) for plan in loop.runner.plans)  # type: ignore[attr-defined]
    assert most >= 100 // 8


def test_forecast_learns_that_outputs_end_early() -> None:
    """Limits of 40 tokens that end after 4: once learned, far more run at once than the limits would allow."""
    tokens = expected([1, 2, 3, 4], 4)
    loop = make_loop(
        num_blocks=60, max_num_seqs=64, max_batched_tokens=256, eos=frozenset({tokens[3]}), forecast=OutputForecast()
    )
    run(loop, *(request(str(index), [1, 2, 3, 4], 40) for index in range(40)))
    loop.runner.plans.clear()  # type: ignore[attr-defined]
    run(loop, *(request(str(index), [1, 2, 3, 4], 40) for index in range(40)))
    assert max(len(plan.scheduled) for plan in loop.runner.plans) > 60 // 11  # type: ignore[attr-defined]
