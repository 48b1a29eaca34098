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
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import loadtest  # noqa: F401  # settings of gRPC's core and the way to proto/, before gRPC
from locust import LoadTestShape, events, task  # patches the standard library, before all of gRPC
from gevent import monkey  # isort: skip
import gevent  # isort: skip
import grpc  # isort: skip
import grpc.experimental.gevent as grpc_gevent  # isort: skip

if not monkey.is_module_patched("socket"):
    raise RuntimeError("this file is for the command `locust`, which patches the standard library first")
grpc_gevent.init_gevent()

from locust.env import Environment  # noqa: E402

from loadtest.arrivals import flat, replay, times  # noqa: E402
from loadtest.ending import status_of  # noqa: E402
from loadtest.locust_clients import (  # noqa: E402
    CALL_SECONDS,
    STOPPED,
    Clients,
    OctavoUser,
    Track,
    clients_of,
    given,
    state,
    stream_one,
)
from loadtest.locust_misbehaving import *  # noqa: E402, F403  # the users that were asked for
from loadtest.measure import distribution  # noqa: E402
from loadtest.mix import MIXES, deal, mix_of  # noqa: E402
from loadtest.records import Arrival, ArrivalProcess  # noqa: E402
from loadtest.shapes import SHAPES, shape_users  # noqa: E402
from octavo.v1 import generation_pb2, generation_pb2_grpc  # noqa: E402

BIDI_REQUESTS = 4


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
