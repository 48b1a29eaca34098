"""The failure table again, with the real engine: what fails says so, with usage, and nothing else notices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc import aio

from engine.model.decoder import Decoder
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc
from service.client import Client, GenerationError
from service.config import ServiceConfig
from tests.model.tiny import write_tiny_model
from tests.service.calls import error_status
from tests.service.real_engine import serving, slow_down
from tests.service.server import until


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def start(prompt: list[int], max_tokens: int, **scheduling: int) -> pb.StartGeneration:
    """scheduling: milliseconds of timeout or queue_timeout."""
    message = pb.StartGeneration(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParameters(temperature=0.0),
        stop=pb.StopCriteria(max_tokens=max_tokens, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True),
    )
    for name, value in scheduling.items():
        getattr(message.scheduling, name).FromMilliseconds(value)
    return message


async def generate(client: Client, message: pb.StartGeneration) -> list[int]:
    return [token_id async for event in client.generate(message) for token_id in event.delta.token_ids]


async def failure(client: Client, message: pb.StartGeneration) -> GenerationError:
    with pytest.raises(GenerationError) as error:
        await generate(client, message)
    return error.value


async def test_queue_full_says_when_to_come_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)
    async with (
        serving(tiny, max_num_seqs=1, max_queued_requests=1) as (engine, server),
        Client(server.address) as client,
        aio.insecure_channel(server.address) as channel,
    ):
        tasks = [asyncio.create_task(generate(client, start([3, index], 120))) for index in (4, 5)]
        await until(lambda: engine.stats.running_requests == engine.stats.queued_requests == 1)
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # no retries
        with pytest.raises(aio.AioRpcError) as error:
            await stub.GenerateUnary(pb.GenerateUnaryRequest(start=start([3], 1)))
        status = error_status(error.value)
        assert (status.code, status.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert status.pushback_ms == round(status.retry_seconds * 1000) > 0
        assert [len(ids) for ids in await asyncio.gather(*tasks)] == [120, 120]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(("seqs", "bound", "burst"), [(16, 1, 8), (2, 2, 4)])
async def test_a_burst_on_an_idle_server_is_taken(tiny: Path, seqs: int, bound: int, burst: int, streams: bool) -> None:
    async with (
        serving(tiny, max_num_seqs=seqs, max_queued_requests=bound) as (_, server),
        aio.insecure_channel(server.address) as channel,
    ):
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # no retries
        messages = [start([3 + index], 5) for index in range(burst)]
        if not streams:
            calls = [stub.GenerateUnary(pb.GenerateUnaryRequest(start=message)) for message in messages]
            assert [len(answer.candidates) for answer in await asyncio.gather(*calls)] == [1] * burst
            return
        call = stub.Generate()
        for message in messages:
            message.request_id = str(message.token_ids.ids[0])
            await call.write(pb.GenerateRequest(start=message))
        await call.done_writing()
        events = [event for response in [r async for r in call] for event in response.events]
        assert sorted(event.request_id for event in events if event.HasField("finished")) == sorted(
            message.request_id for message in messages
        )


async def test_deadlines_in_the_queue_and_while_running(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, 0.01)
    async with serving(tiny, max_num_seqs=1) as (engine, server), Client(server.address) as client:
        running = asyncio.create_task(failure(client, start([3, 4], 300, timeout=1500)))
        await until(lambda: engine.stats.running_requests == 1)
        expired = await failure(client, start([5, 6, 7], 10, queue_timeout=200))
        assert (expired.code, expired.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "EXPIRED_IN_QUEUE")
        assert expired.usage.completion_tokens == 0
        exceeded = await running
        assert (exceeded.code, exceeded.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        assert exceeded.usage.prompt_tokens == 2
        assert exceeded.usage.completion_tokens > 0


async def test_logits_that_are_no_numbers_fail_their_own_request_only(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch)
    async with serving(tiny) as (_, server), Client(server.address) as client:
        prompts = ([7, 8, 9], [5])
        alone = [await generate(client, start(prompt, 40)) for prompt in prompts]
        scores, poisoned = Decoder.scores, []

        def broken(self: Decoder, batch: Any) -> torch.Tensor:
            logits = scores(self, batch)
            if logits.shape[0] == 2 and not poisoned:
                logits[1] = float("nan")
                poisoned.append(True)
            return logits

        monkeypatch.setattr(Decoder, "scores", broken)
        both = await asyncio.gather(
            *(generate(client, start(prompt, 40)) for prompt in prompts), return_exceptions=True
        )
        (error,) = [result for result in both if isinstance(result, GenerationError)]
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
        assert [result for result in both if result in alone], "the neighbour noticed"
        assert server.replica.ready


async def test_step_that_raises_fails_what_ran_and_nothing_after_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny) as (engine, server), Client(server.address) as client:
        before = await generate(client, start([7, 8, 9], 8))
        with monkeypatch.context() as patch:

            def broken(self: Decoder, batch: Any) -> torch.Tensor:
                raise RuntimeError("an illegal memory access")

            patch.setattr(Decoder, "forward", broken)
            error = await failure(client, start([5], 4))
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
        assert "an illegal memory access" in error.message
        assert await generate(client, start([7, 8, 9], 8)) == before
        assert engine.stats.live_blocks == 0
        assert server.replica.ready


async def test_engine_whose_steps_all_raise_ends(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tiny) as (_, server), Client(server.address) as client:

        def broken(self: Decoder, batch: Any) -> torch.Tensor:
            raise RuntimeError("broken for good")

        monkeypatch.setattr(Decoder, "forward", broken)
        for _ in range(3):
            assert (await failure(client, start([5], 4))).reason == "ENGINE_ERROR"
        await until(lambda: not server.replica.alive)
        assert (await failure(client, start([5], 4))).reason == "ENGINE_DIED"


async def test_drain_time_over_ends_what_runs_with_usage(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)
    config = ServiceConfig(port=0, drain_grace=0.0, drain_timeout=0.3)
    async with serving(tiny, config) as (engine, server), Client(server.address) as client:
        running = asyncio.create_task(failure(client, start([3, 4], 390)))
        await until(lambda: engine.stats.generated_tokens > 2)
        await server.drain()
        error = await running
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAIN_TIMEOUT")
        assert error.usage.completion_tokens > 2


async def test_prompts_that_cannot_fit_are_refused_with_the_numbers(tiny: Path) -> None:
    async with serving(tiny, max_model_len=64) as (_, server), Client(server.address) as client:
        assert len(await generate(client, start([5] * 63, 4))) == 1
        error = await failure(client, start([5] * 64, 4))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
        assert "64 tokens; at most 63 fit" in error.message


async def test_low_priority_gives_way_in_a_full_queue(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)
    async with (
        serving(tiny, max_num_seqs=1, max_queued_requests=1) as (engine, server),
        aio.insecure_channel(server.address) as channel,
    ):
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # no retries

        async def unary(message: pb.StartGeneration, priority: int) -> pb.GenerateUnaryResponse:
            message.scheduling.priority = priority
            answer: pb.GenerateUnaryResponse = await stub.GenerateUnary(pb.GenerateUnaryRequest(start=message))
            return answer

        running = asyncio.create_task(unary(start([3, 4], 40), 0))
        await until(lambda: engine.stats.running_requests == 1)
        low = asyncio.create_task(unary(start([3, 5], 2), -1))
        await until(lambda: engine.stats.queued_requests == 1)
        high = asyncio.create_task(unary(start([3, 6], 2), 0))
        with pytest.raises(aio.AioRpcError) as error:
            await low
        status = error_status(error.value)
        assert (status.code, status.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SHED")
        assert status.pushback_ms == round(status.retry_seconds * 1000) > 0
        assert [(await task).usage.completion_tokens for task in (running, high)] == [40, 2]
