"""Clients that go away at every point of a request's life, with the real engine: all its blocks are free again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from grpc import aio

from engine import EngineStats
from engine.config import PreemptionMode
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc
from service.client import Client
from tests.model.tiny import write_tiny_model
from tests.service.real_engine import serving, slow_down
from tests.service.server import until

CANARY = pb.StartGeneration(
    token_ids=pb.TokenIds(ids=[7, 8, 9]),
    sampling=pb.SamplingParameters(temperature=0.0),
    stop=pb.StopCriteria(max_tokens=6, ignore_eos=True),
    output=pb.OutputOptions(token_ids=True),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)


def long_request(name: str, prompt_tokens: int, max_tokens: int = 300) -> pb.GenerateRequest:
    stop = pb.StopCriteria(max_tokens=max_tokens, ignore_eos=True)
    ids = [3 + (len(name) + position) % 400 for position in range(prompt_tokens)]
    return pb.GenerateRequest(start=pb.StartGeneration(request_id=name, token_ids=pb.TokenIds(ids=ids), stop=stop))


# What makes requests meet a state, and how the state shows.
TIGHT = {"kv_cache_tokens": 160, "enable_prefix_caching": False}
STATES: dict[str, tuple[dict[str, Any], list[pb.GenerateRequest], Callable[[EngineStats], bool]]] = {
    "queued": (
        {"max_num_seqs": 1},
        [long_request("a", 4), long_request("bb", 4)],
        lambda stats: stats.queued_requests == 1 and stats.running_requests == 1,
    ),
    "inside a chunked prefill": (
        {"max_num_batched_tokens": 8},
        [long_request("a", 380, 10)],
        lambda stats: stats.running_requests == 1 and stats.generated_tokens == 0,
    ),
    "decoding": ({}, [long_request("a", 4)], lambda stats: stats.generated_tokens > 3),
    "preempted": (
        {**TIGHT, "preemption_mode": PreemptionMode.RECOMPUTE},
        [long_request(name, 30, 90) for name in ("a", "bb", "ccc")],
        lambda stats: stats.preemptions > 0,
    ),
    "swapped out": (
        {**TIGHT, "preemption_mode": PreemptionMode.SWAP, "swap_space_gib": 0.01},
        [long_request(name, 30, 90) for name in ("a", "bb", "ccc")],
        lambda stats: stats.swapped_blocks > 0,
    ),
}


@pytest.mark.parametrize("state", STATES)
async def test_client_that_goes_away_frees_everything(tiny: Path, state: str) -> None:
    options, requests, met = STATES[state]
    async with serving(tiny, **options) as (engine, server), Client(server.address) as client:
        before = await canary(client)
        async with aio.insecure_channel(server.address) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate()
            generated = engine.stats.generated_tokens
            for request in requests:
                await call.write(request)
            seen: list[EngineStats] = []
            engine.on_stats(lambda stats, _: seen.append(stats))
            await until(lambda: any(met(since(stats, generated)) for stats in seen))
            call.cancel()
        await until(lambda: is_idle(engine.stats))
        assert engine.stats.integrity_errors == 0
        assert len(server.replica.live) == 0
        assert await canary(client) == before


def since(stats: EngineStats, generated: int) -> EngineStats:
    return msgspec.structs.replace(stats, generated_tokens=stats.generated_tokens - generated)


def is_idle(stats: EngineStats) -> bool:
    return stats.running_requests == stats.queued_requests == stats.live_blocks == stats.swapped_blocks == 0


async def canary(client: Client) -> list[int]:
    async with asyncio.timeout(20):
        return [token_id async for event in client.generate(CANARY) for token_id in event.delta.token_ids]
