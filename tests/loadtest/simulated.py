"""Servers of known behaviour in simulated time, as drivers of a search: hours of load in a second."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from loadtest.drive import schedule_of
from loadtest.measure import LevelRows
from loadtest.mix import Form, RequestClass, deal
from loadtest.plan import LevelPlan
from loadtest.records import (
    Arrival,
    ClientReport,
    Level,
    Outcome,
    Phase,
    ReferenceTime,
    ReferenceWork,
    RequestRow,
    TelemetryRow,
)

GAP = 1.0  # seconds between levels
REFERENCE = 0.03  # seconds of it on a machine of speed 1
WORK = ReferenceWork(name="simulated", bytes=1 << 26, numpy="none")
QUIET = ClientReport(client=0, cpu=0.1, lag_p50=0.0001, lag_p99=0.001, lag_max=0.002)


@dataclass
class Job:
    index: int
    intended: float
    tokens: int
    stamps: list[float] = field(default_factory=list)
    admitted: float | None = None


@dataclass
class Drift:
    """A machine whose speed goes up and down around `mean` by up to `by`, slowly and a little faster, and whose
    reference is off by about `noise`."""

    seed: int
    by: float = 0.08
    mean: float = 1.0
    noise: float = 0.05

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._phases = [self._random.uniform(0, 2 * math.pi) for _ in range(2)]

    def speed(self, at: float) -> float:
        waves = zip((0.6, 0.4), (310, 140), self._phases, strict=True)
        moved = sum(share * math.sin(2 * math.pi * at / period + phase) for share, period, phase in waves)
        return self.mean * (1 + self.by * moved)

    def reference(self, at: float) -> ReferenceTime:
        return ReferenceTime(at=at, seconds=REFERENCE / self.speed(at) * self._random.gauss(1.0, self.noise))


@dataclass
class SteppingServer:
    """Continuous batching: a step takes `base + each * n` seconds and gives each of n running requests a token.
    Beyond `seats` they queue; beyond `queue` waiting ones they are refused, which costs a step `refusal` seconds each.
    Capacity is known in closed form. machine: None is one of speed 1 that nobody measured."""

    base: float = 0.010
    each: float = 0.001
    seats: int = 16
    queue: int = 1_000_000
    tokens: tuple[int, int] = (8, 24)  # of a request, equally likely, both ends included
    refusal: float = 0.0
    machine: Drift | None = None
    next_level: int = 0
    now: float = 0.0
    schedules: dict[int, list[Arrival]] = field(default_factory=dict)

    @property
    def mix(self) -> dict[str, RequestClass]:
        return {"short": RequestClass(Form.TOKENS, (4, 12), self.tokens)}

    @property
    def capacity(self) -> float:
        """Requests/s with every seat taken."""
        return self.seats / (self.base + self.each * self.seats) / (sum(self.tokens) / 2)

    async def run(self, plan: LevelPlan) -> LevelRows:
        start = self.now
        window_start, window_end = start + plan.warm_up, start + plan.seconds
        arrivals = self._arrivals(plan)
        supply = deque(self._job(index, start + arrival.at, arrival) for index, arrival in enumerate(arrivals))
        rows, telemetry, end = self._serve(plan, start, supply)
        level = Level(
            index=self.next_level,
            phase=plan.phase,
            group=plan.group,
            process=plan.process,
            start=start,
            window_start=window_start,
            window_end=window_end,
            end=end,
            rate=plan.rate,
            concurrency=plan.concurrency,
            repeat=plan.repeat,
            multiple=plan.multiple,
            seed=plan.seed,
            recovery=end - window_end + self.base + self.each if plan.phase is Phase.RECOVERY else None,
            clients=[QUIET],
            reference=[]
            if self.machine is None
            else list(map(self.machine.reference, range(math.ceil(start), int(end)))),
        )
        self.schedules[level.index] = [Arrival(at=row.intended - start, kind="chat", seed=row.index) for row in rows]
        self.next_level += 1
        self.now = end + GAP
        return LevelRows(level, rows, telemetry)

    def _arrivals(self, plan: LevelPlan) -> list[Arrival]:
        """As a real run has them; but for a closed loop no more than can be served, which saves most of its time."""
        if plan.concurrency is None:
            return schedule_of(plan, self.mix)
        steps = plan.seconds / (self.base + self.each)
        most = plan.concurrency + round(self.seats * steps / self.tokens[0])
        return deal([0.0] * most, self.mix, plan.seed)

    def _serve(
        self, plan: LevelPlan, start: float, supply: deque[Job]
    ) -> tuple[list[RequestRow], list[TelemetryRow], float]:
        stop, cut = start + plan.seconds, start + plan.seconds + plan.drain_limit
        users = plan.concurrency
        coming = supply if users is None else deque(supply.popleft() for _ in range(users))
        waiting: deque[Job] = deque()
        running: list[Job] = []
        rows: list[RequestRow] = []
        telemetry: list[TelemetryRow] = []
        now, steps, generated, refused, told = start, 0, 0, 0, 0
        while now < cut and (coming or waiting or running):
            while coming and coming[0].intended <= now:
                job = coming.popleft()
                if len(waiting) >= self.queue:
                    rows.append(self._refused(job))
                    refused += 1
                else:
                    waiting.append(job)
            while waiting and len(running) < self.seats:
                job = waiting.popleft()
                job.admitted = now
                running.append(job)
            if not running:
                now = min(cut, coming[0].intended) if coming else cut
                continue
            step = self.base + self.each * len(running) + self.refusal * (refused - told)
            now += step / (1.0 if self.machine is None else self.machine.speed(now))
            told = refused
            steps += 1
            generated += len(running)
            for job in running:
                job.stamps.append(now)
            for job in [job for job in running if len(job.stamps) == job.tokens]:
                running.remove(job)
                rows.append(self._row(job, Outcome.COMPLETED, now))
                if users is not None and now < stop:
                    coming.append(replace(supply.popleft(), intended=now))
            if not telemetry or now - telemetry[-1].at >= 1.0:
                telemetry.append(self._telemetry(now, steps, len(running), len(waiting), generated, refused))
        rows += [self._row(job, Outcome.CENSORED, now) for job in (*running, *waiting)]
        return sorted(rows, key=lambda row: row.index), telemetry, now

    def _telemetry(
        self, now: float, steps: int, running: int, waiting: int, generated: int, refused: int
    ) -> TelemetryRow:
        metrics = {
            "steps_total": float(steps),
            "requests_running": float(running),
            "requests_waiting": float(waiting),
            "generated_tokens_total": float(generated),
            "preemptions_total": 0.0,
            "kv_utilization": running / self.seats,
            'requests_ended_total{outcome="QUEUE_FULL"}': float(refused),
        }
        return TelemetryRow(
            at=now, level=self.next_level, metrics=metrics, server_cpu=0.9, server_pss=1 << 30, healthy=True
        )

    def _job(self, index: int, intended: float, arrival: Arrival) -> Job:
        return Job(index, intended, arrival.output_tokens)

    def _refused(self, job: Job) -> RequestRow:
        return RequestRow(
            level=self.next_level,
            index=job.index,
            kind="chat",
            outcome=Outcome.REFUSED,
            intended=round(job.intended, 6),
            sent=round(job.intended, 6),
            finish=round(job.intended + 0.002, 6),
            code="RESOURCE_EXHAUSTED",
            reason="QUEUE_FULL",
        )

    def _row(self, job: Job, outcome: Outcome, finish: float) -> RequestRow:
        return RequestRow(
            level=self.next_level,
            index=job.index,
            kind="chat",
            outcome=outcome,
            intended=round(job.intended, 6),
            sent=round(job.intended, 6),
            accepted=round(job.intended, 6),
            first=round(job.stamps[0], 6) if job.stamps else None,
            finish=round(finish, 6),
            chunk_us=[round((stamp - job.intended) * 1e6) for stamp in job.stamps],
            prompt_tokens=32,
            asked_tokens=job.tokens,
            completion_tokens=job.tokens if outcome is Outcome.COMPLETED else None,
            code="OK" if outcome is Outcome.COMPLETED else "",
        )


def queue_waits(arrivals: list[float], servers: int, service: Callable[[], float]) -> list[tuple[float, float]]:
    """(begin of service, end) of each arrival at a first-come-first-served queue with so many servers."""
    free = [0.0] * servers
    found = []
    for at in arrivals:
        begin = max(at, heapq.heappop(free))
        end = begin + service()
        heapq.heappush(free, end)
        found.append((begin, end))
    return found
