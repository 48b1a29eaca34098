"""The engine on a GPU: the CPU's tokens up to near-ties, graph = eager, batched = alone, a static memory budget."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from engine import ops_prefill
from engine.config import AllocatorKind, Device, EngineConfig, PreemptionMode
from engine.engine import Engine, GenerationResult
from engine.errors import ConfigurationError
from engine.model import layers
from engine.model.source import resolve
from engine.run.buckets import decode_buckets
from engine.run.cuda_runner import CudaRunner
from engine.text.tokenizer import Tokenizer
from engine.types import FinishReason, GenerationRequest, Grammar, GrammarKind, SamplingParameters, StopCriteria
from tests.model.tiny import write_byte_level_model, write_tiny_model
from tests.near_tie import BF16_GAP, assert_same_or_near_tie

pytestmark = pytest.mark.gpu

GREEDY = SamplingParameters(temperature=0.0)
FAMILIES = [
    ("llama", {"head_dim": 64}),
    ("qwen2", {"head_dim": 128, "hidden_size": 128, "num_attention_heads": 6, "num_key_value_heads": 1}),
    ("qwen3", {"head_dim": 80}),
    ("mistral", {"head_dim": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96}),
]
# Of shapes that the fused decode step serves: every width a multiple of 64.
FUSED = [
    ("llama", {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}),
    ("qwen2", {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}),
    ("qwen3", {"head_dim": 128, "hidden_size": 192, "intermediate_size": 192}),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=128)


def engine(path: Path | str, device: Device = Device.CUDA, **options: object) -> Engine:
    defaults: dict[str, object] = {
        "model": str(path),
        "device": device,
        "max_num_seqs": 16,
        "max_model_len": 512,
        "kv_cache_tokens": 16_384,
        "admission_forecast": False,  # so that small pools do preempt
    }
    return Engine(EngineConfig(**{**defaults, **options}))  # type: ignore[arg-type]


def request(
    name: str, prompt: list[int], max_tokens: int, sampling: SamplingParameters = GREEDY, top: int | None = None
) -> GenerationRequest:
    stop = StopCriteria(max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(name, prompt, sampling, stop, top_logprobs=top)


def requests(count: int, seed: int, longest: int = 150, top: int | None = None) -> list[GenerationRequest]:
    generator = random.Random(seed)
    return [
        request(
            str(index),
            [generator.randrange(3, 500) for _ in range(generator.randint(1, longest))],
            generator.randint(1, 60),
            top=top,
        )
        for index in range(count)
    ]


def compare(
    results: list[GenerationResult], references: list[GenerationResult], least: float = 0.5, gap: float = BF16_GAP
) -> None:
    """Near-ties may end a comparison early, but most tokens must have been compared."""
    agreed = sum(
        assert_same_or_near_tie(result.token_ids, reference, gap)
        for result, reference in zip(results, references, strict=True)
    )
    total = sum(len(reference.token_ids) for reference in references)
    assert agreed >= least * total, f"only {agreed} of {total} tokens could be compared"


@pytest.mark.parametrize(("family", "overrides"), FUSED)
def test_shapes_of_whole_lines_get_the_fused_decode_step(
    tmp_path: Path, family: str, overrides: dict[str, object]
) -> None:
    assert engine(write_tiny_model(tmp_path, family, **overrides)).model.decoder.decodes_fused


@pytest.mark.parametrize(("dtype", "gap", "least"), [("float16", 0.1, 0.5), ("bfloat16", 0.8, 0.1)])
@pytest.mark.parametrize(("family", "overrides"), FAMILIES + FUSED)
def test_tokens_equal_the_cpus_up_to_near_ties(
    tmp_path: Path, family: str, overrides: dict[str, object], dtype: str, gap: float, least: float
) -> None:
    """Against fp32. The weights of these models are large, so that roundings grow: fp16 keeps three bits more than bf16
    and its gap is that much smaller."""
    path = write_tiny_model(tmp_path, family, **overrides)
    references = engine(path, Device.CPU).generate(requests(12, 1, top=10))
    gpu = engine(path, dtype=dtype)
    compare(gpu.generate(requests(12, 1)), references, least, gap)
    gpu.scheduler.check_idle()


@pytest.mark.parametrize(("family", "overrides"), FUSED)
def test_prompts_by_the_kernels_for_many_rows_equal_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, overrides: dict[str, object]
) -> None:
    """Prompts of these models have too few rows for them by themselves."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels need compute capability 9.0")
    calls: list[int] = []
    original = ops_prefill.query_and_kv

    def noted(query: torch.Tensor, *args: object, **options: object) -> None:
        calls.append(query.shape[0])
        original(query, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ops_prefill, "query_and_kv", noted)
    monkeypatch.setattr(layers, "LEAST_QKV_EFFICIENCY", 1e-6)
    monkeypatch.setattr(layers, "LEAST_EFFICIENCY", dict.fromkeys(layers.LEAST_EFFICIENCY, 1e-6))
    path = write_tiny_model(tmp_path, family, **overrides)
    references = engine(path, Device.CPU).generate(requests(12, 1, top=10))
    compare(engine(path, dtype="float16", max_num_batched_tokens=256).generate(requests(12, 1)), references, gap=0.1)
    assert max(calls) > 128


def test_graph_equals_eager(tiny: Path) -> None:
    graph = engine(tiny).generate(requests(16, 2))
    eager = engine(tiny, enforce_eager=True)
    assert isinstance(eager.loop.runner, CudaRunner)
    assert eager.loop.runner.num_graphs == 0
    compare(graph, eager.generate(requests(16, 2, top=5)), least=0.8)


def test_batched_equals_alone(tiny: Path) -> None:
    together = engine(tiny).generate(requests(16, 3))
    alone = engine(tiny)
    compare(together, [alone.generate([item])[0] for item in requests(16, 3, top=5)], least=0.8)


@pytest.mark.parametrize(
    "options",
    [
        {"swap_space_gib": 0.0},
        {"swap_space_gib": 0.25, "preemption_mode": PreemptionMode.SWAP},
        {"swap_space_gib": 0.25, "preemption_mode": PreemptionMode.SWAP, "enable_prefix_caching": False},
        {"swap_space_gib": 0.0005, "preemption_mode": PreemptionMode.SWAP},
    ],
)
def test_preempted_equals_undisturbed(tiny: Path, options: dict[str, object]) -> None:
    """By recomputing, by swapping, and by swapping with a host pool that is soon full; freed blocks are NaN."""
    small = engine(tiny, kv_cache_tokens=512, allocator=AllocatorKind.CHECKED, max_num_batched_tokens=64, **options)
    results = small.generate(requests(24, 4))
    assert small.stats.preemptions > 0
    assert (small.scheduler.counters.swaps > 0) == bool(options["swap_space_gib"])
    small.scheduler.check_idle()
    compare(results, engine(tiny).generate(requests(24, 4, top=5)))


def test_drawn_requests_leave_the_greedy_ones_behind_them_alone(tmp_path: Path) -> None:
    """In a graph whose LM head finds the greedy tokens itself, as it does of large vocabularies."""
    path = write_tiny_model(tmp_path, "llama", head_dim=64, hidden_size=128, intermediate_size=256, vocab_size=49_152)
    shared = engine(path, dtype="float16", enable_prefix_caching=False)
    chain = shared.model.decoder._chain
    assert chain is not None
    assert chain.finds_best
    scored = shared.generate(requests(8, 5, top=5))
    for seed in range(3):
        drawn = SamplingParameters(temperature=1.5, seed=seed)
        for item in shared.generate([request(str(index), [9 + index], 3, drawn) for index in range(16)]):
            assert item.failure is None
        compare(shared.generate(requests(8, 5)), scored, least=0.8)


def test_padded_rows_of_a_graph_touch_nothing(tiny: Path) -> None:
    """Three sequences in the graph of four, with NaN in the scratch block and in every block that nobody owns: the
    tokens are those of eager steps, and the NaN stays where it was but for the scratch block."""
    graph, eager = engine(tiny), engine(tiny, enforce_eager=True)
    runner = graph.loop.runner
    assert isinstance(runner, CudaRunner)
    assert 3 not in decode_buckets(graph.info.max_num_seqs)
    runner._kv_pool.fill_(float("nan"))
    results = graph.generate(requests(3, 12))
    compare(results, eager.generate(requests(3, 12, top=5)), least=0.8)
    assert all(result.failure is None for result in results)
    used = -(-max(len(item.prompt_token_ids) + (item.stop.max_tokens or 0) for item in requests(3, 12)) // 16)
    assert runner._kv_pool[1 + 3 * used :].isnan().all()


def test_blocks_beyond_two_to_the_31_elements_give_the_same_tokens(tiny: Path) -> None:
    """A pool of more than 2^31 elements whose low blocks are all held, against a small one."""
    shape = engine(tiny)
    elements = shape.loop.runner._kv_pool[0].numel()  # type: ignore[attr-defined]
    count = 2**31 // elements + 200
    low = shape.generate(requests(16, 13, top=5))
    del shape
    high = engine(tiny, kv_cache_tokens=16 * count, gpu_memory_utilization=0.9, enable_prefix_caching=False)
    allocator = high.scheduler.tables.allocator
    held = allocator.allocate(2**31 // elements + 1)
    results = high.generate(requests(16, 13, top=5))
    assert [result.token_ids for result in results] == [result.token_ids for result in low]
    allocator.release(held[::-1])
    high.scheduler.check_idle()


def test_end_of_sequence_is_learned_a_step_late_and_costs_nothing_visible(tiny: Path) -> None:
    free = engine(tiny).generate([request("a", [5, 6, 7], 40)])[0].token_ids
    stop_id = free[17]
    item = GenerationRequest("a", [5, 6, 7], GREEDY, StopCriteria(max_tokens=40, token_ids=[stop_id], ignore_eos=True))
    shared = engine(tiny)
    result = shared.generate([item, *requests(5, 6)])[0]
    assert result.token_ids == free[: free.index(stop_id) + 1]
    assert result.candidates[0].finish is not None
    assert result.candidates[0].finish.reason is FinishReason.STOP
    shared.scheduler.check_idle()


def test_sampled_tokens_equal_the_cpus_for_one_seed(tiny: Path) -> None:
    """The noise is the same; a near-tie of the noisy scores may differ, so only most tokens must agree."""
    sampling = SamplingParameters(temperature=0.9, seed=11)
    items = [request(str(index), [9, 8, index + 3], 20, sampling) for index in range(6)]
    cpu = [result.token_ids for result in engine(tiny, Device.CPU).generate(items)]
    gpu = [result.token_ids for result in engine(tiny).generate(items)]
    first = [
        next((index for index, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(cpu, gpu, strict=True)
    ]
    assert sum(first) >= 60, first


def test_mixed_sampling_in_one_batch_equals_each_alone(tiny: Path) -> None:
    kinds = [
        GREEDY,
        SamplingParameters(temperature=0.8, seed=1),
        SamplingParameters(temperature=1.0, top_k=5, seed=2),
        SamplingParameters(temperature=1.0, top_p=0.7, seed=3),
    ]
    items = [request(str(index), [4, 5, index + 3], 8, sampling) for index, sampling in enumerate(kinds)]
    together = [result.token_ids for result in engine(tiny).generate(items)]
    shared = engine(tiny)
    alone = [shared.generate([item])[0].token_ids for item in items]
    agreeing = sum(a[:4] == b[:4] for a, b in zip(together, alone, strict=True))
    assert agreeing >= 3, (together, alone)


def test_edited_draws_equal_the_cpus_beside_plain_ones(tiny: Path) -> None:
    """Bias, penalties and masks, each beside rows without any; a near-tie may end a comparison early."""
    kinds = [
        SamplingParameters(temperature=0.0, repetition_penalty=1.8),
        SamplingParameters(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5),
        SamplingParameters(temperature=0.0, logit_bias={40: 5.0, 41: -100.0}),
        SamplingParameters(temperature=0.0, allowed_token_ids=list(range(100, 130))),
        GREEDY,
        SamplingParameters(temperature=0.9, seed=4, repetition_penalty=1.2),
    ]
    items = [request(str(index), [4, 5, index + 3, 5], 20, sampling) for index, sampling in enumerate(kinds)]
    cpu = [result.token_ids for result in engine(tiny, Device.CPU).generate(items)]
    shared = engine(tiny, dtype="float16")
    for batch in (items, items[:1], items[4:5]):
        gpu = [result.token_ids for result in shared.generate(batch)]
        same = [
            next((index for index, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), 20)
            for x, y in zip(cpu[items.index(batch[0]) :], gpu, strict=False)
        ]
        assert sum(same) >= 10 * len(batch), same
    assert set(shared.generate(items)[3].token_ids) <= set(range(100, 130))
    shared.scheduler.check_idle()


def test_answers_follow_their_grammars_beside_free_ones(tmp_path: Path) -> None:
    path = write_byte_level_model(tmp_path, "qwen3", head_dim=128)
    tokenizer, shared = Tokenizer.load(str(path)), engine(path)
    items = [
        GenerationRequest(
            str(seed),
            [5, 6, seed + 7],
            SamplingParameters(seed=seed, repetition_penalty=1.0 + seed % 2),
            StopCriteria(max_tokens=40),
            grammar=Grammar(GrammarKind.REGEX, "[a-c]{3,9}-[0-9]{2}"),
        )
        for seed in range(5)
    ]
    for result in shared.generate([*items, request("free", [5, 6, 7], 20)])[:5]:
        assert re.fullmatch("[a-c]{3,9}-[0-9]{2}", tokenizer.decode(result.token_ids))
    shared.scheduler.check_idle()


def test_prompt_log_probabilities_are_the_cpus_in_any_chunks(tiny: Path) -> None:
    """In fp16 against fp32, so most of them must be near, and one chunk against many likewise."""
    prompt = [3 + 7 * index % 490 for index in range(100)]
    item = GenerationRequest("a", prompt, GREEDY, StopCriteria(max_tokens=4, ignore_eos=True), prompt_top_logprobs=2)
    beside = requests(6, 5)
    cpu = engine(tiny, Device.CPU).generate([item])[0].prompt_logprobs
    for budget in (16, 256):
        gpu = engine(tiny, dtype="float16", max_num_batched_tokens=budget).generate([item, *beside])[0].prompt_logprobs
        assert [score.token_id for score in gpu] == prompt[1:]
        near = sum(abs(a.logprob - b.logprob) < 0.1 for a, b in zip(cpu, gpu, strict=True))
        assert near >= 80, near


def test_no_device_allocation_after_the_start(tiny: Path) -> None:
    shared = engine(tiny, max_num_batched_tokens=256)
    shared.generate(requests(4, 7))
    before = torch.cuda.memory_stats()["num_device_alloc"]
    shared.generate(requests(40, 8))
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


def test_pool_is_what_the_budget_leaves(tiny: Path) -> None:
    shared = engine(tiny, kv_cache_tokens=None, gpu_memory_utilization=0.5)
    free, total = torch.cuda.mem_get_info()
    assert 0.40 < (total - free) / total <= 0.51
    assert len(shared.generate(requests(3, 9))) == 3


def test_too_little_memory_is_one_line_with_the_numbers(tiny: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"GiB.*gpu_memory_utilization") as caught:
        engine(tiny, kv_cache_tokens=None, gpu_memory_utilization=0.0001)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="kv_cache_tokens"):
        engine(tiny, kv_cache_tokens=10**10)


@pytest.mark.slow
def test_smollm2_equals_the_cpu_up_to_near_ties() -> None:
    try:
        resolve("demo")
    except ConfigurationError as error:
        pytest.skip(f"the demo model is not here: {error}")
    prompts = [[1, 9690, 198, 2683, 359, 253, 5356], [788, 1743, 282, 4649, 314], [4518, 253, 655]]
    items = [request(str(index), prompt, 100, top=5) for index, prompt in enumerate(prompts)]
    references = engine("demo", Device.CPU).generate(items)
    compare(
        engine("demo").generate([request(item.request_id, item.prompt_token_ids, 100) for item in items]),
        references,
        0.2,
    )
