"""The faults of a fault matrix: what is done to a service under load, and what has to hold all the same."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]

from loadtest.drive import Stage
from loadtest.launch import Service
from loadtest.orders import Entry, Manner, Order
from loadtest.records import Arrival

LOAD = 0.4  # of the closed loop's rate, beside a fault
SHARE = 0.3  # of the window, after which the fault happens
BEHIND = 0.5  # seconds in which a request has surely arrived
GIANT_OUTPUT = 8
BESIDE = 2  # times as long as alone it may take beside others: they are LOAD of what the service can do, and of each
# step a long prompt leaves them half at most
BURST_HEIGHT = 10
BURST_SECONDS = 2.0
FROZEN_SECONDS = 3.0
VICTIMS = 4
VICTIM_REQUESTS = 4
DEADLINES = (0.001, 0.005, 0.02, 0.05)
OVERLOAD = frozenset({"QUEUE_FULL", "DEADLINE_UNATTAINABLE", "SHED"})
LATE = frozenset({"DEADLINE_EXCEEDED", "DEADLINE_UNATTAINABLE", "EXPIRED_IN_QUEUE"})
LOST_ENGINE = frozenset({"ENGINE_DIED", "ENGINE_STALLED", "ENGINE_STARTING"})


@dataclass
class Scene:
    """What a fault can reach. `alone`: seconds that what the fault adds to the load takes the idle service, where it
    adds something and that was served. `asked`: when the first request of another manner is sent, if there is one;
    `at`: when the fault has happened (both CLOCK_MONOTONIC). `exit_code`: of a service that was told to end."""

    service: Service
    context: int
    alone: float | None = None
    asked: float = 0.0
    at: float | None = None
    happened: asyncio.Event = field(default_factory=asyncio.Event)
    exit_code: int | None = None

    @property
    def longer(self) -> float:
        """Seconds that everything may take longer for what is added."""
        return BESIDE * (self.alone or 0.0)

    async def until(self, order: Order, share: float) -> None:
        """Waits for that share of the window, which is when the fault happens, and until what is asked otherwise has
        arrived: a probe that came before would find nothing wrong."""
        begin = order.window_begin + share * (order.stop - order.window_begin)
        await asyncio.sleep(max(begin, self.asked + BEHIND) - time.monotonic())
        self.at = time.monotonic()
        self.happened.set()

    def engine(self) -> psutil.Process:
        """The child that holds the model."""
        children = psutil.Process(self.service.pid).children(recursive=True)
        return max(children, key=lambda child: child.memory_info().rss)


Happening = Callable[[Scene, Order], Coroutine[Any, Any, None]]
Change = Callable[[Scene, list[Entry]], list[Entry]]


async def nothing(scene: Scene, order: Order) -> None:
    await scene.until(order, SHARE)


def unchanged(scene: Scene, entries: list[Entry]) -> list[Entry]:
    return entries


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`flags`: of `serve`. `allowed`: reasons (or codes) for which requests of any class may fail; by class in
    `allowed_of`. `ends`: the service is to end, with exit code 0. `recovers`: seconds in which a probe is to be served
    as well as the TTFT limit asks for; None: it need not. `adds`: requests beside the load, which are timed alone
    first: beside it they may take BESIDE times that, and it as much longer. `cut`: classes that may still run when the
    level is cut off."""

    name: str
    flags: tuple[str, ...] = ()
    mix: str = ""
    change: Change = unchanged
    happen: Happening = nothing
    allowed: frozenset[str] = frozenset()
    allowed_of: dict[str, frozenset[str]] = field(default_factory=dict)
    ends: bool = False
    recovers: float | None = 5.0
    adds: Change | None = None
    cut: frozenset[str] = frozenset()

    def stage(self, scene: Scene) -> Stage:
        def changed(entries: list[Entry]) -> list[Entry]:
            found = numbered([*self.change(scene, entries), *self.added(scene, entries)])
            scene.asked = min((entry.at for entry in found if entry.manner is not None), default=0.0)
            return found

        return Stage(change=changed, beside=lambda order: self.happen(scene, order))

    def added(self, scene: Scene, entries: list[Entry]) -> list[Entry]:
        return self.adds(scene, entries) if self.adds is not None and entries else []

    def within(self, scene: Scene) -> float | None:
        """Seconds in which a probe is to be served."""
        return None if self.recovers is None else self.recovers + scene.longer

    def may(self, kind: str) -> frozenset[str]:
        return self.allowed | self.allowed_of.get(kind, frozenset())


# --- what happens to the service -------------------------------------------------------------------------------------


async def kill_engine(scene: Scene, order: Order) -> None:
    await scene.until(order, SHARE)
    scene.engine().kill()


async def freeze_engine(scene: Scene, order: Order) -> None:
    await scene.until(order, SHARE)
    scene.engine().send_signal(signal.SIGSTOP)


async def terminate(scene: Scene, order: Order) -> None:
    await scene.until(order, SHARE)
    scene.exit_code = await scene.service.terminate()


async def lose_clients(scene: Scene, order: Order, *, freeze: bool) -> None:
    command = (sys.executable, "-m", "loadtest.victim", scene.service.address, str(VICTIM_REQUESTS))
    victims = [
        await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        for _ in range(VICTIMS)
    ]
    try:
        for victim in victims:
            assert victim.stdout is not None
            await victim.stdout.readline()
        await scene.until(order, SHARE)
        if freeze:
            for victim in victims:
                victim.send_signal(signal.SIGSTOP)
            await asyncio.sleep(FROZEN_SECONDS)
    finally:
        for victim in victims:
            if victim.returncode is None:
                victim.kill()
            await victim.wait()


async def kill_clients(scene: Scene, order: Order) -> None:
    await lose_clients(scene, order, freeze=False)


async def freeze_clients(scene: Scene, order: Order) -> None:
    await lose_clients(scene, order, freeze=True)


# --- what is asked of it ---------------------------------------------------------------------------------------------


def middle(entries: list[Entry]) -> float:
    """About when the fault is."""
    first, last = entries[0].at, entries[-1].at
    return first + (last - first) * (SHARE + 0.1)


def burst(scene: Scene, entries: list[Entry]) -> list[Entry]:
    """Ten times the arrivals for two seconds: nine more of each."""
    begin = middle(entries)
    return [
        msgspec.structs.replace(
            entry,
            at=entry.at + copy * BURST_SECONDS / BURST_HEIGHT / 10,
            arrival=msgspec.structs.replace(entry.arrival, seed=entry.arrival.seed + copy),
            manner=Manner(kind="burst"),
        )
        for entry in entries
        if begin <= entry.at < begin + BURST_SECONDS
        for copy in range(1, BURST_HEIGHT)
    ]


def giant(scene: Scene, entries: list[Entry]) -> list[Entry]:
    """One prompt that fills the context."""
    length = scene.context - GIANT_OUTPUT - 1
    arrival = Arrival(at=0.0, kind="long-prompt", seed=1, prompt_tokens=length, output_tokens=GIANT_OUTPUT)
    return [Entry(index=0, at=middle(entries), arrival=arrival, manner=Manner(kind="giant"))]


def every(share: int, manner: Callable[[int], Manner]) -> Change:
    """Every so many entries are treated so."""

    def change(scene: Scene, entries: list[Entry]) -> list[Entry]:
        return [
            msgspec.structs.replace(entry, manner=manner(index // share)) if index % share == 0 else entry
            for index, entry in enumerate(entries)
        ]

    return change


def flip(scene: Scene, entries: list[Entry]) -> list[Entry]:
    """From shared prefixes to prompts of the same length that share nothing."""
    at = middle(entries)
    return [
        entry
        if entry.at < at
        else msgspec.structs.replace(
            entry, arrival=msgspec.structs.replace(entry.arrival, kind="long-prompt"), manner=Manner(kind="unshared")
        )
        for entry in entries
    ]


def numbered(entries: list[Entry]) -> list[Entry]:
    """In order of time, with fresh numbers."""
    ordered = sorted(entries, key=lambda entry: entry.at)
    return [msgspec.structs.replace(entry, index=index) for index, entry in enumerate(ordered)]


def slow_reader(index: int) -> Manner:
    return Manner(deaf=True, kind="deaf") if index % 2 else Manner(pause=0.2, kind="slow")


RESTART = ("--restart-engine",)
FAULTS = (
    Fault(name="engine-killed", flags=RESTART, happen=kill_engine, allowed=LOST_ENGINE, recovers=60.0),
    Fault(
        name="engine-frozen",
        flags=(*RESTART, "--hang-timeout", "3", "--heartbeat-timeout", "1"),
        happen=freeze_engine,
        allowed=LOST_ENGINE,
        recovers=60.0,
    ),
    Fault(
        name="sigterm",
        happen=terminate,
        # CANCELLED: what gRPC's core answers to a call that reaches a server just as it closes.
        allowed=frozenset({"DRAINING", "DRAIN_TIMEOUT", "UNAVAILABLE", "CANCELLED"}),
        ends=True,
        recovers=None,
    ),
    Fault(name="burst", adds=burst, allowed=OVERLOAD),
    Fault(name="giant-prompt", adds=giant),
    Fault(name="cancel-storm", change=every(2, lambda index: Manner(cancel_after=1 + index % 6, kind="cancelling"))),
    Fault(name="slow-readers", change=every(3, slow_reader), cut=frozenset({"deaf"})),
    Fault(name="prefix-flip", mix="shared-prefix", change=flip),
    Fault(
        name="deadlines",
        change=every(3, lambda index: Manner(timeout=DEADLINES[index % len(DEADLINES)], kind="deadline")),
        allowed_of={"deadline": LATE},
    ),
    Fault(name="clients-killed", happen=kill_clients, allowed=OVERLOAD),
    Fault(name="clients-frozen", happen=freeze_clients, allowed=OVERLOAD, recovers=10.0),
)
