"""The service under test: what it says of itself, the ids that its tokenizer knows, and single probes of it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any

import grpc
from grpc import aio

from loadtest.ending import CHANNEL_OPTIONS
from loadtest.mix import WORDS
from loadtest.records import Target
from loadtest.telemetry import scrape
from octavo.v1 import (
    capacity_pb2,
    capacity_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    tokenization_pb2,
    tokenization_pb2_grpc,
)

SECONDS = 20.0
PROBE_SECONDS = 10.0
PROBE_PERIOD = 0.1
PLAIN_IDS = list(range(32, 96))  # for a server without a tokenizer
RECOVERED = 1.2  # of the floor
DEVICE = re.compile(r'engine_info\{.*\bdevice="([^"]*)"')


class TargetError(Exception):
    """Nothing answers there; the message says so."""


async def describe(address: str, command: Sequence[str] = (), metrics_url: str | None = None) -> Target:
    """Raises TargetError. A server without a capacity service is described by its address alone. Its device is told by
    its metrics alone."""
    async with aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        stub: Any = capacity_pb2_grpc.CapacityServiceStub(channel)
        try:
            capacity = (await stub.GetCapacity(capacity_pb2.GetCapacityRequest(), timeout=SECONDS)).capacity
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return Target(address=address, command=list(command))
            raise TargetError(f"{address}: {error.details()}") from None
    limits = capacity.limits
    return Target(
        address=address,
        instance_id=capacity.instance_id,
        model=capacity.model,
        device=await asyncio.to_thread(device_of, metrics_url) if metrics_url else "",
        max_context_tokens=limits.max_context_tokens,
        max_running_requests=limits.max_running_requests,
        max_queued_requests=limits.max_queued_requests,
        kv_tokens=limits.kv_total_blocks * limits.kv_block_tokens,
        command=list(command),
    )


async def answering(metrics_url: str) -> None:
    """Raises TargetError if no Prometheus page answers there."""
    if not await asyncio.to_thread(scrape, metrics_url, SECONDS):
        raise TargetError(f"--metrics-url {metrics_url}: no page of metrics answers there")


def device_of(metrics_url: str) -> str:
    """Where the engine computes, such as "cpu"; empty if it does not say."""
    found = (DEVICE.match(name) for name in scrape(metrics_url))
    return next((match[1] for match in found if match), "")


async def vocabulary(address: str) -> list[int]:
    """Ids of common words, as the model's tokenizer has them."""
    async with aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        stub: Any = tokenization_pb2_grpc.TokenizationServiceStub(channel)
        request = tokenization_pb2.TokenizeRequest(text=" " + " ".join(WORDS), add_special_tokens=False)
        try:
            answer = await stub.Tokenize(request, timeout=SECONDS)
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return PLAIN_IDS
            raise TargetError(f"{address}: {error.details()}") from None
    return sorted(set(answer.token_ids))


async def probe(channel: aio.Channel, ids: Sequence[int]) -> float | None:
    """Time to the first token of a small request; None if it was refused, failed or took too long."""
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    start = generation_pb2.StartGeneration(
        token_ids=generation_pb2.TokenIds(ids=ids),
        stop=generation_pb2.StopCriteria(max_tokens=2, ignore_eos=True),
        sampling=generation_pb2.SamplingParameters(temperature=0.0),
        cache=generation_pb2.CacheOptions(bypass=True),
    )
    begin = time.monotonic()
    try:
        async for response in stub.GenerateStream(
            generation_pb2.GenerateStreamRequest(start=start), timeout=PROBE_SECONDS
        ):
            if any(event.delta.token_count for event in response.events):
                return time.monotonic() - begin
    except aio.AioRpcError:
        pass
    return None


async def time_alone(address: str, starts: Sequence[generation_pb2.StartGeneration], limit: float) -> float | None:
    """Seconds until all of these requests, sent at once, have ended; None unless one completed. The prefix cache knows
    nothing of them. limit: of each."""
    begin = time.monotonic()
    async with aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        completed = await asyncio.gather(*(_completes(channel, start, limit) for start in starts))
    return time.monotonic() - begin if any(completed) else None


async def _completes(channel: aio.Channel, start: generation_pb2.StartGeneration, limit: float) -> bool:
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    start.cache.bypass = True
    events: list[generation_pb2.GenerationEvent] = []
    try:
        async for response in stub.GenerateStream(generation_pb2.GenerateStreamRequest(start=start), timeout=limit):
            events = response.events or events
    except aio.AioRpcError:
        return False
    return bool(events) and events[-1].HasField("finished")


async def until_recovered(address: str, ids: Sequence[int], floor: float, since: float, limit: float) -> float | None:
    """Seconds from `since` until a probe's first token came within 1.2 of the floor; None if none did until `limit`
    (both by CLOCK_MONOTONIC)."""
    return await until_served(address, ids, RECOVERED * floor, since, limit)


async def until_served(address: str, ids: Sequence[int], ttft: float, since: float, limit: float) -> float | None:
    """The same for a first token that took at most `ttft`."""
    async with aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        while (begin := time.monotonic()) < limit:
            took = await probe(channel, ids)
            if took is not None and took <= ttft:
                return begin + took - since
            await asyncio.sleep(PROBE_PERIOD)
    return None
