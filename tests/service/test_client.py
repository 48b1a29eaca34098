"""The typed Python client."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import grpc
import pytest
from grpc import aio

from engine import EngineState
from octavo.v1 import generation_pb2 as pb
from service.client import (
    MOST_MESSAGE_BYTES,
    STATUS_SECONDS,
    Client,
    GenerationError,
    Session,
    chat_request,
    prompt_request,
    refusal_behind,
)
from service.config import ServiceConfig
from service.status import engine_starting
from tests.service.fake_engine import Script
from tests.service.server import Running, until


async def text(client: Client, start: pb.StartGeneration) -> str:
    return "".join([event.delta.text async for event in client.generate(start)])


async def test_generate(served: Running) -> None:
    async with Client(served.server.address) as client:
        assert await text(client, prompt_request("x", max_tokens=4)) == "abcd"
        assert await text(client, chat_request([("user", "x")], max_tokens=2)) == "ab"
        greedy = pb.SamplingParameters(temperature=0.0)
        assert await text(client, prompt_request("x", max_tokens=1, sampling=greedy)) == "a"
    assert served.engine.submitted[-1].sampling.temperature == 0.0


async def test_requests_of_a_session_that_are_left_early_leave_no_fault_behind(served: Running) -> None:
    """Their cancellations are still being written as the session ends."""
    served.engine.step_delay = 0.02
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))

    async def first(session: Session) -> str:
        async for event in session.generate(prompt_request("x", max_tokens=50)):
            if event.HasField("delta"):
                return event.delta.text
        return ""

    async with Client(served.server.address) as client:
        async with client.session() as session:
            assert await asyncio.gather(*(first(session) for _ in range(3))) == ["a"] * 3
        gc.collect()
        await asyncio.sleep(0.05)
    assert not faults


async def test_session_multiplexes(served: Running) -> None:
    served.engine.step_delay = 0.002
    async with Client(served.server.address) as client, client.session() as session:

        async def one(tokens: int) -> str:
            events = session.generate(prompt_request("x", max_tokens=tokens))
            return "".join([event.delta.text async for event in events])

        texts = await asyncio.wait_for(asyncio.gather(*map(one, range(1, 9))), 10)
        assert texts == ["abcdefgh"[:tokens] for tokens in range(1, 9)]


async def test_a_burst_that_begins_a_session_waits_for_no_answer(served: Running) -> None:
    served.engine.hang()  # takes requests in, and answers none
    async with Client(served.server.address) as client, client.session() as session:
        burst = [session.generate(prompt_request("x", max_tokens=1)) for _ in range(8)]
        firsts = [asyncio.create_task(anext(events)) for events in burst]
        await until(lambda: len(served.engine.submitted) == 8, seconds=STATUS_SECONDS / 2)
        served.engine.recover()
        assert all(event.HasField("admitted") for event in await asyncio.wait_for(asyncio.gather(*firsts), 10))
        for events in burst:
            assert [event async for event in events]


async def test_each_request_of_a_refused_burst_is_told_why(served: Running) -> None:
    """Also those that were written just as the refusal of the first arrived."""
    served.engine.set_state(EngineState.STARTING)
    async with Client(served.server.address, patience=0.0) as client:
        for _ in range(20):
            async with client.session() as session:
                burst = [anext(session.generate(prompt_request("x"))) for _ in range(8)]
                ends = await asyncio.wait_for(asyncio.gather(*burst, return_exceptions=True), 30)
            assert {getattr(end, "reason", end) for end in ends} == {"ENGINE_STARTING"}


async def test_failure_of_a_request_is_raised_with_its_usage(served: Running) -> None:
    served.engine.plan = lambda _: Script(fail_after=2)
    async with Client(served.server.address) as client, client.session() as session:
        with pytest.raises(GenerationError) as error:
            [_ async for _ in session.generate(prompt_request("x"))]
        assert (error.value.code, error.value.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
        assert error.value.usage.completion_tokens == 2
        served.engine.plan = lambda _: Script()
        assert [e async for e in session.generate(prompt_request("x", max_tokens=1))], "the session goes on"


async def test_a_message_beyond_the_limit_fails_alone(served: Running) -> None:
    assert ServiceConfig().max_message_bytes == MOST_MESSAGE_BYTES
    served.engine.plan = lambda _: Script(steps_before_first=20)
    async with Client(served.server.address) as client, client.session() as session:

        async def one(prompt: str) -> str:
            return "".join([event.delta.text async for event in session.generate(prompt_request(prompt, max_tokens=3))])

        other = asyncio.create_task(one("x"))
        await until(lambda: served.engine.live_requests == 1)
        with pytest.raises(GenerationError) as error:
            await one("x" * MOST_MESSAGE_BYTES)
        assert (error.value.code, error.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
        assert await asyncio.wait_for(other, 10) == "abc"
        assert await asyncio.wait_for(one("x"), 10) == "abc"


async def test_failure_of_the_rpc_is_raised_with_its_reason(served: Running) -> None:
    served.engine.die()
    async with Client(served.server.address) as client:
        with pytest.raises(GenerationError) as error:
            await text(client, prompt_request("x"))
        assert (error.value.code, error.value.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DIED")


async def test_retries_until_the_engine_is_ready(served: Running) -> None:
    served.engine.set_state(EngineState.STARTING)
    async with Client(served.server.address) as client:
        asking = asyncio.create_task(text(client, prompt_request("x", max_tokens=3)))
        await until(lambda: served.server.replica.metrics.outcomes("ENGINE_STARTING") == 1)
        served.engine.set_state(EngineState.READY)
        assert await asyncio.wait_for(asking, 10) == "abc"


@pytest.fixture
def quick_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine that starts: to be tried again after 20 ms."""
    refusal = replace(engine_starting(), retry_after=0.02, pushback_ms=20)
    monkeypatch.setattr("service.admission.engine_starting", lambda: refusal)


@pytest.mark.usefixtures("quick_refusals")
@pytest.mark.parametrize("first", [True, False])
async def test_a_session_waits_for_an_engine_as_long_as_that_starts(served: Running, first: bool) -> None:
    """The first request's refusal ends the stream, a later one's is an event."""
    refused, engine = served.server.replica.metrics, served.engine
    async with Client(served.server.address) as client, client.session() as session:

        async def one(tokens: int) -> str:
            events = session.generate(prompt_request("x", max_tokens=tokens))
            return "".join([event.delta.text async for event in events])

        if not first:
            assert await one(1) == "a"
        engine.set_state(EngineState.STARTING)
        asking = [asyncio.create_task(one(tokens)) for tokens in range(2, 12)]
        await until(lambda: refused.outcomes("ENGINE_STARTING") >= 60)
        engine.set_state(EngineState.READY)
        texts = await asyncio.wait_for(asyncio.gather(*asking), 10)
        assert texts == ["abcdefghijk"[:tokens] for tokens in range(2, 12)]
        assert await one(4) == "abcd"


@pytest.mark.usefixtures("quick_refusals")
@pytest.mark.parametrize("limit", ["patience", "timeout", "queue_timeout"])
async def test_a_request_waits_no_longer_for_an_engine_than_it_may(served: Running, limit: str) -> None:
    served.engine.set_state(EngineState.STARTING)
    start = prompt_request("x")
    if limit != "patience":
        getattr(start.scheduling, limit).FromMilliseconds(200)
    async with Client(served.server.address, patience=0.2 if limit == "patience" else math.inf) as client:
        with pytest.raises(GenerationError) as error:
            await asyncio.wait_for(text(client, start), 10)
    assert (error.value.reason, error.value.retry_after) == ("ENGINE_STARTING", 0.02)
    assert served.engine.submitted == []


@pytest.mark.parametrize(("limit", "attempts"), [("patience", 1), ("timeout", 2), ("queue_timeout", 2)])
async def test_a_limit_below_the_servers_pushback_leaves_one_more_attempt(
    served: Running, limit: str, attempts: int
) -> None:
    """Before it ends; gRPC's own retries would come after it."""
    served.engine.set_state(EngineState.STARTING)
    start = prompt_request("x")
    if limit != "patience":
        getattr(start.scheduling, limit).FromMilliseconds(500)
    async with Client(served.server.address, patience=0.0 if limit == "patience" else math.inf) as client:
        with pytest.raises(GenerationError, match="ENGINE_STARTING"):
            await text(client, start)
    assert 1 <= served.server.replica.metrics.outcomes("ENGINE_STARTING") <= attempts


@pytest.mark.usefixtures("quick_refusals")
async def test_an_attempt_has_what_is_left_of_the_limits(served: Running) -> None:
    served.engine.set_state(EngineState.STARTING)
    start = prompt_request("x", max_tokens=1)
    start.scheduling.timeout.FromSeconds(3600)
    sent = time.monotonic()
    async with Client(served.server.address) as client:
        asking = asyncio.create_task(text(client, start))
        await until(lambda: served.server.replica.metrics.outcomes("ENGINE_STARTING") >= 3)
        served.engine.set_state(EngineState.READY)
        assert await asyncio.wait_for(asking, 10) == "a"
    deadline = served.engine.submitted[-1].deadline
    assert deadline is not None
    assert deadline <= sent + 3600.03, "two waits of 20 ms were not given again"


@pytest.mark.parametrize("reason", ["DRAINING", "ENGINE_DIED"])
async def test_a_refusal_that_sends_elsewhere_is_tried_a_few_times(served: Running, reason: str) -> None:
    if reason == "DRAINING":
        served.server.replica.draining = True
    else:
        served.engine.die()
    async with Client(served.server.address, patience=0.0) as client:
        with pytest.raises(GenerationError, match=reason):
            await asyncio.wait_for(text(client, prompt_request("x")), 10)
    assert served.server.replica.metrics.outcomes(reason) == 4


class CancelledCall(AsyncIterator[pb.GenerateResponse]):
    """A call that a server which stops never looked at."""

    async def write(self, _: pb.GenerateRequest) -> None:
        pass

    async def __anext__(self) -> pb.GenerateResponse:
        raise rpc_error(grpc.StatusCode.CANCELLED, "CANCELLED")


async def test_a_call_that_a_stopping_server_cancelled_is_tried_again(served: Running) -> None:
    async with Client(served.server.address) as client:
        calls: list[Any] = [CancelledCall(), client._open()]
        session = Session(lambda: calls.pop(0))
        events = session.generate(prompt_request("x", max_tokens=2))
        assert "".join([event.delta.text async for event in events]) == "ab"
        await session.close()


async def test_a_session_closed_while_a_request_waits_stays_closed(served: Running) -> None:
    served.engine.set_state(EngineState.STARTING)
    async with Client(served.server.address) as client:
        async with client.session() as session:
            asking = asyncio.create_task(anext(session.generate(prompt_request("x"))))
            await until(lambda: served.server.replica.metrics.outcomes("ENGINE_STARTING") == 1)
        with pytest.raises(GenerationError, match="closed"):
            await asyncio.wait_for(asking, 10)


async def test_a_closed_client_refuses(served: Running) -> None:
    async with Client(served.server.address) as client:
        pass
    uses = [text(client, prompt_request("x")), client.cancel("x"), client.capacity(), anext(client.watch_capacity())]
    for use in uses:
        with pytest.raises(GenerationError, match="closed"):
            await use


async def test_the_id_of_a_live_request_is_refused_alone(served: Running) -> None:
    served.engine.plan = lambda _: Script(steps_before_first=20)
    start = prompt_request("x", max_tokens=3)
    start.request_id = "same"
    async with Client(served.server.address) as client, client.session() as session:

        async def one(request: pb.StartGeneration) -> str:
            return "".join([event.delta.text async for event in session.generate(request)])

        others = [asyncio.create_task(one(request)) for request in (start, prompt_request("x", max_tokens=2))]
        await until(lambda: served.engine.live_requests == 2)
        with pytest.raises(GenerationError) as error:
            await one(start)
        assert (error.value.code, error.value.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
        assert await asyncio.wait_for(asyncio.gather(*others), 10) == ["abc", "ab"]
        assert await asyncio.wait_for(one(start), 10) == "abc"


async def test_an_id_is_free_again_with_the_last_event(served: Running) -> None:
    """Also before its iteration was left."""
    start = prompt_request("x", max_tokens=3)
    start.request_id = "same"
    async with Client(served.server.address) as client, client.session() as session:
        async for event in session.generate(start):
            if event.HasField("finished"):
                again = session.generate(start)
                assert (await anext(again)).HasField("admitted")
        assert "".join([event.delta.text async for event in again]) == "abc"


async def test_a_requests_limits_run_while_it_waits(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    starting = GenerationError(grpc.StatusCode.UNAVAILABLE, "ENGINE_STARTING", "", retry_after=0.05)

    async def refused(request: pb.StartGeneration, _: object) -> AsyncIterator[pb.GenerationEvent]:
        limits = request.scheduling.timeout, request.scheduling.queue_timeout
        seen.append([limit.ToMilliseconds() for limit in limits])
        if len(seen) < 3:
            raise starting
        yield pb.GenerationEvent()

    start = prompt_request("x")
    start.scheduling.timeout.FromSeconds(3600)
    start.scheduling.queue_timeout.FromSeconds(60)
    async with Client(served.server.address) as client, client.session() as session:
        monkeypatch.setattr(session, "_attempt", refused)
        assert len([event async for event in session.generate(start)]) == 1
    assert seen[0] == [3_600_000, 60_000]
    for before, after in pairwise(seen):
        assert all(least - 50 >= left for least, left in zip(before, after, strict=True))


async def test_what_fails_in_the_middle_is_not_begun_again(served: Running) -> None:
    served.engine.plan = lambda _: Script(fail_after=2)
    async with Client(served.server.address) as client, client.session() as session:
        with pytest.raises(GenerationError, match="ENGINE_ERROR"):
            [_ async for _ in session.generate(prompt_request("x"))]
    assert len(served.engine.submitted) == 1


async def test_leaving_the_iteration_cancels_the_request(served: Running) -> None:
    served.engine.step_delay = 0.005
    async with Client(served.server.address) as client, client.session() as session:
        async with aclosing(session.generate(prompt_request("x"))) as events:
            async for event in events:
                if event.HasField("delta"):
                    break
        await until(lambda: served.engine.live_requests == 0)
        assert [e async for e in session.generate(prompt_request("x", max_tokens=1))]


async def test_cancel_acknowledge_and_capacity(served: Running) -> None:
    served.engine.step_delay = 0.005
    async with Client(served.server.address) as client, client.session() as session:
        start = prompt_request("x")
        start.request_id = "mine"
        start.output.unacknowledged_token_window = 2
        last = None
        async for event in session.generate(start):
            last = event
            if event.HasField("delta"):
                received = event.delta.token_offset + event.delta.token_count
                if received >= 6:
                    await session.cancel("mine")
                await session.acknowledge("mine", received)
        assert last is not None
        assert last.HasField("finished")
        assert await client.cancel("mine") == []
        assert (await client.capacity()).accepting
        async with aclosing(client.watch_capacity()) as watch:  # type: ignore[type-var]
            assert (await anext(watch)).instance_id == "fake-1"


class Refused:
    """A call without a write, as the server ends it."""

    def __init__(self, error: aio.AioRpcError | None) -> None:
        self._error = error
        self.cancelled = False

    async def read(self) -> None:
        if self._error is not None:
            raise self._error
        await asyncio.sleep(3600)

    def cancel(self) -> None:
        self.cancelled = True


def rpc_error(code: grpc.StatusCode, details: str) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details, None)


async def test_a_refusal_that_a_write_hid_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC reports a fault of its own where a stream is refused before its first message was written."""
    monkeypatch.setattr("service.client.STATUS_SECONDS", 0.05)
    hidden = rpc_error(grpc.StatusCode.INTERNAL, "Internal error from Core")
    refusal = rpc_error(grpc.StatusCode.UNAUTHENTICATED, "this bearer token is not known")
    for behind, told in ((refusal, refusal), (None, hidden)):
        call: Any = Refused(behind)
        assert await refusal_behind(hidden, lambda: call) is told  # noqa: B023
        assert call.cancelled
    own = rpc_error(grpc.StatusCode.INTERNAL, "non-finite logits")
    assert await refusal_behind(own, lambda: pytest.fail("asked again")) is own
