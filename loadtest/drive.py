"""Runs levels against a real service: schedules, client processes, telemetry and probes of one run."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
from grpc import aio

from loadtest.arrivals import flat, stretched, times
from loadtest.ending import CHANNEL_OPTIONS
from loadtest.fleet import Fleet, Interrupted, entries_of
from loadtest.measure import LevelRows
from loadtest.mix import APART, RequestClass, deal
from loadtest.orders import Entry, Order, Played, Setup, Transport
from loadtest.plan import LevelPlan
from loadtest.records import Arrival, ArrivalProcess, Level, Phase, ReferenceTime
from loadtest.reference import Reference
from loadtest.result import Result
from loadtest.target import probe, until_recovered
from loadtest.telemetry import Telemetry
from loadtest.thermal import ThermalGate

LEAD = 0.3  # seconds for an order to reach every client
CLOSED_RATE = 2000  # requests/s that a closed loop is given entries for
PROBES = 7


async def nothing(order: Order) -> None:
    """Happens beside most levels."""


@dataclass(frozen=True)
class Stage:
    """`change`: of the entries before they are dealt out. `beside`: runs while the level does, and is awaited."""

    change: Callable[[list[Entry]], list[Entry]] = lambda entries: entries
    beside: Callable[[Order], Coroutine[Any, Any, None]] = nothing


@dataclass
class ServiceDriver:
    """`result` gets every level as soon as it has ended, also one that was interrupted. `pid`: of the service, where
    its processes can be seen. `cap`: most requests in flight of all clients. `reference`: None where the machine's
    speed says nothing of the service's."""

    fleet: Fleet
    result: Result
    mix: dict[str, RequestClass]
    address: str
    vocabulary: Sequence[int]
    origin: float
    metrics_url: str | None = None
    pid: int | None = None
    cap: int = 20_000
    next_level: int = 0
    floor: float | None = None
    gate: ThermalGate = field(default_factory=ThermalGate)
    reference: Reference | None = None
    interrupted: bool = field(default=False, init=False)

    async def run(self, plan: LevelPlan, stage: Stage | None = None) -> LevelRows:
        """stage: what happens beside the load. Raises CancelledError after an interrupted level was kept."""
        stage = stage or Stage()
        if self.floor is None:
            self.floor = await idle_floor(self.address, self.vocabulary)
        cooled = await self.gate.cool()
        index, self.next_level = self.next_level, self.next_level + 1
        arrivals = schedule_of(plan, self.mix)
        begin = time.monotonic() + LEAD
        order = Order(
            level=index,
            entries=stage.change(entries_of(arrivals, begin)),
            begin=begin,
            window_begin=begin + plan.warm_up,
            stop=begin + plan.seconds,
            cut=begin + plan.seconds + plan.drain_limit,
            cap=self.cap,
            concurrency=plan.concurrency,
        )
        schedule = self.result.write_schedule(index, arrivals) if plan.concurrency is None else ""
        async with (
            Telemetry(index, self.origin, self.address, self.metrics_url, self.pid) as telemetry,
            self._speeds() as times,
        ):
            beside = asyncio.create_task(stage.beside(order))
            try:
                played, recovery = await self._play(plan, order)
                await beside
            finally:
                beside.cancel()
        self.gate.note(telemetry.rows)
        level = msgspec.structs.replace(self._level(plan, order, schedule, played, recovery), reference=times)
        if cooled >= 1.0:
            level = msgspec.structs.replace(level, parameters={**level.parameters, "cooled_seconds": round(cooled, 1)})
        rows = sorted((row for part in played for row in part.rows), key=lambda row: row.intended)
        if level.window_end > level.window_start:  # else it was interrupted before there was anything to judge
            self.result.append_level(level, rows, telemetry.rows)
        if self.interrupted:
            raise asyncio.CancelledError
        return LevelRows(level, rows, telemetry.rows)

    def _speeds(self) -> AbstractAsyncContextManager[list[ReferenceTime]]:
        return nullcontext([]) if self.reference is None else self.reference.watch(self.origin)

    async def _play(self, plan: LevelPlan, order: Order) -> tuple[list[Played], float | None]:
        probing = asyncio.create_task(self._recovery(order)) if plan.probes else None
        try:
            played = await self.fleet.play(order)
            return played, await probing if probing is not None else None
        except Interrupted as interrupted:
            self.interrupted = True
            if probing is not None:
                probing.cancel()
            return interrupted.played, None

    async def _recovery(self, order: Order) -> float | None:
        assert self.floor is not None
        await asyncio.sleep(order.stop - time.monotonic())
        return await until_recovered(self.address, self.vocabulary[:16], self.floor, order.stop, order.cut)

    def _level(
        self, plan: LevelPlan, order: Order, schedule: str, played: Sequence[Played], recovery: float | None
    ) -> Level:
        now = time.monotonic()
        stop = min(order.stop, now)

        def clock(at: float) -> float:
            return round(at - self.origin, 6)

        ends = [row.finish for part in played for row in part.rows if row.finish is not None]
        return Level(
            index=order.level,
            phase=plan.phase,
            group=plan.group,
            process=plan.process,
            start=clock(order.begin),
            window_start=clock(min(order.window_begin, stop)),
            window_end=clock(stop),
            end=max([clock(stop), *ends]),
            rate=plan.rate,
            concurrency=plan.concurrency,
            repeat=plan.repeat,
            multiple=plan.multiple,
            seed=plan.seed,
            schedule=schedule,
            interrupted=self.interrupted,
            recovery=recovery,
            clients=[part.report for part in played],
            fault=plan.label if plan.phase is Phase.FAULT else "",
            parameters={**plan.parameters, **({"probe_floor": self.floor} if plan.probes else {})},
        )


def schedule_of(plan: LevelPlan, mix: dict[str, RequestClass]) -> list[Arrival]:
    """The arrivals of a level, by its plan alone. Warm-up and window have their exact numbers of arrivals each, and
    draws of their own: windows of two rates and one seed begin alike, however many arrivals came before them. A closed
    loop's users take as many of theirs as they get to, whatever their times say."""
    if plan.rate is None:
        return deal([0.0] * int(CLOSED_RATE * plan.seconds), mix, plan.seed, plan.words)
    warm = _stretch(plan, mix, plan.warm_up, plan.seed + 1)
    window = _stretch(plan, mix, plan.window, plan.seed)
    return [*warm, *(msgspec.structs.replace(arrival, at=round(plan.warm_up + arrival.at, 6)) for arrival in window)]


def _stretch(plan: LevelPlan, mix: dict[str, RequestClass], seconds: float, seed: int) -> list[Arrival]:
    """The arrivals of so many seconds at the plan's rate."""
    assert plan.rate is not None
    if plan.process is ArrivalProcess.REPLAY:
        count = round(plan.rate * seconds)
        begin = random.Random(seed).randrange(len(plan.trace))
        found = stretched(plan.trace, count, seconds, begin)
        first = random.Random(f"{seed}/{plan.words}").getrandbits(48)
        return [msgspec.structs.replace(arrival, seed=first + index * APART) for index, arrival in enumerate(found)]
    at = times(flat(plan.rate, seconds), plan.process, random.Random(seed), cv=plan.cv, size=plan.size)
    return deal(at, mix, seed, plan.words)


async def idle_floor(address: str, ids: Sequence[int]) -> float | None:
    """Median time to the first token of probes of an idle service; None if it refuses them."""
    async with aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        took = [await probe(channel, ids[:16]) for _ in range(PROBES)]
    known = [seconds for seconds in took if seconds is not None]
    return statistics.median(known) if known else None


def setups(
    count: int,
    address: str,
    vocabulary: Sequence[int],
    context: int,
    origin: float,
    *,
    transport: Transport = Transport.STREAM,
    channels: int = 4,
    streams: int = 8,
    stamps: bool = False,
    cores: Sequence[int] = (),
) -> list[Setup]:
    """Of so many client processes. channels, streams: of each."""
    return [
        Setup(
            client=client,
            address=address,
            channels=channels,
            transport=transport,
            streams=streams,
            vocabulary=list(vocabulary),
            context=context,
            origin=origin,
            stamps=stamps,
            cores=list(cores),
        )
        for client in range(count)
    ]
