"""The sections of `make gpu-bench`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from engine.config import Device, EngineConfig, LoadFormat
from tests.bench import gpu_steps
from tests.bench.impossible_job import FULL
from tests.bench.impossible_job import measure as measure_job
from tests.bench.shapes import SHAPES, write_shape

Figures = dict[str, float]


def sections() -> dict[str, Callable[[], Figures]]:
    steps = {f"steps {name}": lambda name=name: _steps(name) for name in SHAPES}
    return {**steps, "impossible job": _impossible_job}


def _steps(name: str) -> Figures:
    ceilings = gpu_steps.measure_ceilings()
    figures = gpu_steps.measure(name, ceilings)
    return {"copy_tbps": ceilings.copy / 1e12, "matmul_tflops": ceilings.matmul / 1e12, **figures}


def _impossible_job() -> Figures:
    """Random weights give near-ties everywhere, and bf16 rounds by batch shape: tokens are compared in tests, on
    fp32."""
    with tempfile.TemporaryDirectory() as folder:
        base = EngineConfig(
            model=str(write_shape(Path(folder), "qwen2.5-1.5b")),
            load_format=LoadFormat.DUMMY,
            device=Device.CUDA,
            max_model_len=4096,
            max_num_batched_tokens=8192,
        )
        figures, runs, same = measure_job(base, FULL)
    for name, run in runs.items():
        print(f"{name}: {run}, tokens as unlimited: {same[name]}")
    return figures
