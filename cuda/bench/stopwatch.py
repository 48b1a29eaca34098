"""Timing on a GPU: CUDA graphs, events, medians; and what a run prints about the machine it ran on."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
COLD_BYTES = 400e6  # several times the L2 of any card: what a timed loop must touch before it comes back


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`step` as a graph. It runs once before, so that modules are loaded and algorithms picked."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def microseconds(graphs: list[torch.cuda.CUDAGraph], *, seconds: float = 0.03, least: int = 7) -> list[float]:
    """Median time of one replay of each graph, their replays interleaved."""
    for graph in graphs:
        graph.replay()
    first = [_replay(graph) for graph in graphs]
    torch.cuda.synchronize()
    total = sum(start.elapsed_time(end) for start, end in first)
    rounds = max(least, min(100, int(seconds * 1e3 / max(total, 1e-3))))
    timed = [[_replay(graph) for graph in graphs] for _ in range(rounds)]
    torch.cuda.synchronize()
    columns = zip(*timed, strict=True)
    return [1e3 * statistics.median(start.elapsed_time(end) for start, end in column) for column in columns]


def _replay(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    return start, end


def warm_up(seconds: float = 0.5) -> None:
    """Keeps the GPU busy until its clocks are up."""
    a = torch.randn(4096, 4096, device="cuda")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        a @ a
        torch.cuda.synchronize()


def copy_rate() -> float:
    """Bytes a second of a device copy, read plus written: the ceiling that fractions are of. Not in a graph, where a
    copy becomes a node for the copy engine, which is slower."""
    warm_up()
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * source.numel() / statistics.median(times)


def matmul_rate() -> float:
    """Flops a second of a bf16 8192^3 product of random numbers."""
    warm_up()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    (time,) = microseconds([captured(lambda: torch.mm(a, b, out=out))])
    return 2 * 8192**3 / (time * 1e-6)


def machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    gpu, _, driver = _output(query).partition(", ")
    return {"gpu": gpu, "driver": driver, "commit": _output(commit), "torch": torch.__version__}


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
