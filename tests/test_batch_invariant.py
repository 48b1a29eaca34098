"""The engine with `batch_invariant`, whole, on a tiny model: whatever happens around a request, its tokens and log
probabilities are the same bits, and a GPU would compute each of its tokens by the same kernels with the same plan."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from engine.config import AllocatorKind, EngineConfig, PreemptionMode
from engine.engine import Engine
from engine.generation_result import GenerationResult
from engine.loop import PendingStep
from engine.run.buckets import InvariantBuckets, MixedBuckets
from engine.run.inputs import StepArrays, decode_arrays, prefill_arrays
from engine.schedule.plan import StepPlan
from engine.types import FailureKind, GenerationRequest, SamplingParameters, StopCriteria
from tests.model.tiny import write_tiny_model

BUDGET, SEQUENCES = 16, 8
BLOCK_BYTES = 2048  # of the tiny model, in fp32
HOW_TO_YIELD: dict[str, dict[str, object]] = {
    "swap": {"swap_space_gib": 0.001},
    "swap to a pool that is soon full": {"swap_space_gib": 6.5 * BLOCK_BYTES / 2**30},
    "recompute": {"swap_space_gib": 0.001, "preemption_mode": PreemptionMode.RECOMPUTE},
    "no swap space": {},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


def engine(path: Path, **options: object) -> Engine:
    defaults: dict[str, object] = {
        "model": str(path),
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": BUDGET,
        "max_model_len": 96,
        "block_size": 4,
        "admission_forecast": False,  # so that small pools do preempt
        "batch_invariant": True,
    }
    return Engine(EngineConfig(**{**defaults, **options}))  # type: ignore[arg-type]


def requests() -> list[GenerationRequest]:
    """Prompts that share their beginnings, of less and more than a step; every way to draw; log probabilities of some
    outputs and of some prompts."""
    generator = random.Random(3)
    ways = [
        SamplingParameters(temperature=0.0),
        SamplingParameters(temperature=1.1, seed=5),
        SamplingParameters(temperature=0.0, repetition_penalty=1.4),
        SamplingParameters(temperature=0.9, top_p=0.8, seed=9, n=2),
    ]
    return [
        GenerationRequest(
            str(index),
            [*range(3, 3 + generator.choice([1, 15, 16, 17, 33])), 7 + index],
            ways[index % 4],
            StopCriteria(max_tokens=generator.randint(6, 24), ignore_eos=True),
            top_logprobs=(None, 0, 3)[index % 3],
            prompt_top_logprobs=(None, None, None, None, 2)[index % 5],
        )
        for index in range(20)
    ]


class Spy:
    """Notes for each token of each candidate what would compute it on a GPU whose decode kernels all depend on their
    number of rows, and lets the CPU compute it."""

    def __init__(self, engine: Engine, buckets: InvariantBuckets | MixedBuckets) -> None:
        self._runner, self._tables, self._buckets = engine.loop.runner, engine.scheduler.tables, buckets
        self.lookahead = self._runner.lookahead
        self.seen: dict[tuple[str, int, int], set[object]] = {}
        self.decode_rows: set[int] = set()  # of steps behind prompts, before they are padded

    @property
    def moved(self) -> int | None:
        return self._runner.moved

    def launch(self, plan: StepPlan) -> PendingStep:
        if plan.scheduled:
            self._note(plan)
        return self._runner.launch(plan)

    def _note(self, plan: StepPlan) -> None:
        bucket = self._buckets.serving(plan)
        if bucket is None:
            manner: object = shapes(prefill_arrays(plan, self._tables))
        else:
            manner = shapes(decode_arrays(plan, self._tables, bucket))
            self.decode_rows.add(len(plan.scheduled))
        for entry in plan.scheduled:
            for position in range(entry.start, entry.start + entry.count):
                key = (entry.sequence.group.request_id, entry.sequence.candidate, position)
                self.seen.setdefault(key, set()).add((manner, entry.start, entry.count))


def shapes(arrays: StepArrays) -> object:
    """Whatever a kernel or its plan may be chosen by: of a chunk also the lengths, by which its attention is shared
    out. A chunk that is computed again scores no row, which comes after all that it leaves behind."""
    drawn = ("logits_rows", "scored", "targets", "wanted", "sampling")
    fields: dict[str, Any] = {field.name: getattr(arrays, field.name) for field in dataclasses.fields(arrays)}
    found: list[object] = [getattr(value, "shape", value) for name, value in fields.items() if name not in drawn]
    if arrays.logits_rows is not None:
        found += [arrays.context_lens.tolist(), arrays.query_start.tolist(), arrays.prefill_start.tolist()]
    else:
        found.append(arrays.targets.shape)
    return repr(found)


def spied(engine: Engine, buckets: MixedBuckets | None = None) -> Spy:
    spy = Spy(engine, buckets or InvariantBuckets(SEQUENCES, lambda rows, others: rows == others))
    engine.loop.runner = spy
    return spy


def told(result: GenerationResult) -> object:
    """All that a client learns of the outcome, floats to the bit."""
    assert result.failure is None
    return repr([result.candidates, result.prompt_logprobs, result.usage])


@pytest.fixture(scope="module")
def alone(tiny: Path) -> tuple[list[object], dict[tuple[str, int, int], set[object]]]:
    """What each request gives with nobody beside it, and how its tokens were computed."""
    roomy = engine(tiny, kv_cache_tokens=2000)
    spy = spied(roomy)
    results = [told(roomy.generate([item])[0]) for item in requests()]
    assert not roomy.stats.preemptions
    return results, spy.seen


@pytest.mark.parametrize("way", HOW_TO_YIELD)
def test_a_crowd_in_a_tight_pool_is_computed_as_each_alone(
    tiny: Path, alone: tuple[list[object], dict[tuple[str, int, int], set[object]]], way: str
) -> None:
    tight = engine(tiny, kv_cache_tokens=132, allocator=AllocatorKind.CHECKED, **HOW_TO_YIELD[way])
    spy = spied(tight)
    results = [told(result) for result in tight.generate(requests())]
    tight.scheduler.check_idle()
    swaps, preemptions = tight.scheduler.counters.swaps, tight.stats.preemptions
    assert preemptions > 5
    assert swaps == {"swap": preemptions, "swap to a pool that is soon full": swaps}.get(way, 0)
    assert way != "swap to a pool that is soon full" or 0 < swaps < preemptions
    assert results == alone[0]
    assert spy.seen == alone[1]
    assert all(len(manners) == 1 for manners in spy.seen.values())
    assert len(spy.decode_rows) > 2


def test_a_crowd_with_room_for_all_likewise(
    tiny: Path, alone: tuple[list[object], dict[tuple[str, int, int], set[object]]]
) -> None:
    roomy = engine(tiny, kv_cache_tokens=2000)
    spy = spied(roomy)
    assert [told(result) for result in roomy.generate(requests())] == alone[0]
    assert spy.seen == alone[1]
    assert max(spy.decode_rows) == SEQUENCES


def test_the_spy_sees_the_company_in_ordinary_steps(tiny: Path) -> None:
    """Without the mode, tokens are computed now in one manner and now in another."""
    ordinary = engine(tiny, batch_invariant=False, enable_prefix_caching=False, kv_cache_tokens=132)
    spy = spied(ordinary, MixedBuckets([SEQUENCES]))
    ordinary.generate(requests())
    assert sum(len(manners) > 1 for manners in spy.seen.values()) > 50


def test_it_is_off_unless_asked_for_and_then_shares_nothing(tiny: Path) -> None:
    assert not EngineConfig().batch_invariant
    lines: list[str] = []
    config = EngineConfig(model=str(tiny), batch_invariant=True, max_num_batched_tokens=16, max_model_len=64)
    residency = Engine(config, lines.append).scheduler.residency
    assert residency.prefix_index is None
    assert residency.cost.mode is PreemptionMode.SWAP
    assert not residency.shares
    assert [line for line in lines if "batch-invariant" in line] == [
        "batch-invariant: prompts run alone, 16 tokens a step; no prefix cache"
    ]


def test_one_that_outgrows_the_pool_alone_still_ends(tiny: Path) -> None:
    small = engine(tiny, kv_cache_tokens=40)
    item = GenerationRequest("a", [5] * 30, SamplingParameters(temperature=0.0), StopCriteria(ignore_eos=True))
    result = small.generate([item])[0]
    assert len(result.token_ids) == 10
    refused = small.generate([GenerationRequest("b", [5] * 40, SamplingParameters(), StopCriteria())])[0].failure
    assert refused is not None
    assert refused.kind is FailureKind.PROMPT_TOO_LONG
