"""Whole results without a service: what a map of a simulated server leaves behind. `python -m tests.loadtest.synthetic
FOLDER` writes one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from loadtest.judge import judge_levels, summarize
from loadtest.judgements import Verdict
from loadtest.measure import LevelRows
from loadtest.records import SCHEMA, Fingerprint, Hypothesis, Limits, ReferenceWork, Run, RunKind, Target
from loadtest.result import Result
from loadtest.search import Search, Settings
from tests.loadtest.simulated import WORK, SteppingServer

LIMITS = Limits(ttft=1.0, tpot=0.1)
FAST = Settings(calibrate=10.0, warm_up=10.0, window=40.0, beyond=20.0)
HYPOTHESES = [
    Hypothesis(id="fast-refusal", text="Refusals are fast.", measure="refusal_p99_at_3", relation="<=", bound=0.05),
    Hypothesis(id="slow-queue", text="The queue is short.", measure="ttft_p99_at_3", relation="<=", bound=0.01),
]


def run_record(seed: int = 1, reference: ReferenceWork | None = None) -> Run:
    fingerprint = Fingerprint(
        cpu="simulated",
        cores=2,
        memory=1 << 34,
        memory_bandwidth=1e10,
        kernel="none",
        python="3.11",
        versions={"grpcio": "none"},
        commit="none",
        load_average=0.0,
    )
    return Run(
        schema=SCHEMA,
        kind=RunKind.MAP,
        created="2026-11-29T00:00:00Z",
        started=0.0,
        command=["map"],
        seed=seed,
        mix="chat",
        limits=LIMITS,
        target=Target(address="simulated", model="stepping"),
        fingerprint=fingerprint,
        hypotheses=HYPOTHESES,
        reference=reference,
    )


async def synthetic_map(
    folder: Path, server: SteppingServer | None = None, seed: int = 1, settings: Settings = FAST
) -> Result:
    """A complete map in a new folder, judged."""
    server = server or SteppingServer(queue=20)
    result = Result.create(folder, run_record(seed, None if server.machine is None else WORK))

    def keep(part: LevelRows, verdict: Verdict) -> None:
        level = part.level
        schedule = result.write_schedule(level.index, server.schedules[level.index])
        fields = {name: getattr(level, name) for name in level.__struct_fields__}
        result.append_level(type(level)(**{**fields, "schedule": schedule}), part.rows, part.telemetry)

    search = Search(server, LIMITS, settings, seed, keep)
    await search.map()
    parts = sorted((part for parts in search.parts.values() for part in parts), key=lambda part: part.level.index)
    verdicts = judge_levels(parts, LIMITS)
    result.write_judgement(verdicts, summarize(result.run, verdicts, complete=True, notes=search.notes))
    return result


if __name__ == "__main__":
    print(asyncio.run(synthetic_map(Path(sys.argv[1]))).summary)
