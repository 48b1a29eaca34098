"""Host cost of a step with 256 decoding sequences, without a model."""

from __future__ import annotations

import statistics
import time

from engine.config import AllocatorKind
from engine.kv.allocator import make_allocator
from engine.kv.block_table import BlockTables
from engine.schedule.admission import SchedulerLimits
from engine.schedule.plan import StepOutcome
from engine.schedule.residency import Residency
from engine.schedule.scheduler import Scheduler
from engine.types import GenerationRequest, StopCriteria

SEQUENCES = 256
STEPS = 200


def measure() -> dict[str, float]:
    """Microseconds of plan + commit + events, median over steps; with the pure-Python allocator beside it."""
    return {
        "scheduler_step_us_256": _step_microseconds(AllocatorKind.NATIVE),
        "scheduler_step_us_256_oracle": _step_microseconds(AllocatorKind.ORACLE),
    }


def _step_microseconds(kind: AllocatorKind) -> float:
    tables = BlockTables(make_allocator(kind, 40_000), SEQUENCES, 256, 16)
    scheduler = Scheduler(Residency(tables), SchedulerLimits(SEQUENCES, 8192, 4096, 1000, 10**7))
    for index in range(SEQUENCES):
        scheduler.submit(GenerationRequest(str(index), [1] * 30, stop=StopCriteria(max_tokens=1000)), 0.0)
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        plan = scheduler.plan(0.0)
        assert plan is not None
        count = len(plan.sampling)
        scheduler.commit(plan, StepOutcome([5] * count), 0.0)
        scheduler.take_events()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times[10:])
