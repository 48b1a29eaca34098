"""Requests of every kind, coming and going at random on one engine whose LM head finds the greedy tokens: none notices
what used its rows, its slot or its blocks before."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from engine import ops
from engine.config import AllocatorKind, Device, EngineConfig
from engine.engine import Engine
from engine.generation_result import GeneratedCandidate, GenerationResult
from engine.run.cuda_runner import CudaRunner
from engine.types import GenerationRequest, Grammar, GrammarKind, SamplingParameters, StopCriteria
from tests.model.tiny import write_tiny_model
from tests.near_tie import assert_same_or_near_tie

pytestmark = pytest.mark.gpu

GREEDY = SamplingParameters(temperature=0.0)
WAYS = [
    GREEDY,
    SamplingParameters(temperature=1.5),
    SamplingParameters(temperature=1.0, top_k=40),
    GREEDY,
    SamplingParameters(temperature=1.2, top_p=0.9),
    SamplingParameters(temperature=0.9, min_p=0.05),
    GREEDY,
    SamplingParameters(temperature=0.8, top_k=300, top_p=0.8, min_p=0.01),
    SamplingParameters(temperature=0.0, repetition_penalty=1.4),
    GREEDY,
    SamplingParameters(temperature=0.9, presence_penalty=0.7, frequency_penalty=0.4),
    SamplingParameters(temperature=0.0, logit_bias={60: 4.0, 61: -100.0}),
    SamplingParameters(temperature=1.0, allowed_token_ids=list(range(100, 140))),
]
REGEX = Grammar(GrammarKind.REGEX, "[a-c]{3,9}-[0-9]{2}")
POOLS: dict[str, dict[str, object]] = {
    "room for all": {},
    "swap": {"kv_cache_tokens": 1_024, "swap_space_gib": 0.25},
    "no swap space": {"kv_cache_tokens": 1_024},
}
TICKET_BYTES = 16_384 * 4  # kTickets in cuda/gpu/decode_plan.cu
PREFIX = [7 + 11 * index % 480 for index in range(96)]  # that some prompts begin with


@pytest.fixture(scope="module", params=["512 tokens", "49152 tokens"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose vocabulary is padded to 49,152, or is as large: then no tokenizer is there, and no grammar can be."""
    shape = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 49_152}
    path = write_tiny_model(tmp_path_factory.mktemp("llama"), "llama", **shape)
    if request.param == "49152 tokens":
        (path / "tokenizer.json").unlink()
    return path


def engine(path: Path, **options: object) -> Engine:
    defaults: dict[str, object] = {
        "model": str(path),
        "device": Device.CUDA,
        "max_num_seqs": 48,  # more than 32: the head has kernels for up to 8, 16, 32 and 64 rows
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "kv_cache_tokens": 32_768,
        "admission_forecast": False,  # so that small pools do preempt
        "allocator": AllocatorKind.CHECKED,  # freed blocks are NaN
    }
    made = Engine(EngineConfig(**{**defaults, **options}))  # type: ignore[arg-type]
    chain = made.model.decoder._chain
    assert made.config.device is Device.CPU or (chain is not None and chain.finds_best)
    return made


def requests(path: Path, count: int, seed: int) -> list[GenerationRequest]:
    generator = random.Random(seed)
    has_tokenizer = (path / "tokenizer.json").exists()
    vocabulary = 512 if has_tokenizer else 49_152
    items = []
    for index in range(count):
        prompt = PREFIX[: generator.choice([0, 0, 40, 96])]
        prompt = prompt + [generator.randrange(3, vocabulary) for _ in range(generator.randint(1, 70))]
        way = msgspec.structs.replace(WAYS[index % len(WAYS)], seed=index, n=generator.choice([1, 1, 2, 3]))
        grammar = REGEX if has_tokenizer and index % 7 == 3 and not way.allowed_token_ids else None
        items.append(
            GenerationRequest(
                str(index),
                prompt,
                way,
                StopCriteria(max_tokens=generator.randint(1, 60), ignore_eos=grammar is None),
                top_logprobs=generator.choice([None, None, 0, 5]),
                prompt_top_logprobs=1 if index % 9 == 4 else None,
                grammar=grammar,
                priority=generator.choice([0, 0, 0, 1]),
            )
        )
    return items


class Outcome(NamedTuple):
    results: dict[str, GenerationResult]
    cancelled: set[str]  # that had not ended by then


def come_and_go(shared: Engine, items: Iterable[GenerationRequest], seed: int) -> Outcome:
    """Submits them in random order, some steps apart or many at once, and cancels one in ten, most of them running."""
    generator = random.Random(seed)
    waiting = list(items)
    generator.shuffle(waiting)
    outcome = Outcome({item.request_id: _empty(item) for item in waiting}, set())
    to_cancel: list[str] = []
    while waiting or shared.has_work:
        for item in waiting[: generator.choice([0, 0, 0, 0, 1, 1, 2, 40])]:
            waiting.remove(item)
            shared.submit(item)
            if generator.random() < 0.1:
                to_cancel.append(item.request_id)
        if to_cancel and generator.random() < 0.1:
            name = to_cancel.pop(0)
            if shared.cancel(name):
                outcome.cancelled.add(name)
        for event in shared.step().events:
            outcome.results[event.request_id].add(event)
    return outcome


def _empty(item: GenerationRequest) -> GenerationResult:
    return GenerationResult(item.request_id, [GeneratedCandidate() for _ in range(item.sampling.n)])


def assert_nothing_is_left(shared: Engine) -> None:
    """What kernels find zero and must leave so: the head's best, tickets of attention, the sampler's state of rows."""
    runner = shared.loop.runner
    assert isinstance(runner, CudaRunner)
    state_bytes = ops.sample_workspace_bytes(101) - ops.sample_workspace_bytes(100)  # room for lists ends at 64 rows
    assert not runner._best.any()
    assert not runner._workspace[:TICKET_BYTES].any()
    assert not runner._sample_workspace[: state_bytes * shared.info.max_num_seqs].any()
    shared.scheduler.check_idle()


def assert_same_bits(result: GenerationResult, alone: GenerationResult, *, cut_short: bool) -> None:
    """Tokens and log probabilities; of a request that was cancelled, as far as it came."""
    assert result.failure is alone.failure is None
    for ours, theirs in zip(result.candidates, alone.candidates, strict=True):
        count = len(ours.token_ids) if cut_short else len(theirs.token_ids)
        assert ours.token_ids == theirs.token_ids[:count]
        assert repr(ours.logprobs) == repr(theirs.logprobs[:count])  # floats to the bit
    assert cut_short or repr(result.prompt_logprobs) == repr(alone.prompt_logprobs)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, GenerationResult]:
    """What each request of the first workload gets alone; some of them are the first of an engine, too."""
    items = requests(model, 72, seed=1)
    one_by_one = engine(model, batch_invariant=True)
    found = {item.request_id: one_by_one.generate([item])[0] for item in items}
    for item in items[::24]:
        new = engine(model, batch_invariant=True)
        assert_same_bits(new.generate([item])[0], found[item.request_id], cut_short=False)
    return found


@pytest.mark.parametrize("pool", POOLS)
def test_batch_invariant_each_gets_the_bits_that_it_gets_alone(
    model: Path, alone: dict[str, GenerationResult], pool: str
) -> None:
    crowded = engine(model, batch_invariant=True, **POOLS[pool])
    for seed in range(2):
        outcome = come_and_go(crowded, requests(model, 72, seed=1), seed)
        assert outcome.cancelled
        for name, result in outcome.results.items():
            assert_same_bits(result, alone[name], cut_short=name in outcome.cancelled)
        assert_nothing_is_left(crowded)
    assert (crowded.stats.preemptions > 0) == (pool != "room for all")


@pytest.fixture(scope="module")
def truth(model: Path) -> dict[str, GenerationResult]:
    """The CPU's, in fp32, with log probabilities of every token."""
    scored = [msgspec.structs.replace(item, top_logprobs=5) for item in requests(model, 72, seed=2)]
    return {result.request_id: result for result in engine(model, device=Device.CPU).generate(scored)}


@pytest.mark.parametrize("pool", POOLS)
def test_greedy_tokens_are_the_cpus_up_to_near_ties_whatever_else_runs(
    model: Path, truth: dict[str, GenerationResult], pool: str
) -> None:
    """With the prefix cache, in graphs and mixed steps, preempted. Draws, which one rounding may end, mostly agree."""
    items = requests(model, 72, seed=2)
    crowded = engine(model, dtype="float16", **POOLS[pool])
    outcome = come_and_go(crowded, items, seed=0)
    agreed = compared = 0
    for item in items:
        result, expected = outcome.results[item.request_id], truth[item.request_id]
        assert result.failure is expected.failure is None
        if item.request_id not in outcome.cancelled:
            pairs = zip(result.candidates, expected.candidates, strict=True)
            agreed += sum(agreeing(item, *pair) for pair in pairs)
            compared += sum(len(candidate.token_ids) for candidate in expected.candidates)
    assert agreed > 0.7 * compared, f"only {agreed} of {compared} tokens could be compared"
    assert (crowded.stats.preemptions > 0) == (pool != "room for all")
    assert crowded.stats.cached_prompt_tokens > 0
    assert_nothing_is_left(crowded)


def agreeing(item: GenerationRequest, candidate: GeneratedCandidate, truth: GeneratedCandidate) -> int:
    """How many tokens do before the first difference, which of plain greedy ones must be a near-tie."""
    if item.grammar is None and msgspec.structs.replace(item.sampling, seed=None, n=1) == GREEDY:
        return assert_same_or_near_tie(candidate.token_ids, GenerationResult(item.request_id, [truth]), gap=0.1)
    same = [ours == theirs for ours, theirs in zip(candidate.token_ids, truth.token_ids, strict=False)]
    return [*same, False].index(False)
