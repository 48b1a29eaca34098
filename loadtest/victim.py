"""`python -m loadtest.victim ADDRESS COUNT`: a client process that is there to be frozen or killed. It starts requests
on one stream, says `started`, and reads."""

from __future__ import annotations

import asyncio
import sys

from grpc import aio

from loadtest.ending import CHANNEL_OPTIONS
from octavo.v1 import generation_pb2, generation_pb2_grpc

TOKENS = 400


async def suffer(address: str, count: int) -> None:
    async with aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        stub: generation_pb2_grpc.GenerationServiceAsyncStub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate()  # type: ignore[call-arg]  # no iterator: written by `write`
        for index in range(count):
            start = generation_pb2.StartGeneration(
                request_id=str(index),
                text=f"Count to {index}.",
                stop=generation_pb2.StopCriteria(max_tokens=TOKENS, ignore_eos=True),
            )
            await call.write(generation_pb2.GenerateRequest(start=start))
        print("started", flush=True)
        while await call.read() is not aio.EOF:  # type: ignore[attr-defined]
            pass


if __name__ == "__main__":
    asyncio.run(suffer(sys.argv[1], int(sys.argv[2])))
