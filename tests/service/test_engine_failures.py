"""What fails in an engine, and engines that die: the requests that it had end, with usage."""

from __future__ import annotations

import asyncio

import grpc

from engine import EngineState
from octavo.v1 import generation_pb2 as pb
from service.status import RETRY_AT_ONCE
from tests.service.calls import (
    Stream,
    error_status,
    read_to_error,
    refusal,
    rich_status,
    run_bidi,
    run_stream,
    start,
    start_message,
)
from tests.service.fake_engine import Script
from tests.service.server import Running, until


async def test_engine_error_is_the_requests_own(served: Running) -> None:
    served.engine.step_delay = 0.005
    served.engine.plan = lambda request: Script(fail_after=3 if request.prompt_token_ids == [33] else None)
    logs = await run_bidi(served, start_message("!", request_id="bad"), start_message(request_id="good", max_tokens=12))
    status = rich_status(logs["bad"].failed.status)
    assert (status.code, status.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
    assert logs["bad"].failed.usage.completion_tokens == 3
    assert logs["good"].text() == "abcdefghijkl"
    assert (await run_stream(served, start(max_tokens=3))).text() == "abc"


async def test_failure_of_a_stream_after_output_is_event_and_status(served: Running) -> None:
    served.engine.plan = lambda _: Script(fail_after=3)
    call = served.generation.GenerateStream(pb.GenerateStreamRequest(start=start()), timeout=10)
    messages, error = await read_to_error(call)
    assert messages[-1].events[-1].failed.usage.completion_tokens == 3
    status = error_status(error)
    assert status.reason == "ENGINE_ERROR"
    assert status.usage.completion_tokens == 3


async def test_failure_of_a_unary_call_has_usage_in_its_details(served: Running) -> None:
    served.engine.plan = lambda _: Script(fail_after=4)
    status = await refusal(served, start("hi"))
    assert (status.usage.prompt_tokens, status.usage.completion_tokens) == (2, 4)


async def test_engine_death_fails_every_live_request(served: Running) -> None:
    served.engine.step_delay = 0.005
    stream = Stream(served)
    await stream.send(start_message(request_id="a"), start_message(request_id="b"))
    await stream.read_until_tokens("a", 2)
    await stream.read_until_tokens("b", 2)
    served.engine.die()
    await stream.read_until_ended("a", "b")
    for request_id in ("a", "b"):
        status = rich_status(stream.logs[request_id].failed.status)
        assert (status.code, status.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DIED")
        assert status.metadata == {"instance_id": "fake-1"}
        assert status.message == "the engine died: engine process ended with code -9"
        usage = stream.logs[request_id].failed.usage
        assert usage.prompt_tokens == len("prompt")
        assert usage.completion_tokens == stream.logs[request_id].token_count() >= 2
    assert await stream.finish() is grpc.StatusCode.OK


async def test_engine_death_before_output_allows_a_retry(served: Running) -> None:
    served.engine.hold = True
    calling = asyncio.create_task(refusal(served, start()))
    await until(lambda: served.engine.live_requests == 1)
    served.engine.die()
    status = await calling
    assert (status.code, status.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DIED")
    assert (status.retry_seconds, status.pushback_ms) == (0.0, RETRY_AT_ONCE)  # elsewhere


async def test_engine_death_after_output_forbids_one(served: Running) -> None:
    served.engine.step_delay = 0.005
    call = served.generation.GenerateStream(pb.GenerateStreamRequest(start=start()), timeout=10)
    await call.read()
    served.engine.die()
    status = error_status((await read_to_error(call))[1])
    assert (status.reason, status.pushback_ms) == ("ENGINE_DIED", -1)


async def test_dead_engine_refuses_new_requests(served: Running) -> None:
    served.engine.die()
    assert (await refusal(served, start())).reason == "ENGINE_DIED"


async def test_starting_engine_refuses_with_a_time_to_retry(served: Running) -> None:
    served.engine.set_state(EngineState.STARTING)
    status = await refusal(served, start())
    assert (status.code, status.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_STARTING")
    assert status.retry_seconds > 0
    served.engine.set_state(EngineState.READY)
