"""`batch_invariant` on a GPU in bf16: the same bits alone, in any crowd, after any preemption, in any pool."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from engine import _runtime, ops
from engine.config import AllocatorKind, Device, EngineConfig, PreemptionMode
from engine.engine import Engine, GenerationResult
from engine.types import GenerationRequest, SamplingParameters, StopCriteria
from tests.bench.impossible_job import Job, run, variants
from tests.model.tiny import write_tiny_model

pytestmark = pytest.mark.gpu

# Of a shape that the fused decode step serves, with a head that finds the greedy tokens, and of one that it does not.
FUSED = {
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "vocab_size": 49_152,
}
PLAIN = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 96}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {"fused": ("qwen2", {**FUSED}), "plain": ("mistral", {**PLAIN})}
HOW_TO_YIELD: dict[str, dict[str, object]] = {
    "swap": {"swap_space_gib": 0.25, "preemption_mode": PreemptionMode.SWAP},
    "swap to a pool that is soon full": {"swap_space_gib": 0.00009, "preemption_mode": PreemptionMode.SWAP},
    "recompute": {"swap_space_gib": 0.25, "preemption_mode": PreemptionMode.RECOMPUTE},
    "no swap space": {},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = FAMILIES[request.param]
    return write_tiny_model(tmp_path_factory.mktemp(request.param), family, **overrides)


def config(path: Path, **options: object) -> EngineConfig:
    defaults: dict[str, object] = {
        "model": str(path),
        "device": Device.CUDA,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "kv_cache_tokens": 32_768,
        "admission_forecast": False,  # so that small pools do preempt
        "batch_invariant": True,
    }
    return EngineConfig(**{**defaults, **options})  # type: ignore[arg-type]


def requests(count: int, seed: int = 1) -> list[GenerationRequest]:
    """Prompts of less and more than a chunk, beginning alike; greedy, drawn and edited; some with log probabilities."""
    generator = random.Random(seed)
    ways = [
        SamplingParameters(temperature=0.0),
        SamplingParameters(temperature=1.0, seed=3),
        SamplingParameters(temperature=0.0, repetition_penalty=1.3),
        SamplingParameters(temperature=0.9, top_p=0.9, seed=4),
    ]
    return [
        GenerationRequest(
            str(index),
            [*range(3, 3 + generator.choice([0, 1, 62, 63, 64, 130, 200])), 5 + index],
            ways[index % 4],
            StopCriteria(max_tokens=generator.randint(20, 60), ignore_eos=True),
            top_logprobs=(0, None, 4)[index % 3],
            prompt_top_logprobs=1 if index % 7 == 0 else None,
        )
        for index in range(count)
    ]


def told(result: GenerationResult) -> str:
    """All that a client learns of the outcome, floats to the bit."""
    assert result.failure is None
    return repr([result.candidates, result.prompt_logprobs])


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[str]:
    """What a crowd gives with room for all."""
    return [told(result) for result in Engine(config(model)).generate(requests(64))]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_num_seqs": 80}], ids=["graphs", "eager", "80"])
def test_alone_and_in_a_crowd_of_64(model: Path, options: dict[str, object]) -> None:
    shared, items = Engine(config(model, **options)), requests(64)
    chain = shared.model.decoder._chain
    assert (chain is not None and chain.finds_best) == model.name.startswith("fused")
    crowd = [told(result) for result in shared.generate(items)]
    for count in (1, 7, 30):
        assert [told(result) for result in shared.generate(items[-count:])] == crowd[-count:]
    for index in range(0, 64, 9):
        assert told(shared.generate([items[index]])[0]) == crowd[index]


@pytest.mark.parametrize("way", HOW_TO_YIELD)
def test_preempted_and_undisturbed(model: Path, undisturbed: list[str], way: str) -> None:
    tight = Engine(config(model, kv_cache_tokens=1_024, allocator=AllocatorKind.CHECKED, **HOW_TO_YIELD[way]))
    assert [told(result) for result in tight.generate(requests(64))] == undisturbed
    tight.scheduler.check_idle()
    swaps, preemptions = tight.scheduler.counters.swaps, tight.stats.preemptions
    assert preemptions > 0
    assert (swaps > 0) == way.startswith("swap")
    assert (swaps < preemptions) == (way != "swap")


def test_the_impossible_job_gives_the_tokens_of_an_unlimited_pool(model: Path) -> None:
    """The job of the bench in small: its tight rows swap, compute again, and have no swap space."""
    job = Job(requests=64, prompt=64, output=144, pool_tokens=9_744, vocabulary=500, swap_gib=0.25)
    base = config(model, max_model_len=256)
    runs = {}
    for name, options in variants(job).items():
        if not name.startswith("fitting"):  # has other flags
            runs[name] = run(Engine(msgspec.structs.replace(base, **options)), job)  # type: ignore[arg-type]
    assert len(runs) == 5
    assert {name for name in runs if runs[name].tokens != runs["unlimited"].tokens} == set()
    assert runs["tight, swap"].swaps == runs["tight, swap"].preemptions > 0
    for row in ("tight, recompute", "tight, no swap space"):
        assert runs[row].preemptions > 0 == runs[row].swaps


def test_more_sequences_than_there_are_places_for_parts_are_refused() -> None:
    """The Python side knows the runtime's limit."""
    kv_heads = 8
    most = ops.MAX_FIXED_PAIRS // kv_heads
    assert ops.paged_attention_workspace_bytes(most, 16, kv_heads, 128, fixed=True) > 0
    with pytest.raises(_runtime.OpError, match="tickets"):
        ops.paged_attention_workspace_bytes(most + 1, 16, kv_heads, 128, fixed=True)
