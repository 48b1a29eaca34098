"""GenerationService: one request or many on one stream, unary, and cancelling from outside."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NoReturn

from grpc import aio

from octavo.v1 import generation_pb2, generation_pb2_grpc
from service.convert.requests import parse_start
from service.intake import Intake
from service.orca import LoadReports
from service.output import RequestOutput
from service.pending import PendingBytes
from service.replica import Replica
from service.request import Generation
from service.status import (
    Failure,
    RequestRefusedError,
    abort,
    abort_bounded,
    duplicate_request_id,
    internal,
    invalid,
)
from service.stream import OutputStream

LOGGER = logging.getLogger(__name__)

OPENING_SECONDS = 2.0  # for a failed stream's first message to leave, which brings the RPC's headers

Context = aio.ServicerContext[Any, Any]


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._intake = Intake(replica)
        self._reports = LoadReports(replica)

    async def Generate(  # type: ignore[override]  # writes by context.write
        self, request_iterator: AsyncIterator[generation_pb2.GenerateRequest], context: Context
    ) -> None:
        call = self._call(context, generation_pb2.GenerateResponse, multiplexed=True)
        await call.serve(request_iterator)

    async def GenerateStream(  # type: ignore[override]  # writes by context.write
        self, request: generation_pb2.GenerateStreamRequest, context: Context
    ) -> None:
        await self._refuse_when_full(request.start, context)
        call = self._call(context, generation_pb2.GenerateStreamResponse, multiplexed=False)
        await call.serve_one(request.start)

    def _call(self, context: Context, response: Callable[[], Any], *, multiplexed: bool) -> StreamCall:
        return StreamCall(self._replica, self._intake, self._reports, context, response, multiplexed=multiplexed)

    async def _refuse_when_full(self, start: generation_pb2.StartGeneration, context: Context) -> None:
        """Ends a call of one request at once, if no request is taken."""
        refusal = self._intake.refusal(start.scheduling.priority)
        if refusal is not None:
            await self._refuse(start, refusal, time.monotonic(), context)

    async def _refuse(
        self, start: generation_pb2.StartGeneration, failure: Failure, arrival: float, context: Context
    ) -> NoReturn:
        self._intake.note_refused(start.request_id, failure, arrival)
        self._reports.attach(context)
        await abort(context, failure)

    async def GenerateUnary(
        self, request: generation_pb2.GenerateUnaryRequest, context: Context
    ) -> generation_pb2.GenerateUnaryResponse:
        await self._refuse_when_full(request.start, context)
        arrival = time.monotonic()
        deadline = rpc_deadline(context, arrival)
        done = asyncio.Event()

        def on_ready(output: RequestOutput) -> None:
            if output.closed:
                done.set()

        parsed = parse(request.start, self._replica, arrival, windowed=False, in_one=True)
        if isinstance(parsed, Failure):
            await self._refuse(request.start, parsed, arrival, context)
        output = self._intake.begin(parsed, PendingBytes(), on_ready, deadline)
        try:
            await done.wait()
        finally:
            if not output.closed:
                output.control.release()
        self._reports.attach(context)
        if output.failure is not None:
            await abort(context, output.failure)
        return output.take_all()

    async def CancelGenerations(
        self, request: generation_pb2.CancelGenerationsRequest, context: Context
    ) -> generation_pb2.CancelGenerationsResponse:
        cancelled = []
        for request_id in request.request_ids:
            live = self._replica.live.find(request_id)
            if live is not None and live.cancel():
                cancelled.append(request_id)
                LOGGER.info(
                    "cancelled from outside",
                    extra={"request_id": live.engine_id, "reason": request.reason},
                )
        return generation_pb2.CancelGenerationsResponse(cancelled_request_ids=cancelled)


class StreamCall:
    """One streaming RPC: a reader of actions, a writer of events, and the requests between them."""

    def __init__(
        self,
        replica: Replica,
        intake: Intake,
        reports: LoadReports,
        context: Context,
        response: Callable[[], Any],
        *,
        multiplexed: bool,
    ) -> None:
        self._replica = replica
        self._intake = intake
        self._reports = reports
        self._context = context
        self._multiplexed = multiplexed
        self._deadline = rpc_deadline(context, time.monotonic())
        self._last: RequestOutput | None = None
        self._stream = OutputStream(
            *(context.write, partial(context.send_initial_metadata, ()), response, replica.config.stream),
            multiplexed=multiplexed,
            pacer=replica.streams.pacer,
        )

    async def serve(self, requests: AsyncIterator[generation_pb2.GenerateRequest]) -> None:
        """Runs until input and requests have ended. However it ends, the engine forgets its requests at once."""
        self._replica.streams.add(self._stream)
        reader = asyncio.create_task(self._read(requests))
        reader.add_done_callback(self._on_read_end)
        try:
            failure = await self._write()
        finally:
            self._release()
            reader.cancel()
        await self._end(failure)

    async def serve_one(self, start: generation_pb2.StartGeneration) -> None:
        """The same for one request. One that is refused at once needs no tasks."""
        self._replica.streams.add(self._stream)
        try:
            self._start(start)
            self._stream.close_input()
            failure = self._refusal
            if failure is None:
                failure = await self._write()
        finally:
            self._release()
        await self._end(failure)

    @property
    def _refusal(self) -> Failure | None:
        """What a call of one request was refused with as it came."""
        if self._stream.failed.done():
            return self._stream.failed.result()
        return None if self._last is None else self._last.failure

    async def _end(self, failure: Failure | None) -> None:
        self._reports.attach(self._context)
        if failure is not None:
            await abort_bounded(self._context, failure)

    async def _write(self) -> Failure | None:
        writer = asyncio.create_task(self._stream.run())
        writer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # which `failed` has, too
        try:
            return await self._outcome(writer)
        finally:
            writer.cancel()

    async def _outcome(self, writer: asyncio.Task[None]) -> Failure | None:
        stream = self._stream
        ends: set[asyncio.Future[Any]] = {writer, stream.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if stream.failed.done():
            if stream.opening:
                await asyncio.wait({writer}, timeout=OPENING_SECONDS)
            failure = stream.failed.result()
            return failure if self._multiplexed or self._last is None else failure.with_usage(self._last.usage_so_far)
        writer.result()
        if self._multiplexed or self._last is None or self._last.failure is None:
            return None
        return self._last.failure.after_output()

    def _on_read_end(self, reader: asyncio.Task[None]) -> None:
        self._stream.close_input()
        error = None if reader.cancelled() else reader.exception()
        if isinstance(error, RequestRefusedError):
            self._stream.fail(error.failure)
        elif error is not None:
            LOGGER.error("reading a stream failed", exc_info=error)
            self._stream.fail(internal(f"{type(error).__name__} while reading the stream"))

    def _release(self) -> None:
        self._replica.streams.remove(self._stream)
        failed = self._stream.failed
        for output in self._stream.outputs.values():
            if not output.closed:
                if failed.done():  # metrics, log and traces tell what ended it
                    output.fail_when_cancelled(failed.result())
                output.control.release()

    # --- actions ----------------------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[generation_pb2.GenerateRequest]) -> None:
        async for message in requests:
            match message.WhichOneof("action"):
                case "start":
                    self._start(message.start)
                case "cancel":
                    self._cancel(message.cancel.request_id)
                case "acknowledge":
                    self._acknowledge(message.acknowledge)
                case _:
                    self._stream.fail(invalid("action", "is missing: set start, cancel or acknowledge"))
            if self._stream.failed.done():
                return

    def _start(self, start: generation_pb2.StartGeneration) -> None:
        arrival = time.monotonic()
        stream, request_id = self._stream, start.request_id
        if request_id and stream.has(request_id):
            stream.fail(duplicate_request_id(request_id))
            return
        parsed = self._intake.refusal(start.scheduling.priority) or parse(
            start, self._replica, arrival, windowed=self._multiplexed
        )
        if isinstance(parsed, Failure):
            stream.refuse(self._intake.note_refused(request_id, parsed, arrival), parsed)
            return
        self._last = self._intake.begin(parsed, stream.pending, stream.mark_ready, self._deadline)
        stream.attach(self._last)

    def _cancel(self, request_id: str) -> None:
        output = self._stream.outputs.get(request_id)
        if output is not None:
            output.control.cancel()

    def _acknowledge(self, message: generation_pb2.AcknowledgeOutput) -> None:
        output = self._stream.outputs.get(message.request_id)
        if output is not None:
            output.acknowledge(message.candidate_index, message.token_count)


def parse(
    start: generation_pb2.StartGeneration, replica: Replica, arrival: float, *, windowed: bool, in_one: bool = False
) -> Generation | Failure:
    try:
        return parse_start(start, replica.model, arrival, windowed=windowed, in_one=in_one)
    except RequestRefusedError as error:
        return error.failure


def rpc_deadline(context: Context, now: float) -> float | None:
    """The RPC's deadline as `time.monotonic()` seconds."""
    left = context.time_remaining()
    return None if left is None else now + left
