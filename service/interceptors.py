"""What happens to every call before its handler: the caller's token is looked up, garbage is turned away."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from service.status import Failure, RequestRefusedError, abort, malformed, no_token, not_allowed
from service.tokens import CALLER, Right, TokenFile

# Probes of orchestrators carry no tokens, and tell nothing that a port scan would not.
OPEN_PREFIX = "/grpc.health.v1.Health/"
SCHEME = "bearer"


class BearerAuthentication(aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic class at run time
    """Lets calls with a known token pass and tells their handlers whose it is. right: what the token must allow."""

    def __init__(self, tokens: TokenFile, right: Right) -> None:
        self._tokens = tokens
        self._right = right

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(OPEN_PREFIX):
            return await continuation(handler_call_details)
        token = bearer_token(handler_call_details)
        principal = self._tokens.find(token) if token is not None else None
        if principal is None:
            return refusing(no_token(missing=token is None))
        if self._right not in principal.rights:
            return refusing(not_allowed(principal.name, self._right))
        CALLER.set(principal)  # the handler runs in this call's own task
        return await continuation(handler_call_details)


def bearer_token(details: grpc.HandlerCallDetails) -> str | None:
    for key, value in details.invocation_metadata or ():
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            if scheme.lower() == SCHEME and token:
                return token
    return None


def refusing(failure: Failure) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler for any kind of call: what the client sent is not read."""

    async def refuse(_: Any, context: aio.ServicerContext[Any, Any]) -> None:
        await abort(context, failure)

    return grpc.stream_stream_rpc_method_handler(refuse)


class Malformed:
    """Stands for bytes that are no message of their method."""


MALFORMED = Malformed()


class MalformedRequests(aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic class at run time
    """Answers garbage with INVALID_ARGUMENT. gRPC itself would call it UNKNOWN and log a stack trace for each.

    The innermost interceptor: what it gets are the methods' own handlers, which it wraps once.
    """

    def __init__(self) -> None:
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        wrapped = self._wrapped.get(handler_call_details.method)
        if wrapped is not None:
            return wrapped
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method; names that clients make up are not kept
            return handler
        self._wrapped[handler_call_details.method] = wrapped = self._wrap(handler)
        return wrapped

    def _wrap(self, handler: Any) -> Any:
        if handler.request_deserializer is None:
            return handler
        kind = next(kind for kind in HANDLER_KINDS if getattr(handler, kind) is not None)
        if not inspect.iscoroutinefunction(getattr(handler, kind)):
            return handler  # reflection and channelz, which are not ours
        guard = guard_stream if handler.request_streaming else guard_message
        return handler._replace(
            request_deserializer=lenient(handler.request_deserializer), **{kind: guard(getattr(handler, kind))}
        )


HANDLER_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return MALFORMED

    return parse


def guard_message(handle: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        if request is MALFORMED:
            await abort(context, malformed())
        return await handle(request, context)

    return guarded


def guard_stream(handle: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(requests: AsyncIterator[Any], context: aio.ServicerContext[Any, Any]) -> Any:
        return await handle(well_formed(requests), context)

    return guarded


async def well_formed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Raises RequestRefusedError at the first message that is none."""
    async for request in requests:
        if request is MALFORMED:
            raise RequestRefusedError(malformed())
        yield request
