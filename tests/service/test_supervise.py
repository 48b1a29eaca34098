"""Engines that die or hang: their requests fail with a status, and with `restart` another engine serves on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine import ConfigurationError, EngineClient, EngineInfo, EngineState
from octavo.v1 import capacity_pb2
from service.config import ServiceConfig
from service.server import Server
from service.supervise import SupervisedEngine
from tests.service.byte_tokenizer import byte_tokenizer
from tests.service.calls import Stream, refusal, rich_status, run_stream, start, start_message
from tests.service.fake_engine import FakeEngineClient
from tests.service.server import Running, running_server, until

QUICK = ServiceConfig(port=0, drain_grace=0.0, heartbeat_timeout=0.4)


class Factory:
    """Makes engines with distinct instance ids. `broken`: the next so many do not start."""

    def __init__(self) -> None:
        self.engines: list[FakeEngineClient] = []
        self.broken = 0
        self.beats = True

    def __call__(self) -> EngineClient:
        engine = FakeEngineClient(step_delay=0.005, instance_id=f"fake-{len(self.engines) + 1}")
        if self.broken:
            self.broken -= 1
            engine.start = _refuse_to_start  # type: ignore[method-assign]
        if not self.beats:
            engine.hang()
            engine.stats_overrides = {"heartbeat": 0.0, "progressed": 0.0}
        self.engines.append(engine)
        return engine

    @property
    def newest(self) -> FakeEngineClient:
        return self.engines[-1]


async def _refuse_to_start() -> EngineInfo:
    raise ConfigurationError("no weights")


def kill(engine: EngineClient) -> None:
    assert isinstance(engine, FakeEngineClient)
    engine.die()


@asynccontextmanager
async def supervised(*, restart: bool, hang_timeout: float | None = None) -> AsyncIterator[tuple[Running, Factory]]:
    factory = Factory()
    engine = SupervisedEngine(factory, restart=restart, hang_timeout=hang_timeout, kill=kill)
    await engine.start()
    async with running_server(Server(engine, byte_tokenizer(), QUICK), factory.newest) as served:
        yield served, factory


async def capacity(served: Running) -> capacity_pb2.Capacity:
    return (await served.capacity.GetCapacity(capacity_pb2.GetCapacityRequest(), timeout=5)).capacity


async def dying_stream(served: Running) -> Stream:
    stream = Stream(served)
    await stream.send(start_message(request_id="a"))
    await stream.read_until_tokens("a", 2)
    return stream


async def test_serves_like_the_engine_it_holds() -> None:
    async with supervised(restart=True) as (served, _):
        assert (await run_stream(served, start(max_tokens=3))).text() == "abc"
        assert (await capacity(served)).instance_id == "fake-1"


async def test_dead_engine_is_replaced() -> None:
    async with supervised(restart=True) as (served, factory):
        stream = await dying_stream(served)
        factory.newest.die()
        await stream.read_until_ended("a")
        status = rich_status(stream.logs["a"].failed.status)
        assert (status.reason, status.metadata) == ("ENGINE_DIED", {"instance_id": "fake-1"})
        assert (await refusal(served, start())).reason == "ENGINE_STARTING"
        assert (await capacity(served)).state == capacity_pb2.REPLICA_STATE_STARTING
        await until(lambda: served.server.replica.ready)
        assert (await capacity(served)).instance_id == "fake-2"
        await stream.send(start_message(request_id="b", max_tokens=3))
        await stream.read_until_ended("b")
        assert stream.logs["b"].text() == "abc"
        assert served.server.replica.alive
        await stream.finish()


async def test_failed_restarts_are_tried_again() -> None:
    async with supervised(restart=True) as (served, factory):
        factory.broken = 1
        factory.newest.die()
        await until(lambda: served.server.replica.ready)
        assert (await capacity(served)).instance_id == "fake-3"


async def test_hung_engine_is_killed_and_replaced() -> None:
    async with supervised(restart=True, hang_timeout=0.6) as (served, factory):
        stream = await dying_stream(served)
        factory.newest.hang()
        await stream.read_until_ended("a")
        assert rich_status(stream.logs["a"].failed.status).reason == "ENGINE_DIED"
        await until(lambda: served.server.replica.ready)
        assert (await run_stream(served, start(max_tokens=3))).text() == "abc"
        await stream.finish()


async def test_idle_engine_with_heartbeats_is_left_alone() -> None:
    async with supervised(restart=True, hang_timeout=1.0) as (served, factory):
        await asyncio.sleep(2.0)
        assert len(factory.engines) == 1
        assert served.server.replica.ready


async def test_death_without_restart_is_logged_once_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    async with supervised(restart=False) as (served, factory):
        factory.newest.die()
        factory.newest.set_state(EngineState.FAILED)
        (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert "engine died" in record.getMessage()
        assert vars(record)["problem"] == "engine process ended with code -9"
        status = await refusal(served, start())
        assert (status.reason, status.message) == ("ENGINE_DIED", "the engine died: engine process ended with code -9")


async def test_first_request_before_any_heartbeat_is_served() -> None:
    """Also after a restart, when the engine before gave its last sign of life long ago."""
    async with supervised(restart=True) as (served, factory):
        factory.newest.hang()
        factory.newest.stats_overrides = {"heartbeat": 0.0, "progressed": 0.0}
        assert served.server.replica.ready
        assert (await capacity(served)).load.engine_heartbeat_age.ToSeconds() == 0
        await asyncio.sleep(QUICK.heartbeat_timeout + 0.1)
        assert not served.server.replica.ready
        factory.beats = False
        factory.newest.die()
        await until(lambda: served.server.replica.ready)
        assert factory.newest.stats.heartbeat == 0.0


async def test_without_restart_a_dead_engine_stays_dead() -> None:
    async with supervised(restart=False) as (served, factory):
        factory.newest.die()
        await asyncio.sleep(1.0)
        assert len(factory.engines) == 1
        assert (await capacity(served)).state == capacity_pb2.REPLICA_STATE_FAILED
        assert not served.server.replica.alive


async def test_stop_during_a_restart_ends_it() -> None:
    async with supervised(restart=True) as (_, factory):
        factory.broken = 100
        factory.newest.die()
        await until(lambda: len(factory.engines) == 2)
    assert all(engine.state is not EngineState.READY or engine.live_requests == 0 for engine in factory.engines)


@pytest.mark.parametrize("restart", [True, False])
async def test_clean_stop_is_no_death(restart: bool) -> None:
    async with supervised(restart=restart) as (served, factory):
        assert served.server.replica.ready
    assert [engine.state for engine in factory.engines] == [EngineState.STOPPED]
