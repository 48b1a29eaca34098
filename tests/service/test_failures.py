"""The failure table, row by row, against the real server."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from typing import Any, cast

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio

from engine import EngineState, FailureKind, RequestFailed, Usage
from octavo.v1 import generation_pb2 as pb
from service.config import ServiceConfig
from service.intake import Intake
from service.request import Generation
from service.status import (
    RETRY_AT_ONCE,
    deadline_unattainable,
    drain_timeout,
    draining,
    engine_died,
    engine_stalled,
    engine_starting,
    from_engine,
)
from tests.service.calls import (
    Stream,
    error_status,
    read_to_error,
    refusal,
    rich_status,
    run_bidi,
    run_stream,
    run_unary,
    start,
    start_message,
)
from tests.service.fake_engine import FakeEngineClient, Script
from tests.service.server import Running, running, until


def tight_engine() -> FakeEngineClient:
    return FakeEngineClient(max_num_seqs=1, max_queued_requests=1)


async def bidi_error(stream: Stream) -> aio.AioRpcError:
    return (await read_to_error(stream.call))[1]


# --- queue full ------------------------------------------------------------------------------------------------------


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


async def test_queue_full_of_the_engine_has_its_own_retry_time() -> None:
    async with running(FakeEngineClient(max_num_seqs=8, max_queued_requests=1)) as served:
        served.engine.hold = True
        stream = Stream(served)
        await stream.send(start_message(request_id="hold"))
        await until(lambda: served.engine.live_requests == 1)
        served.engine.stats_overrides = {"queued_requests": 0}  # as its last frame had it
        status = await refusal(served, start())
        assert (status.reason, status.retry_seconds, status.pushback_ms) == ("QUEUE_FULL", 0.25, 250)
        assert status.metadata == {"waiting_requests": "1"}
        stream.call.cancel()


async def test_full_queue_of_the_engine_refuses_without_asking_it() -> None:
    """Also while few run, as where the KV pool is what is full."""
    async with running(FakeEngineClient(max_num_seqs=8, max_queued_requests=1)) as served:
        served.engine.hold = True
        stream = Stream(served)
        await stream.send(start_message(request_id="hold"))
        await until(lambda: served.engine.live_requests == 1)
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
        status = error_status(await bidi_error(stream))
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


async def test_grpc_retries_by_itself_until_there_is_room() -> None:
    """With a retry policy in its channel a client never sees the refusal of a full queue."""
    from service.client import Client, prompt_request

    async with running(tight_engine()) as served:
        holding = await fill(served)
        async with Client(served.server.address) as client:

            async def ask() -> str:
                texts = [event.delta.text async for event in client.generate(prompt_request("x", max_tokens=3))]
                return "".join(texts)

            asking = asyncio.create_task(ask())
            await until(lambda: served.server.replica.metrics.outcomes("QUEUE_FULL") >= 1)
            holding.call.cancel()
            assert await asyncio.wait_for(asking, 10) == "abc"


# --- deadlines -------------------------------------------------------------------------------------------------------


async def test_deadline_unattainable(served: Running) -> None:
    served.engine.stats_overrides = {
        "queued_requests": 3,
        "queued_uncached_tokens": 1000,
        "prefill_tokens_per_second": 100.0,
    }
    request = start(scheduling=pb.Scheduling(timeout=Duration(seconds=5)))
    status = await refusal(served, request)
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status.reason == "DEADLINE_UNATTAINABLE"
    assert int(status.metadata["estimated_ms"]) >= 10_000
    assert 10.0 <= status.retry_seconds < 11.0  # for a request with a deadline of its own
    assert status.pushback_ms == -1  # this one's deadline would only be nearer
    assert served.engine.submitted == []


async def test_an_unattainable_deadline_is_its_own_requests_alone(served: Running) -> None:
    """A retry of the whole stream would not help the first, and the others have done nothing."""
    served.engine.stats_overrides = {
        "queued_requests": 3,
        "queued_uncached_tokens": 700,
        "prefill_tokens_per_second": 100.0,
    }
    stream, soon = Stream(served), pb.Scheduling(timeout=Duration(seconds=5))
    await stream.send(
        start_message(request_id="late", scheduling=soon), start_message(request_id="patient", max_tokens=3)
    )
    for name in ("late", "patient"):
        await stream.read_until_ended(name)
    assert rich_status(stream.logs["late"].failed.status).reason == "DEADLINE_UNATTAINABLE"
    assert stream.logs["patient"].text() == "abc"
    assert await stream.finish() is grpc.StatusCode.OK


async def test_deadline_unattainable_while_every_place_is_taken(served: Running) -> None:
    """Nothing waits, but by the engine's estimate the first place is free too late."""
    served.engine.stats_overrides = {"least_delay_seconds": 8.0, "prefill_tokens_per_second": 1000.0}
    status = await refusal(served, start(scheduling=pb.Scheduling(timeout=Duration(seconds=5))))
    assert status.reason == "DEADLINE_UNATTAINABLE"
    assert 8000 <= int(status.metadata["estimated_ms"]) < 8100


async def test_a_guess_at_outputs_lengths_refuses_no_deadline(served: Running) -> None:
    served.engine.stats_overrides = {"queue_delay_seconds": 8.0, "prefill_tokens_per_second": 1000.0}
    request = start(max_tokens=1, scheduling=pb.Scheduling(timeout=Duration(seconds=5)))
    assert (await run_stream(served, request)).token_count() == 1


async def test_expired_in_queue(served: Running) -> None:
    served.engine.hold = True
    request = start(scheduling=pb.Scheduling(queue_timeout=Duration(nanos=50_000_000)))
    status = await refusal(served, request)
    assert (status.code, status.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "EXPIRED_IN_QUEUE")
    assert status.usage.completion_tokens == 0


async def test_a_deadline_is_kept_while_the_engine_stands_still(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says it between two steps only, and no step ends here."""
    monkeypatch.setattr("service.live.DEADLINE_GRACE", 0.2)
    served.engine.plan = lambda _: Script(tokens_per_step=2)
    stream = Stream(served)
    request = start("hi", request_id="a", scheduling=pb.Scheduling(timeout=Duration(nanos=300_000_000)))
    await stream.send(pb.GenerateRequest(start=request))
    await stream.read_until_tokens("a", 2)
    served.engine.hang()
    await stream.read_until_ended("a")
    status = rich_status(stream.logs["a"].failed.status)
    assert (status.code, status.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
    assert status.message == "the deadline passed while the engine was busy"
    assert len(served.server.replica.live) == 0
    assert served.engine.cancelled


async def test_a_queue_timeout_is_kept_while_the_engine_is_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes meanwhile the engine does not see. One that it took in may be running: that is for it to say."""
    monkeypatch.setattr("service.live.DEADLINE_GRACE", 0.2)
    async with running(config=ServiceConfig(drain_grace=0.0, heartbeat_timeout=60.0)) as served:
        served.engine.hold = True
        stream = Stream(served)
        await stream.send(start_message("hi", request_id="taken in"))
        while "taken in" not in stream.logs:
            assert await stream.read()
        served.engine.hang()
        (taken_in,) = served.server.replica.live
        taken_in.queue_deadline = time.monotonic() - 1.0
        limits = pb.Scheduling(queue_timeout=Duration(nanos=50_000_000))
        await stream.send(start_message("hi", request_id="too late", scheduling=limits))
        await stream.read_until_ended("too late")
        status = rich_status(stream.logs["too late"].failed.status)
        assert (status.code, status.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "EXPIRED_IN_QUEUE")
        assert list(served.server.replica.live) == [taken_in]
        stream.call.cancel()


async def test_a_queue_timeout_is_kept_while_the_engine_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a deadline is; but one that had its turn in time waits in no queue, though no token of it came yet."""
    monkeypatch.setattr("service.live.DEADLINE_GRACE", 0.2)
    async with running(tight_engine(), ServiceConfig(drain_grace=0.0, heartbeat_timeout=0.5)) as served:
        served.engine.plan = lambda _: Script(steps_before_first=10**9)
        stream = Stream(served)
        limits = pb.Scheduling(queue_timeout=Duration(seconds=3600))
        for request_id in ("runs", "waits"):
            await stream.send(start_message("hi", request_id=request_id, scheduling=limits))
            while request_id not in stream.logs:
                assert await stream.read()
        requests = {request.client_id: request for request in served.server.replica.live}
        await until(lambda: requests["runs"].output is not None and requests["runs"].output.scheduled)
        served.engine.hang()
        for request in requests.values():
            request.queue_deadline = time.monotonic() - 1.0
        await stream.read_until_ended("waits")
        status = rich_status(stream.logs["waits"].failed.status)
        assert (status.code, status.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "EXPIRED_IN_QUEUE")
        assert status.message == "the deadline passed in the queue of an engine that stands still"
        requests["runs"].check_deadline(time.monotonic(), stalled=True)
        assert list(served.server.replica.live) == [requests["runs"]]
        stream.call.cancel()


@pytest.mark.parametrize("unary", [False, True])
async def test_a_call_of_one_request_keeps_its_deadline_too(
    served: Running, monkeypatch: pytest.MonkeyPatch, unary: bool
) -> None:
    monkeypatch.setattr("service.live.DEADLINE_GRACE", 0.2)
    served.engine.hang()
    request = start("hi", scheduling=pb.Scheduling(timeout=Duration(nanos=100_000_000)))
    with pytest.raises(aio.AioRpcError) as error:
        await (run_unary(served, request) if unary else run_stream(served, request))
    status = error_status(error.value)
    assert (status.code, status.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
    assert len(served.server.replica.live) == 0


async def test_deadline_while_running_is_in_band_with_usage(served: Running) -> None:
    served.engine.step_delay = 0.01
    request = start("hi", request_id="a", scheduling=pb.Scheduling(timeout=Duration(nanos=700_000_000)))
    logs = await run_bidi(served, pb.GenerateRequest(start=request))
    status = rich_status(logs["a"].failed.status)
    assert (status.code, status.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
    assert logs["a"].failed.usage.completion_tokens == logs["a"].token_count() > 0
    assert logs["a"].failed.usage.prompt_tokens == 2


async def test_rpc_deadline_reaches_the_engine(served: Running) -> None:
    served.engine.step_delay = 0.01
    with pytest.raises(aio.AioRpcError) as error:
        await run_unary(served, start(), timeout=0.7)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert served.engine.submitted[0].deadline is not None
    await until(lambda: served.engine.live_requests == 0)


async def test_the_earlier_of_two_deadlines_wins(served: Running) -> None:
    request = start(max_tokens=1, scheduling=pb.Scheduling(timeout=Duration(seconds=3)))
    await run_unary(served, request, timeout=9)
    await run_unary(served, start(max_tokens=1, scheduling=pb.Scheduling(timeout=Duration(seconds=300))), timeout=9)
    first, second = (request.deadline for request in served.engine.submitted)
    assert first is not None
    assert second is not None
    assert 5.9 < second - first < 100


# --- engine ----------------------------------------------------------------------------------------------------------


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


async def test_refusal_without_usage_has_no_detail_of_it(served: Running) -> None:
    status = await refusal(served, start("x" * 500))
    assert status.reason == "PROMPT_TOO_LONG"
    assert not [detail for detail in status.details if isinstance(detail, pb.Usage)]


async def test_dead_engine_refuses_new_requests(served: Running) -> None:
    served.engine.die()
    assert (await refusal(served, start())).reason == "ENGINE_DIED"


async def test_starting_engine_refuses_with_a_time_to_retry(served: Running) -> None:
    served.engine.set_state(EngineState.STARTING)
    status = await refusal(served, start())
    assert (status.code, status.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_STARTING")
    assert status.retry_seconds > 0
    served.engine.set_state(EngineState.READY)


@pytest.mark.parametrize("kind", list(FailureKind))
def test_every_engine_failure_has_a_status(kind: FailureKind) -> None:
    event = RequestFailed("r", kind, "why", usage=Usage(prompt_tokens=1), field="sampling.n")
    failure = from_engine(event, "instance")
    assert failure.code is not grpc.StatusCode.UNKNOWN
    assert failure.usage == Usage(prompt_tokens=1)


# --- streams ---------------------------------------------------------------------------------------------------------


def test_hints_for_retries_are_those_that_the_readme_has() -> None:
    """Seconds of RetryInfo, and gRPC's own pushback in ms."""
    failures = [
        deadline_unattainable("", {"estimated_ms": "1500"}),
        draining(),
        drain_timeout(),
        engine_died("", "a cause"),
        engine_stalled(),
        engine_starting(),
    ]
    assert {failure.reason: (failure.retry_after, failure.pushback_ms) for failure in failures} == {
        "DEADLINE_UNATTAINABLE": (1.5, -1),
        "DRAINING": (0.0, RETRY_AT_ONCE),
        "DRAIN_TIMEOUT": (None, None),
        "ENGINE_DIED": (0.0, RETRY_AT_ONCE),
        "ENGINE_STALLED": (1.0, 1000),
        "ENGINE_STARTING": (1.0, 1000),
    }


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
    from service.config import ServiceConfig

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
