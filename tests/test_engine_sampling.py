"""Sampling as users meet it, on whole engines: penalties and masks in company, in every slot, through preemption."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.run.runner import EagerRunner, FinishedStep
from engine.schedule.plan import StepOutcome, StepPlan
from engine.types import (
    FailureKind,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    SamplingParameters,
    StopCriteria,
    TokensGenerated,
)
from tests.model.tiny import write_tiny_model
from tests.test_engine import GREEDY, engine, request

PROMPT = [7, 300, 12, 45, 45, 9, 200, 31]

EDITING = [
    SamplingParameters(temperature=0.0, repetition_penalty=2.0),
    SamplingParameters(temperature=1.1, seed=5, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParameters(temperature=0.8, seed=6, frequency_penalty=1.5, top_k=20),
    SamplingParameters(temperature=0.0, logit_bias={60: 4.0, 61: -100.0}),
    SamplingParameters(temperature=1.0, seed=7, allowed_token_ids=list(range(100, 140))),
    GREEDY,
    SamplingParameters(temperature=1.0, seed=8),
    SamplingParameters(temperature=1.0, seed=9, top_p=0.8),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Engine:
    return engine(tiny)


def editing_requests(max_tokens: int = 16) -> list[GenerationRequest]:
    return [
        request(str(index), [*PROMPT, index + 3, 45], max_tokens, sampling) for index, sampling in enumerate(EDITING)
    ]


@pytest.mark.parametrize("penalty", [1.3, 2.0, 0.8])
def test_greedy_with_a_repetition_penalty_equals_transformers(tiny: Path, shared: Engine, penalty: float) -> None:
    peer = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager")
    options = {"do_sample": False, "pad_token_id": 0, "repetition_penalty": penalty}
    expected = peer.generate(torch.tensor([PROMPT]), max_new_tokens=30, min_new_tokens=30, **options)
    sampling = SamplingParameters(temperature=0.0, repetition_penalty=penalty)
    item = GenerationRequest("a", PROMPT, sampling, StopCriteria(max_tokens=30, min_tokens=30))
    assert shared.generate([item])[0].token_ids == expected[0, len(PROMPT) :].tolist()


def test_a_mixed_batch_equals_each_alone_in_any_slot(tiny: Path, shared: Engine) -> None:
    items = editing_requests()
    alone = [shared.generate([item])[0].token_ids for item in items]
    assert [result.token_ids for result in shared.generate(items)] == alone
    assert [result.token_ids for result in shared.generate(items[::-1])] == alone[::-1]


def test_preemption_does_not_change_edited_draws(tiny: Path, shared: Engine) -> None:
    items = editing_requests(24)
    alone = [shared.generate([item])[0].token_ids for item in items]
    small = engine(tiny, kv_cache_tokens=100, max_num_batched_tokens=24)
    assert [result.token_ids for result in small.generate(items)] == alone
    assert small.stats.preemptions > 0
    small.scheduler.check_idle()


class _LateRunner(EagerRunner):
    """The CPU's runner as a device would answer: a step later, so the loop must hold back what needs its tokens."""

    lookahead = True


def answering_late(engine_: Engine) -> Engine:
    runner = engine_.loop.runner
    assert isinstance(runner, EagerRunner)
    runner.__class__ = _LateRunner
    return engine_


def test_with_lookahead_a_penalty_waits_for_the_token_before(tiny: Path, shared: Engine) -> None:
    items = editing_requests()[:5]
    alone = [shared.generate([item])[0].token_ids for item in items]
    late = answering_late(engine(tiny))
    assert [result.token_ids for result in late.generate(items)] == alone


def test_only_a_penalty_ends_the_lookahead(tiny: Path) -> None:
    """Steps are launched before the last one is committed, unless a request's next token depends on it."""
    launched: list[int] = []
    loop = engine(tiny).loop
    scheduler = loop.scheduler

    class Recorder:
        lookahead = True
        moved: int | None = None

        def launch(self, plan: StepPlan) -> FinishedStep:
            launched.append(sum(entry.sequence.num_pending for entry in plan.sampling))
            return FinishedStep(StepOutcome([9] * len(plan.sampling)))

    loop.runner = Recorder()
    biased = SamplingParameters(temperature=0.0, logit_bias={9: 1.0})
    for sampling, pending in ((GREEDY, 2), (biased, 2), (SamplingParameters(presence_penalty=0.1), 1)):
        launched.clear()
        scheduler.submit(request("a", [5, 6], 8, sampling), 0.0)
        while loop.has_work:
            loop.step()
        assert max(launched) == pending


def test_min_tokens_keeps_the_end_back_and_no_longer(shared: Engine) -> None:
    free = shared.generate([request("a", PROMPT, 30)])[0].token_ids
    stop_id = free[0]
    for least in (0, 1, 7):
        stop = StopCriteria(max_tokens=30, min_tokens=least, token_ids=[stop_id], ignore_eos=True)
        sampling = SamplingParameters(temperature=0.0, logit_bias={stop_id: 100.0})
        result = shared.generate([GenerationRequest("a", PROMPT, sampling, stop)])[0]
        assert result.token_ids.index(stop_id) == least == len(result.token_ids) - 1
        assert result.candidates[0].finish is not None
        assert result.candidates[0].finish.reason is FinishReason.STOP


def test_ignore_eos_runs_through_every_eos_and_still_honours_stop_ids(tiny: Path) -> None:
    local = engine(tiny)
    eos = sorted(local.info.eos_token_ids)
    assert eos
    sampling = SamplingParameters(temperature=0.0, allowed_token_ids=eos)
    ignoring = StopCriteria(max_tokens=9, ignore_eos=True)
    result = local.generate([GenerationRequest("a", PROMPT, sampling, ignoring)])[0]
    assert len(result.token_ids) == 9
    assert set(result.token_ids) <= set(eos)
    honouring = StopCriteria(max_tokens=9, ignore_eos=True, token_ids=eos)
    finish = local.generate([GenerationRequest("a", PROMPT, sampling, honouring)])[0].candidates[0].finish
    assert finish is not None
    assert finish.reason is FinishReason.STOP
    ended = local.generate([GenerationRequest("a", PROMPT, sampling, StopCriteria(max_tokens=9))])[0].candidates[0]
    assert ended.finish is not None
    assert (len(ended.token_ids), ended.finish.reason) == (1, FinishReason.END_OF_SEQUENCE)


def test_a_seed_draws_the_same_in_any_company_and_slot_and_through_preemption(tiny: Path, shared: Engine) -> None:
    seeded = request("seeded", PROMPT, 24, SamplingParameters(temperature=1.2, seed=42, presence_penalty=0.3))
    alone = shared.generate([seeded])[0].token_ids
    for seed in (None, 42):
        others = [
            request(str(i), [*PROMPT, i], 24, SamplingParameters(temperature=1.2, seed=seed and seed + i))
            for i in range(7)
        ]
        assert shared.generate([seeded, *others])[0].token_ids == alone
        assert shared.generate([*others, seeded])[-1].token_ids == alone
        small, events = engine(tiny, kv_cache_tokens=96), []
        for item in [*others, seeded]:
            small.submit(item)
        while small.has_work:
            events += [event for event in small.step().events if event.request_id == "seeded"]
        assert [token for event in events if isinstance(event, TokensGenerated) for token in event.token_ids] == alone
        assert isinstance(events[-1], RequestFinished)
        assert events[-1].timing.preemptions > 0


def test_penalties_do_not_leak_to_neighbours(shared: Engine) -> None:
    a = request("a", PROMPT, 20, SamplingParameters(temperature=0.0, repetition_penalty=2.0))
    b = request("b", PROMPT, 20)
    alone = [shared.generate([item])[0].token_ids for item in (a, b)]
    assert alone[0] != alone[1]
    assert [result.token_ids for result in shared.generate([a, b])] == alone
    assert [result.token_ids for result in shared.generate([b, a])] == alone[::-1]


def test_top_k_on_and_off_in_one_batch(shared: Engine) -> None:
    """Off, by 0 and by all of the vocabulary or more, beside some of it."""
    items = [
        request(str(k), PROMPT, 12, SamplingParameters(temperature=1.0, seed=3, top_k=k))
        for k in (0, 1, 64, 511, 512, 10**9)
    ]
    alone = [shared.generate([item])[0].token_ids for item in items]
    assert [result.token_ids for result in shared.generate(items)] == alone
    assert alone[0] == alone[4] == alone[5]
    assert alone[1] == shared.generate([request("greedy", PROMPT, 12)])[0].token_ids


def test_top_p_at_its_ends(shared: Engine) -> None:
    """0 keeps the likeliest token, 1 keeps all."""
    greedy = shared.generate([request("a", PROMPT, 8)])[0].token_ids
    free = shared.generate([request("a", PROMPT, 8, SamplingParameters(seed=1))])[0].token_ids
    for top_p, expected in ((0.0, greedy), (1e-12, greedy), (1.0, free)):
        item = request("a", PROMPT, 8, SamplingParameters(seed=1, top_p=top_p))
        assert shared.generate([item])[0].token_ids == expected


def test_without_a_seed_candidates_and_requests_differ(shared: Engine) -> None:
    items = [request(str(i), PROMPT, 12, SamplingParameters(temperature=1.2, n=8)) for i in range(2)]
    found = [tuple(c.token_ids) for result in shared.generate(items[:1]) for c in result.candidates]
    found += [tuple(c.token_ids) for result in shared.generate(items[1:]) for c in result.candidates]
    assert len(set(found)) == 16


def test_tiny_temperatures_are_greedy_and_huge_ones_draw(shared: Engine) -> None:
    greedy = shared.generate([request("a", PROMPT, 8)])[0].token_ids
    for temperature in (1e-9, 1e-6, 1e-4):
        item = request("a", PROMPT, 8, SamplingParameters(temperature=temperature, seed=1))
        assert shared.generate([item])[0].token_ids == greedy
    hot = [request(str(seed), PROMPT, 8, SamplingParameters(temperature=1e4, seed=seed)) for seed in (1, 2)]
    drawn = [result.token_ids for result in shared.generate(hot)]
    assert drawn[0] != drawn[1]
    assert len(drawn[0]) == len(drawn[1]) == 8


def test_candidates_go_on_when_one_ends(shared: Engine) -> None:
    """Eight seeds, eight streams; a stop token ends its own candidate only."""
    item = request("a", PROMPT, 12, SamplingParameters(temperature=1.2, seed=77, n=8))
    free = [candidate.token_ids for candidate in shared.generate([item])[0].candidates]
    assert len({tuple(tokens) for tokens in free}) == 8
    stop_id = free[3][2]
    stop = StopCriteria(max_tokens=12, token_ids=[stop_id], ignore_eos=True)
    stopped = shared.generate([GenerationRequest("a", PROMPT, item.sampling, stop)])[0].candidates
    for tokens, candidate in zip(free, stopped, strict=True):
        ends = tokens.index(stop_id) + 1 if stop_id in tokens else len(tokens)
        assert candidate.token_ids == tokens[:ends]


@pytest.mark.parametrize(
    ("sampling", "stop", "field"),
    [
        (SamplingParameters(temperature=math.nan), StopCriteria(), "sampling.temperature"),
        (SamplingParameters(temperature=-1.0), StopCriteria(), "sampling.temperature"),
        (SamplingParameters(top_p=1.1), StopCriteria(), "sampling.top_p"),
        (SamplingParameters(min_p=-0.1), StopCriteria(), "sampling.min_p"),
        (SamplingParameters(top_k=-1), StopCriteria(), "sampling.top_k"),
        (SamplingParameters(repetition_penalty=0.0), StopCriteria(), "sampling.repetition_penalty"),
        (SamplingParameters(presence_penalty=math.inf), StopCriteria(), "sampling.presence_penalty"),
        (SamplingParameters(frequency_penalty=math.nan), StopCriteria(), "sampling.frequency_penalty"),
        (SamplingParameters(seed=2**64), StopCriteria(), "sampling.seed"),
        (SamplingParameters(seed=-1), StopCriteria(), "sampling.seed"),
        (SamplingParameters(logit_bias={10**6: 1.0}), StopCriteria(), "sampling.logit_bias"),
        (SamplingParameters(logit_bias={3: math.inf}), StopCriteria(), "sampling.logit_bias"),
        (SamplingParameters(allowed_token_ids=[-1]), StopCriteria(), "sampling.allowed_token_ids"),
        (
            SamplingParameters(allowed_token_ids=[9]),
            StopCriteria(min_tokens=2, token_ids=[9]),
            "sampling.allowed_token_ids",
        ),
        (SamplingParameters(), StopCriteria(min_tokens=-1), "stop.min_tokens"),
        (SamplingParameters(), StopCriteria(max_tokens=0), "stop.max_tokens"),
        (SamplingParameters(), StopCriteria(max_tokens=-1), "stop.max_tokens"),
    ],
)
def test_impossible_parameters_are_named_and_others_go_on(
    shared: Engine, sampling: SamplingParameters, stop: StopCriteria, field: str
) -> None:
    bad, good = GenerationRequest("bad", PROMPT, sampling, stop), request("good", PROMPT, 4)
    golden = shared.generate([good])[0].token_ids
    results = shared.generate([bad, good])
    assert results[0].failure is not None
    assert (results[0].failure.kind, results[0].failure.field) == (FailureKind.INVALID, field)
    assert results[1].token_ids == golden
    shared.scheduler.check_idle()


@pytest.mark.parametrize(("length", "tokens"), [(126, 2), (127, 1)])
def test_the_longest_prompts_give_what_fits(shared: Engine, length: int, tokens: int) -> None:
    """A context of 128. One token of output is the least."""
    prompt = [3 + index % 400 for index in range(length)]
    result = shared.generate([request("a", prompt, 2**31)])[0]
    assert len(result.token_ids) == tokens
    assert shared.generate([request("one", prompt, 1)])[0].token_ids == result.token_ids[:1]
    for too_long in (128, 129):
        refused = shared.generate([request("b", [*prompt, *[4] * (too_long - length)], 1)])[0].failure
        assert refused is not None
        assert refused.kind is FailureKind.PROMPT_TOO_LONG
        assert (refused.details["prompt_tokens"], refused.details["max_prompt_tokens"]) == (str(too_long), "127")


def test_blocks_of_a_request_with_non_finite_logits_are_never_found(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = engine(tiny)
    decoder = local.model.decoder
    original = decoder.logits
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "logits", lambda hidden: original(hidden) * math.nan)
        failure = local.generate([request("a", PROMPT * 3, 4)])[0].failure
    assert failure is not None
    assert failure.kind is FailureKind.ENGINE_ERROR
    assert local.generate([request("b", PROMPT * 3, 4)])[0].usage.cached_prompt_tokens == 0
    assert local.generate([request("c", PROMPT * 3, 4)])[0].usage.cached_prompt_tokens > 0


def test_usage_counts_tokens_that_have_no_text(shared: Engine) -> None:
    sampling = SamplingParameters(temperature=0.0, allowed_token_ids=sorted(shared.info.eos_token_ids))
    result = shared.generate([request("a", PROMPT, 9, sampling)])[0]
    assert result.usage.completion_tokens == 9
