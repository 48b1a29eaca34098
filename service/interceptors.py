"""What happens to every call before its handler: the caller's token is looked up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from service.status import Failure, abort, no_token, not_allowed
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
