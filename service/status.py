"""The one table from causes of failure to gRPC statuses. Every status a client sees is built here."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import grpc
from google.protobuf import duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from engine import FailureKind, Grammar, RequestFailed, Usage
from octavo.v1 import generation_pb2

LOGGER = logging.getLogger(__name__)

DOMAIN = "octavo.v1"
DETAILS_TRAILER = "grpc-status-details-bin"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
NEVER_RETRY = -1
# Of what another replica can serve now. Not 0: a gRPC C-core client (1.84) that is told to retry after 0 ms never does
# and waits for its deadline.
RETRY_AT_ONCE = 1
ABORT_SECONDS = 5.0
MOST_ECHOED = 200  # letters of a client's own name that are told back


@dataclass(frozen=True)
class Failure:
    """Why a request or a stream ends without its result. Messages of it are built once, however many clients get it.

    metadata: ErrorInfo's. fields: (field path, what is wrong with it). resource: (type, name) that does not exist.
    retry_after: seconds, RetryInfo. pushback_ms: what gRPC's own retries obey; None leaves it to their policy.
    """

    code: grpc.StatusCode
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    fields: tuple[tuple[str, str], ...] = ()
    resource: tuple[str, str] | None = None
    retry_after: float | None = None
    pushback_ms: int | None = None
    usage: Usage | None = None

    @property
    def fails_first_start(self) -> bool:
        """Whether a stream whose first start met this fails as a whole, so that the client's retry policy works. What
        must not be retried concerns that start alone."""
        retried = self.code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        return retried and self.pushback_ms != NEVER_RETRY

    @cached_property
    def status(self) -> status_pb2.Status:
        """For events. Nobody changes it."""
        return status_message(self)

    @cached_property
    def trailers(self) -> tuple[tuple[str, str | bytes], ...]:
        """For RPCs that end with it."""
        return trailing_metadata(self)

    def after_output(self) -> Failure:
        """The same where output was sent already: a retry would repeat it, so gRPC must not make one."""
        return self if self.pushback_ms is None else replace(self, pushback_ms=NEVER_RETRY)

    def with_usage(self, usage: Usage) -> Failure:
        return replace(self, usage=usage)


class RequestRefusedError(Exception):
    """A request that gets no further; `failure` is what its client is told."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def invalid(field_path: str, problem: str) -> Failure:
    return Failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_PARAMETER",
        f"{field_path}: {problem}",
        fields=((field_path, problem),),
    )


def malformed() -> Failure:
    return Failure(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", "the bytes are no message of this method")


def clipped(name: str) -> str:
    """A client's own name, short enough to be told back: gRPC's clients drop statuses of more than 8 KiB, in which it
    stands three times and a letter may take nine bytes."""
    return name if len(name) <= MOST_ECHOED else name[:MOST_ECHOED] + "..."


def unknown_model(asked: str, served: str) -> Failure:
    return Failure(
        grpc.StatusCode.NOT_FOUND,
        "MODEL_NOT_FOUND",
        f"model {clipped(asked)!r} is not served here; this replica serves {served!r}",
        metadata={"served_model": served},
        resource=("octavo.v1.Model", clipped(asked)),
    )


def prompt_too_long(problem: str, numbers: Mapping[str, int]) -> Failure:
    """`numbers`: prompt_tokens (or prompt_bytes), max_prompt_tokens, max_context_tokens."""
    return Failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "PROMPT_TOO_LONG",
        problem,
        metadata={name: str(value) for name, value in numbers.items()},
        fields=(("start.prompt", problem),),
    )


def grammar_invalid(field_path: str, problem: str) -> Failure:
    return Failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "GRAMMAR_INVALID",
        f"{field_path}: {problem}",
        fields=((field_path, problem),),
    )


def queue_full(problem: str, retry_after: float, numbers: Mapping[str, str]) -> Failure:
    """`numbers`: what waits and what may, as in QueueFill; none where it is no queue for steps that is full."""
    return Failure(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        problem,
        metadata=numbers,
        retry_after=retry_after,
        pushback_ms=max(RETRY_AT_ONCE, milliseconds(retry_after)),
    )


def shed(problem: str, retry_after: float, numbers: Mapping[str, str]) -> Failure:
    return replace(queue_full(problem, retry_after, numbers), reason="SHED")


def deadline_unattainable(problem: str, numbers: Mapping[str, str]) -> Failure:
    """`numbers`: estimated_ms, until the first token; by then those before it have had their turn. gRPC's own retries
    keep the call's deadline, which only comes nearer."""
    return Failure(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "DEADLINE_UNATTAINABLE",
        problem,
        metadata=numbers,
        retry_after=float(numbers.get("estimated_ms", "0")) / 1000,
        pushback_ms=NEVER_RETRY,
    )


def expired_in_queue(problem: str = "the deadline passed before the request was scheduled") -> Failure:
    return Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "EXPIRED_IN_QUEUE", problem)


def deadline_exceeded(problem: str = "the deadline passed while the request ran") -> Failure:
    return Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", problem)


def slow_consumer(problem: str) -> Failure:
    return Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER", problem, pushback_ms=NEVER_RETRY)


def draining() -> Failure:
    return Failure(
        grpc.StatusCode.UNAVAILABLE,
        "DRAINING",
        "this replica is draining; ask another one",
        retry_after=0.0,
        pushback_ms=RETRY_AT_ONCE,
    )


def drain_timeout() -> Failure:
    return Failure(grpc.StatusCode.UNAVAILABLE, "DRAIN_TIMEOUT", "the replica stopped before the request was done")


def engine_starting() -> Failure:
    return Failure(
        grpc.StatusCode.UNAVAILABLE,
        "ENGINE_STARTING",
        "the model is still loading",
        retry_after=1.0,
        pushback_ms=1000,
    )


def engine_stalled() -> Failure:
    return Failure(
        grpc.StatusCode.UNAVAILABLE,
        "ENGINE_STALLED",
        "the engine makes no progress",
        retry_after=1.0,
        pushback_ms=1000,
    )


def engine_died(instance_id: str, cause: str = "") -> Failure:
    return Failure(
        grpc.StatusCode.UNAVAILABLE,
        "ENGINE_DIED",
        f"the engine died: {cause}" if cause else "the engine died",
        metadata={"instance_id": instance_id},
        retry_after=0.0,
        pushback_ms=RETRY_AT_ONCE,
    )


def internal(problem: str) -> Failure:
    return Failure(grpc.StatusCode.INTERNAL, "ENGINE_ERROR", problem)


def quota_exceeded(problem: str, retry_after: float) -> Failure:
    return Failure(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUOTA_EXCEEDED",
        problem,
        retry_after=retry_after,
        pushback_ms=max(RETRY_AT_ONCE, milliseconds(retry_after)),
    )


def no_token(*, missing: bool) -> Failure:
    problem = "this server needs a bearer token" if missing else "this bearer token is not known"
    return Failure(grpc.StatusCode.UNAUTHENTICATED, "TOKEN_MISSING" if missing else "TOKEN_INVALID", problem)


def not_allowed(caller: str, right: str) -> Failure:
    problem = f"the token of {caller!r} does not allow {str(right)!r}"
    return Failure(grpc.StatusCode.PERMISSION_DENIED, "RIGHT_MISSING", problem, metadata={"right": right})


def duplicate_request_id(request_id: str) -> Failure:
    return Failure(
        grpc.StatusCode.ALREADY_EXISTS,
        "DUPLICATE_REQUEST_ID",
        f"request id {request_id!r} is already live on this stream",
        metadata={"request_id": request_id},
    )


def changes_lost(problem: str) -> Failure:
    return Failure(grpc.StatusCode.OUT_OF_RANGE, "CACHE_CHANGES_LOST", f"{problem}: subscribe again from 0")


def unknown_service(name: str) -> Failure:
    return Failure(
        grpc.StatusCode.NOT_FOUND,
        "SERVICE_UNKNOWN",
        f"no service {clipped(name)!r} here",
        resource=("grpc.health.v1.Service", clipped(name)),
    )


def from_engine(event: RequestFailed, instance_id: str, grammar: Grammar | None = None) -> Failure:
    """The failure of a request inside the engine, as its client sees it. grammar: the request's, to name its field."""
    return _from_kind(event, instance_id, grammar).with_usage(event.usage)


def _from_kind(event: RequestFailed, instance_id: str, grammar: Grammar | None) -> Failure:
    match event.kind:
        case FailureKind.INVALID:
            return invalid(f"start.{event.field}" if event.field else "start", event.message)
        case FailureKind.PROMPT_TOO_LONG:
            return replace(prompt_too_long(event.message, {}), metadata=event.details)
        case FailureKind.GRAMMAR_INVALID:
            path = "start.structured_output"
            return grammar_invalid(path if grammar is None else f"{path}.{grammar.kind}", event.message)
        case FailureKind.QUEUE_FULL:
            return queue_full(event.message, *_retry_and_numbers(event))
        case FailureKind.SHED:
            return shed(event.message, *_retry_and_numbers(event))
        case FailureKind.DEADLINE_UNATTAINABLE:
            return deadline_unattainable(event.message, event.details)
        case FailureKind.EXPIRED_IN_QUEUE:
            return expired_in_queue(event.message)
        case FailureKind.DEADLINE_EXCEEDED:
            return deadline_exceeded(event.message)
        case FailureKind.DRAINING:
            return draining()
        case FailureKind.DRAIN_TIMEOUT:
            return drain_timeout()
        case FailureKind.ENGINE_DIED:
            return engine_died(instance_id, event.message)
        case FailureKind.ENGINE_ERROR:
            return internal(event.message)


def _retry_and_numbers(event: RequestFailed) -> tuple[float, dict[str, str]]:
    numbers = dict(event.details)
    return float(numbers.pop("retry_after", "1")), numbers


def milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)


def status_message(failure: Failure) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo first, then whatever else the failure has to say."""
    status = status_pb2.Status(
        code=failure.code.value[0],
        message=failure.message,
    )
    for detail in _details(failure):
        status.details.add().Pack(detail)
    return status


def _details(failure: Failure) -> list[message.Message]:
    details: list[message.Message] = [
        error_details_pb2.ErrorInfo(reason=failure.reason, domain=DOMAIN, metadata=failure.metadata)
    ]
    if failure.fields:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=path, description=problem)
            for path, problem in failure.fields
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    if failure.resource is not None:
        kind, name = failure.resource
        details.append(
            error_details_pb2.ResourceInfo(resource_type=kind, resource_name=name, description=failure.message)
        )
    if failure.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(milliseconds(failure.retry_after))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def usage_message(usage: Usage) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        completion_tokens=usage.completion_tokens,
    )


def trailing_metadata(failure: Failure) -> tuple[tuple[str, str | bytes], ...]:
    """The status with its details (the usage among them, which has a field of its own in events), and the pushback."""
    status = failure.status
    if failure.usage not in (None, Usage()):
        status = status_pb2.Status()
        status.CopyFrom(failure.status)
        status.details.add().Pack(usage_message(failure.usage))
    trailers: list[tuple[str, str | bytes]] = [(DETAILS_TRAILER, status.SerializeToString())]
    if failure.pushback_ms is not None:
        trailers.append((PUSHBACK_TRAILER, str(failure.pushback_ms)))
    return tuple(trailers)


async def abort(context: aio.ServicerContext[Any, Any], failure: Failure) -> NoReturn:
    """Ends the RPC with the failure's status and details."""
    trailers = (*failure.trailers, *(context.trailing_metadata() or ()))
    await context.abort(failure.code, failure.message, trailers)
    raise AssertionError("abort returned")


async def abort_bounded(context: aio.ServicerContext[Any, Any], failure: Failure) -> None:
    """As `abort`, for streams that may be stalled: their status can wait for a client that never reads."""
    try:
        async with asyncio.timeout(ABORT_SECONDS):
            await abort(context, failure)
    except TimeoutError:
        LOGGER.warning("client did not take its status", extra={"reason": failure.reason})
