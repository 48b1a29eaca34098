"""What the service costs around the engine: requests through gRPC against the same engine in this process."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from engine.config import Device, EngineConfig, LoadFormat
from engine.engine import Engine
from octavo.v1 import generation_pb2 as pb
from service.client import Client
from tests.bench.generation import prompts, run_engine
from tests.bench.running_service import running_service
from tests.bench.shapes import SHAPES, write_shape, write_tokenizer

Figures = dict[str, float]
Generate = Callable[[pb.StartGeneration], AsyncIterator[pb.GenerationEvent]]

REQUESTS = 16
NEW_TOKENS = 48
ROUNDS = 5

GPU_SHAPE = "qwen3-0.6b"
GPU_STREAMS = 64
GPU_PROMPT = 512
GPU_NEW_TOKENS = 512
GPU_KV_TOKENS = 2 * GPU_STREAMS * (GPU_PROMPT + GPU_NEW_TOKENS)


def measure() -> Figures:
    """16 requests on one bidirectional stream, the embedded model on the CPU: tokens a second of both, and the ratio
    gRPC / in-process."""
    config = EngineConfig(max_num_seqs=REQUESTS, max_model_len=1024, enable_prefix_caching=False)
    direct, remote = _compare(config, prompts(REQUESTS), NEW_TOKENS, streams=1)
    return {
        "engine_tokens_per_second_b16": direct,
        "grpc_tokens_per_second_b16": remote,
        "grpc_ratio_b16": remote / direct,
    }


def measure_gpu() -> Figures:
    """64 requests, each on a stream of its own, random weights on a GPU. Tokens are only counted there: bf16 rounds by
    the shape of the batch, and the steps of two runs need not be cut alike."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(Path(folder), GPU_SHAPE)
        write_tokenizer(model, SHAPES[GPU_SHAPE]["vocab_size"])
        config = EngineConfig(
            model=str(model),
            load_format=LoadFormat.DUMMY,
            device=Device.CUDA,
            max_num_seqs=GPU_STREAMS,
            max_model_len=4096,
            kv_cache_tokens=GPU_KV_TOKENS,
            enable_prefix_caching=False,
        )
        inputs = [
            [(index * 7919 + place * 104_729) % 40_000 for place in range(GPU_PROMPT)] for index in range(GPU_STREAMS)
        ]
        direct, remote = _compare(config, inputs, GPU_NEW_TOKENS, streams=GPU_STREAMS, exact=False)
    return {
        f"engine_tokens_per_second.{GPU_SHAPE}.b{GPU_STREAMS}": direct,
        f"grpc_tokens_per_second.{GPU_SHAPE}.b{GPU_STREAMS}": remote,
        f"grpc_ratio.{GPU_SHAPE}.b{GPU_STREAMS}": remote / direct,
    }


def _compare(
    config: EngineConfig, inputs: list[list[int]], new_tokens: int, *, streams: int, exact: bool = True
) -> tuple[float, float]:
    """Total tokens a second, in-process and through gRPC, interleaved, medians; AssertionError if outputs differ."""
    engine = Engine(config)
    direct, remote = [], []
    with running_service(config.model, *_flags(config)) as address:
        for round_ in range(ROUNDS + 1):
            seconds, tokens = run_engine(engine, inputs, new_tokens)
            remote_seconds, remote_tokens = asyncio.run(_through_grpc(address, inputs, new_tokens, streams))
            if exact and tokens != remote_tokens:
                raise AssertionError("tokens through gRPC differ from the engine's")
            if any(len(ids) != new_tokens for ids in (*tokens, *remote_tokens)):
                raise AssertionError("an output has another length than was asked for")
            if round_:
                direct.append(len(inputs) * new_tokens / seconds)
                remote.append(len(inputs) * new_tokens / remote_seconds)
    return statistics.median(direct), statistics.median(remote)


def _flags(config: EngineConfig) -> list[str]:
    """The service's flags that make the same engine: what differs from the defaults."""
    default = EngineConfig()
    flags = []
    for name in msgspec.structs.asdict(config):
        value = getattr(config, name)
        if name == "model" or value == getattr(default, name):
            continue
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", f"{value}"]
    return flags


async def _through_grpc(
    address: str, inputs: list[list[int]], new_tokens: int, streams: int
) -> tuple[float, list[list[int]]]:
    """All requests on one bidirectional stream, or each in a call of its own."""

    async def one(generate: Generate, index: int) -> list[int]:
        start = pb.StartGeneration(
            request_id=str(index),
            token_ids=pb.TokenIds(ids=inputs[index]),
            sampling=pb.SamplingParameters(temperature=0.0),
            stop=pb.StopCriteria(max_tokens=new_tokens, ignore_eos=True),
            output=pb.OutputOptions(token_ids=True),
        )
        tokens: list[int] = []
        async for event in generate(start):
            tokens += event.delta.token_ids
        return tokens

    async def everyone(generate: Generate) -> tuple[float, list[list[int]]]:
        begin = time.perf_counter()
        results = await asyncio.gather(*(one(generate, index) for index in range(len(inputs))))
        return time.perf_counter() - begin, list(results)

    async with Client(address) as client:
        if streams > 1:
            return await everyone(client.generate)
        async with client.session() as session:
            return await everyone(session.generate)
