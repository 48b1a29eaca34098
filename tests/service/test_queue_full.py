"""A full queue refuses: with its numbers, before it looks at the request, and so that clients may retry."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter

import grpc
import pytest

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc
from service.client import Client, GenerationError, prompt_request
from service.config import ServiceConfig
from service.intake import Intake
from service.request import Generation
from service.status import draining
from tests.service.calls import (
    Stream,
    error_status,
    read_to_error,
    refusal,
    rich_status,
    run_bidi,
    start,
    start_message,
)
from tests.service.fake_engine import FakeEngineClient, Script
from tests.service.server import Running, running, until


def tight_engine() -> FakeEngineClient:
    return FakeEngineClient(max_num_seqs=1, max_queued_requests=1)


async def fill(served: Running) -> Stream:
    """Takes all places, running and queued, on a stream of its own, with requests that never get a token."""
    served.engine.plan = lambda _: Script(steps_before_first=10**9)
    stream = Stream(served, timeout=60)
    await stream.send(start_message(request_id="runs"))
    await until(lambda: served.engine.stats.running_requests == 1)
    await stream.send(start_message(request_id="waits"))
    await until(lambda: served.engine.stats.queued_requests == 1)
    served.engine.plan = lambda _: Script()
    return stream


async def test_queue_full_unary() -> None:
    async with running(tight_engine()) as served:
        stream = await fill(served)
        status = await refusal(served, start())
        assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert status.reason == "QUEUE_FULL"
        assert status.pushback_ms == round(status.retry_seconds * 1000) > 0
        served.engine.stats_overrides = {"queued_requests": 0}  # as an older frame had it
        assert (await refusal(served, start())).metadata["waiting_requests"] == "1"
        stream.call.cancel()


async def held(served: Running) -> Stream:
    """A stream whose request the engine keeps as it is."""
    served.engine.hold = True
    stream = Stream(served)
    await stream.send(start_message(request_id="hold"))
    await until(lambda: served.engine.live_requests == 1)
    return stream


async def test_queue_full_of_the_engine_has_its_own_retry_time() -> None:
    async with running(FakeEngineClient(max_num_seqs=8, max_queued_requests=1)) as served:
        stream = await held(served)
        served.engine.stats_overrides = {"queued_requests": 0}  # as its last frame had it
        status = await refusal(served, start())
        assert (status.reason, status.retry_seconds, status.pushback_ms) == ("QUEUE_FULL", 0.25, 250)
        assert status.metadata == {"waiting_requests": "1"}
        stream.call.cancel()


async def test_full_queue_of_the_engine_refuses_without_asking_it() -> None:
    """Also while few run, as where the KV pool is what is full."""
    async with running(FakeEngineClient(max_num_seqs=8, max_queued_requests=1)) as served:
        stream = await held(served)
        status = await refusal(served, start())
        assert status.reason == "QUEUE_FULL"
        assert status.metadata == {
            "waiting_requests": "1",
            "max_queued_requests": "1",
            "waiting_prompt_tokens": "6",
            "max_queued_tokens": "4096",
        }
        assert len(served.engine.submitted) == 1
        stream.call.cancel()


async def test_what_starts_at_once_fills_no_queue() -> None:
    async with running(FakeEngineClient(max_num_seqs=8, max_queued_requests=1, max_queued_tokens=100)) as served:
        figures = {"queued_requests": 3, "queued_prompt_tokens": 90}
        served.engine.stats_overrides = {**figures, "starting_requests": 3, "starting_prompt_tokens": 90}
        await served.generation.GenerateUnary(pb.GenerateUnaryRequest(start=start("x" * 60)), timeout=10)
        served.engine.stats_overrides = {**figures, "starting_requests": 2, "starting_prompt_tokens": 60}
        assert (await refusal(served, start())).metadata["waiting_prompt_tokens"] == "30"


async def test_queue_full_in_prompt_tokens() -> None:
    async with running(FakeEngineClient(max_queued_tokens=100)) as served:
        served.engine.hold = True
        stream = Stream(served)
        await stream.send(start_message("x" * 60, request_id="hold"))
        await until(lambda: served.engine.live_requests == 1)
        assert (await refusal(served, start("x" * 41))).reason == "QUEUE_FULL"
        assert "100 prompt tokens wait; this prompt has 41" in (await refusal(served, start("x" * 41))).message
        served.engine.hold = False
        stream.call.cancel()


async def test_refused_first_start_fails_the_stream_so_that_clients_retry() -> None:
    async with running(tight_engine()) as served:
        holding = await fill(served)
        stream = Stream(served)
        await stream.send(start_message(request_id="a"))
        status = error_status((await read_to_error(stream.call))[1])
        assert (status.code, status.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert stream.messages == []
        assert status.pushback_ms is not None
        holding.call.cancel()


async def test_refused_first_start_is_an_event_once_others_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The RPC's failure would be theirs, too."""
    monkeypatch.setattr("service.intake.INLINE_BYTES", 10)  # a longer text is tokenized on another thread
    tokenize, go_on = Intake._tokenize, threading.Event()

    def tokenize_last(intake: Intake, generation: Generation) -> list[int]:
        assert generation.request_id != "first" or go_on.wait(10)
        return tokenize(intake, generation)

    monkeypatch.setattr(Intake, "_tokenize", tokenize_last)
    async with running(FakeEngineClient(max_num_seqs=8, max_queued_requests=1)) as served:
        served.engine.step_delay = 0.5  # nothing comes of the other one before the first is refused
        served.engine.stats_overrides = {"queued_requests": 0}  # as its last frame had it: the engine refuses itself
        stream = Stream(served)
        await stream.send(start_message("x" * 50, request_id="first"), start_message(request_id="other", max_tokens=1))
        await until(lambda: served.engine.live_requests == 1)
        go_on.set()
        await stream.read_until_ended("first")
        assert rich_status(stream.logs["first"].failed.status).reason == "QUEUE_FULL"
        assert not stream.logs["other"].events
        await stream.read_until_ended("other")
        assert stream.logs["other"].text() == "a"
        assert await stream.finish() is grpc.StatusCode.OK


async def test_full_queue_refuses_before_it_looks_at_the_request() -> None:
    """Under overload most requests are refused: nothing is parsed, tokenized or made for them first."""
    wrong = start(sampling=pb.SamplingParameters(temperature=-1))
    async with running(tight_engine()) as served:
        assert (await refusal(served, wrong)).reason == "INVALID_PARAMETER"
        holding = await fill(served)
        assert (await refusal(served, wrong)).reason == "QUEUE_FULL"
        calls = [
            served.generation.GenerateStream(pb.GenerateStreamRequest(start=wrong), timeout=10),
            Stream(served).call,
        ]
        await calls[1].write(pb.GenerateRequest(start=wrong))
        for call in calls:
            messages, error = await read_to_error(call)
            assert (messages, error_status(error).reason) == ([], "QUEUE_FULL")
        assert served.server.replica.metrics.outcomes("QUEUE_FULL") == 3
        holding.call.cancel()


async def test_a_burst_of_calls_is_refused_by_this_service() -> None:
    """gRPC would cancel some of those beyond a thousand that nobody has looked at yet, and say nothing."""
    async with running(tight_engine()) as served:
        holding = await fill(served)
        request = pb.GenerateUnaryRequest(start=start())
        calls = [served.generation.GenerateUnary(request, timeout=60) for _ in range(2500)]
        codes = Counter(await asyncio.gather(*(call.code() for call in calls)))
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED: len(calls)}
        holding.call.cancel()


async def test_a_refusal_makes_no_more_than_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused for the same numbers shares one status; nothing else is made for it, on a stream or a call."""
    made: Counter[str] = Counter()

    def count(path: str) -> None:
        module, _, name = path.rpartition(".")
        make = getattr(sys.modules[module], name)
        monkeypatch.setattr(path, lambda *arguments, **fields: made.update([name]) or make(*arguments, **fields))

    config = ServiceConfig(drain_grace=0.0, heartbeat_timeout=60.0)
    async with running(tight_engine(), config) as served:
        stream = await fill(served)
        snapshot, replica = served.engine.stats, served.server.replica
        monkeypatch.setattr(FakeEngineClient, "stats", property(lambda _: snapshot))
        replica.tokenizer.encode = lambda *_: made.update(["encode"])  # type: ignore[method-assign,assignment]
        for path in ("generation.parse_start", "intake.RequestOutput", "intake.LiveRequest", "status.status_message"):
            count(f"service.{path}")
        ids = [str(index) for index in range(20)]
        await stream.send(*(start_message(request_id=request_id) for request_id in ids))
        for request_id in ids:
            await stream.read_until_ended(request_id)
            assert [event.sequence for event in stream.logs[request_id].events] == [0]
        for _ in range(5):
            call = served.generation.GenerateStream(pb.GenerateStreamRequest(start=start()), timeout=10)
            assert error_status((await read_to_error(call))[1]).reason == (await refusal(served, start())).reason
        assert made == {"status_message": 1}
        assert replica.metrics.outcomes("QUEUE_FULL") == len(ids) + 10
        assert (len(served.engine.submitted), len(replica.live)) == (2, 2)
        stream.call.cancel()


async def test_refused_request_is_live_until_its_client_is_told() -> None:
    """Its id stands for it until then, and a stream whose input has ended still tells."""
    async with running(tight_engine()) as served:
        holding = await fill(served)
        await holding.send(start_message(request_id="a"), start_message(request_id="b"))
        cancels = [pb.GenerateRequest(cancel=pb.CancelGeneration(request_id=name)) for name in ("a", "runs", "waits")]
        await holding.send(*cancels)
        assert await holding.finish() is grpc.StatusCode.OK
        reasons = {name: rich_status(holding.logs[name].failed.status).reason for name in ("a", "b")}
        assert reasons == {"a": "QUEUE_FULL", "b": "QUEUE_FULL"}
        replica = served.server.replica
        await until(lambda: len(replica.streams) == 0)
        stream = await fill(served)
        (output_stream,) = replica.streams._streams
        output_stream.refuse("c", draining())
        assert (output_stream.has("c"), output_stream.owes, replica.streams.has_output) == (True, True, True)
        await stream.read_until_ended("c")
        assert not output_stream.has("c")
        stream.call.cancel()


async def test_refused_later_start_is_an_event() -> None:
    async with running(tight_engine()) as served:
        stream = Stream(served)
        served.engine.step_delay = 0.01
        await stream.send(start_message(request_id="a"))
        await stream.read_until_tokens("a", 1)
        served.engine.hold = True
        await stream.send(start_message(request_id="b"), start_message(request_id="c"))
        await stream.read_until_ended("c")
        status = rich_status(stream.logs["c"].failed.status)
        assert (status.code, status.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert not stream.logs["b"].ended
        stream.call.cancel()


async def test_first_start_refused_for_its_own_fault_is_an_event(served: Running) -> None:
    logs = await run_bidi(served, start_message("x" * 500, request_id="a"))
    assert rich_status(logs["a"].failed.status).reason == "PROMPT_TOO_LONG"


@pytest.mark.parametrize("session", [True, False])
async def test_clients_retry_by_themselves_until_there_is_room(session: bool) -> None:
    """A session of the Python client, and gRPC with the retry policy of its channel: neither shows the refusal."""
    request = prompt_request("x", max_tokens=3)
    async with running(tight_engine()) as served:
        holding = await fill(served)
        async with Client(served.server.address) as client:

            async def ask() -> str:
                if session:
                    return "".join([event.delta.text async for event in client.generate(request)])
                stub: generation_pb2_grpc.GenerationServiceAsyncStub
                stub = generation_pb2_grpc.GenerationServiceStub(client.channel)
                stream = stub.GenerateStream(pb.GenerateStreamRequest(start=request))
                return "".join([event.delta.text async for batch in stream for event in batch.events])

            asking = asyncio.create_task(ask())
            await until(lambda: served.server.replica.metrics.outcomes("QUEUE_FULL") >= 1)
            holding.call.cancel()
            assert await asyncio.wait_for(asking, 10) == "abc"


@pytest.fixture
def refusals_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue says: try again in a second."""
    monkeypatch.setattr("service.admission.Admission.retry_after", lambda _: 1.0)


@pytest.mark.usefixtures("refusals_of_a_second")
async def test_a_retry_has_what_is_left_of_the_timeout() -> None:
    request = prompt_request("x", max_tokens=1)
    request.scheduling.timeout.FromSeconds(3600)
    async with running(tight_engine()) as served:
        holding = await fill(served)
        async with Client(served.server.address) as client:
            sent = time.monotonic()
            asking = asyncio.create_task(anext(client.generate(request)))
            await until(lambda: served.server.replica.metrics.outcomes("QUEUE_FULL") == 1)
            holding.call.cancel()
            await asyncio.wait_for(asking, 10)
        deadline = served.engine.submitted[-1].deadline
        assert deadline is not None
        assert deadline < sent + 3600.9


@pytest.mark.usefixtures("refusals_of_a_second")
@pytest.mark.parametrize("limit", ["timeout", "queue_timeout"])
async def test_nobody_is_told_to_retry_after_its_own_limit(limit: str) -> None:
    request = prompt_request("x", max_tokens=1)
    getattr(request.scheduling, limit).FromMilliseconds(900)
    async with running(tight_engine()) as served:
        holding = await fill(served)
        async with Client(served.server.address) as client:
            with pytest.raises(GenerationError, match="QUEUE_FULL") as error:
                await anext(client.generate(request))
        assert error.value.retry_after == 1.0
        assert served.server.replica.metrics.outcomes("QUEUE_FULL") == 1
        holding.call.cancel()


async def test_a_session_whose_first_request_was_refused_takes_others() -> None:
    async with running(tight_engine()) as served:
        holding = await fill(served)
        async with Client(served.server.address) as client, client.session() as session:
            hurried = prompt_request("x")
            hurried.scheduling.queue_timeout.FromMilliseconds(1)
            with pytest.raises(GenerationError, match="QUEUE_FULL"):
                await anext(session.generate(hurried))
            holding.call.cancel()
            await until(lambda: served.engine.live_requests == 0)
            assert [event async for event in session.generate(prompt_request("x", max_tokens=1))]
