"""Decode steps and prefill of the three model shapes on a GPU, against the floor of the memory bus and the tensor
cores.

Floors: a decode step reads every weight and the cached K and V once; a prefill does 2 flops a weight and token.
Ceilings are measured on the card in the same run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import Device, EngineConfig, LoadFormat
from engine.engine import Engine
from engine.model.spec import ModelSpec
from engine.run.cuda_runner import CudaRunner
from engine.types import GenerationRequest, SamplingParameters, StopCriteria
from tests.bench.shapes import write_shape

Figures = dict[str, float]

DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 2048
STEPS = 60
SETTLE_SECONDS = 0.25  # prompts leave the SM clock a fifth lower, which takes 0.1 s to come back (LOG.md)
BUSY_BATCHES = (1, 64, 256)


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second of a device copy (read plus written), flops a second of a bf16 8192^3 product of random
    numbers."""

    copy: float
    matmul: float


def measure_ceilings() -> Ceilings:
    return Ceilings(_copy_rate(), _matmul_rate())


def _copy_rate() -> float:
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), 10)


def _matmul_rate() -> float:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return 2 * 8192**3 / _seconds(lambda: torch.mm(a, b, out=out), 10)


def weight_numbers(spec: ModelSpec) -> int:
    """Numbers that a decode step multiplies with: projections of every layer, and the head."""
    layer = spec.hidden_size * (spec.qkv_size + spec.q_size + 3 * spec.intermediate_size)
    return spec.num_layers * layer + spec.vocab_size * spec.hidden_size


def decode_floor(spec: ModelSpec, batch: int, context: int, ceilings: Ceilings) -> float:
    """Seconds: bf16 weights and KV over the copy rate."""
    return 2 * (weight_numbers(spec) + batch * context * spec.kv_elements_per_token) / ceilings.copy


def prefill_floor(spec: ModelSpec, count: int, tokens: int, ceilings: Ceilings) -> float:
    """Seconds: 2 flops a layer weight and token, the head once a sequence, causal attention."""
    head = spec.vocab_size * spec.hidden_size
    linear = 2 * (weight_numbers(spec) - head) * tokens + 2 * head
    attention = 4 * spec.num_layers * spec.q_size * tokens**2 / 2
    return count * (linear + attention) / ceilings.matmul


def measure(name: str, ceilings: Ceilings) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            EngineConfig(
                model=str(write_shape(Path(folder), name)),
                load_format=LoadFormat.DUMMY,
                device=Device.CUDA,
                max_num_seqs=max(DECODE_BATCHES),
                max_model_len=4096,
                max_num_batched_tokens=8192,
                kv_cache_tokens=max(DECODE_BATCHES) * (CONTEXT + 256),
            )
        )
    figures = _prefill(engine, name, 1, ceilings)
    for batch in DECODE_BATCHES:
        figures |= _decode(engine, name, batch, ceilings)
    # Last: it brings the card to its power limit, and clocks take a while to recover.
    return figures | _prefill(engine, name, 64, ceilings)


def _prefill(engine: Engine, name: str, count: int, ceilings: Ceilings) -> Figures:
    seconds = _prefill_seconds(engine, count)
    floor = prefill_floor(engine.model.spec, count, CONTEXT, ceilings)
    return {
        f"prefill_ms.{name}.{count}x{CONTEXT}": 1e3 * seconds,
        f"prefill_floor_ratio.{name}.{count}x{CONTEXT}": floor / seconds,
    }


def _requests(count: int, max_tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            str(index),
            torch.randint(0, 40_000, (CONTEXT,)).tolist(),
            SamplingParameters(temperature=0.0),
            StopCriteria(max_tokens=max_tokens, ignore_eos=True),
        )
        for index in range(count)
    ]


def _prefill_seconds(engine: Engine, count: int) -> float:
    """From submission to the first token of every request, median of three; the host's work included."""
    times = []
    for _ in range(4):
        requests = _requests(count, 1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.generate(requests)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _decode(engine: Engine, name: str, batch: int, ceilings: Ceilings) -> Figures:
    """One step's graph, replayed alone (device time), and the loop's own pace (wall clock) in a steady run, when the
    card has settled. Contexts grow in that run, so the graph is timed on either side of it."""
    # The first to have their prompt decode beside the others' prefill, and must not end before the last step.
    beside_prefill = -(-batch * CONTEXT // engine.config.max_num_batched_tokens)
    for request in _requests(batch, beside_prefill + STEPS + 40):
        engine.submit(request)
    while engine.stats.generated_tokens == 0 or engine.stats.queued_requests or not _decoding(engine, batch):
        engine.step()
    graph = _graph(engine, batch)
    _settle(graph)
    before = _seconds(graph.replay, 40)
    for _ in range(8):
        engine.step()
    # A step returns when the one before it has run, so these times are a step's end to a step's end: no start is in
    # between them, nor is the queue ever empty.
    begin = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    wall = (time.perf_counter() - begin) / STEPS
    if not _decoding(engine, batch):
        raise RuntimeError(f"not {batch} sequences to the end: the replayed graph would read another step's arrays")
    device = (before + _seconds(graph.replay, 40)) / 2
    while engine.has_work:
        engine.step()
    floor = decode_floor(engine.model.spec, batch, CONTEXT, ceilings)
    key = f"{name}.b{batch}.c{CONTEXT}"
    figures = {
        f"decode_ms.{key}": 1e3 * device,
        f"decode_floor_ratio.{key}": floor / device,
        f"decode_wall_ms.{key}": 1e3 * wall,
    }
    if batch in BUSY_BATCHES and name == "qwen2.5-1.5b":
        figures[f"gpu_busy_percent.b{batch}"] = 100 * device / wall
    return figures


def _decoding(engine: Engine, batch: int) -> bool:
    plan = getattr(engine.loop, "_in_flight", None)
    return plan is not None and len(plan[0].scheduled) == batch and plan[0].num_tokens == batch


def _graph(engine: Engine, batch: int) -> torch.cuda.CUDAGraph:
    """The bucket's captured graph: a replay runs on the inputs of the last step."""
    runner = engine.loop.runner
    assert isinstance(runner, CudaRunner)
    return runner.graph_for(batch)


def _settle(graph: torch.cuda.CUDAGraph) -> None:
    begin = time.perf_counter()
    while time.perf_counter() - begin < SETTLE_SECONDS:
        graph.replay()
        torch.cuda.synchronize()


def _seconds(call: object, repeats: int) -> float:
    assert callable(call)
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times) / 1e3
