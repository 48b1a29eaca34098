"""What goes over the pipe between the run and its client processes, in msgpack. Times are CLOCK_MONOTONIC."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from loadtest.records import Arrival, ClientReport, RequestRow


class Transport(StrEnum):
    """STREAM: an RPC a request. MULTIPLEXED: many requests on each of a few bidirectional streams."""

    STREAM = "server-stream"
    MULTIPLEXED = "bidi"


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """`stamps`: the server writes `@SECONDS ` at the beginning of each delta's text, by its monotonic clock on this
    machine, and the receive lag is taken from it. `cores`: to run on; empty: any."""

    client: int
    address: str
    channels: int
    transport: Transport
    streams: int
    vocabulary: list[int]
    context: int
    origin: float
    stamps: bool = False
    cores: list[int] = []


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """How a client treats its request. `cancel_after`: tokens. `timeout`: the RPC's deadline in seconds. `pause`:
    seconds between reads. `deaf`: reads the first message and then nothing until the end. `kind`: what its row is
    called instead of its arrival's class."""

    cancel_after: int | None = None
    timeout: float | None = None
    pause: float = 0.0
    deaf: bool = False
    kind: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `at`: when it is to be sent."""

    index: int
    at: float
    arrival: Arrival
    manner: Manner | None = None


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Plays a level. In an open loop each entry is sent at its time, whatever became of the others, up to `cap` in
    flight. In a closed loop (`concurrency`) so many users take one entry after the other from `begin` until `stop`.
    What still runs at `cut` is cut off. Lags and CPU are of [`window_begin`, `stop`)."""

    level: int
    entries: list[Entry]
    begin: float
    window_begin: float
    stop: float
    cut: float
    cap: int
    concurrency: int | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Cuts the level off at once; its answer comes as if it had ended."""


class Quit(msgspec.Struct, frozen=True, tag=True):
    """Ends the process."""


class Connected(msgspec.Struct, frozen=True, tag=True):
    """The process has its channels open and waits for orders. `problem`: why it has not."""

    problem: str = ""


class Played(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The level as this client saw it."""

    rows: list[RequestRow]
    report: ClientReport
