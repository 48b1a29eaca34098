"""What the users of one Locust process share: options, channels, requests while they run, and what becomes of them.

For `locustfile.py` alone, which patches the standard library before this is imported.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import msgspec
from gevent.lock import BoundedSemaphore
from google.rpc import status_pb2
from locust import User, constant
from locust.env import Environment

from loadtest.ending import CHANNEL_OPTIONS, Ending, ending_of, status_of
from loadtest.mix import WORDS, RequestBuilder, deal, mix_of
from loadtest.records import Arrival, Outcome, RequestRow
from octavo.v1 import generation_pb2, generation_pb2_grpc, tokenization_pb2, tokenization_pb2_grpc

USERS_PER_CHANNEL = 16
MOST_CHANNELS = 64
CALL_SECONDS = 600.0
DEFAULT_CONTEXT = 2048


def given(name: str) -> str:
    """An option's value while the command line is not parsed yet: what classes there are depends on it."""
    for index, word in enumerate(sys.argv):
        if word == name and index + 1 < len(sys.argv):
            return sys.argv[index + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return os.environ.get("OCTAVO_" + name.removeprefix("--").replace("-", "_").upper(), "")


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
