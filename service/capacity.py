"""CapacityService: what this replica can take, once or as a watch in which the newest state wins, and what its prefix
cache holds, as a watch in which nothing is left out."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from grpc import aio

from engine import EngineDiedError, EngineState
from octavo.v1 import capacity_pb2, capacity_pb2_grpc
from service.admission import Admission
from service.cache_feed import ChangesLostError
from service.convert.cache import changes_message, snapshot_message
from service.convert.capacity import at_rest, capacity_message, capacity_response, parse_watch, watch_response
from service.replica import Replica
from service.status import RequestRefusedError, abort, changes_lost, draining, engine_died, not_allowed
from service.tokens import CALLER, Right

Context = aio.ServicerContext[Any, Any]

MOST_CHANGES = 1024  # of the cache in one message
WATCH_SECONDS = 1.0  # how often a watch of the cache looks whether its engine is still there


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
        """A snapshot unless the watcher has one, then changes as there is room to send them. What is kept for watchers
        is bounded, so one that reads too slowly is told that it lost some."""
        replica, feed = self._replica, self._replica.cache_feed
        try:
            replica.model.check_name(request.model)
            if Right.ADMIN not in CALLER.get().rights:
                raise RequestRefusedError(not_allowed(CALLER.get().name, Right.ADMIN))
            instance_id = replica.info.instance_id
            sequence = request.start_sequence - 1 if request.start_sequence else await self._send_cache(context)
            while not replica.stopping:
                seen = feed.revision.value
                if replica.info.instance_id != instance_id:
                    raise ChangesLostError(f"instance {instance_id} is gone")
                changes = feed.after(sequence, MOST_CHANGES)
                if changes:
                    sequence += len(changes)
                    await context.write(changes_message(instance_id, sequence, changes))
                else:
                    await feed.revision.wait_beyond(seen, WATCH_SECONDS)
                    self._check_engine()
        except RequestRefusedError as error:
            await abort(context, error.failure)
        except ChangesLostError as error:
            await abort(context, changes_lost(str(error)))
        except EngineDiedError as error:
            await abort(context, engine_died(replica.info.instance_id, str(error)))
        await abort(context, draining())

    async def _send_cache(self, context: Context) -> int:
        """All that the cache holds, a piece at a time, each asked for when the one before was sent. Returns the
        sequence behind which the changes since the beginning follow."""
        feed, instance_id = self._replica.cache_feed, self._replica.info.instance_id
        sequence = feed.newest  # what changes from here on is sent behind the snapshot, be it in there or not
        blocks, start = await feed.read()
        await context.write(snapshot_message(instance_id, sequence, blocks, first=True, last=start is None))
        while start is not None:
            blocks, start = await feed.read(start)
            if blocks or start is None:
                await context.write(snapshot_message(instance_id, sequence, blocks, first=False, last=start is None))
        return sequence

    def _check_engine(self) -> None:
        state = self._replica.engine.state
        if state in (EngineState.FAILED, EngineState.STOPPED):
            raise EngineDiedError(self._replica.problem)

    def _snapshot(self) -> capacity_pb2.Capacity:
        replica = self._replica
        stats, queue_delay = replica.engine.stats, self._admission.queue_delay()
        if replica.engine.state is not EngineState.READY:
            stats, queue_delay = at_rest(replica.info, stats), 0.0
        return capacity_message(
            replica.info,
            stats,
            state=replica.state,
            accepting=replica.ready,
            revision=replica.changes.value,
            queue_delay=queue_delay,
            heartbeat_age=time.monotonic() - replica.last_sign_of_life,
        )
