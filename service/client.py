"""A small typed client: one channel that retries by service config, requests multiplexed over one stream.

A Generate stream that was refused is tried again here: gRPC would send its requests as they were, with limits that have
run meanwhile, and a few times only, where the start of an engine may take minutes.

It reads and writes the public messages themselves; `prompt_request` and `chat_request` build the usual ones.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_status import rpc_status

from octavo.v1 import capacity_pb2, capacity_pb2_grpc, generation_pb2, generation_pb2_grpc

WRITE_FAULT = "Internal error from Core"
MOST_MESSAGE_BYTES = 4 << 20  # what the service takes
STATUS_SECONDS = 5.0  # a busy machine may take a while to refuse
# Reasons of refusals that an engine which starts, or is about to be replaced, puts an end to.
STARTING = frozenset({"ENGINE_STARTING", "ENGINE_STALLED"})
# Of calls that nothing came of: a server that stops cancels those which it has not looked at.
UNSERVED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
LAST_SECONDS = 0.1  # before a request's limit there is one more attempt
RETRIES = 3  # of other streams that were refused before anything came of them
BACKOFF_SECONDS = 0.1  # doubled each time; where the server does not say

GenerateCall = aio.StreamStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]

RETRY_POLICY = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
}
# What a client in any language gives its channel, but without the exception of Generate unless it has retries of its
# own. Pushback of the server overrules the backoff.
SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [
                    {"service": "octavo.v1.GenerationService"},
                    {"service": "octavo.v1.TokenizationService"},
                    {"service": "octavo.v1.CapacityService"},
                ],
                "retryPolicy": RETRY_POLICY,
            },
            {"name": [{"service": "octavo.v1.GenerationService", "method": "Generate"}]},
        ]
    }
)


class GenerationError(Exception):
    """A request that failed. `reason` is ErrorInfo's; `usage` is what was used until then; `retry_after` is
    RetryInfo's, in seconds."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        usage: generation_pb2.Usage | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{code.name} {reason}: {message}" if reason else f"{code.name}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.usage = usage or generation_pb2.Usage()
        self.retry_after = retry_after

    @classmethod
    def from_status(cls, status: status_pb2.Status, usage: generation_pb2.Usage | None = None) -> Self:
        reason, retry_after = error_info(status).reason, _retry_after(status)
        return cls(_code(status.code), reason, status.message, usage, retry_after)

    @classmethod
    def from_rpc(cls, error: aio.AioRpcError) -> Self:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # an aio error has what it reads
        if status is None:
            return cls(error.code(), "", error.details() or "")
        return cls.from_status(status)

    @classmethod
    def closed(cls) -> Self:
        return cls(grpc.StatusCode.CANCELLED, "", "the stream is closed")


class StreamRefusedError(GenerationError):
    """A stream that was refused before anything came of it: it can be opened again."""


def error_info(status: status_pb2.Status) -> error_details_pb2.ErrorInfo:
    """The status's ErrorInfo; empty if it has none."""
    info = error_details_pb2.ErrorInfo()
    _unpack(status, info)
    return info


def _retry_after(status: status_pb2.Status) -> float | None:
    info = error_details_pb2.RetryInfo()
    return info.retry_delay.ToNanoseconds() / 1e9 if _unpack(status, info) else None


def _unpack(status: status_pb2.Status, detail: Message) -> bool:
    """Fills it from the status's first detail of its kind; False if there is none."""
    return any(packed.Unpack(detail) for packed in status.details)


def prompt_request(
    text: str, *, max_tokens: int | None = None, sampling: generation_pb2.SamplingParameters | None = None
) -> generation_pb2.StartGeneration:
    stop = generation_pb2.StopCriteria(max_tokens=max_tokens)
    return generation_pb2.StartGeneration(text=text, stop=stop, sampling=sampling)


def chat_request(
    messages: Sequence[tuple[str, str]],
    *,
    max_tokens: int | None = None,
    sampling: generation_pb2.SamplingParameters | None = None,
) -> generation_pb2.StartGeneration:
    """messages: (role, content) pairs."""
    chat = generation_pb2.Chat(
        messages=[generation_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    )
    stop = generation_pb2.StopCriteria(max_tokens=max_tokens)
    return generation_pb2.StartGeneration(chat=chat, stop=stop, sampling=sampling)


class Client:
    """`async with Client("127.0.0.1:50051") as client`. Safe for many tasks of one event loop."""

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        patience: float = math.inf,
        on_wait: Callable[[GenerationError], None] = lambda _: None,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """credentials: TLS; None for plain text. token: sent as bearer token with every call. patience: seconds since
        its begin that a request waits while the service says that its engine starts; the request's own
        `scheduling.timeout` and `queue_timeout`, which run meanwhile, end it, too. on_wait: called with the refusal
        before each such wait."""
        self._patience = patience
        self._on_wait = on_wait
        self._closed = False
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        channel_options = [("grpc.service_config", SERVICE_CONFIG), ("grpc.enable_retries", 1), *options]
        if credentials is None:
            self.channel = aio.insecure_channel(address, channel_options)
        else:
            self.channel = aio.secure_channel(address, credentials, channel_options)
        self._generation: generation_pb2_grpc.GenerationServiceAsyncStub
        self._generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self._capacity: capacity_pb2_grpc.CapacityServiceAsyncStub
        self._capacity = capacity_pb2_grpc.CapacityServiceStub(self.channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        await self.channel.close(None)

    def _check_open(self) -> None:
        if self._closed:
            raise GenerationError.closed()

    def _open(self) -> GenerateCall:
        self._check_open()
        return self._generation.Generate(metadata=self._metadata)  # type: ignore[call-arg]  # no iterator: written by `write`

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """One bidirectional stream for any number of concurrent requests. Leaving it cancels what still runs."""
        session = Session(self._open, self._patience, self._on_wait)
        try:
            yield session
        finally:
            await session.close()

    async def generate(
        self, start: generation_pb2.StartGeneration
    ) -> AsyncGenerator[generation_pb2.GenerationEvent, None]:
        """The events of one request, on a stream of its own. Raises GenerationError."""
        async with self.session() as session, aclosing(session.generate(start)) as events:
            async for event in events:
                yield event

    async def cancel(self, *request_ids: str, reason: str = "") -> list[str]:
        """Cancels requests of any stream; those that were live are returned."""
        self._check_open()
        request = generation_pb2.CancelGenerationsRequest(request_ids=request_ids, reason=reason)
        return list((await self._generation.CancelGenerations(request, metadata=self._metadata)).cancelled_request_ids)

    async def capacity(self) -> capacity_pb2.Capacity:
        self._check_open()
        return (await self._capacity.GetCapacity(capacity_pb2.GetCapacityRequest(), metadata=self._metadata)).capacity

    async def watch_capacity(self) -> AsyncIterator[capacity_pb2.Capacity]:
        self._check_open()
        request = capacity_pb2.WatchCapacityRequest()
        async for response in self._capacity.WatchCapacity(request, metadata=self._metadata):
            yield response.capacity


class Session:
    """A Generate stream. Each request's events come in order to the one who started it.

    A stream that was refused as a whole is opened again. On the first one requests are sent as they come. If one is
    written as the refusal of another arrives, gRPC hides that (`refusal_behind`); so on those opened again the first
    request is sent alone, and the others follow its answer."""

    def __init__(
        self,
        open_call: Callable[[], GenerateCall],
        patience: float = math.inf,
        on_wait: Callable[[GenerationError], None] = lambda _: None,
    ) -> None:
        """patience, on_wait: as Client has them."""
        self._open_call = open_call
        self._patience = patience
        self._on_wait = on_wait
        self._ids = itertools.count(1)
        self._queues: dict[str, asyncio.Queue[generation_pb2.GenerationEvent | GenerationError]] = {}
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._open(first_alone=False)

    def _open(self, *, first_alone: bool) -> None:
        self._call = self._open_call()
        self._first_alone = first_alone
        self._ended: GenerationError | None = None
        self._begun = False  # a request has been sent
        self._answered = asyncio.Event()  # or ended
        self._reader = asyncio.create_task(self._read())

    async def generate(
        self, start: generation_pb2.StartGeneration
    ) -> AsyncGenerator[generation_pb2.GenerationEvent, None]:
        """Starts a request, as soon as there is an engine, and yields its events up to `finished`. Raises
        GenerationError for `failed`, for the end of the stream, and for a request of more than MOST_MESSAGE_BYTES or
        with the id of another one that lives, which would be the end of the stream for all others if it was sent.
        Leaving the iteration cancels the request."""
        request = generation_pb2.StartGeneration()
        request.CopyFrom(start)
        request.request_id = start.request_id or f"r{next(self._ids)}"
        limits = Limits(request.scheduling, self._patience)
        retries = 0
        while True:
            begun = False
            try:
                async with aclosing(self._attempt(request, limits)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except GenerationError as error:
                wait = BACKOFF_SECONDS * 2**retries if error.retry_after is None else error.retry_after
                if not begun and error.reason in STARTING and limits.seconds_left > LAST_SECONDS:
                    wait = min(wait, limits.seconds_left - LAST_SECONDS)
                    self._on_wait(error)
                elif (
                    isinstance(error, StreamRefusedError)
                    and error.reason not in STARTING
                    and retries < RETRIES
                    and wait < limits.own_seconds_left
                ):
                    retries += 1
                else:
                    raise
            await asyncio.sleep(wait)
            limits.apply(request.scheduling)

    async def _attempt(
        self, request: generation_pb2.StartGeneration, limits: Limits
    ) -> AsyncGenerator[generation_pb2.GenerationEvent, None]:
        await self._stream_taken(request.scheduling, limits)
        message = generation_pb2.GenerateRequest(start=request)
        check_size(message)
        if request.request_id in self._queues:
            problem = f"a request with the id {request.request_id!r} is live on this stream"
            raise GenerationError(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", problem)
        queue = self._queues[request.request_id] = asyncio.Queue()
        self._begun = True
        try:
            await self._write(message)
            while True:
                event = await queue.get()
                if isinstance(event, GenerationError):
                    raise event
                if event.HasField("failed"):
                    raise GenerationError.from_status(event.failed.status, event.failed.usage)
                yield event
                if event.HasField("finished"):
                    return
        finally:
            if self._queues.get(request.request_id) is queue:  # and not of a later one with its id
                await self._forget(request.request_id)

    async def _stream_taken(self, scheduling: generation_pb2.Scheduling, limits: Limits) -> None:
        """Opens a stream that was refused again, and waits until it is this request's turn to be sent."""
        try:
            async with asyncio.timeout(min(STATUS_SECONDS, limits.own_seconds_left)):
                while True:
                    if isinstance(self._ended, StreamRefusedError):
                        self._open(first_alone=True)
                    if not (self._first_alone and self._begun) or self._answered.is_set():
                        return
                    await self._answered.wait()
                    limits.apply(scheduling)
        except TimeoutError:
            limits.apply(scheduling)

    async def cancel(self, request_id: str) -> None:
        """Its events go on to a `finished` with what was used."""
        cancel = generation_pb2.CancelGeneration(request_id=request_id)
        await self._write(generation_pb2.GenerateRequest(cancel=cancel))

    async def acknowledge(self, request_id: str, token_count: int, candidate_index: int = 0) -> None:
        """Opens the window of a request that asked for one: tokens [0, token_count) were consumed."""
        message = generation_pb2.AcknowledgeOutput(
            request_id=request_id, candidate_index=candidate_index, token_count=token_count
        )
        await self._write(generation_pb2.GenerateRequest(acknowledge=message))

    async def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._end(GenerationError.closed())  # also where the reader was never begun, or had met a refusal

    async def _forget(self, request_id: str) -> None:
        del self._queues[request_id]
        if self._ended is None and not self._reader.done():
            with suppress(GenerationError):  # of a stream that ends meanwhile, which cancels it, too
                await self.cancel(request_id)

    async def _write(self, message: generation_pb2.GenerateRequest) -> None:
        call = self._call
        async with self._writing:
            if self._call is not call:
                return  # it was refused, which its requests have been told
            if self._ended is None:
                try:
                    await call.write(message)
                    return
                except (aio.AioRpcError, asyncio.InvalidStateError):
                    await self._reader  # which learns why the stream ended
        raise self._ended or GenerationError.closed()

    async def _read(self) -> None:
        error = GenerationError.closed()
        try:
            async for response in self._call:
                self._answered.set()
                for event in response.events:
                    self._deliver(event)
        except aio.AioRpcError as rpc_error:
            error = await self._end_of(rpc_error)
        finally:
            self._end(error)

    async def _end_of(self, rpc_error: aio.AioRpcError) -> GenerationError:
        """What the requests of a stream that ended like this are told."""
        answered = self._answered.is_set()
        if hides_refusal(rpc_error) and not (answered or self._first_alone):
            return StreamRefusedError(rpc_error.code(), "", rpc_error.details() or "", retry_after=0.0)
        rpc_error = await refusal_behind(rpc_error, self._open_call)
        error = GenerationError.from_rpc(rpc_error)
        told = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after is not None
        refused = not answered and (told or error.code in UNSERVED)
        return StreamRefusedError.from_rpc(rpc_error) if refused else error

    def _deliver(self, event: generation_pb2.GenerationEvent) -> None:
        queue = self._queues.get(event.request_id)
        if queue is not None:
            queue.put_nowait(event)
            if event.HasField("finished") or event.HasField("failed"):
                del self._queues[event.request_id]

    def _end(self, error: GenerationError) -> None:
        self._ended = error
        self._answered.set()
        for queue in self._queues.values():
            queue.put_nowait(error)
        self._queues.clear()


class Limits:
    """Until when a request may wait: by the patience of its client, and by its own limits, which count from its first
    attempt on."""

    def __init__(self, scheduling: generation_pb2.Scheduling, patience: float) -> None:
        now = time.monotonic()
        self._ends: dict[str, float] = {
            name: now + getattr(scheduling, name).ToNanoseconds() / 1e9
            for name in ("timeout", "queue_timeout")
            if scheduling.HasField(name)
        }
        self._last = min([now + patience, *self._ends.values()])

    @property
    def seconds_left(self) -> float:
        return self._last - time.monotonic()

    @property
    def own_seconds_left(self) -> float:
        """By the request's own limits alone."""
        return min(self._ends.values(), default=math.inf) - time.monotonic()

    def apply(self, scheduling: generation_pb2.Scheduling) -> None:
        """Gives the next attempt what is left."""
        for name, end in self._ends.items():
            left = getattr(scheduling, name)
            left.seconds, left.nanos = divmod(max(1, int((end - time.monotonic()) * 1e9)), 10**9)


def check_size(message: generation_pb2.GenerateRequest) -> None:
    size = message.ByteSize()
    if size > MOST_MESSAGE_BYTES:
        problem = f"the request has {size} bytes; a message has at most {MOST_MESSAGE_BYTES}"
        raise GenerationError(grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE", problem)


def hides_refusal(error: aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.INTERNAL and (error.details() or "").startswith(WRITE_FAULT)


async def refusal_behind(error: aio.AioRpcError, reopen: Callable[[], GenerateCall]) -> aio.AioRpcError:
    """What the server said where gRPC (1.84) hides it: a write that meets the end of its call, as where a token is
    refused at once, becomes a fault of gRPC's own. The same call without a write tells."""
    if not hides_refusal(error):
        return error
    call = reopen()
    try:
        async with asyncio.timeout(STATUS_SECONDS):
            await call.read()
    except aio.AioRpcError as refusal:
        return refusal
    except TimeoutError:
        pass
    finally:
        call.cancel()
    return error


def _code(value: int) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == value)
