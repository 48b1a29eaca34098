"""A client process: plays its part of a schedule over gRPC and keeps a stamp of every token. Plain asyncio and
grpc.aio, spawned and never forked; it hears from the run over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import grpc
import msgspec
from google.rpc import status_pb2
from grpc import aio

from loadtest.ending import CHANNEL_OPTIONS, ending_of, status_of, with_details
from loadtest.lag import LoopLag
from loadtest.mix import RequestBuilder
from loadtest.orders import Abort, Connected, Entry, Manner, Order, Played, Quit, Setup, Transport
from loadtest.records import ClientReport, Outcome, RequestRow
from octavo.v1 import generation_pb2

SERVICE = "/octavo.v1.GenerationService"
CONNECT_SECONDS = 20.0
NICE = -10
GRACE_SECONDS = 5.0  # for cancelled calls to end
PLAIN = Manner()
incoming = msgspec.msgpack.Decoder(Order | Abort | Quit)


class Track:
    """One request while it runs, and its row afterwards."""

    def __init__(self, player: Player, entry: Entry, level: int) -> None:
        self.player = player
        self.entry = entry
        self.manner = entry.manner or PLAIN
        self.level = level
        self.sent: float | None = None
        self.accepted: float | None = None
        self.finish: float | None = None
        self.outcome: Outcome | None = None
        self.chunk_us: list[int] = []
        self.chunk_tokens: list[int] = []
        self.tokens = 0
        self.prompt_tokens = 0
        self.usage: generation_pb2.Usage | None = None
        self.timing: generation_pb2.Timing | None = None
        self.code = self.reason = self.cause = ""
        self.ended = asyncio.Event()

    def on_event(self, event: generation_pb2.GenerationEvent, now: float) -> None:
        kind = event.WhichOneof("event")
        if kind == "delta":
            self._on_delta(event.delta, now)
        elif kind == "admitted":
            self.accepted = now
            self.prompt_tokens = event.admitted.prompt_tokens
        elif kind == "finished":
            self.usage, self.timing = event.finished.usage, event.finished.timing
            cancelled = self.manner.cancel_after is not None and self.tokens >= self.manner.cancel_after
            self.end(Outcome.CANCELLED if cancelled else Outcome.COMPLETED, now, "OK")
        elif kind == "failed":
            self.usage = event.failed.usage
            self.fail(event.failed.status, now)

    def _on_delta(self, delta: generation_pb2.CandidateDelta, now: float) -> None:
        if not delta.token_count or self.sent is None:
            return
        self.chunk_us.append(round((now - self.sent) * 1e6))
        self.chunk_tokens.append(delta.token_count)
        self.tokens += delta.token_count
        self.player.on_tokens(delta, now)

    @property
    def wants_cancel(self) -> bool:
        return self.manner.cancel_after is not None and self.tokens >= self.manner.cancel_after

    def end(self, outcome: Outcome, now: float, code: str = "", reason: str = "", cause: str = "") -> None:
        """The first end counts."""
        if self.outcome is None:
            self.outcome, self.finish = outcome, now
            self.code, self.reason, self.cause = code, reason, cause
            self.ended.set()

    def fail(self, status: status_pb2.Status, now: float) -> None:
        ending = ending_of(status, has_tokens=bool(self.chunk_us))
        self.end(ending.outcome, now, ending.code, ending.reason, ending.cause)

    def row(self) -> RequestRow:
        origin, usage, timing = self.player.setup.origin, self.usage, self.timing

        def clock(at: float | None) -> float | None:
            return None if at is None else round(at - origin, 6)

        first = None if self.sent is None or not self.chunk_us else self.sent + self.chunk_us[0] / 1e6
        return RequestRow(
            level=self.level,
            index=self.entry.index,
            kind=self.manner.kind or self.entry.arrival.kind,
            outcome=self.outcome or Outcome.CENSORED,
            intended=round(self.entry.at - origin, 6),
            sent=clock(self.sent),
            accepted=clock(self.accepted),
            first=clock(first),
            finish=clock(self.finish),
            chunk_us=self.chunk_us,
            chunk_tokens=[] if self.tokens == len(self.chunk_us) else self.chunk_tokens,
            prompt_tokens=self.prompt_tokens,
            asked_tokens=self.entry.arrival.output_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
            cached_prompt_tokens=0 if usage is None else usage.cached_prompt_tokens,
            preemptions=0 if timing is None else timing.preemptions,
            queued=None if timing is None else round(timing.queued.ToMicroseconds() / 1e6, 6),
            code=self.code,
            reason=self.reason,
            cause=self.cause,
            client=self.player.setup.client,
        )


class Stream:
    """Requests as RPCs of their own, over several channels in turn."""

    def __init__(self, channels: list[aio.Channel]) -> None:
        self._calls = [
            channel.unary_stream(
                f"{SERVICE}/GenerateStream",
                request_serializer=generation_pb2.GenerateStreamRequest.SerializeToString,
                response_deserializer=generation_pb2.GenerateStreamResponse.FromString,
            )
            for channel in channels
        ]
        self._next = 0

    async def run(self, track: Track, start: generation_pb2.StartGeneration) -> None:
        """Returns when the request has ended."""
        open_call = self._calls[self._next % len(self._calls)]
        self._next += 1
        track.sent = time.monotonic()
        call = open_call(generation_pb2.GenerateStreamRequest(start=start), timeout=track.manner.timeout)
        try:
            await self._read(call, track)
        except aio.AioRpcError as error:
            track.fail(status_of(error), time.monotonic())
        finally:
            call.cancel()

    async def _read(self, call: Any, track: Track) -> None:
        manner = track.manner
        while (response := await call.read()) is not aio.EOF:  # type: ignore[attr-defined]
            now = time.monotonic()
            for event in response.events:
                track.on_event(event, now)
            if track.wants_cancel:
                track.end(Outcome.CANCELLED, now)
                return
            if manner.deaf:
                await track.ended.wait()
                return
            if manner.pause:
                await asyncio.sleep(manner.pause)
        code = await call.code()
        if track.outcome is None:
            status = status_pb2.Status(code=code.value[0], message=await call.details() or "")
            if code is grpc.StatusCode.OK:
                track.end(Outcome.FAILED, time.monotonic(), "OK", cause="the stream ended without an end")
            else:
                track.fail(with_details(status, await call.trailing_metadata()), time.monotonic())

    async def close(self) -> None:
        pass


class Multiplexed:
    """Requests on bidirectional streams, dealt to them in turn."""

    def __init__(self, channels: list[aio.Channel], streams: int) -> None:
        self._sessions = [Session(channels[index % len(channels)]) for index in range(max(streams, len(channels)))]
        self._next = 0

    async def run(self, track: Track, start: generation_pb2.StartGeneration) -> None:
        session = self._sessions[self._next % len(self._sessions)]
        self._next += 1
        await session.run(track, start)

    async def close(self) -> None:
        for session in self._sessions:
            session.close()


class Session:
    """One bidirectional stream; opened again when it has ended."""

    def __init__(self, channel: aio.Channel) -> None:
        self._open = channel.stream_stream(
            f"{SERVICE}/Generate",
            request_serializer=generation_pb2.GenerateRequest.SerializeToString,
            response_deserializer=generation_pb2.GenerateResponse.FromString,
        )
        self._call: Any = None
        self._tracks: dict[str, Track] = {}
        self._writing = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    async def run(self, track: Track, start: generation_pb2.StartGeneration) -> None:
        request_id = start.request_id
        track.sent = time.monotonic()
        try:
            async with asyncio.timeout(track.manner.timeout):
                await self._start(track, start)
                await track.ended.wait()
        except TimeoutError:
            track.end(Outcome.FAILED, time.monotonic(), "DEADLINE_EXCEEDED", cause="the client's own deadline")
        finally:
            if self._tracks.pop(request_id, None) is not None:
                cancel = generation_pb2.GenerateRequest(cancel=generation_pb2.CancelGeneration(request_id=request_id))
                with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
                    await self._call.write(cancel)

    async def _start(self, track: Track, start: generation_pb2.StartGeneration) -> None:
        async with self._writing:  # gRPC takes one write at a time
            if self._reader is None or self._reader.done():
                self._call = self._open()  # type: ignore[call-arg]
                self._tracks = {}
                self._reader = asyncio.create_task(self._read(self._call, self._tracks))
            self._tracks[start.request_id] = track
            try:
                await self._call.write(generation_pb2.GenerateRequest(start=start))
            except (aio.AioRpcError, asyncio.InvalidStateError):
                await self._reader  # which tells every track

    async def _read(self, call: Any, tracks: dict[str, Track]) -> None:
        status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="the stream ended")
        try:
            while (response := await call.read()) is not aio.EOF:  # type: ignore[attr-defined]
                now = time.monotonic()
                for event in response.events:
                    track = tracks.get(event.request_id)
                    if track is not None:
                        self._pass(track, event, now, tracks)
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                plain = status_pb2.Status(code=code.value[0], message=await call.details() or "")
                status = with_details(plain, await call.trailing_metadata())
        except aio.AioRpcError as error:
            status = status_of(error)
        finally:
            now = time.monotonic()
            for track in list(tracks.values()):
                track.fail(status, now)
            tracks.clear()

    def _pass(self, track: Track, event: generation_pb2.GenerationEvent, now: float, tracks: dict[str, Track]) -> None:
        track.on_event(event, now)
        if track.outcome is not None:
            tracks.pop(event.request_id, None)
        elif track.wants_cancel:
            track.end(Outcome.CANCELLED, now)

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._reader is not None:
            self._reader.cancel()


class Player:
    """Everything of one client process."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.builder = RequestBuilder(setup.vocabulary, setup.context)
        self.receive_lags: list[float] = []
        self._window = (0.0, 0.0)
        self._received = 0
        self._live: dict[asyncio.Task[None], Track] = {}
        self._tracks: list[Track] = []
        self._aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def connect(self) -> None:
        """Raises TimeoutError if the service is not there."""
        setup = self.setup
        self._channels = [aio.insecure_channel(setup.address, CHANNEL_OPTIONS) for _ in range(setup.channels)]
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        self._sender: Stream | Multiplexed = (
            Stream(self._channels)
            if setup.transport is Transport.STREAM
            else Multiplexed(self._channels, setup.streams)
        )

    async def close(self) -> None:
        await self._sender.close()
        for channel in self._channels:
            await channel.close(None)

    def abort(self) -> None:
        if not self._aborted.done():
            self._aborted.set_result(None)

    def on_tokens(self, delta: generation_pb2.CandidateDelta, now: float) -> None:
        if self._window[0] <= now < self._window[1]:
            self._received += delta.token_count
            if self.setup.stamps and delta.text.startswith("@"):
                self.receive_lags.append(now - float(delta.text[1:].split(" ", 1)[0]))

    async def play(self, order: Order) -> Played:
        """Returns when everything has ended or was cut off."""
        self._tracks, self._live = [], {}
        self.receive_lags, self._received = [], 0
        self._window = (order.window_begin, order.stop)
        self._aborted = asyncio.get_running_loop().create_future()
        prepared = None if order.concurrency else self._prepared(order)
        lag = LoopLag(order.window_begin, order.stop)
        watch = asyncio.create_task(lag.watch())
        if prepared is None:
            await self._closed_loop(order)
        else:
            await self._open_loop(order, prepared)
        await self._drain(order)
        watch.cancel()
        seconds = max(1e-9, min(time.monotonic(), order.stop) - order.window_begin)
        report = ClientReport(
            client=self.setup.client,
            cpu=lag.cpu_share,
            lag_p50=lag.quantile(0.5),
            lag_p99=lag.quantile(0.99),
            lag_max=lag.quantile(1.0),
            tokens_per_second=self._received / seconds,
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            first=os.sched_getscheduler(0) == os.SCHED_FIFO,
            receive_lag_p99=quantile(self.receive_lags, 0.99) if self.receive_lags else None,
        )
        return Played(rows=[track.row() for track in self._tracks], report=report)

    def _prepared(self, order: Order) -> list[tuple[Entry, generation_pb2.StartGeneration]]:
        """Messages are built before the level begins."""
        return [(entry, self._build(order.level, entry)) for entry in order.entries]

    def _build(self, level: int, entry: Entry) -> generation_pb2.StartGeneration:
        return self.builder.build(entry.arrival, f"{level}-{self.setup.client}-{entry.index}")

    async def _open_loop(self, order: Order, prepared: list[tuple[Entry, generation_pb2.StartGeneration]]) -> None:
        for entry, start in prepared:
            wait = entry.at - time.monotonic()
            if wait > 0 and await self._aborted_within(wait):
                return
            track = Track(self, entry, order.level)
            self._tracks.append(track)
            if len(self._live) >= order.cap:
                track.end(Outcome.CLIENT_CAP, time.monotonic(), cause="client_cap")
                track.finish = None
            else:
                self._spawn(track, start)
        await self._aborted_within(order.stop - time.monotonic())

    async def _aborted_within(self, seconds: float) -> bool:
        """Waits so long, or until the level is aborted. Before every request: without a task of its own."""
        if seconds > 0 and not self._aborted.done():
            await asyncio.wait([self._aborted], timeout=seconds)
        return self._aborted.done()

    async def _closed_loop(self, order: Order) -> None:
        await self._aborted_within(order.begin - time.monotonic())
        supply = iter(order.entries)
        await asyncio.gather(*(self._user(order, supply) for _ in range(order.concurrency or 0)))

    async def _user(self, order: Order, supply: Iterator[Entry]) -> None:
        while (now := time.monotonic()) < order.stop and not self._aborted.done():
            planned = next(supply, None)
            if planned is None:
                return
            entry = msgspec.structs.replace(planned, at=now)
            start = self._build(order.level, entry)
            track = Track(self, entry, order.level)
            self._tracks.append(track)
            task = self._spawn(track, start)
            left = max(0.0, order.cut - time.monotonic())
            await asyncio.wait([task, self._aborted], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if track.outcome in (Outcome.REFUSED, Outcome.FAILED):
                await self._aborted_within(0.05)  # a closed loop does not turn into a storm

    def _spawn(self, track: Track, start: generation_pb2.StartGeneration) -> asyncio.Task[None]:
        task = asyncio.create_task(self._sender.run(track, start))
        self._live[task] = track
        task.add_done_callback(self._live.pop)
        return task

    async def _drain(self, order: Order) -> None:
        """Waits for what runs, until the cut or an abort; then cuts it off."""
        while self._live and time.monotonic() < order.cut and not self._aborted.done():
            await asyncio.wait(list(self._live), timeout=0.05)
        now = time.monotonic()
        for task, track in list(self._live.items()):
            track.end(Outcome.CENSORED, now, cause="still running when the level ended")
            task.cancel()
        if self._live:
            await asyncio.wait(list(self._live), timeout=GRACE_SECONDS)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def _serve(pipe: Connection, setup: Setup) -> None:
    player = Player(setup)
    try:
        await player.connect()
    except TimeoutError:
        pipe.send_bytes(msgspec.msgpack.encode(Connected(f"nothing answers at {setup.address}")))
        return
    pipe.send_bytes(msgspec.msgpack.encode(Connected()))
    receive: Callable[[], Any] = lambda: incoming.decode(pipe.recv_bytes())  # noqa: E731
    playing: asyncio.Task[Played] | None = None

    def answer(done: asyncio.Task[Played]) -> None:
        pipe.send_bytes(msgspec.msgpack.encode(done.result()))

    with contextlib.suppress(EOFError):
        while not isinstance(message := await asyncio.to_thread(receive), Quit):
            if isinstance(message, Order):
                playing = asyncio.create_task(player.play(message))
                playing.add_done_callback(answer)
            else:
                player.abort()
    await player.close()


def go_first() -> None:
    """A client is not to be late because a service on the same cores is busy: it is scheduled before everything of
    ordinary priority, or is at least nicer to itself, where that is allowed."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main(pipe: Connection, setup: Setup) -> None:
    """The process. It leaves Ctrl-C to the run, which asks it to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    go_first()
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)
    asyncio.run(_serve(pipe, setup))
