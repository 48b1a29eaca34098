"""Calls that tests make, and what every answer must satisfy."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from octavo.v1 import generation_pb2 as pb
from tests.service.server import Running

CALL_SECONDS = 10.0
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs


def start(text: str = "prompt", *, max_tokens: int | None = None, **fields: Any) -> pb.StartGeneration:
    """A request that asks for text and token ids, unless `fields` say otherwise."""
    if not {"token_ids", "chat"} & fields.keys():
        fields["text"] = text
    fields.setdefault("output", pb.OutputOptions(token_ids=True))
    if max_tokens is not None:
        fields["stop"] = pb.StopCriteria(max_tokens=max_tokens)
    return pb.StartGeneration(**fields)


def start_message(*arguments: Any, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(start=start(*arguments, **fields))


def cancel_message(request_id: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(cancel=pb.CancelGeneration(request_id=request_id))


def acknowledge_message(request_id: str, count: int, candidate: int = 0) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        acknowledge=pb.AcknowledgeOutput(request_id=request_id, candidate_index=candidate, token_count=count)
    )


@dataclass
class RequestLog:
    """All events of one request, checked as they come."""

    events: list[pb.GenerationEvent] = field(default_factory=list)

    def add(self, event: pb.GenerationEvent) -> None:
        assert event.sequence == len(self.events), "a gap in the sequence"
        assert not self.ended, "an event after the last one"
        kind = event.WhichOneof("event")
        if kind == "admitted":
            assert not self.events
        elif kind != "failed":
            assert self.events, f"{kind} before admitted"
        if kind == "delta":
            self._check_delta(event.delta)
        self.events.append(event)

    def _check_delta(self, delta: pb.CandidateDelta) -> None:
        assert delta.token_offset == self.token_count(delta.candidate_index)
        assert not delta.token_ids or len(delta.token_ids) == delta.token_count
        assert not delta.logprobs or len(delta.logprobs) == delta.token_count
        assert self.finish(delta.candidate_index) is None, "a delta after the candidate's end"
        assert delta.token_count or delta.text or delta.HasField("finish"), "an empty delta"

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.kinds[-1] in ("finished", "failed")

    @property
    def kinds(self) -> list[str | None]:
        return [event.WhichOneof("event") for event in self.events]

    @property
    def deltas(self) -> list[pb.CandidateDelta]:
        return [event.delta for event in self.events if event.HasField("delta")]

    @property
    def admitted(self) -> pb.Admitted:
        return self.events[0].admitted

    @property
    def finished(self) -> pb.RequestFinished:
        assert self.events[-1].HasField("finished"), self.events[-1]
        return self.events[-1].finished

    @property
    def failed(self) -> pb.RequestFailed:
        assert self.events[-1].HasField("failed"), self.events[-1]
        return self.events[-1].failed

    def text(self, candidate: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.candidate_index == candidate)

    def token_ids(self, candidate: int = 0) -> list[int]:
        return [i for delta in self.deltas if delta.candidate_index == candidate for i in delta.token_ids]

    def token_count(self, candidate: int = 0) -> int:
        return sum(delta.token_count for delta in self.deltas if delta.candidate_index == candidate)

    def finish(self, candidate: int = 0) -> pb.CandidateFinish | None:
        for delta in self.deltas:
            if delta.candidate_index == candidate and delta.HasField("finish"):
                return delta.finish
        return None

    def finish_reason(self, candidate: int = 0) -> str:
        finish = self.finish(candidate)
        return pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_") if finish else ""


Logs = dict[str, RequestLog]


async def collect(messages: AsyncIterable[pb.GenerateResponse | pb.GenerateStreamResponse]) -> Logs:
    """Reads to the end. Every request must have ended."""
    logs: Logs = defaultdict(RequestLog)
    async with asyncio.timeout(CALL_SECONDS):
        async for message in messages:
            assert message.events, "an empty message"
            for event in message.events:
                logs[event.request_id].add(event)
    assert all(log.ended for log in logs.values())
    return logs


async def run_stream(served: Running, request: pb.StartGeneration) -> RequestLog:
    """GenerateStream to its end."""
    (log,) = (await collect(served.generation.GenerateStream(pb.GenerateStreamRequest(start=request)))).values()
    return log


async def run_unary(served: Running, request: pb.StartGeneration, **options: Any) -> pb.GenerateUnaryResponse:
    options.setdefault("timeout", CALL_SECONDS)
    return await served.generation.GenerateUnary(pb.GenerateUnaryRequest(start=request), **options)


async def run_bidi(served: Running, *requests: pb.GenerateRequest) -> Logs:
    """Sends all, closes the send side, reads to the end."""
    call = cast(Any, served.generation).Generate(timeout=CALL_SECONDS)
    for request in requests:
        await call.write(request)
    await call.done_writing()
    return await collect(call)


class Stream:
    """An open Generate call: requests out, logs in."""

    def __init__(self, served: Running, **options: Any) -> None:
        options.setdefault("timeout", CALL_SECONDS)
        # The stub wants an iterator of requests; here they are written.
        self.call = cast(Any, served.generation).Generate(**options)
        self.logs: Logs = defaultdict(RequestLog)
        self.messages: list[pb.GenerateResponse] = []

    async def send(self, *requests: pb.GenerateRequest) -> None:
        for request in requests:
            await self.call.write(request)

    async def read(self) -> bool:
        """One message into the logs; False at the end of the stream."""
        message = await self.call.read()
        if message is EOF:
            return False
        self.messages.append(message)
        for event in message.events:
            self.logs[event.request_id].add(event)
        return True

    async def read_until_ended(self, *request_ids: str) -> None:
        async with asyncio.timeout(CALL_SECONDS):
            while not all(self.logs[request_id].ended for request_id in request_ids):
                assert await self.read(), "the stream ended"

    async def read_until_tokens(self, request_id: str, count: int, candidate: int = 0) -> None:
        async with asyncio.timeout(CALL_SECONDS):
            while self.logs[request_id].token_count(candidate) < count:
                assert await self.read(), "the stream ended"

    async def finish(self) -> grpc.StatusCode:
        """Closes the send side and reads to the end of the RPC."""
        await self.call.done_writing()
        while await self.read():
            pass
        code: grpc.StatusCode = await self.call.code()
        return code


# --- statuses --------------------------------------------------------------------------------------------------------


@dataclass
class RichStatus:
    """A gRPC status with its details unpacked."""

    code: grpc.StatusCode
    message: str
    details: list[Any]
    trailers: dict[str, str | bytes] = field(default_factory=dict)

    def detail(self, kind: type[Any]) -> Any:
        found = [detail for detail in self.details if isinstance(detail, kind)]
        assert len(found) == 1, f"{len(found)} details of {kind.__name__} in {self}"
        return found[0]

    @property
    def reason(self) -> str:
        info = self.detail(error_details_pb2.ErrorInfo)
        assert info.domain == "octavo.v1"
        return str(info.reason)

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self.detail(error_details_pb2.ErrorInfo).metadata)

    @property
    def fields(self) -> list[str]:
        return [item.field for item in self.detail(error_details_pb2.BadRequest).field_violations]

    @property
    def retry_seconds(self) -> float:
        delay = self.detail(error_details_pb2.RetryInfo).retry_delay
        return float(delay.seconds + delay.nanos / 1e9)

    @property
    def pushback_ms(self) -> int | None:
        value = self.trailers.get("grpc-retry-pushback-ms")
        return None if value is None else int(value)

    @property
    def usage(self) -> pb.Usage:
        usage: pb.Usage = self.detail(pb.Usage)
        return usage


DETAIL_TYPES = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.ResourceInfo,
    error_details_pb2.RetryInfo,
    pb.Usage,
)


def rich_status(status: status_pb2.Status) -> RichStatus:
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return RichStatus(code, status.message, list(_unpacked(status.details)))


def _unpacked(details: Iterable[Any]) -> Iterable[Any]:
    for detail in details:
        kind = next(kind for kind in DETAIL_TYPES if detail.Is(kind.DESCRIPTOR))
        message = kind()
        detail.Unpack(message)
        yield message


def error_status(error: aio.AioRpcError) -> RichStatus:
    """Checks that code and message are those of the details, too."""
    trailing: Any = error.trailing_metadata()
    trailers: dict[str, Any] = dict(trailing)
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    rich = rich_status(status)
    assert rich.code is error.code()
    assert rich.message == error.details()
    rich.trailers = trailers
    return rich


async def read_to_error(call: Any) -> tuple[list[Any], aio.AioRpcError]:
    """The messages and the error of a stream that must fail."""
    messages: list[Any] = []
    try:
        async with asyncio.timeout(CALL_SECONDS):
            while (message := await call.read()) is not EOF:
                messages.append(message)
    except aio.AioRpcError as error:
        return messages, error
    raise AssertionError("the stream did not fail")


async def refusal(served: Running, request: pb.StartGeneration, **options: Any) -> RichStatus:
    """The status of a unary call that must fail."""
    try:
        response = await run_unary(served, request, **options)
    except aio.AioRpcError as error:
        return error_status(error)
    raise AssertionError(f"not refused: {response}")
