"""Deadlines: refused if they cannot be met, kept in the queue, while running, and while the engine stands still."""

from __future__ import annotations

import time

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio

from octavo.v1 import generation_pb2 as pb
from service.config import ServiceConfig
from tests.service.calls import (
    Stream,
    error_status,
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
    async with running(
        FakeEngineClient(max_num_seqs=1, max_queued_requests=1), ServiceConfig(drain_grace=0.0, heartbeat_timeout=0.5)
    ) as served:
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
