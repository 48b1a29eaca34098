"""Random lives of whole engines in which requests of every kind come, run beside each other, follow each other in the
same slots and rows, are preempted and cancelled: each gives what it gives alone, log probabilities to the bit."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import AllocatorKind, PreemptionMode
from engine.engine import Engine
from engine.generation_result import GeneratedCandidate, GenerationResult
from engine.types import GenerationRequest, RequestFailed, RequestFinished
from tests.mixture import random_request
from tests.model.tiny import write_byte_level_model
from tests.test_engine import engine

Told = tuple[list[int], list[Any], Any]

TIGHT = {"kv_cache_tokens": 140, "allocator": AllocatorKind.CHECKED}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tight": {**TIGHT, "preemption_mode": PreemptionMode.RECOMPUTE, "max_num_batched_tokens": 24},
    "tight, swap": {**TIGHT, "preemption_mode": PreemptionMode.SWAP, "swap_space_gib": 0.001},
    "invariant": {**TIGHT, "batch_invariant": True, "swap_space_gib": 0.001},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Iterator[Engine]:
    """Has one request at a time, and shares nothing among them."""
    one = engine(tiny, max_num_seqs=4, enable_prefix_caching=False)
    yield one
    one.close()


class Life:
    def __init__(self, engine_: Engine, seed: int) -> None:
        self.engine = engine_
        self.random = random.Random(seed)
        self.requests: dict[str, GenerationRequest] = {}
        self.results: dict[str, GenerationResult] = {}
        self.live: list[str] = []
        self.cancelled: set[str] = set()

    def submit(self) -> None:
        name = str(len(self.requests))
        request = random_request(self.random, name)
        self.requests[name] = request
        self.results[name] = GenerationResult(name, [GeneratedCandidate() for _ in range(request.sampling.n)])
        self.live.append(name)
        self.engine.submit(request)

    def disturb(self) -> None:
        name = self.random.choice(self.live)
        self.cancelled.add(name)
        if self.random.random() < 0.7:
            assert self.engine.cancel(name)
        else:
            self.engine.stop_candidate(name, self.random.randrange(self.requests[name].sampling.n))

    def step(self) -> None:
        for event in self.engine.step().events:
            self.results[event.request_id].add(event)
            if isinstance(event, RequestFinished | RequestFailed):
                self.live.remove(event.request_id)
        if self.live and not self.engine.loop.has_work:
            time.sleep(0.001)  # grammars are being compiled

    def run(self, count: int) -> None:
        while len(self.requests) < count or self.live:
            if len(self.requests) < count and len(self.live) < 14 and self.random.random() < 0.5:
                self.submit()
            if self.live and self.random.random() < 0.03:
                self.disturb()
            self.step()
        self.engine.scheduler.check_idle()


def told(candidate: GeneratedCandidate) -> Told:
    return candidate.token_ids, candidate.logprobs, candidate.finish


@pytest.mark.parametrize("way", ENGINES)
def test_each_gives_what_it_gives_alone(tiny: Path, alone: Engine, way: str) -> None:
    company = engine(tiny, **ENGINES[way])
    life = Life(company, seed=list(ENGINES).index(way))
    life.run(40)
    company.close()
    assert (company.stats.preemptions > 3) == (way != "roomy")
    complete = 0
    for name, request in life.requests.items():
        [expected], result = alone.generate([request]), life.results[name]
        assert (result.failure, expected.failure) == (None, None)
        if name not in life.cancelled:
            complete += 1
            assert [told(one) for one in result.candidates] == [told(one) for one in expected.candidates], request
            assert result.prompt_logprobs == expected.prompt_logprobs
            continue
        for one, whole in zip(result.candidates, expected.candidates, strict=True):
            assert one.token_ids == whole.token_ids[: len(one.token_ids)], request
            assert one.logprobs == whole.logprobs[: len(one.logprobs)]
    assert complete > 25
    assert life.cancelled
