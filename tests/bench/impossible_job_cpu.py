"""The impossible job scaled down to the CPU: the same code, a tiny model."""

from __future__ import annotations

import tempfile
from pathlib import Path

from engine.config import Device, EngineConfig
from tests.bench.impossible_job import Figures, Job
from tests.bench.impossible_job import measure as measure_job
from tests.model.tiny import write_tiny_model

JOB = Job(requests=64, prompt=128, output=32, pool_tokens=7_520, vocabulary=500)


def measure() -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_model(Path(folder), "qwen2", max_position_embeddings=512)
        base = EngineConfig(model=str(path), device=Device.CPU, max_model_len=256, max_num_batched_tokens=256)
        figures, _, same = measure_job(base, JOB)
    wrong = [name for name, equal in same.items() if not equal]
    if wrong:
        raise AssertionError(f"tokens differ from the unlimited pool's: {', '.join(wrong)}")
    return figures
