"""Offline throughput: the public workload of nano-vllm and mini-sglang, on random weights of the same shape.

256 prompts of 100 to 1024 random tokens, 100 to 1024 output tokens each, seed 0, temperature 0.6, end-of-sequence
ignored: 133,966 output tokens. All are submitted at once.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

from engine.config import Device, EngineConfig, LoadFormat
from engine.engine import Engine
from engine.types import GenerationRequest, SamplingParameters, StopCriteria
from tests.bench.shapes import write_shape

Figures = dict[str, float]

SEQUENCES = 256
SHORTEST, LONGEST = 100, 1024
SHAPE = "qwen3-0.6b"
ROUNDS = 3


def workload() -> list[GenerationRequest]:
    """Drawn in the order in which the public scripts draw: every prompt, then every output length."""
    generator = random.Random(0)
    prompts = [
        [generator.randint(0, 10_000) for _ in range(generator.randint(SHORTEST, LONGEST))] for _ in range(SEQUENCES)
    ]
    return [
        GenerationRequest(
            str(index),
            prompt,
            SamplingParameters(temperature=0.6),
            StopCriteria(max_tokens=generator.randint(SHORTEST, LONGEST), ignore_eos=True),
        )
        for index, prompt in enumerate(prompts)
    ]


def measure() -> Figures:
    """Output tokens a second from the first submission to the last token, median; every output must be complete."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            EngineConfig(
                model=str(write_shape(Path(folder), SHAPE)),
                load_format=LoadFormat.DUMMY,
                device=Device.CUDA,
                max_num_seqs=SEQUENCES,
                max_model_len=4096,
                max_num_batched_tokens=8192,
                enable_prefix_caching=False,
            )
        )
    requests = workload()
    expected = [request.stop.max_tokens for request in requests]
    rates = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        results = engine.generate(requests)
        seconds = time.perf_counter() - begin
        if [len(result.token_ids) for result in results] != expected:
            raise AssertionError("an output has another length than was asked for")
        rates.append(sum(expected) / seconds)
    return {f"offline_tokens_per_second.{SHAPE}": statistics.median(rates)}
