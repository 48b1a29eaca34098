"""The admin port: drain by RPC, and channelz for looking into connections. Always on loopback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpc import aio

from octavo.v1 import admin_pb2, admin_pb2_grpc
from service.convert.admin import drain_response, parse_drain
from service.replica import Replica
from service.status import RequestRefusedError, abort

Context = aio.ServicerContext[Any, Any]


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """request_drain: starts the drain with so many seconds for running requests, None for the configured time."""

    def __init__(self, replica: Replica, request_drain: Callable[[float | None], None]) -> None:
        self._replica = replica
        self._request_drain = request_drain

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        try:
            timeout = parse_drain(request)
        except RequestRefusedError as error:
            await abort(context, error.failure)
        self._request_drain(timeout)
        return drain_response(len(self._replica.live))
