"""What the front end costs: microseconds of CPU a token, on one multiplexed stream and on 64 streams.

`python -m tests.service.frontend_cost`. The scripted engine, in a process of its own as the real one is, gives 64
requests a token every step. The CPU time of the service's process, all of its threads and wake-ups included, is taken
for short and for long outputs: the difference is what tokens cost, the rest what requests do. The floor beside it is a
bare grpc.aio server that writes constants: a message a step, or one a stream and step.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]
from grpc import aio

import service  # noqa: F401  # puts proto/ on the path
from octavo.v1 import generation_pb2, generation_pb2_grpc
from tests.service.process import Process, server_process

STREAMS = 64
SHORT, TOKENS = 200, 1000
STEP_SECONDS = 0.004  # about a decode step of a small model on a GPU
FAKE = {
    "FAKE_PROCESS": "1",
    "FAKE_STEP_DELAY": str(STEP_SECONDS),
    "FAKE_MAX_NUM_SEQS": str(STREAMS),
    "FAKE_MAX_MODEL_LEN": "2048",
}


def measure() -> dict[str, float]:
    return asyncio.run(_measure())


async def _measure() -> dict[str, float]:
    async with (
        server_process("-m", "tests.service.fake_server", env=FAKE) as server,
        aio.insecure_channel(server.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await multiplexed(stub, 8)
        one = await slope(server, lambda tokens: multiplexed(stub, tokens))
        many = await slope(server, lambda tokens: separate(stub, tokens))
    return {
        "frontend_us_per_token_multiplexed": one.token,
        "frontend_us_per_token_streams64": many.token,
        "frontend_us_per_request_multiplexed": one.request,
        "frontend_us_per_request_streams64": many.request,
        "bare_grpc_us_per_token_multiplexed": await bare_cost("one"),
        "bare_grpc_us_per_token_streams64": await bare_cost("many"),
    }


@dataclass(frozen=True)
class Cost:
    """Microseconds of CPU."""

    token: float
    request: float


async def slope(server: Process, work: Callable[[int], Awaitable[None]]) -> Cost:
    short, long = [await cpu_of(server, work(tokens)) for tokens in (SHORT, TOKENS)]
    token = (long - short) / (STREAMS * (TOKENS - SHORT))
    return Cost(token, short / STREAMS - SHORT * token)


async def bare_cost(method: str) -> float:
    command = ("-m", "tests.service.bare_server", str(STREAMS), str(STEP_SECONDS), str(TOKENS))
    async with server_process(*command) as server, aio.insecure_channel(server.address) as channel:

        async def read() -> None:
            async for _ in channel.unary_stream(f"/bare/{method}")(b""):
                pass

        calls = STREAMS if method == "many" else 1
        await asyncio.gather(*(read() for _ in range(calls)))
        return await cpu_of(server, asyncio.gather(*(read() for _ in range(calls)))) / (STREAMS * TOKENS)


async def cpu_of(server: Process, work: Awaitable[Any]) -> float:
    """Microseconds of the server's CPU meanwhile."""
    process = psutil.Process(server.process.pid)
    before = cpu_seconds(process)
    await work
    return (cpu_seconds(process) - before) * 1e6


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


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
