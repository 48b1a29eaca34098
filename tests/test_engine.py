"""The engine whole, on tiny random models in fp32: against Hugging Face, against itself, and through preemption."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import AllocatorKind, EngineConfig, LoadFormat, PreemptionMode
from engine.engine import Engine
from engine.errors import ConfigurationError, EngineError
from engine.generation_result import GenerationResult
from engine.schedule.candidate_seed import candidate_seed
from engine.schedule.composition import MixedSteps
from engine.types import FailureKind, GenerationRequest, SamplingParameters, StopCriteria
from tests.model.tiny import write_tiny_model

GREEDY = SamplingParameters(temperature=0.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


def engine(path: Path, **options: object) -> Engine:
    defaults: dict[str, object] = {"model": str(path), "max_num_seqs": 8, "max_model_len": 128, "block_size": 4}
    defaults["admission_forecast"] = False  # so that small pools do preempt
    return Engine(EngineConfig(**{**defaults, **options}))  # type: ignore[arg-type]


def request(name: str, prompt: list[int], max_tokens: int, sampling: SamplingParameters = GREEDY) -> GenerationRequest:
    return GenerationRequest(name, prompt, sampling, StopCriteria(max_tokens=max_tokens, ignore_eos=True))


def random_requests(count: int, seed: int, sampling: SamplingParameters = GREEDY) -> list[GenerationRequest]:
    generator = random.Random(seed)
    return [
        request(
            str(index),
            [generator.randrange(3, 500) for _ in range(generator.randint(1, 40))],
            generator.randint(1, 30),
            sampling,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 24}),
        ("mistral", {}),
        ("phi3", {}),
    ],
)
def test_greedy_tokens_equal_transformers(tmp_path: Path, family: str, overrides: dict[str, object]) -> None:
    path = write_tiny_model(tmp_path, family, **overrides)
    prompt = [7, 300, 12, 45, 45, 9, 200, 31]
    peer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    expected = peer.generate(
        torch.tensor([prompt]), max_new_tokens=30, min_new_tokens=30, do_sample=False, pad_token_id=0
    )[0, len(prompt) :].tolist()
    assert engine(path).generate([request("a", prompt, 30)])[0].token_ids == expected


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParameters(temperature=1.0, seed=42)])
def test_thirty_requests_with_preemption_equal_each_alone(tiny: Path, sampling: SamplingParameters) -> None:
    requests = random_requests(30, seed=1, sampling=sampling)
    small = engine(tiny, kv_cache_tokens=120, max_num_batched_tokens=24, allocator=AllocatorKind.CHECKED)
    together = small.generate(requests)
    assert small.stats.preemptions > 0
    small.scheduler.check_idle()
    alone = engine(tiny)
    for item, result in zip(requests, together, strict=True):
        assert result.token_ids == alone.generate([item])[0].token_ids
        assert len(result.token_ids) == item.stop.max_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"swap_space_gib": 0.001, "preemption_mode": PreemptionMode.SWAP},
        {"swap_space_gib": 0.001},
        {"preemption_mode": PreemptionMode.RECOMPUTE},
        {"enable_prefix_caching": False},
        {"swap_space_gib": 0.001, "preemption_mode": PreemptionMode.SWAP, "enable_prefix_caching": False},
    ],
)
def test_shared_prefixes_and_swap_do_not_change_tokens(tiny: Path, options: dict[str, object]) -> None:
    generator = random.Random(5)
    prefixes = [[generator.randrange(3, 500) for _ in range(length)] for length in (8, 13, 24)]
    requests = [
        request(str(index), [*prefixes[index % 3], *range(3, 3 + index % 5)], 12 + index % 9) for index in range(24)
    ]
    alone = engine(tiny, enable_prefix_caching=False)
    expected = [alone.generate([item])[0].token_ids for item in requests]
    small = engine(tiny, kv_cache_tokens=120, allocator=AllocatorKind.CHECKED, **options)
    for _ in range(2):
        assert [result.token_ids for result in small.generate(requests)] == expected
        small.scheduler.check_idle()
    assert small.stats.preemptions > 0
    if options.get("preemption_mode") is PreemptionMode.SWAP:
        assert small.scheduler.counters.swaps == small.stats.preemptions
    if options.get("enable_prefix_caching", True):
        assert small.stats.cached_prompt_tokens > 0


@pytest.mark.parametrize("budget", [1, 3, 4, 16, 64])
def test_chunk_size_does_not_change_tokens(tiny: Path, budget: int) -> None:
    requests = random_requests(6, seed=2)
    expected = [result.token_ids for result in engine(tiny).generate(requests)]
    chunked = engine(tiny, max_num_batched_tokens=budget, max_num_seqs=1 if budget in (1, 4) else 8)
    assert [result.token_ids for result in chunked.generate(requests)] == expected


def told(result: GenerationResult) -> str:
    """All that a client learns of the outcome, floats to the bit."""
    assert result.failure is None
    return repr(result.candidates)


def test_any_chunk_beside_a_decode_gives_the_same_scores(tiny: Path) -> None:
    prompt, shared = [3 + 11 * index % 400 for index in range(37)], engine(tiny, enable_prefix_caching=False)
    scored = msgspec.structs.replace(request("scored", prompt, 2), top_logprobs=3)
    expected = told(shared.generate([scored])[0])
    for budget in range(1, 41):
        scheduler = shared.scheduler
        scheduler.limits = dataclasses.replace(scheduler.limits, max_batched_tokens=budget)
        scheduler._composition = MixedSteps(budget)
        assert told(shared.generate([request("beside", [9, 8], 12), scored])[1]) == expected, budget


@pytest.mark.parametrize("length", [4, 5, 7, 8, 9, 12])
def test_a_prompt_found_whole_gives_the_scores_of_a_cold_run(tiny: Path, length: int) -> None:
    """Its last token is computed at least, and the blocks are right for whoever finds them next."""
    item = msgspec.structs.replace(request("a", [3 + 13 * index for index in range(length)], 9), top_logprobs=3)
    expected = told(engine(tiny, enable_prefix_caching=False).generate([item])[0])
    shared = engine(tiny, allocator=AllocatorKind.CHECKED)
    for found in (0, 1, 1):
        result = shared.generate([item])[0]
        assert told(result) == expected
        assert result.usage.cached_prompt_tokens == found * min(length // 4 * 4, length - 1)


def test_prompts_about_as_long_as_a_block_in_pairs(tiny: Path) -> None:
    """3, 4 and 5 tokens in blocks of 4, with so many in common, one after the other and together."""
    requests: list[GenerationRequest] = []
    for pair, (first, second, common) in enumerate(itertools.product((3, 4, 5), repeat=3)):
        begin = 5 + 16 * pair
        other = [*range(begin, begin + common), *range(begin + 8, begin + 12)][:second]
        requests += [request(f"{pair}a", [*range(begin, begin + first)], 10), request(f"{pair}b", other, 10)]
    golden = {
        result.request_id: result.token_ids for result in engine(tiny, enable_prefix_caching=False).generate(requests)
    }
    for batches in ([requests[::2], requests[1::2], requests], [requests, requests]):
        shared = engine(tiny, kv_cache_tokens=2000, allocator=AllocatorKind.CHECKED)
        for batch in batches:
            assert all(result.token_ids == golden[result.request_id] for result in shared.generate(batch))
        assert shared.stats.cached_prompt_tokens > 27 * 3


def test_seed_does_not_depend_on_company(tiny: Path) -> None:
    seeded = request("seeded", [5, 6, 7, 8], 20, SamplingParameters(temperature=1.2, seed=42))
    alone = engine(tiny).generate([seeded])[0].token_ids
    others = random_requests(7, seed=3, sampling=SamplingParameters(temperature=1.0, seed=7))
    unseeded = [request(f"u{i}", [5, 6, 7, 8], 20, SamplingParameters(temperature=1.2)) for i in range(7)]
    assert engine(tiny).generate([seeded, *others])[0].token_ids == alone
    assert engine(tiny).generate([*unseeded, seeded])[-1].token_ids == alone


def test_candidates_differ_and_are_those_of_their_seeds_alone(tiny: Path) -> None:
    """They share the prompt's blocks, and each writes its own output behind it."""
    prompt = [5, 6, 7, 8, 9, 10]
    item = request("a", prompt, 12, SamplingParameters(temperature=1.2, seed=9, n=4))
    first, second = engine(tiny).generate([item])[0], engine(tiny).generate([item])[0]
    tokens = [tuple(candidate.token_ids) for candidate in first.candidates]
    assert len(set(tokens)) == 4
    assert tokens == [tuple(candidate.token_ids) for candidate in second.candidates]
    assert first.usage.completion_tokens == 48
    for index, candidate in enumerate(tokens):
        alone = request("a", prompt, 12, SamplingParameters(temperature=1.2, seed=candidate_seed(9, index)))
        assert tuple(engine(tiny).generate([alone])[0].token_ids) == candidate


def test_offline_batches_keep_their_order_twice(tiny: Path) -> None:
    shared = engine(tiny)
    for seed in (4, 5):
        requests = random_requests(9, seed)
        results = shared.generate(requests)
        assert [result.request_id for result in results] == [item.request_id for item in requests]
        assert all(len(r.token_ids) == i.stop.max_tokens for r, i in zip(results, requests, strict=True))


def test_ids_outside_the_vocabulary_are_refused_and_others_go_on(tiny: Path) -> None:
    shared = engine(tiny)
    bad, good = request("bad", [1, 10**6], 4), request("good", [1, 2], 4)
    results = shared.generate([bad, good])
    assert results[0].failure is not None
    assert (results[0].failure.kind, results[0].failure.field) == (FailureKind.INVALID, "prompt.token_ids")
    assert len(results[1].token_ids) == 4
    shared.scheduler.check_idle()


def test_an_empty_prompt_is_refused_and_others_go_on(tiny: Path) -> None:
    shared = engine(tiny)
    golden = shared.generate([request("canary", [1, 2, 3], 5)])[0].token_ids
    empty, canary = shared.generate([request("empty", [], 4), request("canary", [1, 2, 3], 5)])
    assert empty.failure is not None
    assert (empty.failure.kind, empty.failure.field) == (FailureKind.INVALID, "prompt")
    assert canary.token_ids == golden
    assert shared.generate([request("canary", [1, 2, 3], 5)])[0].token_ids == golden


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = engine(tiny)
    golden = shared.generate([request("canary", [1, 2, 3], 5)])[0].token_ids

    def explode(plan: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(shared.loop.runner, "launch", explode)
        failure = shared.generate([request("a", [1, 2, 3], 5)])[0].failure
    assert failure is not None
    assert failure.kind is FailureKind.ENGINE_ERROR
    assert "device lost" in failure.message
    shared.scheduler.check_idle()
    assert shared.generate([request("canary", [1, 2, 3], 5)])[0].token_ids == golden


def test_non_finite_logits_fail_their_request_alone(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = engine(tiny)
    items = [request(str(index), [9, index + 3], 6) for index in range(3)]
    golden = [result.token_ids for result in shared.generate(items)]
    decoder = shared.model.decoder
    original = decoder.logits

    def poisoned(hidden: torch.Tensor, *, own: bool = False) -> torch.Tensor:
        logits = original(hidden, own=own)
        if logits.shape[0] == 3:
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(decoder, "logits", poisoned)
    results = shared.generate(items)
    assert results[1].failure is not None
    assert results[1].failure.kind is FailureKind.ENGINE_ERROR
    assert [results[0].token_ids, results[2].token_ids] == [golden[0], golden[2]]
    shared.scheduler.check_idle()


def test_whoever_reads_a_freed_block_is_caught_in_checked_mode(tiny: Path) -> None:
    """A block released behind its owner's back: the next step fills it with NaN, and its owner's logits show that."""

    def failures(kind: AllocatorKind) -> dict[int, str]:
        shared = engine(tiny, allocator=kind, enable_prefix_caching=False)
        shared.submit(request("a", [5, 6, 7, 8, 9], 10))
        shared.submit(request("b", [5, 6, 7, 8, 9], 10))
        for _ in range(3):
            shared.step()
        tables = shared.scheduler.tables
        tables.allocator.release([int(tables.rows[0, 0])])
        plan = shared.scheduler.plan(0.0)
        assert plan is not None
        return shared.loop.runner.launch(plan).wait().failures

    assert failures(AllocatorKind.NATIVE) == {}
    caught = failures(AllocatorKind.CHECKED)
    assert list(caught) == [0]
    assert "non-finite" in caught[0]


def test_pool_is_claimed_at_start_and_context_limited_by_it(tiny: Path) -> None:
    small = engine(tiny, kv_cache_tokens=16)
    assert small.info.kv_cache_tokens == 16
    assert small.info.max_context_tokens == 16
    result = small.generate([request("a", [3] * 10, 100), request("b", [3] * 16, 1)])
    assert len(result[0].token_ids) == 6
    assert result[1].failure is not None
    assert result[1].failure.kind is FailureKind.PROMPT_TOO_LONG


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens"),
        ({"kv_cache_tokens": 10**14}, "kv_cache_tokens"),
        ({"max_model_len": 10**7}, "max_model_len"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"num_threads": 10**6}, "num_threads"),
        ({"swap_space_gib": 1e6}, "swap_space_gib"),
        ({"dtype": "int3"}, "int3"),
    ],
)
def test_bad_configurations_are_named(tiny: Path, options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        engine(tiny, **options)


def test_dummy_weights_need_a_config_only(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    dummy = engine(tmp_path, load_format=LoadFormat.DUMMY)
    assert len(dummy.generate([request("a", [1, 2, 3], 5)])[0].token_ids) == 5


def test_generate_refuses_equal_ids_and_foreign_work(tiny: Path) -> None:
    shared = engine(tiny)
    with pytest.raises(EngineError, match="distinct"):
        shared.generate([request("a", [1], 1), request("a", [1], 1)])
    shared.submit(request("a", [1], 1))
    with pytest.raises(EngineError, match="live"):
        shared.generate([request("b", [1], 1)])


def test_generation_config_does_not_change_sampling(tiny: Path, tmp_path: Path) -> None:
    """Defaults that a model's author ships are not applied: what the request says is all there is."""
    path = tmp_path / "model"
    shutil.copytree(tiny, path)
    expected = engine(path).generate([request("a", [5, 6, 7, 5, 6, 7], 20)])[0].token_ids
    shipped = {"repetition_penalty": 1.5, "temperature": 0.6, "top_p": 0.5, "do_sample": True}
    (path / "generation_config.json").write_text(json.dumps(shipped))
    assert engine(path).generate([request("a", [5, 6, 7, 5, 6, 7], 20)])[0].token_ids == expected


def test_yarn_to_its_last_position_and_no_further(tmp_path: Path) -> None:
    """The length in the config is the scaled one already: it is served as it stands, and nothing is read beyond the
    table of angles."""
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    scaling["attention_factor"] = 1.0
    path = write_tiny_model(tmp_path, "qwen2", max_position_embeddings=128, rope_parameters=scaling)
    whole = engine(path, max_model_len=None)
    assert (whole.info.max_context_tokens, whole.info.max_prompt_tokens) == (128, 127)
    peer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for length in (126, 127):
        prompt = [3 + 7 * index % 400 for index in range(length)]
        result = whole.generate([request("a", prompt, 50)])[0]
        expected = peer.generate(torch.tensor([prompt]), max_new_tokens=128 - length, min_new_tokens=1, do_sample=False)
        assert result.token_ids == expected[0, length:].tolist()
    refused = whole.generate([request("b", [5] * 128, 1)])[0].failure
    assert refused is not None
    assert refused.kind is FailureKind.PROMPT_TOO_LONG


def test_ids_that_pad_the_vocabulary_are_never_sampled(tmp_path: Path) -> None:
    """A vocabulary of 640 with a tokenizer of 512, and an output layer that prefers the padding by far."""
    path = write_tiny_model(tmp_path, "qwen2", vocab_size=640, tie_word_embeddings=False)
    padded = engine(path)
    assert padded.info.vocab_size == 512
    original = padded.model.decoder.logits

    def prefer_padding(hidden: torch.Tensor, *, own: bool = False) -> torch.Tensor:
        logits = original(hidden, own=own)
        logits[:, 512:] += 1000.0
        return logits

    padded.model.decoder.logits = prefer_padding  # type: ignore[method-assign]
    results = padded.generate(
        [request("greedy", [5, 6], 10), request("drawn", [5, 6], 10, SamplingParameters(temperature=1.0, seed=3))]
    )
    assert all(token < 512 for result in results for token in result.token_ids)
    assert all(len(result.token_ids) == 10 for result in results)
    biased = SamplingParameters(temperature=0.0, logit_bias={600: 100.0})
    refused = padded.generate([request("biased", [5, 6], 10, biased)])[0].failure
    assert refused is not None
    assert (refused.kind, refused.field) == (FailureKind.INVALID, "sampling.logit_bias")
