"""A system prompt of 2000 tokens that every user shares: time to first token with and without the prefix cache."""

from __future__ import annotations

import random
import statistics
import time

from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import GenerationRequest, SamplingParameters, StopCriteria, TokensGenerated

PREFIX = 2000
QUESTION = 20
USERS = 64


def measure() -> dict[str, float]:
    """Seconds of a cold prompt and of hits (medians), one request at a time; raises if the tokens differ."""
    generator = random.Random(0)
    prefix = [generator.randrange(3, 40_000) for _ in range(PREFIX)]
    prompts = [prefix + [generator.randrange(3, 40_000) for _ in range(QUESTION)] for _ in range(USERS)]
    cold = Engine(EngineConfig(max_num_seqs=4, max_model_len=2304, enable_prefix_caching=False))
    expected = [_first_tokens(cold, prompt) for prompt in prompts[:3]]
    cached = Engine(EngineConfig(max_num_seqs=4, max_model_len=2304))
    _first_tokens(cached, prompts[-1])
    hits = [_first_tokens(cached, prompt) for prompt in prompts[:-1]]
    if [tokens for _, tokens in hits[:3]] != [tokens for _, tokens in expected]:
        raise AssertionError("tokens with a prefix hit differ from a cold run's")
    cold_seconds = statistics.median(seconds for seconds, _ in expected)
    hit_seconds = statistics.median(seconds for seconds, _ in hits)
    return {
        "prefix_cold_ttft_ms": 1e3 * cold_seconds,
        "prefix_hit_ttft_ms": 1e3 * hit_seconds,
        "prefix_hit_ttft_ratio": cold_seconds / hit_seconds,
    }


def _first_tokens(engine: Engine, prompt: list[int]) -> tuple[float, list[int]]:
    """Time to the first token, and the first eight tokens."""
    stop = StopCriteria(max_tokens=8, ignore_eos=True)
    begin = time.perf_counter()
    engine.submit(GenerationRequest("a", prompt, SamplingParameters(temperature=0.0), stop))
    first, tokens = 0.0, []
    while engine.has_work:
        for event in engine.step().events:
            if isinstance(event, TokensGenerated):
                first = first or time.perf_counter() - begin
                tokens += event.token_ids
    return first, tokens
