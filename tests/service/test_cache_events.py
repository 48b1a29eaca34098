"""The watch of the prefix cache: a snapshot, then every change in order; what was lost is said."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc import aio

from engine import BlockRemoved, BlockStored
from octavo.v1 import capacity_pb2 as pb
from service.cache_feed import CacheFeed, ChangesLostError
from service.convert.cache import cache_events
from service.replica import Replica
from tests.service.calls import error_status
from tests.service.fake_engine import FakeEngineClient
from tests.service.server import Running, running


def chain(first: int, count: int, parent: int | None = None) -> list[BlockStored]:
    """Blocks that follow one another, with hashes from `first` on."""
    hashes = range(first, first + count)
    return [BlockStored(number, parent if number == first else number - 1, [number] * 16) for number in hashes]


def watch(served: Running, start: int = 0) -> Any:
    return served.capacity.WatchCacheEvents(pb.WatchCacheEventsRequest(start_sequence=start), timeout=20)


class Router:
    """What a client that applies every event in order knows."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.blocks: dict[int, int | None] = {}  # hash -> parent
        self.sequence = 0
        self.snapshots = 0

    async def read(self) -> pb.WatchCacheEventsResponse:
        message: pb.WatchCacheEventsResponse = await self.call.read()
        assert message.instance_id == "fake-1"
        self.sequence, self.snapshots = message.sequence, self.snapshots + message.snapshot
        for event in message.events:
            match event.WhichOneof("event"):
                case "cleared":
                    self.blocks.clear()
                case "stored":
                    stored = event.stored
                    parent = stored.parent_hash if stored.HasField("parent_hash") else None
                    for block in stored.blocks:
                        self.blocks[block.hash] = parent
                        parent = block.hash
                        assert list(block.token_ids) == [block.hash] * 16
                case "removed":
                    for number in event.removed.hashes:
                        self.blocks.pop(number, None)
        return message

    async def read_snapshot(self) -> None:
        while not (await self.read()).snapshot_end:
            pass


def parents(engine: FakeEngineClient) -> dict[int, int | None]:
    return {stored.hash: stored.parent for stored in engine.cache.values()}


async def test_snapshot_in_pieces_then_changes(served: Running) -> None:
    engine = served.engine
    engine.change_cache(*chain(10, 5), *chain(30, 2, parent=11))
    router = Router(watch(served))
    await router.read_snapshot()
    assert router.snapshots == 3
    assert router.blocks == parents(engine) == {10: None, 11: 10, 12: 11, 13: 12, 14: 13, 30: 11, 31: 30}
    engine.change_cache(BlockRemoved(14), BlockRemoved(31), *chain(50, 2))
    message = await router.read()
    assert not message.snapshot
    assert message.sequence == router.sequence == 7 + 4
    assert router.blocks == parents(engine)
    router.call.cancel()


async def test_an_empty_cache_is_a_snapshot_too(served: Running) -> None:
    message = await Router(watch(served)).read()
    assert (message.snapshot, message.snapshot_end, message.sequence) == (True, True, 0)
    assert [event.WhichOneof("event") for event in message.events] == ["cleared"]


async def test_changes_during_the_snapshot_follow_it(served: Running) -> None:
    engine = served.engine
    engine.change_cache(*chain(10, 30))
    router = Router(watch(served))
    await router.read()
    engine.change_cache(BlockRemoved(39), BlockRemoved(38), *chain(70, 3), BlockRemoved(72))
    await router.read_snapshot()
    while router.blocks != parents(engine):
        await router.read()
    assert not {39, 38, 72} & router.blocks.keys()


async def test_a_watch_goes_on_where_it_left_off(served: Running) -> None:
    engine = served.engine
    router = Router(watch(served))
    await router.read_snapshot()
    engine.change_cache(*chain(10, 3))
    await router.read()
    router.call.cancel()
    engine.change_cache(BlockRemoved(12), *chain(20, 1))
    router.call = watch(served, router.sequence + 1)
    message = await router.read()
    assert (message.snapshot, router.sequence) == (False, 5)
    assert router.blocks == parents(engine)


@pytest.mark.parametrize("start", [1, 2, 9])
async def test_lost_changes_are_out_of_range(start: int) -> None:
    """Older than what is kept, or not yet there."""
    async with running(FakeEngineClient()) as served:
        served.server.replica.cache_feed = CacheFeed(served.engine, most_kept=4)
        served.engine.change_cache(*chain(10, 6))
        with pytest.raises(aio.AioRpcError) as error:
            await watch(served, start).read()
        status = error_status(error.value)
        assert (status.code, status.reason) == (grpc.StatusCode.OUT_OF_RANGE, "CACHE_CHANGES_LOST")
        message = await Router(watch(served, 3)).read()
        assert message.sequence == 6


async def test_a_watcher_that_reads_too_slowly_is_told(served: Running) -> None:
    engine, replica = served.engine, served.server.replica
    replica.cache_feed = CacheFeed(engine, most_kept=100)
    router = Router(watch(served))
    await router.read_snapshot()
    for turn in range(2000):  # more than the transport takes while nothing is read
        engine.change_cache(*chain(turn * 200, 90))
        if turn % 50 == 0:
            await asyncio.sleep(0)
    with pytest.raises(aio.AioRpcError) as error:
        await read_for_ever(router)
    assert error_status(error.value).code is grpc.StatusCode.OUT_OF_RANGE


async def read_for_ever(router: Router) -> None:
    while True:
        await router.read()


async def test_a_dead_engine_ends_the_watch(served: Running) -> None:
    router = Router(watch(served))
    await router.read_snapshot()
    served.engine.die()
    with pytest.raises(aio.AioRpcError) as error:
        await router.read()
    assert error_status(error.value).reason == "ENGINE_DIED"
    with pytest.raises(aio.AioRpcError) as error:
        await watch(served).read()
    assert error_status(error.value).reason == "ENGINE_DIED"


async def test_another_instance_is_out_of_range() -> None:
    engine = FakeEngineClient()
    feed = CacheFeed(engine, most_kept=10)
    engine.change_cache(*chain(1, 4))
    assert (feed.newest, len(feed.after(1, 10)), len(feed.after(1, 2))) == (4, 3, 2)
    object.__setattr__(engine, "_info", FakeEngineClient(instance_id="fake-2").info)
    assert feed.newest == 0
    with pytest.raises(ChangesLostError):
        feed.after(4, 10)
    assert feed.after(0, 10) == []


async def test_unknown_model(served: Running) -> None:
    with pytest.raises(aio.AioRpcError) as error:
        await served.capacity.WatchCacheEvents(pb.WatchCacheEventsRequest(model="other"), timeout=5).read()
    assert error_status(error.value).code is grpc.StatusCode.NOT_FOUND


async def test_the_watch_ends_with_the_server(served: Running) -> None:
    replica: Replica = served.server.replica
    router = Router(watch(served))
    await router.read_snapshot()
    replica.begin_stop()
    with pytest.raises(aio.AioRpcError) as error:
        await router.read()
    assert error_status(error.value).reason == "DRAINING"


def test_runs_of_changes_become_one_event_each() -> None:
    changes = [*chain(1, 2), *chain(5, 1, parent=2), BlockRemoved(1), BlockRemoved(2), *chain(9, 1), *chain(20, 1)]
    events = cache_events(changes)
    assert [event.WhichOneof("event") for event in events] == ["stored", "removed", "stored", "stored"]
    assert [block.hash for block in events[0].stored.blocks] == [1, 2, 5]
    assert not events[0].stored.HasField("parent_hash")
    assert list(events[1].removed.hashes) == [1, 2]
    largest = cache_events([BlockStored(2**64 - 1, 2**64 - 2, [7])])[0].stored
    assert (largest.parent_hash, largest.blocks[0].hash) == (2**64 - 2, 2**64 - 1)
