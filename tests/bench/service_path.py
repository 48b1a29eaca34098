"""What the service costs around the engine: 16 requests through gRPC against the same engine in this process."""

from __future__ import annotations

import asyncio
import statistics
import time

from engine.config import EngineConfig
from engine.engine import Engine
from octavo.v1 import generation_pb2 as pb
from service.client import Client
from tests.bench.generation import prompts, run_engine
from tests.bench.running_service import running_service

REQUESTS = 16
NEW_TOKENS = 48
ROUNDS = 5


def measure() -> dict[str, float]:
    """Total tokens a second of both, interleaved, medians; raises if the tokens differ. Ratio = gRPC / in-process."""
    inputs = prompts(REQUESTS)
    engine = Engine(EngineConfig(max_num_seqs=REQUESTS, max_model_len=1024, enable_prefix_caching=False))
    flags = ("--max-num-seqs", str(REQUESTS), "--max-model-len", "1024", "--no-enable-prefix-caching")
    with running_service("demo", *flags) as address:
        direct, remote = [], []
        for round_ in range(ROUNDS + 1):
            seconds, tokens = run_engine(engine, inputs, NEW_TOKENS)
            remote_seconds, remote_tokens = asyncio.run(_through_grpc(address, inputs))
            if tokens != remote_tokens:
                raise AssertionError("tokens through gRPC differ from the engine's")
            if round_:
                direct.append(REQUESTS * NEW_TOKENS / seconds)
                remote.append(REQUESTS * NEW_TOKENS / remote_seconds)
    return {
        "engine_tokens_per_second_b16": statistics.median(direct),
        "grpc_tokens_per_second_b16": statistics.median(remote),
        "grpc_ratio_b16": statistics.median(remote) / statistics.median(direct),
    }


async def _through_grpc(address: str, inputs: list[list[int]]) -> tuple[float, list[list[int]]]:
    """All requests on one bidirectional stream."""

    async def one(session: object, index: int) -> list[int]:
        start = pb.StartGeneration(
            request_id=str(index),
            token_ids=pb.TokenIds(ids=inputs[index]),
            sampling=pb.SamplingParameters(temperature=0.0),
            stop=pb.StopCriteria(max_tokens=NEW_TOKENS, ignore_eos=True),
            output=pb.OutputOptions(token_ids=True),
        )
        tokens: list[int] = []
        async for event in session.generate(start):  # type: ignore[attr-defined]
            tokens += event.delta.token_ids
        return tokens

    async with Client(address) as client, client.session() as session:
        begin = time.perf_counter()
        results = await asyncio.gather(*(one(session, index) for index in range(len(inputs))))
        return time.perf_counter() - begin, results
