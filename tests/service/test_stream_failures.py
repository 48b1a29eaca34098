"""What ends a whole stream, and what does not."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest
from grpc import aio

from octavo.v1 import generation_pb2 as pb
from service.config import ServiceConfig
from tests.service.calls import (
    Stream,
    error_status,
    read_to_error,
    rich_status,
    run_bidi,
    run_stream,
    run_unary,
    start,
    start_message,
)
from tests.service.fake_engine import Script
from tests.service.server import Running, running, until


async def bidi_error(stream: Stream) -> aio.AioRpcError:
    return (await read_to_error(stream.call))[1]


async def test_duplicate_live_id_ends_the_stream(served: Running) -> None:
    served.engine.plan = lambda _: Script(steps_before_first=10**9)  # the first one lives until it is ended
    stream = Stream(served)
    await stream.send(start_message(request_id="a"), start_message(request_id="a"))
    status = error_status(await bidi_error(stream))
    assert (status.code, status.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
    assert status.metadata == {"request_id": "a"}
    await until(lambda: served.engine.live_requests == 0)


async def test_status_of_a_stream_that_fails_while_its_first_message_leaves(served: Running) -> None:
    """grpc.aio takes headers for sent once the write that brings them has returned, and sends them again else."""
    served.engine.plan = lambda _: Script(steps_before_first=10**9)
    streams = [Stream(served) for _ in range(150)]
    for stream in streams:
        await stream.send(start_message(request_id="a"))
    await asyncio.gather(*(stream.send(start_message(request_id="a")) for stream in streams))
    errors = await asyncio.gather(*(bidi_error(stream) for stream in streams))
    assert {error.code() for error in errors} == {grpc.StatusCode.ALREADY_EXISTS}


async def test_id_can_be_used_again_once_its_request_ended(served: Running) -> None:
    stream = Stream(served)
    for _ in range(3):
        await stream.send(start_message(request_id="a", max_tokens=2))
        await stream.read_until_ended("a")
        assert stream.logs.pop("a").text() == "ab"
    assert await stream.finish() is grpc.StatusCode.OK


async def test_same_id_on_two_streams_is_two_requests(served: Running) -> None:
    logs = await asyncio.gather(*(run_bidi(served, start_message(request_id="a", max_tokens=3)) for _ in range(2)))
    assert [log["a"].text() for log in logs] == ["abc", "abc"]
    assert len({request.request_id for request in served.engine.submitted}) == 2


async def test_empty_action_ends_the_stream(served: Running) -> None:
    stream = Stream(served)
    await stream.send(pb.GenerateRequest())
    status = error_status(await bidi_error(stream))
    assert (status.code, status.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["action"])


async def test_garbage_bytes_end_only_their_own_call(served: Running) -> None:
    path = "/octavo.v1.GenerationService"
    calls: list[Any] = [
        served.channel.unary_unary(f"{path}/GenerateUnary", None, None)(b"\xff\xff\xff", timeout=5),
        served.channel.unary_stream(f"{path}/GenerateStream", None, None)(b"\xff\xff\xff", timeout=5).read(),
        served.channel.unary_unary("/octavo.v1.CapacityService/GetCapacity", None, None)(b"\xff\xff", timeout=5),
    ]
    bidi = cast(Any, served.channel.stream_stream(f"{path}/Generate", None, None))(timeout=5)
    await bidi.write(b"\xff\xff\xff")
    calls.append(bidi.read())
    for call in calls:
        with pytest.raises(aio.AioRpcError) as error:
            await call
        status = error_status(error.value)
        assert (status.code, status.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
    assert (await run_stream(served, start(max_tokens=3))).text() == "abc"


async def test_message_above_the_limit_is_refused_by_the_transport() -> None:
    async with running(config=ServiceConfig(max_message_bytes=1 << 20)) as served:
        with pytest.raises(aio.AioRpcError) as error:
            await run_unary(served, start("x" * (1 << 20)))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in (error.value.details() or "")
        assert (await run_stream(served, start(max_tokens=1))).text() == "a"


async def test_fault_while_converting_is_the_requests_own(served: Running) -> None:
    """An engine event that cannot be converted (a candidate that was never asked for) fails that request only."""
    served.engine.step_delay = 0.005
    stream = Stream(served)
    await stream.send(start_message(request_id="a"), start_message(request_id="b", max_tokens=20))
    await stream.read_until_tokens("a", 1)
    victim = next(live for live in served.server.replica.live if live.client_id == "a")
    assert victim.output is not None
    victim.output.candidates.clear()
    await stream.read_until_ended("a", "b")
    status = rich_status(stream.logs["a"].failed.status)
    assert (status.code, status.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
    assert stream.logs["b"].text() == "abcdefghijklmnopqrst"
    assert served.engine.live_requests == 0
