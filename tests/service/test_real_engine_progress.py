"""The real engine's own signs of progress: a step that is slow is healthy, one that hangs is not."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig, load_tokenizer, ops
from engine.engine import Engine
from engine.local import LocalEngineClient
from engine.model.decoder import Decoder
from engine.types import GenerationRequest, SamplingParameters, StopCriteria
from octavo.v1 import generation_pb2 as pb
from service.client import Client
from service.config import ServiceConfig
from service.server import Server
from tests.model.tiny import write_tiny_model
from tests.service.real_engine import slow_down
from tests.service.server import until

LAYERS = 6
QUICK = ServiceConfig(port=0, drain_grace=0.0, heartbeat_timeout=1.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=LAYERS)


def config(path: Path) -> EngineConfig:
    return EngineConfig(model=str(path), max_num_seqs=4, max_model_len=64, block_size=4, num_threads=1)


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[tuple[Server, Any]]:
    """A server over the engine on a thread, and the running generation of two tokens."""
    engine = LocalEngineClient(config(path))
    await engine.start()
    server = Server(engine, load_tokenizer(str(path)), QUICK)
    await server.start()
    try:
        async with Client(server.address) as client:

            async def generate() -> int:
                start = pb.StartGeneration(
                    token_ids=pb.TokenIds(ids=[3, 4, 5]), stop=pb.StopCriteria(max_tokens=2, ignore_eos=True)
                )
                return sum([event.delta.token_count async for event in client.generate(start)])

            yield server, asyncio.create_task(generate())
    finally:
        await server.stop()


async def test_step_longer_than_the_limit_is_healthy_while_layers_are_done(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, 0.25)
    async with serving(tiny) as (server, task):
        stats = server.replica.engine.stats
        began, unhealthy = time.monotonic(), 0
        while not task.done():
            unhealthy += not server.replica.ready
            await until(lambda seen=stats: server.replica.engine.stats is not seen)  # type: ignore[misc]
            stats = server.replica.engine.stats
        assert await task == 2
        assert time.monotonic() - began > 2 * LAYERS * 0.25
        assert stats.last_step_seconds > QUICK.heartbeat_timeout
        assert unhealthy == 0


async def test_step_that_hangs_inside_a_layer_is_no_health(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silu_mul, go_on, calls = ops.silu_mul, threading.Event(), itertools.count()

    def hanging(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= LAYERS:  # the first step is of the start
            go_on.wait(30)
        return silu_mul(*arguments, **options)

    monkeypatch.setattr(ops, "silu_mul", hanging)
    async with serving(tiny) as (server, task):
        await until(lambda: not server.replica.ready)
        assert server.replica.alive
        assert not task.done()
        go_on.set()
        await until(lambda: server.replica.ready)
        assert await task == 2


def test_steps_in_a_row_that_raise_are_counted_until_one_does_not(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(config(tiny))
    forward = Decoder.forward

    def failing(self: Decoder, batch: Any) -> Any:
        raise RuntimeError("broken")

    def step(name: str) -> str:
        stop = StopCriteria(max_tokens=1, ignore_eos=True)
        engine.submit(GenerationRequest(name, [3, 4], SamplingParameters(temperature=0.0), stop))
        return type(engine.step().events[-1]).__name__

    monkeypatch.setattr(Decoder, "forward", failing)
    assert [step(name) for name in "ab"] == ["RequestFailed", "RequestFailed"]
    assert engine.failed_steps == 2
    monkeypatch.setattr(Decoder, "forward", forward)
    assert step("c") == "RequestFinished"
    assert engine.failed_steps == 0
    engine.close()
