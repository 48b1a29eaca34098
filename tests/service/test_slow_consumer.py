"""Clients that do not read: bounded memory, a typed end, nobody else disturbed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from octavo.v1 import generation_pb2 as pb
from service.config import ServiceConfig
from service.stream import StreamLimits
from tests.service.calls import (
    Stream,
    acknowledge_message,
    cancel_message,
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

# Without this option a client's window grows to megabytes, and the server never notices that nobody reads.
UNREADING = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]


@asynccontextmanager
async def flooding(limits: StreamLimits, tokens_per_step: int = 2000) -> AsyncIterator[tuple[Running, Running]]:
    """A server whose engine writes a lot, and the same server seen through a channel with a small window."""
    engine = FakeEngineClient(max_context_tokens=10**7, max_num_seqs=4)
    engine.plan = lambda _: Script(tokens_per_step=tokens_per_step)
    async with (
        running(engine, ServiceConfig(drain_grace=0.0, stream=limits)) as served,
        aio.insecure_channel(served.server.address, UNREADING) as channel,
    ):
        yield served, Running(served.server, engine, channel)


async def first_output(unreading: Running, request: pb.StartGeneration) -> Stream:
    stream = Stream(unreading)
    await stream.send(pb.GenerateRequest(start=request))
    assert await stream.read()
    return stream


async def end_of(stream: Stream) -> aio.AioRpcError:
    return (await read_to_error(stream.call))[1]


async def test_too_much_pending_output_aborts_the_stream_and_the_engine_first() -> None:
    async with flooding(StreamLimits(pending_bytes=100_000, stall=600)) as (served, unreading):
        stream = await first_output(unreading, start(request_id="a"))
        await until(lambda: served.engine.live_requests == 0)
        assert len(served.server.replica.streams) == 0
        status = error_status(await end_of(stream))
        assert (status.code, status.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")
        assert status.pushback_ms == -1
        assert served.engine.cancelled
        metrics = served.server.replica.metrics
        assert (metrics.outcomes("SLOW_CONSUMER"), metrics.outcomes("cancelled")) == (1, 0)


async def test_stalled_write_aborts_the_stream() -> None:
    async with flooding(StreamLimits(pending_bytes=1 << 40, stall=0.3)) as (served, unreading):
        stream = await first_output(unreading, start(request_id="a"))
        await until(lambda: served.engine.live_requests == 0)
        status = error_status(await end_of(stream))
        assert status.reason == "SLOW_CONSUMER"
        assert "stalled" in status.message


@pytest.mark.parametrize("late", [0.0, 1.5])
async def test_a_first_message_beyond_the_window_hides_no_status(late: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """grpc.aio sends headers with the first message, and while that is stalled no status behind it. late: seconds after
    the server stopped waiting for its status to be taken."""
    monkeypatch.setattr("service.status.ABORT_SECONDS", 1.0)
    async with flooding(StreamLimits(pending_bytes=1 << 40, stall=0.3), tokens_per_step=60_000) as (served, unreading):
        stream = Stream(unreading)
        await stream.send(pb.GenerateRequest(start=start(request_id="a")))
        await until(lambda: served.engine.submitted and served.engine.live_requests == 0)
        await asyncio.sleep(late)
        status = error_status(await end_of(stream))
        assert (status.code, status.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")


REFUSED: dict[str, dict[str, Any]] = {
    "a wrong parameter": {"sampling": pb.SamplingParameters(temperature=-1)},
    "too many bytes": {"text": "x" * 10_000},
}


@pytest.mark.parametrize("wrong", REFUSED)
async def test_refusals_that_nobody_reads_are_bounded_too(wrong: str) -> None:
    """Behind a write that is stalled, with nothing else that waits."""
    async with flooding(StreamLimits(pending_bytes=400_000, stall=600), tokens_per_step=60_000) as (served, unreading):
        replica = served.server.replica
        replica.max_prompt_bytes = 5000
        stream = Stream(unreading)
        await stream.send(start_message(request_id="a", max_tokens=60_000))
        await until(lambda: served.engine.submitted and served.engine.live_requests == 0)
        (output_stream,) = replica.streams._streams
        await until(lambda: output_stream.writing_since is not None and not output_stream.pending.total)
        number = 0
        while not output_stream.failed.done():
            request_id = f"{number} " + "x" * 4000
            await stream.send(start_message(request_id=request_id, **REFUSED[wrong]))
            await until(lambda name=request_id: output_stream.has(name))
            number += 1
        assert 70 < number < 100
        assert error_status(await end_of(stream)).reason == "SLOW_CONSUMER"


@pytest.mark.parametrize("wrong", REFUSED)
async def test_refusals_that_are_read_are_not(wrong: str) -> None:
    async with flooding(StreamLimits(pending_bytes=100_000)) as (served, _):
        replica = served.server.replica
        replica.max_prompt_bytes = 5000
        stream = Stream(served)
        for begin in range(0, 300, 50):
            ids = [f"{number} " + "x" * 1000 for number in range(begin, begin + 50)]
            await stream.send(*(start_message(request_id=request_id, **REFUSED[wrong]) for request_id in ids))
            await stream.read_until_ended(*ids)
        (output_stream,) = replica.streams._streams
        assert output_stream.pending.total == 0
        assert await stream.finish() is grpc.StatusCode.OK


def scored(request_id: str, tokens: int) -> pb.GenerateRequest:
    """A request of one output token, for whose prompt there are 21 log probabilities a token."""
    ids = pb.TokenIds(ids=[97] * tokens)
    output = pb.OutputOptions(token_ids=True, prompt_top_logprobs=20)
    return start_message(request_id=request_id, token_ids=ids, output=output, max_tokens=1)


async def test_log_probabilities_of_prompts_that_nobody_reads_are_bounded_too() -> None:
    """Some 2 MB, of which the transport takes the first, and nothing else waits."""
    async with flooding(StreamLimits(burst=0.2, stall=600)) as (served, unreading):
        stream = await first_output(unreading, scored("a", 4000).start)
        (output_stream,) = served.server.replica.streams._streams
        await until(output_stream.failed.done)
        assert served.engine.live_requests == 0
        assert error_status(await end_of(stream)).reason == "SLOW_CONSUMER"


async def test_log_probabilities_of_prompts_may_come_at_once() -> None:
    """Megabytes of them behind a write that takes long: they come by the prompt, as fast as that is computed."""
    async with flooding(StreamLimits(pending_bytes=100_000, burst=600, stall=600)) as (served, unreading):
        stream = await first_output(unreading, scored("a", 4000).start)
        await stream.send(scored("b", 4000))
        await until(lambda: len(served.engine.submitted) == 2 and not served.engine.live_requests)
        (output_stream,) = served.server.replica.streams._streams
        assert output_stream.pending.total > 1_000_000
        await stream.read_until_ended("a", "b")
        for log in stream.logs.values():
            assert sum(len(event.prompt.logprobs) for event in log.events) == 4000
        assert (output_stream.pending.total, output_stream.pending.prompts) == (0, 0)
        assert await stream.finish() is grpc.StatusCode.OK


async def test_log_probabilities_of_many_prompts_come_in_messages_that_clients_take() -> None:
    engine = FakeEngineClient(max_context_tokens=1000, max_num_seqs=24, max_queued_tokens=10**6)
    engine.hold = True
    async with running(engine) as served:
        stream, ids = Stream(served), [f"r{number}" for number in range(24)]
        await stream.send(*(scored(request_id, 800) for request_id in ids))
        await until(lambda: engine.live_requests == len(ids))
        engine.hold = False
        await stream.read_until_ended(*ids)
        sizes = [message.ByteSize() for message in stream.messages]
        assert sum(sizes) > 4 << 20
        assert max(sizes) < 2 << 20
        assert await stream.finish() is grpc.StatusCode.OK


async def test_a_request_that_fails_leaves_no_log_probabilities_of_its_prompt_behind() -> None:
    async with flooding(StreamLimits(pending_bytes=1 << 30)) as (served, unreading):
        served.engine.plan = lambda _: Script(fail_after=0)
        stream = await first_output(unreading, scored("a", 4000).start)
        (output_stream,) = served.server.replica.streams._streams
        await stream.read_until_ended("a")
        assert rich_status(stream.logs["a"].failed.status).reason == "ENGINE_ERROR"
        await until(lambda: (output_stream.pending.total, output_stream.pending.prompts) == (0, 0))
        assert await stream.finish() is grpc.StatusCode.OK


async def test_single_request_stream_is_aborted_too() -> None:
    async with flooding(StreamLimits(pending_bytes=100_000, stall=600)) as (served, unreading):
        call = unreading.generation.GenerateStream(pb.GenerateStreamRequest(start=start()), timeout=30)
        await call.read()
        await until(lambda: served.engine.live_requests == 0)
        assert len(served.server.replica.live) == 0
        _, error = await read_to_error(call)
        assert error_status(error).usage.completion_tokens > 0
        assert served.server.replica.metrics.outcomes("SLOW_CONSUMER") == 1


async def test_client_that_never_reads_its_status_holds_nothing() -> None:
    async with flooding(StreamLimits(pending_bytes=100_000, stall=600)) as (served, unreading):
        await first_output(unreading, start(request_id="a"))
        await until(lambda: len(served.server.replica.streams) == 0)
        assert served.engine.live_requests == 0
        served.engine.plan = lambda _: Script()
        logs = await run_bidi(served, start_message(request_id="b", max_tokens=3))
        assert logs["b"].text() == "abc"


async def test_slow_stream_leaves_others_alone() -> None:
    async with flooding(StreamLimits(pending_bytes=200_000, stall=600), tokens_per_step=500) as (served, unreading):
        slow = await first_output(unreading, start(request_id="slow"))
        logs = await run_bidi(served, start_message(request_id="good", max_tokens=50_000))
        assert logs["good"].token_count() == 50_000
        slow.call.cancel()
        await until(lambda: served.engine.live_requests == 0)


async def test_reading_client_gets_all_of_a_long_output() -> None:
    """More than the bound in total, which is for what waits, in messages below gRPC's default limit."""
    async with flooding(StreamLimits(pending_bytes=300_000), tokens_per_step=1000) as (served, _):
        logs = await run_bidi(served, start_message(request_id="a", max_tokens=200_000))
        assert logs["a"].token_count() == 200_000


# --- acknowledge window ----------------------------------------------------------------------------------------------


def windowed(window: int, request_id: str = "a", **fields: Any) -> pb.GenerateRequest:
    output = pb.OutputOptions(token_ids=True, unacknowledged_token_window=window)
    return start_message(request_id=request_id, output=output, **fields)


async def test_window_bounds_what_is_sent_unacknowledged(served: Running) -> None:
    stream = Stream(served)
    await stream.send(windowed(4, max_tokens=10))
    await stream.read_until_tokens("a", 4)
    await until(lambda: served.engine.live_requests == 0)
    await stream.send(start_message(request_id="other", max_tokens=2))
    await stream.read_until_ended("other")
    assert stream.logs["a"].token_count() == 4
    await stream.send(acknowledge_message("a", 3))
    await stream.read_until_tokens("a", 7)
    assert stream.logs["a"].token_count() == 7
    await stream.send(acknowledge_message("a", 2), acknowledge_message("a", 7))
    await stream.read_until_ended("a")
    assert stream.logs["a"].text() == "abcdefghij"
    assert await stream.finish() is grpc.StatusCode.OK


async def test_each_candidate_has_its_own_window(served: Running) -> None:
    stream = Stream(served)
    await stream.send(windowed(2, max_tokens=4, sampling=pb.SamplingParameters(n=2)))
    await stream.read_until_tokens("a", 2)
    await stream.read_until_tokens("a", 2, candidate=1)
    await stream.send(acknowledge_message("a", 2, candidate=1))
    await stream.read_until_tokens("a", 4, candidate=1)
    assert stream.logs["a"].token_count(0) == 2
    await stream.send(acknowledge_message("a", 2), acknowledge_message("a", 2, candidate=9))
    await stream.read_until_ended("a")
    assert await stream.finish() is grpc.StatusCode.OK


async def test_piece_larger_than_the_window_passes_alone(served: Running) -> None:
    served.engine.plan = lambda _: Script(tokens_per_step=8)
    stream = Stream(served)
    await stream.send(windowed(3, max_tokens=16))
    await stream.read_until_tokens("a", 8)
    assert stream.logs["a"].token_count() == 8
    await stream.send(acknowledge_message("a", 8))
    await stream.read_until_ended("a")
    assert stream.logs["a"].token_count() == 16
    assert await stream.finish() is grpc.StatusCode.OK


async def test_acknowledging_more_than_was_sent_opens_no_more(served: Running) -> None:
    stream = Stream(served)
    await stream.send(windowed(2, max_tokens=8))
    await stream.read_until_tokens("a", 2)
    await stream.send(acknowledge_message("a", 1000))
    await stream.read_until_tokens("a", 4)
    await stream.send(start_message(request_id="other", max_tokens=2))
    await stream.read_until_ended("other")
    assert stream.logs["a"].token_count() == 4
    stream.call.cancel()


async def test_shut_window_fails_its_request_only() -> None:
    engine = FakeEngineClient(max_context_tokens=100_000)
    async with running(engine, ServiceConfig(drain_grace=0.0, stream=StreamLimits(stall=0.3))) as served:
        served.engine.step_delay = 0.005
        stream = Stream(served)
        await stream.send(windowed(2, max_tokens=10_000), start_message(request_id="other", max_tokens=100))
        await stream.read_until_ended("a", "other")
        status = rich_status(stream.logs["a"].failed.status)
        assert (status.code, status.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")
        assert stream.logs["a"].failed.usage.completion_tokens > 2
        assert stream.logs["other"].token_count() == 100
        assert await stream.finish() is grpc.StatusCode.OK
        assert engine.live_requests == 0


async def test_output_held_by_windows_is_bounded() -> None:
    async with flooding(StreamLimits(pending_bytes=50_000, stall=600)) as (served, _):
        stream = Stream(served)
        await stream.send(windowed(2))
        status = error_status(await end_of(stream))
        assert status.reason == "SLOW_CONSUMER"
        assert "acknowledge" in status.message
        await until(lambda: served.engine.live_requests == 0)


async def test_cancel_ends_a_request_behind_a_shut_window(served: Running) -> None:
    stream = Stream(served)
    await stream.send(windowed(2))
    await stream.read_until_tokens("a", 2)
    await until(lambda: served.engine.stats.generated_tokens > 20)
    await stream.send(cancel_message("a"))
    await stream.read_until_ended("a")
    assert stream.logs["a"].finish_reason() == "CANCELLED"
    assert stream.logs["a"].token_count() == 2
    assert stream.logs["a"].finished.usage.completion_tokens > 2
    assert await stream.finish() is grpc.StatusCode.OK


async def test_failure_does_not_wait_behind_a_shut_window(served: Running) -> None:
    served.engine.plan = lambda _: Script(fail_after=30)
    stream = Stream(served)
    await stream.send(windowed(2))
    await stream.read_until_ended("a")
    assert rich_status(stream.logs["a"].failed.status).reason == "ENGINE_ERROR"
    assert stream.logs["a"].token_count() == 2
    assert await stream.finish() is grpc.StatusCode.OK


async def test_messages_stay_below_what_clients_take_however_much_waits() -> None:
    """Twenty alternatives for each of 24,000 tokens are some 6 MB, most of which wait when the client reads on."""
    limits = StreamLimits(pending_bytes=1 << 30, stall=600)
    async with flooding(limits, tokens_per_step=200) as (served, unreading):
        request = start(request_id="a", max_tokens=24_000, output=pb.OutputOptions(token_ids=True, top_logprobs=20))
        stream = await first_output(unreading, request)
        await until(lambda: served.engine.live_requests == 0)
        await stream.read_until_ended("a")
        sizes = [message.ByteSize() for message in stream.messages]
        assert sum(sizes) > 6_000_000
        assert max(sizes) < 2_500_000
        assert stream.logs["a"].token_count() == 24_000
        assert sum(len(delta.logprobs) for delta in stream.logs["a"].deltas) == 24_000
        stream.call.cancel()


async def test_coalescing_sends_early_what_becomes_large() -> None:
    """A client that gathers for ten seconds is not one that does not read."""
    async with flooding(StreamLimits(), tokens_per_step=50) as (served, _):
        output = pb.OutputOptions(token_ids=True, top_logprobs=20)
        output.coalesce.FromSeconds(10)
        log = (await run_bidi(served, start_message(request_id="a", max_tokens=4000, output=output)))["a"]
        assert log.token_count() == 4000
        assert len(log.deltas) > 4


async def test_unary_refuses_log_probabilities_that_no_response_could_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.convert.prompts.MAX_UNARY_SCORES", 100)
    async with running() as served:
        output = pb.OutputOptions(top_logprobs=4)
        for request in (start(max_tokens=21, output=output), start(output=output)):
            status = await refusal(served, request)
            assert status.fields == ["start.output.top_logprobs"]
        assert len((await run_unary(served, start(max_tokens=20, output=output))).candidates[0].logprobs) == 20
        assert (await run_stream(served, start(max_tokens=21, output=output))).token_count() == 21


@pytest.mark.parametrize("multiplexed", [True, False])
async def test_cancel_of_a_blocked_write_frees_its_request(multiplexed: bool) -> None:
    """A writer that waits for a client's window learns of the cancel in another way than one that waits for tokens."""
    async with flooding(StreamLimits(pending_bytes=1 << 40, stall=600)) as (served, unreading):
        if multiplexed:
            call = (await first_output(unreading, start(request_id="a"))).call
        else:
            call = unreading.generation.GenerateStream(pb.GenerateStreamRequest(start=start()))
            await call.read()
        (stream,) = served.server.replica.streams._streams
        await until(lambda: stream.writing_since is not None and time.monotonic() - stream.writing_since > 0.3)
        call.cancel()
        await until(lambda: served.engine.live_requests == 0)
        await until(lambda: len(served.server.replica.streams) == 0)
