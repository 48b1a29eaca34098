"""The impossible job: requests that need a third more KV cache than there is, against the engine's own best pace.

64 requests of 2048-token prompts and 256 output tokens need 147,456 tokens; the pool holds 108,000. Every run must give
the tokens of an unlimited pool; the loss is against the best pace over batch sizes that fit that pool without
preemption.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine.config import EngineConfig, PreemptionMode
from engine.engine import Engine
from engine.types import GenerationRequest, RequestFailed, SamplingParameters, StopCriteria, TokensGenerated

Figures = dict[str, float]
MakeEngine = Callable[..., Engine]


@dataclass(frozen=True)
class Job:
    """`pool_tokens` is about 73 % of what the requests need together."""

    requests: int
    prompt: int
    output: int
    pool_tokens: int
    vocabulary: int
    swap_gib: float = 4.0

    def make(self, seed: int = 0) -> list[GenerationRequest]:
        generator = random.Random(seed)
        return [
            GenerationRequest(
                str(index),
                [generator.randrange(3, self.vocabulary) for _ in range(self.prompt)],
                SamplingParameters(temperature=0.0),
                StopCriteria(max_tokens=self.output, ignore_eos=True),
            )
            for index in range(self.requests)
        ]

    @property
    def fitting(self) -> int:
        """Sequences that fit the pool at their full length."""
        return self.pool_tokens // (self.prompt + self.output)


FULL = Job(requests=64, prompt=2048, output=256, pool_tokens=108_000, vocabulary=40_000)


@dataclass
class Run:
    seconds: float
    output_tokens_per_second: float
    preemptions: int
    swaps: int
    p99_stall_seconds: float
    tokens: dict[str, list[int]] = field(repr=False)


def run(engine: Engine, job: Job) -> Run:
    """The job to its end. A stall is the longest wait between two tokens of one request."""
    before = (engine.stats.preemptions, engine.scheduler.counters.swaps)
    tokens: dict[str, list[int]] = {str(index): [] for index in range(job.requests)}
    last: dict[str, float] = {}
    stalls: dict[str, float] = {}
    requests = job.make()
    begin = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        events = engine.step().events
        now = time.perf_counter()
        for event in events:
            if isinstance(event, RequestFailed):
                raise RuntimeError(f"request {event.request_id} failed: {event.message}")
            if isinstance(event, TokensGenerated):
                tokens[event.request_id] += event.token_ids
                stalls[event.request_id] = max(stalls.get(event.request_id, 0.0), now - last.get(event.request_id, now))
                last[event.request_id] = now
    seconds = time.perf_counter() - begin
    engine.scheduler.check_idle()
    ordered = sorted(stalls.values())
    return Run(
        seconds=seconds,
        output_tokens_per_second=job.requests * job.output / seconds,
        preemptions=engine.stats.preemptions - before[0],
        swaps=engine.scheduler.counters.swaps - before[1],
        p99_stall_seconds=ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        tokens=tokens,
    )


def variants(job: Job) -> dict[str, dict[str, object]]:
    """Engine options of each row of the table."""
    tight = {"kv_cache_tokens": job.pool_tokens, "max_num_seqs": job.requests}
    rows: dict[str, dict[str, object]] = {
        "unlimited": {"kv_cache_tokens": job.requests * (job.prompt + job.output + 16), "max_num_seqs": job.requests}
    }
    for batch in sorted({job.fitting, 3 * job.fitting // 4, job.fitting // 2}):
        rows[f"fitting {batch}"] = {"kv_cache_tokens": job.pool_tokens, "max_num_seqs": batch}
    unforeseen = {**tight, "admission_forecast": False}
    rows["tight"] = {**tight, "swap_space_gib": job.swap_gib}
    rows["tight, swap"] = {**unforeseen, "swap_space_gib": job.swap_gib, "preemption_mode": PreemptionMode.SWAP}
    rows["tight, recompute"] = {
        **unforeseen,
        "swap_space_gib": job.swap_gib,
        "preemption_mode": PreemptionMode.RECOMPUTE,
    }
    rows["tight, no swap space"] = unforeseen
    return rows


def measure(base: EngineConfig, job: Job, rounds: int = 2) -> tuple[Figures, dict[str, Run], dict[str, bool]]:
    """Figures for the result file, the best run of each row, and whether its tokens equal the unlimited pool's."""
    runs: dict[str, Run] = {}
    for name, options in variants(job).items():
        engine = Engine(msgspec.structs.replace(base, enable_prefix_caching=False, **options))  # type: ignore[arg-type]
        run(engine, Job(2, min(64, job.prompt), job.output, job.pool_tokens, job.vocabulary))  # warms up
        results = [run(engine, job) for _ in range(rounds)]
        runs[name] = min(results, key=lambda result: result.seconds)
        del engine
    best = max(result.output_tokens_per_second for name, result in runs.items() if name.startswith("fitting"))
    figures = {f"tight_tokens_per_second.{name}": result.output_tokens_per_second for name, result in runs.items()}
    for name, result in runs.items():
        figures[f"tight_preemptions.{name}"] = result.preemptions
        figures[f"tight_p99_stall_ms.{name}"] = 1e3 * result.p99_stall_seconds
        if name.startswith("tight"):
            figure = ".".join(["tight_loss_percent", *name.split(", ")[1:]])
            figures[figure] = 100 * (1 - result.output_tokens_per_second / best)
    same = {name: result.tokens == runs["unlimited"].tokens for name, result in runs.items()}
    return figures, runs, same
