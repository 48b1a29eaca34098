"""A real server on loopback over a scripted engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from grpc import aio

import service  # noqa: F401  # puts proto/ on the path
from engine import EngineState
from octavo.v1 import capacity_pb2_grpc, generation_pb2_grpc, tokenization_pb2_grpc
from service.config import ServiceConfig
from service.server import Server
from tests.service.byte_tokenizer import byte_tokenizer
from tests.service.fake_engine import FakeEngineClient

WAIT_SECONDS = 10.0


@dataclass
class Running:
    """A server, its engine, and a channel with stubs."""

    server: Server
    engine: FakeEngineClient
    channel: aio.Channel

    @property
    def generation(self) -> generation_pb2_grpc.GenerationServiceAsyncStub:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def tokenization(self) -> tokenization_pb2_grpc.TokenizationServiceAsyncStub:
        return tokenization_pb2_grpc.TokenizationServiceStub(self.channel)

    @property
    def capacity(self) -> capacity_pb2_grpc.CapacityServiceAsyncStub:
        return capacity_pb2_grpc.CapacityServiceStub(self.channel)


@asynccontextmanager
async def running(
    engine: FakeEngineClient | None = None, config: ServiceConfig | None = None
) -> AsyncIterator[Running]:
    """Serves until the block ends; then nothing may be live any more."""
    engine = engine or FakeEngineClient()
    config = replace(config or ServiceConfig(drain_grace=0.0), port=0)
    await engine.start()
    async with running_server(Server(engine, byte_tokenizer(), config), engine) as served:
        yield served


@asynccontextmanager
async def running_server(server: Server, engine: FakeEngineClient) -> AsyncIterator[Running]:
    await server.start()
    try:
        async with aio.insecure_channel(server.address) as channel:
            yield Running(server, engine, channel)
        await until(lambda: len(server.replica.live) == 0 == len(server.replica.streams))
        assert engine.state is not EngineState.READY or engine.live_requests == 0
    finally:
        await server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Waits for a condition; fails if it does not come true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
