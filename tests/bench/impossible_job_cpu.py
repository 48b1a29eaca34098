"""The impossible job scaled down to the CPU: the same code, a tiny model. And what the native allocator buys there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from engine.config import AllocatorKind, Device, EngineConfig
from engine.engine import Engine
from tests.bench.impossible_job import Figures, Job, run, variants
from tests.bench.impossible_job import measure as measure_job
from tests.model.tiny import write_tiny_model

JOB = Job(requests=64, prompt=96, output=64, pool_tokens=7_504, vocabulary=500, swap_gib=0.0625)


def measure(job: Job = JOB, rounds: int = 2) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_model(Path(folder), "qwen2", max_position_embeddings=512)
        base = EngineConfig(model=str(path), device=Device.CPU, max_model_len=256, max_num_batched_tokens=256)
        figures, _, same = measure_job(base, job, rounds)
        figures |= _allocators(base, job, rounds)
    wrong = [name for name, equal in same.items() if not equal]
    if wrong:
        raise AssertionError(f"tokens differ from the unlimited pool's: {', '.join(wrong)}")
    return figures


def _allocators(base: EngineConfig, job: Job, rounds: int) -> Figures:
    """The tight job with prefix cache and swap, whole engine, by allocator: output tokens a second."""
    figures: Figures = {}
    for kind in (AllocatorKind.NATIVE, AllocatorKind.ORACLE):
        options = variants(job)["tight, swap"] | {"allocator": kind}
        engine = Engine(msgspec.structs.replace(base, **options))  # type: ignore[arg-type]
        rates = [run(engine, job).output_tokens_per_second for _ in range(rounds)]
        figures[f"tight_tokens_per_second.{kind} allocator"] = max(rates)
    return figures
