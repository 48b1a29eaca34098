"""Resident memory over many requests: the pool is claimed at start, so it must stay flat."""

from __future__ import annotations

import random

import psutil

from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import GenerationRequest, SamplingParameters, StopCriteria

REQUESTS = 500
WARM_UP = 50


def measure() -> dict[str, float]:
    """Growth in percent from after WARM_UP requests to after REQUESTS, of mixed lengths."""
    engine = Engine(EngineConfig(max_num_seqs=16, max_model_len=512))
    generator = random.Random(0)
    process = psutil.Process()

    def run(count: int) -> None:
        engine.generate(
            GenerationRequest(
                str(index),
                [generator.randrange(1, 49_000) for _ in range(generator.randint(1, 60))],
                SamplingParameters(temperature=0.0),
                StopCriteria(max_tokens=generator.randint(1, 12), ignore_eos=True),
            )
            for index in range(count)
        )

    run(WARM_UP)
    before = process.memory_info().rss
    run(REQUESTS - WARM_UP)
    after = process.memory_info().rss
    engine.scheduler.check_idle()
    return {"rss_mib": after / 2**20, "rss_growth_500_percent": 100 * (after - before) / before}
