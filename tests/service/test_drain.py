"""The end of a replica: what was accepted is finished, what is new is refused politely, everything is typed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio

from octavo.v1 import capacity_pb2, generation_pb2
from service.config import ServiceConfig
from service.live import OpenStreams
from service.status import RETRY_AT_ONCE, RequestRefusedError, draining
from service.stream import OutputStream, StreamLimits
from tests.service.calls import Stream, error_status, read_to_error, refusal, rich_status, start, start_message
from tests.service.fake_engine import FakeEngineClient
from tests.service.server import Running, running, until

PATIENT = ServiceConfig(drain_grace=0.0, drain_timeout=20.0)


async def busy_stream(served: Running, max_tokens: int | None) -> Stream:
    served.engine.step_delay = 0.01
    stream = Stream(served)
    await stream.send(start_message(request_id="a", max_tokens=max_tokens))
    await stream.read_until_tokens("a", 1)
    return stream


async def end_of(stream: Stream) -> aio.AioRpcError:
    """How the server ends a stream whose client keeps its side open."""
    return (await read_to_error(stream.call))[1]


async def test_running_requests_finish_and_idle_streams_get_a_typed_end() -> None:
    async with running(config=PATIENT) as served:
        stream = await busy_stream(served, 60)
        draining = asyncio.create_task(served.server.drain())
        await stream.read_until_ended("a")
        assert stream.logs["a"].token_count() == 60
        status = error_status(await end_of(stream))
        assert (status.code, status.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        await asyncio.wait_for(draining, 10)


async def test_stream_whose_client_closed_its_side_ends_well() -> None:
    async with running(config=PATIENT) as served:
        stream = await busy_stream(served, 60)
        await stream.call.done_writing()
        draining = asyncio.create_task(served.server.drain())
        assert await stream.finish() is grpc.StatusCode.OK
        assert stream.logs["a"].token_count() == 60
        await asyncio.wait_for(draining, 10)


async def test_new_requests_are_refused_on_new_calls_and_on_open_streams() -> None:
    async with running(config=PATIENT) as served:
        stream = await busy_stream(served, 100)
        draining = asyncio.create_task(served.server.drain())
        await until(lambda: served.server.replica.draining)
        status = await refusal(served, start())
        assert (status.code, status.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert (status.retry_seconds, status.pushback_ms) == (0.0, RETRY_AT_ONCE)
        await stream.send(start_message(request_id="late"))
        await stream.read_until_ended("late")
        assert rich_status(stream.logs["late"].failed.status).reason == "DRAINING"
        await stream.read_until_ended("a")
        assert stream.logs["a"].token_count() == 100
        await asyncio.wait_for(draining, 10)


async def test_drain_timeout_ends_what_still_runs_with_usage() -> None:
    async with running(config=replace(PATIENT, drain_timeout=0.2)) as served:
        stream = await busy_stream(served, None)
        draining = asyncio.create_task(served.server.drain())
        await stream.read_until_ended("a")
        status = rich_status(stream.logs["a"].failed.status)
        assert (status.code, status.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAIN_TIMEOUT")
        assert stream.logs["a"].failed.usage.completion_tokens >= stream.logs["a"].token_count() > 0
        await asyncio.wait_for(draining, 10)
        assert served.engine.live_requests == 0


async def test_drain_timeout_with_a_hung_engine_still_ends() -> None:
    async with running(config=replace(PATIENT, drain_timeout=0.1)) as served:
        stream = await busy_stream(served, None)
        served.engine.cancel = lambda request_id: True  # type: ignore[method-assign]  # accepts, and never answers
        served.engine.hang()
        await asyncio.wait_for(served.server.drain(), 15)
        status = error_status(await end_of(stream))
        assert status.code is grpc.StatusCode.UNAVAILABLE


async def test_second_signal_ends_the_drain_at_once() -> None:
    async with running(config=replace(PATIENT, drain_timeout=600, drain_grace=600)) as served:
        stream = await busy_stream(served, None)
        stop_now = asyncio.Event()
        draining = asyncio.create_task(served.server.drain(stop_now))
        await until(lambda: served.server.replica.draining)
        assert not draining.done()
        stop_now.set()
        await stream.read_until_ended("a")
        assert rich_status(stream.logs["a"].failed.status).reason == "DRAIN_TIMEOUT"
        await asyncio.wait_for(draining, 10)


async def test_listener_stays_open_for_the_grace_time() -> None:
    async with running(config=replace(PATIENT, drain_grace=600)) as served:
        stop_now = asyncio.Event()
        draining = asyncio.create_task(served.server.drain(stop_now))
        await until(lambda: served.server.replica.draining)
        assert (await refusal(served, start())).reason == "DRAINING"
        assert not draining.done()
        stop_now.set()
        await asyncio.wait_for(draining, 10)


async def test_grace_time_ends() -> None:
    async with running(config=replace(PATIENT, drain_grace=0.2)) as served:
        await asyncio.wait_for(served.server.drain(), 10)


async def test_queued_requests_are_accepted_requests_and_finish() -> None:
    async with running(FakeEngineClient(max_num_seqs=1, step_delay=0.002), PATIENT) as served:
        stream = Stream(served)
        await stream.send(*(start_message(request_id=f"r{i}", max_tokens=10) for i in range(5)))
        await until(lambda: served.engine.live_requests == 5)
        draining = asyncio.create_task(served.server.drain())
        await stream.read_until_ended(*(f"r{i}" for i in range(5)))
        assert all(stream.logs[f"r{i}"].token_count() == 10 for i in range(5))
        await asyncio.wait_for(draining, 10)


async def test_capacity_watch_sees_draining_and_gets_a_typed_end() -> None:
    async with running(config=PATIENT) as served:
        stream = await busy_stream(served, 100)
        request = capacity_pb2.WatchCapacityRequest()
        request.min_interval.FromMilliseconds(10)
        watch = served.capacity.WatchCapacity(request, timeout=20)
        reading = asyncio.create_task(read_to_error(watch))
        await stream.read_until_tokens("a", 5)
        draining = asyncio.create_task(served.server.drain())
        messages, error = await reading
        assert messages[0].capacity.state == capacity_pb2.REPLICA_STATE_READY
        last = messages[-1].capacity
        assert (last.state, last.accepting) == (capacity_pb2.REPLICA_STATE_DRAINING, False)
        assert error_status(error).reason == "DRAINING"
        stream.call.cancel()
        await asyncio.wait_for(draining, 10)


async def test_drained_server_has_stopped_its_engine() -> None:
    async with running(config=PATIENT) as served:
        await served.server.drain()
        assert served.engine.state == "stopped"
        with pytest.raises(aio.AioRpcError) as error:
            await served.capacity.GetCapacity(capacity_pb2.GetCapacityRequest(), timeout=2)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


class LastEvent:
    """As much of a RequestOutput as its stream looks at: one event, and then it is done."""

    request_id, failure, done, urgent = "a", None, False, True

    def take(self, events: Any) -> None:
        events.add(request_id="a")
        self.done = True


async def test_stop_does_not_fail_a_stream_whose_last_events_are_being_written() -> None:
    """The drain ends when the last request does; its stream may still be writing then. One that waits for more
    fails."""
    sending, go_on = asyncio.Event(), asyncio.Event()

    async def send(batch: object) -> None:
        sending.set()
        await go_on.wait()

    streams, writing = OpenStreams(), []
    for closed in (True, False):
        stream = OutputStream(
            send, go_on.wait, generation_pb2.GenerateResponse, StreamLimits(), multiplexed=True, pacer=streams.pacer
        )
        streams.add(stream)
        output: Any = LastEvent()
        stream.attach(output)
        stream.mark_ready(output)
        if closed:
            stream.close_input()
        writing.append(asyncio.create_task(stream.run()))
    await asyncio.wait_for(sending.wait(), 10)
    await asyncio.sleep(0)
    streams.fail_all(draining())
    go_on.set()
    await asyncio.wait_for(writing[0], 10)
    with pytest.raises(RequestRefusedError):
        await asyncio.wait_for(writing[1], 10)
