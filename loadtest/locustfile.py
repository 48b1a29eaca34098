"""Streaming users for Locust: `locust -f loadtest/locustfile.py --host 127.0.0.1:50051` and its web page, or headless
with --users, --run-time, --processes, --master/--worker, --html, --csv as usual.

Users run closed loops. With --rate arrivals are an open loop instead: each worker plays its part of one seeded
schedule, whatever became of earlier requests, and response times count from the intended time.

One `generate` event a request: its response time is end to end, its length the number of tokens. Locust rounds what it
shows (two digits above 100 ms), so every request is also a row of --rows, exactly. Time to the first token is in the
rows and in the summary at the end; --show-ttft makes it events of their own, which count twice in Locust's totals.
Locust's clients share one gevent loop a process: stay below about 1,000 tokens/s of each (--processes), and take gaps
between tokens from `python -m loadtest map`.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import loadtest  # noqa: F401  # settings of gRPC's core and the way to proto/, before gRPC
from locust import LoadTestShape, User, constant, events, task  # patches the standard library, before all of gRPC
from gevent import monkey  # isort: skip
import gevent  # isort: skip
from gevent.lock import BoundedSemaphore  # isort: skip
import grpc  # isort: skip
import grpc.experimental.gevent as grpc_gevent  # isort: skip

if not monkey.is_module_patched("socket"):
    raise RuntimeError("this file is for the command `locust`, which patches the standard library first")
grpc_gevent.init_gevent()

import msgspec  # noqa: E402
from google.rpc import status_pb2  # noqa: E402
from locust.env import Environment  # noqa: E402

from loadtest.arrivals import flat, replay, times  # noqa: E402
from loadtest.ending import CHANNEL_OPTIONS, Ending, ending_of, status_of  # noqa: E402
from loadtest.measure import distribution  # noqa: E402
from loadtest.mix import MIXES, WORDS, RequestBuilder, deal, mix_of  # noqa: E402
from loadtest.records import Arrival, ArrivalProcess, Outcome, RequestRow  # noqa: E402
from loadtest.shapes import SHAPES, shape_users  # noqa: E402
from octavo.v1 import (  # noqa: E402
    generation_pb2,
    generation_pb2_grpc,
    tokenization_pb2,
    tokenization_pb2_grpc,
)

USERS_PER_CHANNEL = 16
MOST_CHANNELS = 64
BIDI_REQUESTS = 4
CALL_SECONDS = 600.0
DEFAULT_CONTEXT = 2048
VICTIM_REQUESTS = 8


def given(name: str) -> str:
    """An option's value while the command line is not parsed yet: what classes there are depends on it."""
    for index, word in enumerate(sys.argv):
        if word == name and index + 1 < len(sys.argv):
            return sys.argv[index + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return os.environ.get("OCTAVO_" + name.removeprefix("--").replace("-", "_").upper(), "")


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    group = parser.add_argument_group("octavo")
    group.add_argument("--mix", default="chat", choices=list(MIXES), help="workload")
    group.add_argument("--schedule-seed", type=int, default=1, help="of arrivals and prompts")
    group.add_argument("--rate", type=float, default=0.0, help="open loop: requests/s of all workers; 0: closed loop")
    group.add_argument(
        "--arrivals", default="poisson", choices=["poisson", "gamma", "constant", "burst"], help="of the open loop"
    )
    group.add_argument("--replay", default="", help="open loop: a schedule or a trace to play")
    group.add_argument("--open-workers", type=int, default=1, help="open loop: how many workers share the schedule")
    group.add_argument("--rows", default="", help="folder for a row of each request, as JSON lines")
    group.add_argument("--shape", default="", choices=["", *SHAPES], help="course of the number of users")
    group.add_argument("--shape-users", type=int, default=32, help="most users of a shape, at its base for a spike")
    group.add_argument("--shape-seconds", type=float, default=60.0, help="length of a shape")
    group.add_argument("--show-ttft", action="store_true", help="time to first token as events of their own")
    group.add_argument(
        "--misbehave",
        default="",
        help="weights of bad users, as cancel=1,deaf=1,frozen=1,killed=1,deadline=1,garbage=1",
    )


class Clients:
    """What the users of one process share. Made after Locust has forked: a channel does not live through that."""

    def __init__(self, environment: Environment) -> None:
        options: Any = environment.parsed_options
        self.environment = environment
        self.address = (environment.host or "127.0.0.1:50051").removeprefix("http://")
        self.options = options
        self.mix = mix_of(options.mix)
        self.channels: list[grpc.Channel] = []
        self.users = count()
        self.requests = count()
        self.seed = options.schedule_seed * 1_000_003 + os.getpid()
        self.builder = RequestBuilder(self._vocabulary(), DEFAULT_CONTEXT)
        self.counts = dict.fromkeys(("started", "first token", *Outcome), 0)
        self.ttft: list[float] = []
        self.rows = self._open_rows()

    def channel(self, user: int) -> grpc.Channel:
        """One for every few users."""
        index = (user // USERS_PER_CHANNEL) % MOST_CHANNELS
        while len(self.channels) <= index:
            self.channels.append(grpc.insecure_channel(self.address, CHANNEL_OPTIONS))
        return self.channels[index]

    def arrivals(self) -> Iterator[Arrival]:
        """Of a closed loop: as many as are wanted, in this process's own order."""
        for block in count():
            yield from deal([0.0] * 256, self.mix, self.seed + block)

    def _vocabulary(self) -> list[int]:
        with grpc.insecure_channel(self.address, CHANNEL_OPTIONS) as channel:
            stub: Any = tokenization_pb2_grpc.TokenizationServiceStub(channel)
            request = tokenization_pb2.TokenizeRequest(text=" " + " ".join(WORDS), add_special_tokens=False)
            try:
                return sorted(set(stub.Tokenize(request, timeout=20.0).token_ids))
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return list(range(32, 96))
                raise

    def _open_rows(self) -> Any:
        if not self.options.rows:
            return None
        Path(self.options.rows).mkdir(parents=True, exist_ok=True)
        return (Path(self.options.rows) / f"requests-{os.getpid()}.jsonl").open("ab")

    def report(self, row: RequestRow) -> None:
        """Counts a request that has ended, writes its row and tells Locust."""
        self.counts[row.outcome] += 1
        if row.ttft is not None:
            self.ttft.append(row.ttft)
        if self.rows is not None:
            self.rows.write(msgspec.json.encode(row) + b"\n")
        exception = None
        if row.outcome in (Outcome.REFUSED, Outcome.FAILED):
            exception = RequestFailedError(f"{row.code} {row.reason}".strip())
        fire = self.environment.events.request.fire
        common = {"name": row.kind, "context": {}, "start_time": time.time() - (row.e2e or 0.0)}
        fire(
            request_type="generate",
            response_time=(row.e2e or 0.0) * 1e3,
            response_length=row.tokens,
            exception=exception,
            **common,
        )
        if self.options.show_ttft and row.ttft is not None:
            fire(request_type="TTFT", response_time=row.ttft * 1e3, response_length=0, exception=None, **common)

    def close(self) -> None:
        if self.rows is not None:
            self.rows.close()
        for channel in self.channels:
            channel.close()


class RequestFailedError(Exception):
    """What Locust groups failures by: the code and the reason, without what differs from request to request."""


class Track:
    """One request while it runs."""

    def __init__(self, clients: Clients, arrival: Arrival, intended: float) -> None:
        self.clients = clients
        self.arrival = arrival
        self.index = next(clients.requests)
        self.intended = intended
        self.sent = time.monotonic()
        self.accepted: float | None = None
        self.chunk_us: list[int] = []
        self.chunk_tokens: list[int] = []
        self.ended = False
        clients.counts["started"] += 1

    @property
    def tokens(self) -> int:
        return sum(self.chunk_tokens)

    def on_event(self, event: generation_pb2.GenerationEvent, now: float) -> None:
        kind = event.WhichOneof("event")
        if kind == "admitted":
            self.accepted = now
        elif kind == "delta" and event.delta.token_count:
            if not self.chunk_us:
                self.clients.counts["first token"] += 1
            self.chunk_us.append(round((now - self.sent) * 1e6))
            self.chunk_tokens.append(event.delta.token_count)
        elif kind == "finished":
            self.end(Ending(Outcome.COMPLETED, "OK", "", ""))
        elif kind == "failed":
            self.fail(event.failed.status)

    def fail(self, status: status_pb2.Status) -> None:
        if state.get("stopping"):
            self.end(STOPPED)
        self.end(ending_of(status, has_tokens=bool(self.chunk_us)))

    def end(self, ending: Ending) -> None:
        """The first end counts."""
        if self.ended:
            return
        self.ended = True
        self.clients.report(
            RequestRow(
                level=0,
                index=self.index,
                kind=self.arrival.kind,
                outcome=ending.outcome,
                intended=self.intended,
                sent=self.sent,
                accepted=self.accepted,
                first=self.sent + self.chunk_us[0] / 1e6 if self.chunk_us else None,
                finish=time.monotonic(),
                chunk_us=self.chunk_us,
                chunk_tokens=self.chunk_tokens,
                asked_tokens=self.arrival.output_tokens,
                code=ending.code,
                reason=ending.reason,
                cause=ending.cause,
                client=os.getpid(),
            )
        )


CANCELLED = Ending(Outcome.CANCELLED, "", "", "by the user")
STOPPED = Ending(Outcome.CENSORED, "", "", "still running when the test stopped")
state: dict[str, Any] = {}
making = BoundedSemaphore()


def clients_of(environment: Environment) -> Clients:
    """This process's, made when they are first wanted."""
    with making:
        if "clients" not in state:
            state["clients"] = Clients(environment)
    clients: Clients = state["clients"]
    return clients


def stream_one(
    clients: Clients, channel: grpc.Channel, track: Track, *, timeout: float = CALL_SECONDS, cancel_after: int = 0
) -> None:
    """One request as an RPC of its own."""
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    start = clients.builder.build(track.arrival, str(track.index))
    call = stub.GenerateStream(generation_pb2.GenerateStreamRequest(start=start), timeout=timeout)
    try:
        for response in call:
            now = time.monotonic()
            for event in response.events:
                track.on_event(event, now)
            if cancel_after and track.tokens >= cancel_after:
                track.end(CANCELLED)
                break
    except grpc.RpcError as error:
        track.fail(status_of(error))
    finally:
        call.cancel()
        track.end(STOPPED)


class OctavoUser(User):
    """What all have in common."""

    abstract = True
    wait_time = constant(0)

    def on_start(self) -> None:
        self.clients = clients_of(self.environment)
        self.channel = self.clients.channel(next(self.clients.users))
        self.supply = self.clients.arrivals()

    def track(self) -> Track:
        return Track(self.clients, next(self.supply), time.monotonic())


RATE = float(given("--rate") or 0) or bool(given("--replay"))

if RATE:

    class OpenLoop(OctavoUser):
        """Only a switch: arrivals come from the dispatcher of each worker, however many users there are."""

        @task
        def idle(self) -> None:
            gevent.sleep(1.0)

else:

    class StreamUser(OctavoUser):
        """Chats one request after the other, each as an RPC of its own."""

        weight = 30

        @task
        def generate(self) -> None:
            stream_one(self.clients, self.channel, self.track())

    class BidiUser(OctavoUser):
        """Runs a few requests at once on one bidirectional stream."""

        weight = 10

        @task
        def generate(self) -> None:
            tracks = {str(track.index): track for track in (self.track() for _ in range(BIDI_REQUESTS))}
            starts = [self.clients.builder.build(track.arrival, name) for name, track in tracks.items()]
            stub: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
            requests = (generation_pb2.GenerateRequest(start=start) for start in starts)
            call = stub.Generate(requests, timeout=CALL_SECONDS)
            try:
                for response in call:
                    now = time.monotonic()
                    for event in response.events:
                        tracks[event.request_id].on_event(event, now)
            except grpc.RpcError as error:
                for track in tracks.values():
                    track.fail(status_of(error))
            finally:
                call.cancel()
                for track in tracks.values():
                    track.end(STOPPED)


# --- users that misbehave --------------------------------------------------------------------------------------------

BAD = {
    name: int(weight) for name, _, weight in (word.partition("=") for word in given("--misbehave").split(",") if word)
}

if "cancel" in BAD:

    class CancelUser(OctavoUser):
        """Goes away at a random token."""

        weight = BAD["cancel"]

        @task
        def generate(self) -> None:
            stream_one(self.clients, self.channel, self.track(), cancel_after=random.randint(1, 12))


if "deaf" in BAD:

    class DeafUser(OctavoUser):
        """Starts requests on a connection of its own and reads none of the answers."""

        weight = BAD["deaf"]

        @task
        def generate(self) -> None:
            with grpc.insecure_channel(self.clients.address, CHANNEL_OPTIONS) as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                start = self.clients.builder.build(next(self.supply), "deaf")
                call = stub.GenerateStream(generation_pb2.GenerateStreamRequest(start=start))
                gevent.sleep(random.uniform(1.0, 5.0))
                call.cancel()


if "deadline" in BAD:

    class DeadlineUser(OctavoUser):
        """Asks for answers in milliseconds."""

        weight = BAD["deadline"]

        @task
        def generate(self) -> None:
            stream_one(self.clients, self.channel, self.track(), timeout=random.uniform(0.001, 0.05))


if "garbage" in BAD:

    class GarbageUser(OctavoUser):
        """Bytes that are no HTTP/2, and bytes that are no message."""

        weight = BAD["garbage"]

        @task
        def send(self) -> None:
            host, _, port = self.clients.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=5.0) as connection:
                connection.sendall(random.choice([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"]))
                connection.sendall(random.randbytes(2000))
            garble = self.channel.unary_unary("/octavo.v1.GenerationService/GenerateUnary", None, None)
            try:
                garble(random.randbytes(200), timeout=5.0)
            except grpc.RpcError:
                gevent.sleep(0.05)


def suffer(user: OctavoUser, *, freeze: bool) -> None:
    """A client process of its own that is killed, frozen for a while before."""
    command = [sys.executable, "-m", "loadtest.victim", user.clients.address, str(VICTIM_REQUESTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as victim:
        try:
            assert victim.stdout is not None
            victim.stdout.readline()
            gevent.sleep(random.uniform(0.1, 1.0))
            if freeze:
                victim.send_signal(signal.SIGSTOP)
                gevent.sleep(random.uniform(2.0, 5.0))
        finally:
            victim.kill()


if "frozen" in BAD:

    class FrozenUser(OctavoUser):
        """Its process is stopped while answers come."""

        weight = BAD["frozen"]

        @task
        def freeze(self) -> None:
            suffer(self, freeze=True)


if "killed" in BAD:

    class KilledUser(OctavoUser):
        """Its process is killed while answers come."""

        weight = BAD["killed"]

        @task
        def die(self) -> None:
            suffer(self, freeze=False)


# --- the course of a test --------------------------------------------------------------------------------------------

if given("--shape"):

    class Shape(LoadTestShape):
        """Ramp, steps, spike or soak: how many users there are, second by second."""

        def tick(self) -> tuple[int, float] | None:
            options: Any = self.runner.environment.parsed_options  # type: ignore[union-attr]
            users = shape_users(options.shape, self.get_run_time(), options.shape_seconds, options.shape_users)
            return None if users is None else (users, max(1.0, float(users)))


def schedule(options: Any, seconds: float) -> Sequence[Arrival]:
    """Of all workers."""
    if options.replay:
        return replay(Path(options.replay))
    process = ArrivalProcess(options.arrivals)
    generator = random.Random(options.schedule_seed)
    return deal(times(flat(options.rate, seconds), process, generator), mix_of(options.mix), options.schedule_seed)


def dispatch(environment: Environment) -> None:
    """Sends this worker's part of the schedule at its times, block after block until the test stops."""
    clients = clients_of(environment)
    options: Any = environment.parsed_options
    worker = max(0, getattr(environment.runner, "worker_index", 0))
    begin, block = time.monotonic(), float(getattr(options, "run_time", 0) or 60.0)
    while True:
        arrivals = schedule(options, block)
        for index, arrival in enumerate(arrivals):
            if index % options.open_workers != worker % options.open_workers:
                continue
            gevent.sleep(max(0.0, begin + arrival.at - time.monotonic()))
            track = Track(clients, arrival, begin + arrival.at)
            channel = clients.channel(index)
            gevent.spawn(stream_one, clients, channel, track)
        if options.replay:
            return
        begin += block


@events.test_start.add_listener
def on_test_start(environment: Environment, **_: Any) -> None:
    from locust.runners import MasterRunner

    state["stopping"] = False
    if not isinstance(environment.runner, MasterRunner) and RATE:
        state["dispatcher"] = gevent.spawn(dispatch, environment)


@events.test_stop.add_listener
def on_test_stop(environment: Environment, **_: Any) -> None:
    state["stopping"] = True
    if "dispatcher" in state:
        state.pop("dispatcher").kill()


@events.quitting.add_listener
def on_quitting(environment: Environment, **_: Any) -> None:
    """What this process did, exactly, and closes what it has open."""
    clients: Clients | None = state.pop("clients", None)
    if clients is None:
        return
    ttft = distribution(clients.ttft)
    counts = ", ".join(f"{name}: {number}" for name, number in clients.counts.items() if number)
    first = "" if ttft is None else f"; TTFT p50 {ttft.p50.value * 1e3:.1f} ms, p99 {ttft.p99.value * 1e3:.1f} ms"
    print(f"octavo client {os.getpid()}: {counts}{first}", file=sys.stderr)
    clients.close()
