"""CapacityService: what this replica can take, once or as a watch in which the newest state wins."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from grpc import aio

from octavo.v1 import capacity_pb2, capacity_pb2_grpc
from service.admission import Admission
from service.convert.capacity import capacity_message, capacity_response, parse_watch, watch_response
from service.replica import Replica
from service.status import RequestRefusedError, abort, draining, unimplemented

Context = aio.ServicerContext[Any, Any]


class CapacityService(capacity_pb2_grpc.CapacityServiceServicer):
    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._admission = Admission(replica)

    async def GetCapacity(
        self, request: capacity_pb2.GetCapacityRequest, context: Context
    ) -> capacity_pb2.GetCapacityResponse:
        try:
            self._replica.model.check_name(request.model)
        except RequestRefusedError as error:
            await abort(context, error.failure)
        return capacity_response(self._snapshot())

    async def WatchCapacity(  # type: ignore[override]  # writes by context.write
        self, request: capacity_pb2.WatchCapacityRequest, context: Context
    ) -> None:
        """Sends the state as it is when there is room to send: what changed meanwhile is never queued."""
        try:
            pace = parse_watch(request, self._replica.model)
        except RequestRefusedError as error:
            await abort(context, error.failure)
        changes = self._replica.changes
        while not self._replica.stopping:
            seen = changes.value
            await context.write(watch_response(self._snapshot()))
            sent_at = time.monotonic()
            await asyncio.sleep(pace.least)
            await changes.wait_beyond(seen, sent_at + pace.most - time.monotonic())
        await abort(context, draining())

    async def WatchCacheEvents(  # type: ignore[override]  # writes by context.write
        self, request: capacity_pb2.WatchCacheEventsRequest, context: Context
    ) -> None:
        await abort(context, unimplemented("this version publishes no cache events"))

    def _snapshot(self) -> capacity_pb2.Capacity:
        replica = self._replica
        stats = replica.engine.stats
        return capacity_message(
            replica.info,
            stats,
            state=replica.state,
            accepting=replica.ready,
            revision=replica.changes.value,
            queue_delay=self._admission.queue_delay(),
            heartbeat_age=time.monotonic() - replica.last_sign_of_life,
        )
