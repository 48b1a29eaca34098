"""Abuse of a server process by many clients at once: `python -m tests.service.abuse [SECONDS [OVERLOAD]]`.

Clients that never read, are killed, are frozen, send garbage, cancel at random tokens, and well-behaved ones, two
hundred together. Those that can be refused try again after a pause that keeps OVERLOAD (3.5) tries for each that is
taken; the others come on top. A prober asks for health and for work all
the while: its times are the figures. It has a process of its own, and all others, which in life have machines of their
own, are nice to it and to the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import psutil  # type: ignore[import-untyped]
from grpc import aio

import service  # noqa: F401  # puts proto/ on the path
from octavo.v1 import capacity_pb2, capacity_pb2_grpc, generation_pb2, generation_pb2_grpc
from service.client import error_info
from service.health import GENERATION_SERVICE, HealthMessages
from tests.service.process import ROOT, Process, server_process

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
UNREADING = [*OWN_CONNECTION, ("grpc.http2.bdp_probe", 0)]
CALL_SECONDS = 20.0
NICE = ("nice", "-n", "10")
WARM_SECONDS = 3.0
OVERLOAD = 3.5
PACE_SECONDS = 0.5
PACED_CLIENTS = 60  # of each of the two kinds


@dataclass
class Report:
    """Times in seconds, memory in bytes. outcomes: how the calls of well-behaved clients and of the prober ended.
    tries, taken: of all clients that pace themselves. started: when the load had begun. Times and memory are taken from
    some seconds after it, when two hundred clients have connected, to their end."""

    duration: float
    started: float = field(default_factory=time.monotonic)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong_texts: int = 0
    tries: int = 0
    taken: int = 0
    refusal_seconds: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    health_seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @property
    def measures(self) -> bool:
        return WARM_SECONDS < time.monotonic() - self.started < self.duration

    @property
    def memory_growth(self) -> float:
        """Of the second half's highest over the first half's, as a share."""
        half = len(self.memory) // 2
        return max(self.memory[half:]) / max(self.memory[:half]) - 1.0

    @property
    def overload(self) -> float:
        """Requests over requests that were not refused."""
        return self.tries / max(1, self.taken)

    def figures(self) -> dict[str, float]:
        return {
            "abuse_seconds": self.duration,
            "abuse_overload": self.overload,
            "abuse_requests_per_second": self.tries / self.duration,
            "abuse_refusals": len(self.refusal_seconds),
            "abuse_refusal_p50_ms": percentile(self.refusal_seconds, 50) * 1e3,
            "abuse_refusal_p99_ms": percentile(self.refusal_seconds, 99) * 1e3,
            "abuse_first_token_p99_ms": percentile(self.first_token_seconds, 99) * 1e3,
            "abuse_health_checks": len(self.health_seconds),
            "abuse_health_p99_ms": percentile(self.health_seconds, 99) * 1e3,
            "abuse_memory_growth_percent": 100 * self.memory_growth,
        }

    def check(self) -> None:
        """What must hold however fast the machine is."""
        assert set(self.outcomes) == {"OK", "QUEUE_FULL", "SERVING"}, f"{self.outcomes}: untyped, or not healthy"
        assert self.wrong_texts == 0
        assert 0 < self.taken < self.tries, "no overload, no proof"
        assert self.memory_growth < 0.05


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)] if values else 0.0


def request(text: str, max_tokens: int | None = None) -> generation_pb2.StartGeneration:
    return generation_pb2.StartGeneration(text=text, stop=generation_pb2.StopCriteria(max_tokens=max_tokens))


def stub_of(channel: aio.Channel) -> Any:
    return generation_pb2_grpc.GenerationServiceStub(channel)


@dataclass
class Pace:
    """How long clients wait after a refusal: so that there are `overload` tries for each one that is taken."""

    overload: float
    pause: float = 0.2
    tries: int = 0
    taken: int = 0

    def note(self, taken: bool) -> None:
        self.tries += 1
        self.taken += taken

    async def keep(self) -> None:
        tries, taken = 0, 0
        while True:
            await asyncio.sleep(PACE_SECONDS)
            ratio = (self.tries - tries) / max(1, self.taken - taken)
            self.pause = min(5.0, max(0.01, self.pause * min(1.5, max(0.7, ratio / self.overload))))
            tries, taken = self.tries, self.taken

    async def begun(self) -> None:
        """Tells the parent once there were as many tries as clients; on a busy machine that takes a while."""
        async with asyncio.timeout(CALL_SECONDS):
            while self.tries < PACED_CLIENTS:
                await asyncio.sleep(0.02)
        print("begun", flush=True)

    def pauses(self) -> float:
        return self.pause * random.uniform(0.5, 1.5)


# --- attackers, in a process of their own ----------------------------------------------------------------------------


async def never_read(address: str, stop: asyncio.Event) -> None:
    while not stop.is_set():
        async with aio.insecure_channel(address, UNREADING) as channel:
            call = stub_of(channel).Generate()
            with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
                for index in range(4):
                    await call.write(generation_pb2.GenerateRequest(start=request(f"unread {index}")))
                await wait(stop, random.uniform(1, 4))
            call.cancel()


async def cancel_at_random(address: str, stop: asyncio.Event, pace: Pace) -> None:
    async with aio.insecure_channel(address, OWN_CONNECTION) as channel:
        while not stop.is_set():
            call = stub_of(channel).GenerateStream(generation_pb2.GenerateStreamRequest(start=request("cancelled")))
            taken = True
            try:
                for _ in range(random.randrange(5)):
                    await call.read()
            except aio.AioRpcError:
                taken = False
            call.cancel()
            pace.note(taken)
            await wait(stop, random.uniform(0, 0.1) if taken else pace.pauses())


async def send_garbage(address: str, stop: asyncio.Event) -> None:
    host, port = address.rsplit(":", 1)
    async with aio.insecure_channel(address, OWN_CONNECTION) as channel:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(random.choice([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"]))
                writer.write(random.randbytes(2000))
                await wait(stop, 0.05)
                writer.close()
            for method in ("GenerateUnary", "CancelGenerations"):
                call = channel.unary_unary(f"/octavo.v1.GenerationService/{method}", None, None)
                with contextlib.suppress(aio.AioRpcError):
                    await call(random.randbytes(200), timeout=CALL_SECONDS)


async def be_killed(address: str, stop: asyncio.Event) -> None:
    """Processes that are killed, every other one after it was frozen for a while."""
    freeze = False
    while not stop.is_set():
        command = (sys.executable, "-m", "tests.service.abuse", "victim", address)
        victim = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        await wait(stop, 2.0)
        if freeze:
            os.kill(victim.pid, signal.SIGSTOP)
            await wait(stop, 4.0)
        freeze = not freeze
        victim.kill()
        await victim.wait()


async def victim(address: str) -> None:
    async with aio.insecure_channel(address, OWN_CONNECTION) as channel:
        call = stub_of(channel).Generate()
        for index in range(20):
            await call.write(generation_pb2.GenerateRequest(start=request(f"slow {index}")))
        while True:
            await call.read()


async def attack(address: str, seconds: float, overload: float) -> None:
    """Prints how often those that pace themselves tried, and were taken."""
    stop, pace = asyncio.Event(), Pace(overload)
    actors: list[tuple[Callable[[str, asyncio.Event], Awaitable[None]], int]] = [
        (never_read, 60),
        (lambda *arguments: cancel_at_random(*arguments, pace), PACED_CLIENTS),
        (send_garbage, 16),
        (be_killed, 2),
    ]
    pacing = asyncio.create_task(pace.keep())
    tasks = [asyncio.ensure_future(actor(address, stop)) for actor, count in actors for _ in range(count)]
    await pace.begun()
    await asyncio.sleep(seconds)
    stop.set()
    await asyncio.wait(tasks, timeout=CALL_SECONDS)
    pacing.cancel()
    print(json.dumps({"tries": pace.tries, "taken": pace.taken}))


async def wait(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


# --- well-behaved clients, in a process of their own -----------------------------------------------------------------


async def behave(address: str, seconds: float, overload: float) -> None:
    """Prints how their calls ended, and how many texts were wrong."""
    stop, outcomes, wrong, pace = asyncio.Event(), Counter[str](), Counter[str](), Pace(overload)

    async def one() -> None:
        async with aio.insecure_channel(address, OWN_CONNECTION) as channel:
            while not stop.is_set():
                tokens = random.randrange(1, 26)
                outcome, text = await ask(channel, tokens)
                outcomes[outcome] += 1
                wrong["texts"] += outcome == "OK" and text != ALPHABET[:tokens]
                pace.note(outcome == "OK")
                await wait(stop, 0.0 if outcome == "OK" else pace.pauses())

    pacing = asyncio.create_task(pace.keep())
    tasks = [asyncio.create_task(one()) for _ in range(PACED_CLIENTS)]
    await pace.begun()
    await asyncio.sleep(seconds)
    stop.set()
    await asyncio.gather(*tasks)
    pacing.cancel()
    told = {"outcomes": outcomes, "wrong_texts": wrong["texts"], "tries": pace.tries, "taken": pace.taken}
    print(json.dumps(told))


async def ask(channel: aio.Channel, tokens: int) -> tuple[str, str]:
    """How a unary call ended, and its text."""
    call = generation_pb2.GenerateUnaryRequest(start=request("behaved", tokens))
    try:
        response = await stub_of(channel).GenerateUnary(call, timeout=CALL_SECONDS)
        return "OK", response.candidates[0].text
    except aio.AioRpcError as error:
        return reason_of(error), ""


# --- the prober ------------------------------------------------------------------------------------------------------


def reason_of(error: aio.AioRpcError) -> str:
    """ErrorInfo's reason; the code's name for an error without details."""
    from google.rpc import status_pb2

    trailing: Any = error.trailing_metadata()
    details = dict(trailing or ()).get("grpc-status-details-bin")
    if details is None:
        return f"untyped {error.code().name}"
    return str(error_info(status_pb2.Status.FromString(details)).reason)


async def probe_health(server: Process, stop: asyncio.Event, report: Report) -> None:
    messages, process = HealthMessages(), psutil.Process(server.process.pid)
    async with aio.insecure_channel(server.address, OWN_CONNECTION) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=messages.CheckRequest.SerializeToString,
            response_deserializer=messages.CheckResponse.FromString,
        )
        while not stop.is_set():
            started = time.monotonic()
            response = await check(messages.CheckRequest(service=GENERATION_SERVICE), timeout=CALL_SECONDS)
            report.outcomes["SERVING" if response.status == 1 else "NOT SERVING"] += 1
            if report.measures:
                report.health_seconds.append(time.monotonic() - started)
                report.memory.append(process.memory_info().rss)
            await wait(stop, 0.1)


async def probe_refusals(server: Process, stop: asyncio.Event, report: Report) -> None:
    async with aio.insecure_channel(server.address, OWN_CONNECTION) as channel, asyncio.TaskGroup() as admitted:
        await channel.channel_ready()  # connecting is not what is timed
        while not stop.is_set():
            started = time.monotonic()
            call = stub_of(channel).GenerateStream(generation_pb2.GenerateStreamRequest(start=request("tried")))
            try:
                first = await call.read()
            except aio.AioRpcError as error:
                report.outcomes[reason_of(error)] += 1
                if report.measures:
                    report.refusal_seconds.append(time.monotonic() - started)
            else:
                admitted.create_task(time_first_token(call, first, started, report))
            await wait(stop, 0.03)


async def time_first_token(
    call: Any, message: generation_pb2.GenerateStreamResponse, started: float, report: Report
) -> None:
    """Of a request that was admitted, and is left then."""
    while not any(event.HasField("delta") for event in message.events):
        message = await call.read()
    if report.measures:
        report.first_token_seconds.append(time.monotonic() - started)
    call.cancel()


async def until_idle(address: str) -> capacity_pb2.Capacity:
    async with aio.insecure_channel(address) as channel:
        stub: capacity_pb2_grpc.CapacityServiceAsyncStub = capacity_pb2_grpc.CapacityServiceStub(channel)
        async with asyncio.timeout(30):
            while True:
                capacity = (await stub.GetCapacity(capacity_pb2.GetCapacityRequest())).capacity
                load = capacity.load
                if load.running_requests == load.queued_requests == 0 and load.kv_utilization == 0.0:
                    return capacity
                await asyncio.sleep(0.1)


async def abuse(server: Process, seconds: float, overload: float = OVERLOAD) -> Report:
    """Runs everything against a server for so long, then waits until the server holds nothing."""
    report, stop = Report(seconds), asyncio.Event()
    attackers, behaved = [await role(name, server, seconds, overload) for name in ("attack", "behave")]
    probes: list[asyncio.Task[None]] = []
    try:
        for process in (attackers, behaved):
            assert process.stdout is not None
            assert await asyncio.wait_for(process.stdout.readline(), 2 * CALL_SECONDS) == b"begun\n"
        report.started = time.monotonic()
        probes += [asyncio.create_task(probe(server, stop, report)) for probe in (probe_health, probe_refusals)]
        out, _ = await asyncio.wait_for(behaved.communicate(), seconds + 2 * CALL_SECONDS)
        attacked, _ = await asyncio.wait_for(attackers.communicate(), 2 * CALL_SECONDS)
    finally:
        for process in (attackers, behaved):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        stop.set()
    await asyncio.gather(*probes)
    said, attack_said = json.loads(out), json.loads(attacked)
    report.tries, report.taken = (said[name] + attack_said[name] for name in ("tries", "taken"))
    report.outcomes.update(said["outcomes"])
    report.wrong_texts = said["wrong_texts"]
    await until_idle(server.address)
    await canary(server.address)
    return report


async def role(name: str, server: Process, seconds: float, overload: float) -> asyncio.subprocess.Process:
    command = (*NICE, sys.executable, "-m", "tests.service.abuse", name, server.address, str(seconds), str(overload))
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=null, cwd=ROOT)


async def canary(address: str) -> None:
    async with aio.insecure_channel(address, OWN_CONNECTION) as channel:
        outcome, text = await ask(channel, 5)
    assert (outcome, text) == ("OK", "abcde"), f"the canary says {text!r}"


def measure() -> dict[str, float]:
    """A minute of it: the figures. Raises AssertionError where what must hold does not."""

    async def run() -> Report:
        async with server_process("-m", "tests.service.fake_server", env=OVERLOADED) as server:
            return await abuse(server, 60.0)

    report = asyncio.run(run())
    report.check()
    assert report.overload > 0.8 * OVERLOAD, "not the overload that was asked for"
    return report.figures()


async def main(arguments: list[str]) -> None:
    match arguments:
        case ["attack", address, *numbers]:
            await attack(address, *map(float, numbers))
        case ["behave", address, *numbers]:
            await behave(address, *map(float, numbers))
        case ["victim", address]:
            await victim(address)
        case _:
            seconds, overload = (*map(float, arguments), *(60.0, OVERLOAD)[len(arguments) :])
            async with server_process("-m", "tests.service.fake_server", env=OVERLOADED) as server:
                report = await abuse(server, seconds, overload)
                print(json.dumps({"outcomes": dict(report.outcomes), **report.figures()}, indent=2))
                report.check()


OVERLOADED = {
    "FAKE_PROCESS": "1",
    "FAKE_MAX_NUM_SEQS": "32",
    "FAKE_MAX_QUEUED_REQUESTS": "32",
    "FAKE_STEP_DELAY": "0.01",
}

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
