"""Capacity snapshots and the pace of a watch."""

from __future__ import annotations

from dataclasses import dataclass

from engine import EngineInfo, EngineStats
from octavo.v1 import capacity_pb2
from service.convert.fields import fill_duration, refuse, seconds_of
from service.convert.model import ServedModel
from service.status import invalid

LEAST_WATCH_SECONDS = 0.01
MOST_WATCH_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class WatchPace:
    """Seconds between two snapshots: never fewer than `least`, never more than `most`."""

    least: float = 0.1
    most: float = 5.0


def parse_watch(request: capacity_pb2.WatchCapacityRequest, model: ServedModel) -> WatchPace:
    model.check_name(request.model)
    pace = WatchPace()
    least, most = pace.least, pace.most
    if request.HasField("min_interval"):
        least = seconds_of(request.min_interval, "min_interval")
    if request.HasField("max_interval"):
        most = seconds_of(request.max_interval, "max_interval")
    elif least > most:
        most = least
    for path, value in (("min_interval", least), ("max_interval", most)):
        if not LEAST_WATCH_SECONDS <= value <= MOST_WATCH_SECONDS:
            problem = f"is not within {LEAST_WATCH_SECONDS:g} to {MOST_WATCH_SECONDS:g} s"
            raise refuse(invalid(path, problem))
    if most < least:
        raise refuse(invalid("max_interval", "is below min_interval"))
    return WatchPace(least, most)


def capacity_message(
    info: EngineInfo,
    stats: EngineStats,
    *,
    state: int,
    accepting: bool,
    revision: int,
    queue_delay: float,
    heartbeat_age: float,
) -> capacity_pb2.Capacity:
    """state: a ReplicaState. queue_delay, heartbeat_age: seconds."""
    capacity = capacity_pb2.Capacity(
        instance_id=info.instance_id,
        revision=revision,
        state=capacity_pb2.ReplicaState.ValueType(state),
        accepting=accepting,
        model=info.model,
    )
    capacity.observe_time.GetCurrentTime()
    _fill_limits(capacity.limits, info)
    _fill_load(capacity.load, info, stats)
    fill_duration(capacity.load.estimated_queue_delay, queue_delay)
    fill_duration(capacity.load.engine_heartbeat_age, heartbeat_age)
    return capacity


def _fill_limits(limits: capacity_pb2.Limits, info: EngineInfo) -> None:
    limits.max_context_tokens = info.max_context_tokens
    limits.max_prompt_tokens = info.max_prompt_tokens
    limits.max_running_requests = info.max_num_seqs
    limits.max_queued_requests = info.max_queued_requests
    limits.max_queued_prompt_tokens = info.max_queued_tokens
    limits.kv_block_tokens = info.block_size
    limits.kv_total_blocks = info.num_blocks


def _fill_load(load: capacity_pb2.Load, info: EngineInfo, stats: EngineStats) -> None:
    load.running_requests = stats.running_requests
    load.queued_requests = stats.queued_requests
    load.queued_uncached_tokens = stats.queued_uncached_tokens
    load.kv_free_blocks = stats.free_blocks
    load.kv_evictable_blocks = stats.cached_blocks
    load.kv_swapped_blocks = stats.swapped_blocks
    load.kv_utilization = kv_utilization(info, stats)
    load.utilization = utilization(info, stats)
    load.prefill_tokens_per_second = stats.prefill_tokens_per_second
    load.decode_tokens_per_second = stats.decode_tokens_per_second
    load.prompt_tokens_total = stats.prompt_tokens
    load.cached_prompt_tokens_total = stats.cached_prompt_tokens
    load.preemptions_total = stats.preemptions
    load.generated_tokens_total = stats.generated_tokens
    load.finished_requests_total = stats.finished_requests


def at_rest(info: EngineInfo, stats: EngineStats) -> EngineStats:
    """Of an engine that is gone: what it did, and that nothing runs, waits or holds a block."""
    return EngineStats(
        free_blocks=info.num_blocks,
        prompt_tokens=stats.prompt_tokens,
        cached_prompt_tokens=stats.cached_prompt_tokens,
        preemptions=stats.preemptions,
        generated_tokens=stats.generated_tokens,
        finished_requests=stats.finished_requests,
    )


def kv_utilization(info: EngineInfo, stats: EngineStats) -> float:
    held = info.num_blocks - stats.free_blocks - stats.cached_blocks
    return held / max(1, info.num_blocks)


def utilization(info: EngineInfo, stats: EngineStats) -> float:
    """The fuller of KV pool and batch, plus what waits beside it: above 1 a balancer should look elsewhere."""
    batch = stats.running_requests / max(1, info.max_num_seqs)
    waiting = stats.queued_requests / max(1, info.max_num_seqs)
    return max(kv_utilization(info, stats), batch) + waiting


def capacity_response(capacity: capacity_pb2.Capacity) -> capacity_pb2.GetCapacityResponse:
    return capacity_pb2.GetCapacityResponse(capacity=capacity)


def watch_response(capacity: capacity_pb2.Capacity) -> capacity_pb2.WatchCapacityResponse:
    return capacity_pb2.WatchCapacityResponse(capacity=capacity)
