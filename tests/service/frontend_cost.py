"""What the front end costs: microseconds of CPU a token, on one multiplexed stream and on 64 streams.

`python -m tests.service.frontend_cost`. A server process over the scripted engine, whose own cost is measured apart and
taken off, gives 64 requests a token every step; the CPU time of the whole process is divided by the tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import psutil  # type: ignore[import-untyped]
from grpc import aio

import service  # noqa: F401  # puts proto/ on the path
from engine import GenerationRequest, StopCriteria
from octavo.v1 import generation_pb2, generation_pb2_grpc
from tests.service.fake_engine import FakeEngineClient
from tests.service.process import Process, server_process

STREAMS = 64
TOKENS = 200
STEP_SECONDS = 0.004  # about a decode step of a small model on a GPU
FAKE = {"FAKE_STEP_DELAY": str(STEP_SECONDS), "FAKE_MAX_NUM_SEQS": str(STREAMS)}


def measure() -> dict[str, float]:
    return asyncio.run(_measure())


async def _measure() -> dict[str, float]:
    engine_cost = scripted_engine_cost()
    async with (
        server_process("-m", "tests.service.fake_server", env=FAKE) as server,
        aio.insecure_channel(server.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await multiplexed(stub, 8)
        one = await cost(server, multiplexed(stub, TOKENS))
        many = await cost(server, separate(stub, TOKENS))
    return {
        "frontend_us_per_token_multiplexed": one - engine_cost,
        "frontend_us_per_token_streams64": many - engine_cost,
    }


async def cost(server: Process, work: Any) -> float:
    """Microseconds of the server's CPU a token."""
    process = psutil.Process(server.process.pid)
    before = cpu_seconds(process)
    await work
    return (cpu_seconds(process) - before) * 1e6 / (STREAMS * TOKENS)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def start(tokens: int, request_id: str = "") -> generation_pb2.StartGeneration:
    stop = generation_pb2.StopCriteria(max_tokens=tokens)
    return generation_pb2.StartGeneration(request_id=request_id, text="x", stop=stop)


async def multiplexed(stub: Any, tokens: int) -> None:
    call = stub.Generate()
    for index in range(STREAMS):
        await call.write(generation_pb2.GenerateRequest(start=start(tokens, str(index))))
    await call.done_writing()
    async for _ in call:
        pass


async def separate(stub: Any, tokens: int) -> None:
    async def one() -> None:
        async for _ in stub.GenerateStream(generation_pb2.GenerateStreamRequest(start=start(tokens))):
            pass

    await asyncio.gather(*(one() for _ in range(STREAMS)))


def scripted_engine_cost() -> float:
    """Microseconds a token of the scripted engine alone."""
    engine = FakeEngineClient(max_num_seqs=STREAMS, max_context_tokens=10**6)
    for index in range(STREAMS):
        engine.submit(GenerationRequest(str(index), [1], stop=StopCriteria(max_tokens=TOKENS)), lambda events: None)
    before = time.process_time()
    for _ in range(TOKENS):
        engine.run_step(time.monotonic())
    return (time.process_time() - before) * 1e6 / (STREAMS * TOKENS)


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
