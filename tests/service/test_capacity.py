"""The capacity snapshot, and a watch in which the newest state wins."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio

from octavo.v1 import capacity_pb2 as pb
from service.replica import ReplicaState
from tests.service.calls import Stream, error_status, run_stream, start, start_message
from tests.service.fake_engine import FakeEngineClient, Script
from tests.service.server import Running, running, until


async def snapshot(served: Running) -> pb.Capacity:
    return (await served.capacity.GetCapacity(pb.GetCapacityRequest(), timeout=5)).capacity


def watch(served: Running, **milliseconds: int) -> Any:
    request = pb.WatchCapacityRequest()
    for name, value in milliseconds.items():
        getattr(request, name).FromMilliseconds(value)
    return served.capacity.WatchCapacity(request, timeout=20)


async def test_idle_replica(served: Running) -> None:
    capacity = await snapshot(served)
    assert capacity.instance_id == "fake-1"
    assert capacity.state == pb.REPLICA_STATE_READY
    assert capacity.accepting
    assert capacity.model == "fake"
    assert capacity.observe_time.seconds > 0
    limits = capacity.limits
    assert (limits.max_context_tokens, limits.max_prompt_tokens) == (256, 255)
    assert (limits.max_running_requests, limits.max_queued_requests, limits.max_queued_prompt_tokens) == (64, 64, 4096)
    assert (limits.kv_block_tokens, limits.kv_total_blocks) == (16, 1024)
    assert capacity.load.kv_free_blocks == 1024
    assert capacity.load.kv_utilization == 0.0
    assert capacity.load.utilization == 0.0


async def test_running_and_queued_requests_show() -> None:
    async with running(FakeEngineClient(max_num_seqs=1)) as served:
        served.engine.plan = lambda _: Script(steps_before_first=10**9)
        stream = Stream(served)
        await stream.send(*(start_message("x" * 32, request_id=f"r{i}") for i in range(3)))
        await until(lambda: served.engine.stats.running_requests == 1 and served.engine.live_requests == 3)
        load = (await snapshot(served)).load
        assert (load.running_requests, load.queued_requests, load.queued_uncached_tokens) == (1, 2, 64)
        assert load.kv_utilization == pytest.approx(2 / 16)
        assert load.utilization == pytest.approx(3.0)
        stream.call.cancel()
        await until(lambda: served.engine.live_requests == 0)
        assert (await snapshot(served)).load.kv_utilization == 0.0


async def test_evictable_blocks_are_free_to_use_and_counted_apart(served: Running) -> None:
    served.engine.stats_overrides = {"free_blocks": 500, "cached_blocks": 524, "swapped_blocks": 3, "preemptions": 9}
    load = (await snapshot(served)).load
    assert (load.kv_free_blocks, load.kv_evictable_blocks, load.kv_utilization) == (500, 524, 0.0)
    assert (load.kv_swapped_blocks, load.preemptions_total) == (3, 9)


async def test_queue_delay_is_estimated_from_the_recent_rate(served: Running) -> None:
    served.engine.stats_overrides = {
        "queued_requests": 2,
        "queued_prompt_tokens": 4000,
        "queued_uncached_tokens": 500,
        "prefill_tokens_per_second": 250.0,
    }
    load = (await snapshot(served)).load
    assert (load.queued_uncached_tokens, load.estimated_queue_delay) == (500, Duration(seconds=2))


async def test_queue_delay_is_the_engines_estimate_where_that_is_longer(served: Running) -> None:
    served.engine.stats_overrides = {"queue_delay_seconds": 7.5, "prefill_tokens_per_second": 250.0}
    assert (await snapshot(served)).load.estimated_queue_delay == Duration(seconds=7, nanos=500_000_000)


async def test_unknown_model(served: Running) -> None:
    with pytest.raises(aio.AioRpcError) as error:
        await served.capacity.GetCapacity(pb.GetCapacityRequest(model="other"), timeout=5)
    assert error_status(error.value).code is grpc.StatusCode.NOT_FOUND


async def test_watch_sends_at_once_then_on_change(served: Running) -> None:
    call = watch(served, min_interval=10, max_interval=3_600_000)
    first = (await call.read()).capacity
    await run_stream(served, start(max_tokens=3))
    second = (await call.read()).capacity
    assert second.revision > first.revision
    async with asyncio.timeout(5):
        while second.load.finished_requests_total != 1:
            second = (await call.read()).capacity
    call.cancel()


async def test_watch_has_a_heartbeat(served: Running) -> None:
    call = watch(served, min_interval=10, max_interval=50)
    revisions = [(await call.read()).capacity.revision for _ in range(4)]
    assert revisions == sorted(revisions)
    call.cancel()


async def test_slow_reader_of_a_watch_gets_the_newest_state() -> None:
    """While a reader sleeps nothing is queued for it: what it reads next was observed after at most one older one."""
    async with running(FakeEngineClient(step_delay=0.002)) as served:
        call = watch(served, min_interval=500)
        await call.read()
        await run_stream(served, start(max_tokens=100))
        second = (await call.read()).capacity
        third = (await call.read()).capacity if second.load.finished_requests_total == 0 else second
        assert third.load.finished_requests_total == 1
        call.cancel()


@pytest.mark.parametrize(
    ("path", "intervals"),
    [
        ("min_interval", {"min_interval": 9}),
        ("min_interval", {"min_interval": -1}),
        ("max_interval", {"max_interval": 0}),
        ("max_interval", {"min_interval": 500, "max_interval": 400}),
        ("max_interval", {"max_interval": 3_600_001}),
    ],
)
async def test_bad_intervals_are_named(served: Running, path: str, intervals: dict[str, int]) -> None:
    with pytest.raises(aio.AioRpcError) as error:
        await watch(served, **intervals).read()
    assert error_status(error.value).fields == [path]


async def test_dead_engine_shows_as_failed(served: Running) -> None:
    served.engine.die()
    capacity = await snapshot(served)
    assert (capacity.state, capacity.accepting) == (pb.REPLICA_STATE_FAILED, False)


async def test_nothing_runs_in_a_dead_engine(served: Running) -> None:
    served.engine.stats_overrides = {
        "running_requests": 3,
        "queued_requests": 2,
        "queued_uncached_tokens": 500,
        "free_blocks": 18,
        "cached_blocks": 4,
        "swapped_blocks": 1,
        "prefill_tokens_per_second": 100.0,
        "decode_tokens_per_second": 72.0,
        "queue_delay_seconds": 7.5,
        "prompt_tokens": 5,
        "cached_prompt_tokens": 4,
        "preemptions": 3,
        "generated_tokens": 2,
        "finished_requests": 1,
    }
    served.engine.die()
    capacity = await snapshot(served)
    capacity.load.ClearField("engine_heartbeat_age")
    assert capacity.load == pb.Load(
        kv_free_blocks=capacity.limits.kv_total_blocks,
        estimated_queue_delay=Duration(),
        prompt_tokens_total=5,
        cached_prompt_tokens_total=4,
        preemptions_total=3,
        generated_tokens_total=2,
        finished_requests_total=1,
    )


def test_states_have_the_public_values() -> None:
    assert {state.name: state.value for state in ReplicaState} == {
        name.removeprefix("REPLICA_STATE_"): number for name, number in pb.ReplicaState.items() if number
    }
