"""`faults`: every fault against a fresh service under load, and what each class of requests saw of it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpc import aio

from loadtest.classify import classify
from loadtest.drive import ServiceDriver, schedule_of
from loadtest.ending import CHANNEL_OPTIONS
from loadtest.faults import BESIDE, FAULTS, LOAD, Fault, Scene
from loadtest.fleet import FleetError, entries_of
from loadtest.judgements import FaultCell, LevelClass
from loadtest.launch import LaunchError
from loadtest.mapping import judge
from loadtest.measure import LevelRows, distribution, measure
from loadtest.mix import RequestBuilder, mix_of
from loadtest.plan import LevelPlan
from loadtest.progress import RunProgress
from loadtest.records import Arrival, Fingerprint, Hypothesis, Limits, Outcome, Phase, RequestRow, RunKind
from loadtest.result import Result
from loadtest.session import Record, SessionOptions, machine_of, session, until_interrupted
from loadtest.target import RECOVERED, TargetError, time_alone, until_recovered, until_served
from octavo.v1 import capacity_pb2, capacity_pb2_grpc

CALIBRATE_SECONDS = 12.0
CALIBRATE_CONCURRENCY = 8
WARM_UP = 2.0
DRAIN_LIMIT = 30.0
ALONE_LIMIT = 600.0  # for what a fault adds
REST_SECONDS = 15.0  # that a fault takes beside its start and its level, until one is over
EMPTY_SECONDS = 3.0
ITSELF_SECONDS = 5.0  # after the last request
ITSELF = f"a probe is as fast as before, {ITSELF_SECONDS:g} s after it all"
ALONE = "an idle service serves what is added"
HYPOTHESES = (
    Hypothesis(id="holds", text="All that has to hold does", measure="cells_broken", relation="==", bound=0.0),
    Hypothesis(id="no-hang", text="Nothing hangs", measure="cells_hung", relation="==", bound=0.0),
)


class NoSuchFaultError(Exception):
    """The message lists those there are."""


@dataclass
class Matrix:
    """The cells so far, and what is shared by all faults."""

    options: SessionOptions
    record: Record
    machine: Fingerprint
    seconds: float
    progress: RunProgress
    rate: float | None
    cells: list[FaultCell] = field(default_factory=list)
    levels: int = 0
    took: list[float] = field(default_factory=list)

    async def run(self, faults: Sequence[Fault]) -> None:
        for index, fault in enumerate(faults):
            begin = time.monotonic()
            found = await self.one(fault, len(faults) - index - 1)
            self.took.append(time.monotonic() - begin)
            self.cells += found
            for cell in found:
                self.progress.say(line(cell))

    async def one(self, fault: Fault, left: int) -> list[FaultCell]:
        """left: how many faults come after it."""
        begin = time.monotonic()
        options = replace(self.options, serve_arguments=[*self.options.serve_arguments, *fault.flags])
        mix = mix_of(fault.mix or options.mix)
        record = replace(self.record, options=options)
        async with session(record, self.machine, mix, self.progress, self.levels) as opened:
            self.record.result = record.result
            driver, service = opened.driver, opened.service
            assert service is not None
            each = self.each(time.monotonic() - begin)
            if not self.took:
                self.progress.say(f"faults: {left + 1}, about {(left + 1) * each / 60:.1f} min")
            if self.rate is None:
                self.rate = await self.calibrate(driver, [each] * (left + 1))
            scene = Scene(service, opened.target.max_context_tokens)
            plan = self.plan(Phase.FAULT, rate=self.rate, label=fault.name)
            if fault.adds is not None:
                self.progress.doing(f"what {fault.name} adds, alone", each, [each] * (left + 1))
                added = fault.added(scene, entries_of(schedule_of(plan, mix), 0.0))
                scene.alone = await alone(driver, scene.context, [entry.arrival for entry in added])
                plan = replace(
                    plan,
                    drain_limit=DRAIN_LIMIT + scene.longer,
                    parameters={} if scene.alone is None else {"alone_seconds": round(scene.alone, 3)},
                )
            self.progress.on_plan(plan, [scene.alone or 0.0, *[each] * left])
            watch = asyncio.create_task(self.recovery(scene, driver, fault))
            part = await driver.run(plan, fault.stage(scene))
            recovery = await watch
            self.levels = driver.next_level
            shared = await after(fault, scene, driver, recovery)
            return cells_of(fault, part, shared, recovery, self.options.limits)

    def each(self, start: float) -> float:
        """About how many seconds a fault takes. start: that the last service took to start."""
        if self.took:
            return statistics.median(self.took)
        return start + WARM_UP + self.seconds + REST_SECONDS

    async def calibrate(self, driver: ServiceDriver, rest: Sequence[float]) -> float:
        plan = self.plan(Phase.CALIBRATE, concurrency=CALIBRATE_CONCURRENCY, window=CALIBRATE_SECONDS)
        self.progress.on_plan(plan, rest)
        part = await driver.run(plan)
        done = sum(row.outcome is Outcome.COMPLETED for row in part.ended)
        return max(0.5, float(f"{LOAD * done / part.seconds:.3g}"))

    async def recovery(self, scene: Scene, driver: ServiceDriver, fault: Fault) -> float | None:
        """Seconds from the fault until a probe's first token came within the limit, with the load still there."""
        await scene.happened.wait()
        within = fault.within(scene)
        if within is None or scene.at is None:
            return None
        ttft = self.options.limits.ttft
        return await until_served(driver.address, driver.vocabulary[:16], ttft, scene.at, scene.at + 2 * within)

    def plan(self, phase: Phase, **more: Any) -> LevelPlan:
        common: dict[str, Any] = {"window": self.seconds, "drain_limit": DRAIN_LIMIT, "seed": self.options.seed}
        return LevelPlan(phase=phase, warm_up=WARM_UP, **{**common, **more})


async def run_faults(
    options: SessionOptions, seconds: float, names: Sequence[str], rate: float | None, progress: RunProgress
) -> Result:
    """seconds: of each fault's window. names: of the faults; all of them if empty. Raises as `session`, and
    NoSuchFaultError."""
    unknown = set(names) - {fault.name for fault in FAULTS}
    if unknown:
        raise NoSuchFaultError(f"no fault {min(unknown)!r}; there are {', '.join(fault.name for fault in FAULTS)}")
    faults = [fault for fault in FAULTS if not names or fault.name in names]
    record = Record(options, RunKind.FAULTS, HYPOTHESES)
    matrix = Matrix(options, record, await machine_of(), seconds, progress, rate)
    notes: list[str] = []
    try:
        await until_interrupted(matrix.run(faults))
    except asyncio.CancelledError:
        notes.append("interrupted")
    except (FleetError, LaunchError, TargetError) as error:
        if record.result is None:
            raise
        notes.append(str(error))
    if record.result is None:
        raise FleetError("interrupted before anything was measured")
    record.result.write_faults(matrix.cells)
    minutes = (time.monotonic() - record.origin) / 60
    judge(record.result, complete=not notes, notes=notes, minutes=minutes)
    return record.result


async def after(fault: Fault, scene: Scene, driver: ServiceDriver, recovery: float | None) -> dict[str, str]:
    """What has to hold for the service as a whole: statement -> what is wrong, empty if it holds."""
    if fault.ends:
        code = scene.exit_code
        return {"the service ends with exit code 0": "" if code == 0 else f"its exit code is {code}"}
    found = {"the service lives": "" if scene.service.process.returncode is None else "its process has ended"}
    if fault.adds is not None:
        found[ALONE] = "" if scene.alone is not None else f"it did not within {ALONE_LIMIT:g} s"
    within = fault.within(scene)
    if within is not None:
        late = recovery is None or recovery > within
        wrong = "" if not late else "no probe was" if recovery is None else f"it took {recovery:.1f} s"
        sums = (
            "" if scene.alone is None else f" ({fault.recovers:g} + {BESIDE} x {scene.alone:.1f}, what is added, alone)"
        )
        found[f"a probe is served within {within:.4g} s{sums}"] = wrong
    if not found["the service lives"]:
        found["nothing is held when all is over"] = await held(driver.address)
        found[ITSELF] = await slower(driver)
    return found


async def alone(driver: ServiceDriver, context: int, arrivals: Sequence[Arrival]) -> float | None:
    """Seconds for these requests, all at once, of a service that does nothing else."""
    if not arrivals:
        return 0.0
    builder = RequestBuilder(driver.vocabulary, context)
    return await time_alone(driver.address, [builder.build(arrival) for arrival in arrivals], ALONE_LIMIT)


async def slower(driver: ServiceDriver) -> str:
    """What is wrong with a service that nobody asks anything any more; empty if it is as fast as at first."""
    if driver.floor is None:
        return "its probes were refused before it all"
    now = time.monotonic()
    back = await until_recovered(driver.address, driver.vocabulary[:16], driver.floor, now, now + ITSELF_SECONDS)
    return "" if back is not None else f"no first token within {RECOVERED:g} of {driver.floor * 1e3:.1f} ms"


async def held(address: str) -> str:
    """What the service still holds some seconds after the last request; empty if nothing."""
    wrong = ""
    async with aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        stub: Any = capacity_pb2_grpc.CapacityServiceStub(channel)
        until = time.monotonic() + EMPTY_SECONDS
        while time.monotonic() < until:
            load = (await stub.GetCapacity(capacity_pb2.GetCapacityRequest(), timeout=5.0)).capacity.load
            if not (load.running_requests or load.queued_requests or load.kv_utilization):
                return ""
            wrong = f"{load.running_requests} running, {load.queued_requests} waiting, KV {load.kv_utilization:.1%}"
            await asyncio.sleep(0.2)
    return wrong


def cells_of(
    fault: Fault, part: LevelRows, shared: dict[str, str], recovery: float | None, limits: Limits
) -> list[FaultCell]:
    """A cell for each class of requests that the level had. What the service is said to have done follows from the
    classes that read what they are sent."""
    rows: defaultdict[str, list[RequestRow]] = defaultdict(list)
    for row in part.rows:
        rows[row.kind].append(row)
    heard = LevelRows(part.level, [row for row in part.rows if row.kind not in fault.cut], part.telemetry)
    level_class, _ = classify(measure([heard], limits))
    return [
        cell_of(fault, kind, rows[kind], part, {**shared, **judged(fault, kind, rows[kind])}, recovery, level_class)
        for kind in sorted(rows)
    ]


def cell_of(
    fault: Fault,
    kind: str,
    rows: Sequence[RequestRow],
    part: LevelRows,
    held_true: dict[str, str],
    recovery: float | None,
    level_class: LevelClass,
) -> FaultCell:
    ttft = distribution([row.ttft for row in rows if row.ttft is not None])
    refusals = [
        row.finish - row.sent
        for row in rows
        if row.outcome is Outcome.REFUSED and row.finish is not None and row.sent is not None
    ]
    refusal = distribution(refusals)
    return FaultCell(
        fault=fault.name,
        kind=kind,
        level=part.level.index,
        outcomes=dict(Counter(how(row) for row in rows)),
        level_class=level_class,
        expected=list(held_true),
        broken=[f"{statement}: {wrong}" for statement, wrong in held_true.items() if wrong],
        recovery=recovery,
        ttft_p99=None if ttft is None else ttft.p99.value,
        refusal_p99=None if refusal is None else refusal.p99.value,
    )


def judged(fault: Fault, kind: str, rows: Sequence[RequestRow]) -> dict[str, str]:
    """What has to hold for one class."""
    allowed = fault.may(kind)
    wrong = Counter(
        how(row) for row in rows if row.outcome in (Outcome.FAILED, Outcome.REFUSED) and how(row) not in allowed
    )
    running = sum(row.outcome is Outcome.CENSORED for row in rows)
    excuse = f" but for {', '.join(sorted(allowed))}" if allowed else ""
    found = {f"nothing fails{excuse}": ", ".join(f"{count} x {name}" for name, count in wrong.items())}
    if kind not in fault.cut:
        found["every request ends"] = f"{running} still ran at the end" if running else ""
    counts = [row for row in rows if row.outcome is Outcome.COMPLETED and not has_all(row)]
    found["every completed one got all its tokens"] = f"{len(counts)} did not" if counts else ""
    return found


def has_all(row: RequestRow) -> bool:
    """Whether a completed request got what the service says that it generated. An end-of-sequence token, with which it
    may end before its length, is counted and not sent."""
    missing = (row.completion_tokens or 0) - row.tokens
    return missing == 0 or (missing == 1 and row.tokens < row.asked_tokens)


def how(row: RequestRow) -> str:
    """How it ended, in one word."""
    if row.outcome in (Outcome.FAILED, Outcome.REFUSED):
        return row.reason or row.code
    return str(row.outcome)


def line(cell: FaultCell) -> str:
    outcomes = ", ".join(f"{name} {count}" for name, count in sorted(cell.outcomes.items()))
    mark = "[green]holds[/green]" if not cell.broken else f"[red]broken: {'; '.join(cell.broken)}[/red]"
    first = "" if cell.ttft_p99 is None else f", first tokens within {cell.ttft_p99:.2f} s (p99)"
    back = first + ("" if cell.recovery is None else f", a probe served after {cell.recovery:.1f} s")
    return f"{cell.fault:>15} {cell.kind:<14} {mark}: {outcomes}{back}"
