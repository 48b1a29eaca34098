"""grpc.health.v1: Check, Watch and List tell the truth about a starting, stalled, dead and draining replica."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio

from engine import EngineState
from octavo.v1 import generation_pb2 as pb
from service.config import ServiceConfig
from service.health import GENERATION_SERVICE, HealthMessages
from tests.service.calls import Stream, error_status, refusal, run_bidi, start, start_message
from tests.service.fake_engine import FakeEngineClient, Script
from tests.service.server import Running, running, until

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
MESSAGES = HealthMessages()
QUICK = ServiceConfig(drain_grace=0.0, heartbeat_timeout=0.4)


def method(served: Running, name: str) -> Any:
    kind = "unary_stream" if name == "Watch" else "unary_unary"
    request = MESSAGES.ListRequest if name == "List" else MESSAGES.CheckRequest
    response = MESSAGES.ListResponse if name == "List" else MESSAGES.CheckResponse
    return getattr(served.channel, kind)(
        f"/grpc.health.v1.Health/{name}",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )


async def check(served: Running, service: str = GENERATION_SERVICE) -> int:
    return (await method(served, "Check")(MESSAGES.CheckRequest(service=service), timeout=5)).status  # type: ignore[no-any-return]


async def until_status(served: Running, status: int) -> None:
    async with asyncio.timeout(10):
        while await check(served) != status:
            await asyncio.sleep(0.02)


async def test_ready_replica_serves_everything(served: Running) -> None:
    for service in ("", GENERATION_SERVICE, "octavo.v1.TokenizationService", "octavo.v1.CapacityService"):
        assert await check(served, service) == SERVING


async def test_list_names_every_service(served: Running) -> None:
    statuses = (await method(served, "List")(MESSAGES.ListRequest(), timeout=5)).statuses
    assert {name: response.status for name, response in statuses.items()} == {
        "": SERVING,
        GENERATION_SERVICE: SERVING,
        "octavo.v1.TokenizationService": SERVING,
        "octavo.v1.CapacityService": SERVING,
    }


async def test_check_of_an_unknown_service_is_not_found(served: Running) -> None:
    with pytest.raises(aio.AioRpcError) as error:
        await check(served, "nobody")
    assert error_status(error.value).code is grpc.StatusCode.NOT_FOUND


async def test_watch_of_an_unknown_service_says_so_and_stays_open(served: Running) -> None:
    call = method(served, "Watch")(MESSAGES.CheckRequest(service="nobody"), timeout=5)
    assert (await call.read()).status == SERVICE_UNKNOWN
    assert not call.done()
    call.cancel()


async def test_not_serving_until_the_engine_is_ready(served: Running) -> None:
    served.engine.set_state(EngineState.STARTING)
    assert await check(served) == NOT_SERVING
    assert await check(served, "") == SERVING
    served.engine.set_state(EngineState.READY)
    assert await check(served) == SERVING


async def test_watch_follows_changes_and_repeats_nothing(served: Running) -> None:
    call = method(served, "Watch")(MESSAGES.CheckRequest(service=GENERATION_SERVICE), timeout=10)
    seen = [(await call.read()).status]
    await run_bidi(served, start_message(max_tokens=5))
    for state in (EngineState.STARTING, EngineState.READY, EngineState.FAILED):
        served.engine.set_state(state)
        seen.append((await call.read()).status)
    assert seen == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]
    call.cancel()


async def test_hung_engine_is_not_serving_and_serves_again_when_it_recovers() -> None:
    async with running(config=QUICK) as served:
        call = method(served, "Watch")(MESSAGES.CheckRequest(service=GENERATION_SERVICE), timeout=20)
        assert (await call.read()).status == SERVING
        served.engine.hang()
        assert (await asyncio.wait_for(call.read(), 10)).status == NOT_SERVING
        assert await check(served, "") == SERVING
        assert (await refusal(served, start())).reason == "ENGINE_STALLED"
        served.engine.recover()
        assert (await asyncio.wait_for(call.read(), 10)).status == SERVING
        call.cancel()


async def test_heartbeats_without_steps_while_requests_run_are_no_health() -> None:
    async with running(config=QUICK) as served:
        stream = Stream(served)
        served.engine.step_delay = 0.01
        await stream.send(start_message(request_id="a"))
        await stream.read_until_tokens("a", 1)
        served.engine.spin()
        await until_status(served, NOT_SERVING)
        served.engine.recover()
        await until_status(served, SERVING)
        stream.call.cancel()


async def test_long_queue_and_long_prefill_are_healthy() -> None:
    """Saturated is not sick: steps advance, though nobody gets a token."""
    patient = replace(QUICK, heartbeat_timeout=1.0)
    async with running(FakeEngineClient(max_num_seqs=1, step_delay=0.05), patient) as served:
        served.engine.plan = lambda _: Script(steps_before_first=10**9)
        stream = Stream(served)
        await stream.send(*(start_message(request_id=f"r{i}") for i in range(20)))
        await until(lambda: served.engine.live_requests == 20)
        for _ in range(30):
            assert await check(served) == SERVING
            await asyncio.sleep(0.05)
        stream.call.cancel()


async def test_dead_engine_is_neither_ready_nor_alive(served: Running) -> None:
    served.engine.die()
    assert await check(served) == NOT_SERVING
    assert await check(served, "") == NOT_SERVING


async def test_watches_end_with_the_server() -> None:
    async with running() as served:
        call = method(served, "Watch")(MESSAGES.CheckRequest(service=GENERATION_SERVICE), timeout=20)
        assert (await call.read()).status == SERVING
        draining = asyncio.create_task(served.server.drain())
        assert (await call.read()).status == NOT_SERVING
        with pytest.raises(aio.AioRpcError) as error:
            await call.read()
        assert error_status(error.value).reason == "DRAINING"
        await draining


async def test_health_answers_while_a_long_prompt_is_tokenized(served: Running) -> None:
    import threading

    go_on = threading.Event()
    replica = served.server.replica
    replica.max_prompt_bytes = 10**9
    replica.tokenizer.encode = lambda *_: go_on.wait(10) and [1]  # type: ignore[method-assign,assignment]
    stream = Stream(served)
    await stream.send(pb.GenerateRequest(start=pb.StartGeneration(text="x" * 100_000, request_id="a")))
    await until(lambda: len(replica.live) == 1)
    assert await check(served) == SERVING
    go_on.set()
    await stream.read_until_tokens("a", 1)
    stream.call.cancel()
