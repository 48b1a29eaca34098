"""A job that needs a third more KV cache than there is, scaled down: all of it is served, with the very tokens of a
pool without limits, however sequences have to yield."""

from __future__ import annotations

import pytest

from engine.config import Device, EngineConfig
from tests.bench.impossible_job import Job, Run, measure
from tests.model.tiny import write_tiny_model

JOB = Job(requests=64, prompt=32, output=32, pool_tokens=3_008, vocabulary=500, swap_gib=0.0625)  # needs 4,096


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    path = write_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")
    base = EngineConfig(model=str(path), device=Device.CPU, max_model_len=128, max_num_batched_tokens=256)
    return measure(base, JOB, rounds=1)[1]


@pytest.mark.parametrize("row", ["tight", "tight, swap", "tight, recompute", "tight, no swap space"])
def test_all_complete_with_the_tokens_of_an_unlimited_pool(runs: dict[str, Run], row: str) -> None:
    assert len(runs["unlimited"].tokens) == 64
    assert {len(tokens) for tokens in runs["unlimited"].tokens.values()} == {32}
    assert runs[row].tokens == runs["unlimited"].tokens
    fitting = [name for name in runs if name.startswith("fitting")]
    assert fitting
    assert all(runs[name].tokens == runs["unlimited"].tokens and not runs[name].preemptions for name in fitting)


def test_who_yields_how(runs: dict[str, Run]) -> None:
    """Known lengths are admitted without any preemption; without the forecast the modes do what they say."""
    assert runs["unlimited"].preemptions == runs["tight"].preemptions == 0
    swap, recompute, none = (runs[f"tight, {mode}"] for mode in ("swap", "recompute", "no swap space"))
    assert swap.swaps == swap.preemptions > 0
    assert recompute.preemptions > 0 == recompute.swaps
    assert none.preemptions > 0 == none.swaps
