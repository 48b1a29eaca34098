"""The sections of `make gpu-bench`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import msgspec

from engine.config import Device, EngineConfig, LoadFormat
from tests.bench import gpu_steps, offline
from tests.bench.impossible_job import FULL
from tests.bench.impossible_job import measure as measure_job
from tests.bench.shapes import SHAPES, write_shape

Figures = dict[str, float]

KERNEL_SCRIPTS = ("decode_attention", "prefill_attention", "prefill_linear", "memory_ops")


def sections() -> dict[str, Callable[[], Figures]]:
    steps = {f"steps {name}": lambda name=name: _steps(name) for name in SHAPES}
    kernels = {f"kernels {script}": lambda script=script: _kernels(script) for script in KERNEL_SCRIPTS}
    return {
        **steps,
        **kernels,
        "impossible job": _impossible_job,
        "invariant job": _invariant_job,
        "offline": offline.measure,
        "service": _service,
    }


def _kernels(script: str) -> Figures:
    """Each kernel against its floor and its peers: the script prints the table; here is floor over time."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        path = Path(__file__).resolve().parents[2] / "cuda" / "bench" / f"{script}.py"
        subprocess.run([sys.executable, str(path), "--json", str(result)], check=True)
        rows = json.loads(result.read_text())["rows"]
    return {f"{row.get('cell') or row['task']} of floor": row["floor"] / _own_time(row) for row in rows}


def _own_time(row: dict[str, float]) -> float:
    """decode_attention's rows have no single time of ours: the decode step uses the fused op."""
    return row["pdl+fused"] if "pdl+fused" in row else row["ours"]


def _service() -> Figures:
    """Needs the service's own dependencies, which the other sections do without."""
    import_module("service")  # finds the generated code of proto/
    figures: Figures = import_module("tests.bench.service_path").measure_gpu()
    return figures


def _steps(name: str) -> Figures:
    ceilings = gpu_steps.measure_ceilings()
    figures = gpu_steps.measure(name, ceilings)
    return {"copy_tbps": ceilings.copy / 1e12, "matmul_tflops": ceilings.matmul / 1e12, **figures}


def _base(folder: str) -> EngineConfig:
    return EngineConfig(
        model=str(write_shape(Path(folder), "qwen2.5-1.5b")),
        load_format=LoadFormat.DUMMY,
        device=Device.CUDA,
        max_model_len=4096,
        max_num_batched_tokens=8192,
    )


def _impossible_job() -> Figures:
    """Random weights give near-ties everywhere, and bf16 rounds by batch shape: tokens are compared in tests, on
    fp32, and by the next section."""
    with tempfile.TemporaryDirectory() as folder:
        figures, runs, same = measure_job(_base(folder), FULL)
    for name, run in runs.items():
        print(f"{name}: {run}, tokens as unlimited: {same[name]}")
    return figures


def _invariant_job() -> Figures:
    """The same with `batch_invariant`: what it costs. Raises AssertionError where a tight pool gives other tokens than
    an unlimited one. (Smaller batches are other flags, and may.)"""
    with tempfile.TemporaryDirectory() as folder:
        base = msgspec.structs.replace(_base(folder), batch_invariant=True, max_num_batched_tokens=2048)
        figures, runs, same = measure_job(base, FULL, rounds=1)
    for name, run in runs.items():
        print(f"{name}: {run}, tokens as unlimited: {same[name]}")
    wrong = [name for name in runs if name.startswith("tight") and not same[name]]
    if wrong:
        raise AssertionError(f"tokens differ from the unlimited pool's: {', '.join(wrong)}")
    return {f"invariant_{name}": figure for name, figure in figures.items()}
