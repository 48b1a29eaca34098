"""What every run has: a service (its own or one that is there), client processes, a result folder, and an end that
keeps what was measured."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest.drive import ServiceDriver, setups
from loadtest.fingerprint import fingerprint
from loadtest.fleet import Fleet
from loadtest.launch import Service
from loadtest.mix import RequestClass
from loadtest.orders import Transport
from loadtest.progress import RunProgress
from loadtest.records import SCHEMA, Fingerprint, Hypothesis, Limits, ReferenceWork, Run, RunKind, Target
from loadtest.reference import Reference
from loadtest.result import Result
from loadtest.target import answering, describe, vocabulary

DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """`address`: of a service that runs; empty: one is started with `serve_arguments`. `clients`: processes.
    `transport`, `channels`, `streams`: of each client."""

    out: Path
    limits: Limits
    address: str = ""
    metrics_url: str | None = None
    pid: int | None = None
    serve_arguments: Sequence[str] = ()
    mix: str = "chat"
    seed: int = 1
    clients: int = 1
    channels: int = 4
    streams: int = 8
    transport: Transport = Transport.STREAM
    command: Sequence[str] = ()


@dataclass
class Session:
    """A service with clients in front of it, on one clock and into one result."""

    driver: ServiceDriver
    target: Target
    service: Service | None
    ids: list[int]


@dataclass
class Record:
    """The result of a run, made once its first service is described."""

    options: SessionOptions
    kind: RunKind
    hypotheses: Sequence[Hypothesis] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    origin: float = field(default_factory=time.monotonic)
    result: Result | None = None

    def open(self, target: Target, machine: Fingerprint, reference: ReferenceWork | None = None) -> Result:
        if self.result is None:
            options = self.options
            run = Run(
                schema=SCHEMA,
                kind=self.kind,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                started=self.origin,
                command=list(options.command),
                seed=options.seed,
                mix=options.mix,
                limits=options.limits,
                target=target,
                fingerprint=machine,
                hypotheses=list(self.hypotheses),
                parameters={
                    "clients": options.clients,
                    "channels": options.channels,
                    "transport": str(options.transport),
                    **self.parameters,
                },
                reference=reference,
            )
            self.result = Result.create(options.out, run)
        return self.result


@asynccontextmanager
async def session(
    record: Record, machine: Fingerprint, mix: dict[str, RequestClass], progress: RunProgress, first_level: int = 0
) -> AsyncIterator[Session]:
    """Raises TargetError, LaunchError, FleetError, ResultError."""
    options = record.options
    async with AsyncExitStack() as stack:
        address, pid, url = options.address, options.pid, options.metrics_url
        service, command = None, list[str]()
        if url is not None:
            await answering(url)
        if not address:
            progress.doing("starting the service", 20.0)
            service = await stack.enter_async_context(Service(options.serve_arguments))
            address, command, pid, url = service.address, service.command, service.pid, service.metrics_url
        target, ids = await describe(address, command, url), await vocabulary(address)
        reference = None
        if has_reference(record.kind, target, pid):
            reference = await asyncio.to_thread(Reference)
        result = record.open(target, machine, None if reference is None else reference.work)
        clients = setups(
            options.clients,
            address,
            ids,
            target.max_context_tokens or DEFAULT_CONTEXT,
            record.origin,
            transport=options.transport,
            channels=options.channels,
            streams=options.streams,
        )
        fleet = await stack.enter_async_context(Fleet(clients))
        driver = ServiceDriver(
            fleet,
            result,
            mix,
            address,
            ids,
            record.origin,
            metrics_url=url,
            pid=pid,
            next_level=first_level,
            reference=reference,
        )
        yield Session(driver, target, service, ids)


def has_reference(kind: RunKind, target: Target, pid: int | None) -> bool:
    """Whether this machine's speed is the service's: its processes are here and compute on the CPU. Services of a fault
    matrix may be broken, and busy, when a level is over."""
    return kind is not RunKind.FAULTS and pid is not None and target.device == "cpu"


async def machine_of() -> Fingerprint:
    return await asyncio.to_thread(fingerprint)


async def until_interrupted(work: Coroutine[Any, Any, None]) -> None:
    """The first Ctrl-C or SIGTERM cancels the work, which keeps what it has; a second one is the terminal's own."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work)
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
        task.cancel()

    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        await task
    finally:
        for number in numbers:
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(number)
