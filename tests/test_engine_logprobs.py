"""Log probabilities of prompts and outputs: transformers' own, whatever the chunks, the company or the cache."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.generation_result import GenerationResult
from engine.schedule.plan import StepPlan
from engine.types import (
    GenerationRequest,
    PromptScored,
    SamplingParameters,
    StopCriteria,
    TokenLogprob,
    TokensGenerated,
)
from tests.model.tiny import write_tiny_model
from tests.test_engine import GREEDY, engine, random_requests

TOP = 5
PROMPT = [random.Random(1).randrange(3, 500) for _ in range(45)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=24)


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Engine:
    return engine(tiny)


def scoring(name: str, prompt: list[int], max_tokens: int = 8, n: int = 1, top: int = TOP) -> GenerationRequest:
    sampling = SamplingParameters(temperature=0.0) if n == 1 else SamplingParameters(seed=4, n=n)
    stop = StopCriteria(max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(name, prompt, sampling, stop, top_logprobs=top, prompt_top_logprobs=top)


@cache
def peer_of(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def reference(path: Path, tokens: list[int]) -> torch.Tensor:
    """Log probabilities [tokens - 1, vocabulary] of what follows each token but the last, by transformers."""
    return scores_by(peer_of(path), tokens)


def scores_by(peer: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(peer(torch.tensor([tokens])).logits[0, :-1], dim=1)


def assert_equal_to(values: torch.Tensor, tokens: list[int], found: list[TokenLogprob], top: int = TOP) -> None:
    """values [n, vocabulary]: of the n tokens `tokens`."""
    assert [score.token_id for score in found] == tokens
    for row, score in zip(values, found, strict=True):
        assert score.logprob == pytest.approx(float(row[score.token_id]), abs=1e-4)
        assert abs(score.rank - 1 - int((row > row[score.token_id]).sum())) <= int(
            ((row - row[score.token_id]).abs() < 1e-4).sum()
        )
        assert len(score.top) == top
        assert [value for _, value in score.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
        for token, value in score.top:
            assert value == pytest.approx(float(row[token]), abs=1e-4)


def all_scores(result: GenerationResult) -> list[TokenLogprob]:
    return result.prompt_logprobs + result.candidates[0].logprobs


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_prompt_and_output_equal_transformers(tmp_path: Path, family: str) -> None:
    path = write_tiny_model(tmp_path, family)
    result = engine(path).generate([scoring("a", PROMPT)])[0]
    tokens = PROMPT + result.token_ids
    assert_equal_to(reference(path, tokens), tokens[1:], all_scores(result))


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 64])
def test_chunks_do_not_change_them(tiny: Path, shared: Engine, budget: int) -> None:
    whole = shared.generate([scoring("a", PROMPT)])[0]
    chunked = engine(tiny, max_num_batched_tokens=budget, max_num_seqs=1 if budget == 1 else 4)
    result = chunked.generate([scoring("a", PROMPT)])[0]
    assert all_scores(result) == all_scores(whole)
    tokens = PROMPT + result.token_ids
    assert_equal_to(reference(tiny, tokens), tokens[1:], all_scores(result))


def test_company_and_preemption_do_not_change_them(tiny: Path, shared: Engine) -> None:
    generator = random.Random(9)
    items = [
        scoring(str(i), [generator.randrange(3, 500) for _ in range(generator.randint(1, 30))], 20) for i in range(8)
    ]
    others = random_requests(8, seed=3)
    results = [shared.generate([item])[0] for item in items]
    alone = [all_scores(result) for result in results]
    for item, result in zip(items, results, strict=True):
        tokens = item.prompt_token_ids + result.token_ids
        assert_equal_to(reference(tiny, tokens), tokens[1:], all_scores(result))
    for options in ({}, {"swap_space_gib": 0.001}):
        small = engine(tiny, kv_cache_tokens=120, max_num_batched_tokens=16, **options)
        mixed = [item for pair in zip(items, _renamed(others), strict=True) for item in pair]
        assert [all_scores(result) for result in small.generate(mixed)[::2]] == alone
        assert small.stats.preemptions > 0
        small.scheduler.check_idle()


def _renamed(requests: list[GenerationRequest]) -> list[GenerationRequest]:
    return [GenerationRequest(f"o{r.request_id}", r.prompt_token_ids, r.sampling, r.stop) for r in requests]


def test_the_prefix_cache_is_written_but_not_read(tiny: Path) -> None:
    local = engine(tiny)
    first = local.generate([scoring("a", PROMPT)])[0]
    again = local.generate([scoring("b", PROMPT)])[0]
    assert all_scores(again) == all_scores(first)
    assert again.usage.cached_prompt_tokens == 0
    plain = GenerationRequest("c", PROMPT, GREEDY, StopCriteria(max_tokens=8, ignore_eos=True), top_logprobs=TOP)
    hit = local.generate([plain])[0]
    assert hit.usage.cached_prompt_tokens > 0
    assert hit.prompt_logprobs == []
    assert hit.candidates[0].logprobs == first.candidates[0].logprobs
    tokens = PROMPT + hit.token_ids
    assert_equal_to(reference(tiny, tokens)[len(PROMPT) - 1 :], hit.token_ids, hit.candidates[0].logprobs)
    local.scheduler.check_idle()


def test_candidates_share_one_scoring_of_the_prompt(shared: Engine) -> None:
    alone = shared.generate([scoring("a", PROMPT)])[0].prompt_logprobs
    result = shared.generate([scoring("b", PROMPT, n=3)])[0]
    assert result.prompt_logprobs == alone
    assert len({tuple(candidate.token_ids) for candidate in result.candidates}) == 3


def test_they_come_in_pieces_before_the_first_token(tiny: Path) -> None:
    local = engine(tiny, max_num_batched_tokens=16)
    local.submit(scoring("a", PROMPT, max_tokens=2))
    events = []
    while local.has_work:
        events += local.step().events
    kinds = [type(event) for event in events if isinstance(event, PromptScored | TokensGenerated)]
    assert kinds == [PromptScored] * 3 + [TokensGenerated] * 2


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_prompts(tiny: Path, shared: Engine, length: int) -> None:
    result = shared.generate([scoring("a", PROMPT[:length], top=0)])[0]
    assert [score.token_id for score in result.prompt_logprobs] == PROMPT[1:length]
    assert all(score.top == [] for score in result.prompt_logprobs)


def test_a_request_without_them_scores_nothing_more(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[StepPlan] = []
    launch = shared.loop.runner.launch

    def recording(plan: StepPlan) -> object:
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(shared.loop.runner, "launch", recording)
    shared.generate(_renamed(random_requests(4, seed=1)))
    assert plans
    assert not any(plan.scored or plan.edited for plan in plans)
