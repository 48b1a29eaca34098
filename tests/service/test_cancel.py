"""Cancelling at every point of a request's life, from every side. Nothing is held afterwards, nothing comes twice."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import grpc
import pytest

from octavo.v1 import generation_pb2 as pb
from tests.service.calls import Stream, cancel_message, run_stream, start, start_message
from tests.service.fake_engine import Script
from tests.service.server import Running, until

ROOT = Path(__file__).resolve().parents[2]


async def test_cancel_while_running(served: Running) -> None:
    served.engine.step_delay = 0.005
    stream = Stream(served)
    await stream.send(start_message("hi", request_id="a"), start_message(request_id="b", max_tokens=30))
    await stream.read_until_tokens("a", 3)
    await stream.send(cancel_message("a"))
    await stream.read_until_ended("a", "b")
    log = stream.logs["a"]
    assert log.finish_reason() == "CANCELLED"
    assert log.finished.usage.prompt_tokens == 2
    assert log.finished.usage.completion_tokens >= log.token_count() >= 3
    assert stream.logs["b"].token_count() == 30
    assert await stream.finish() is grpc.StatusCode.OK


async def test_cancel_while_queued(served: Running) -> None:
    served.engine.hold = True
    stream = Stream(served)
    await stream.send(start_message(request_id="a", sampling=pb.SamplingParameters(n=2)))
    await until(lambda: served.engine.live_requests == 1)
    await stream.send(cancel_message("a"))
    await stream.read_until_ended("a")
    assert [stream.logs["a"].finish_reason(i) for i in range(2)] == ["CANCELLED", "CANCELLED"]
    assert stream.logs["a"].finished.usage.completion_tokens == 0
    assert served.engine.live_requests == 0
    assert await stream.finish() is grpc.StatusCode.OK


async def test_cancel_before_tokenization_ends(served: Running) -> None:
    """A start followed by a cancel while a thread still tokenizes: the engine never sees the request."""
    go_on = threading.Event()
    served.server.replica.max_prompt_bytes = 10**9
    served.server.replica.tokenizer.encode = lambda *_: go_on.wait(10) and [1]  # type: ignore[method-assign,assignment]
    stream = Stream(served)
    await stream.send(start_message("x" * 5000, request_id="a"))
    await until(lambda: len(served.server.replica.live) == 1)
    await stream.send(cancel_message("a"))
    await stream.read_until_ended("a")
    go_on.set()
    assert stream.logs["a"].kinds == ["admitted", "delta", "finished"]
    assert stream.logs["a"].finish_reason() == "CANCELLED"
    assert await stream.finish() is grpc.StatusCode.OK
    assert served.engine.submitted == []
    assert len(served.server.replica.live) == 0


async def test_long_prompt_is_tokenized_apart_and_delays_no_other(served: Running) -> None:
    go_on = threading.Event()
    replica = served.server.replica
    replica.max_prompt_bytes = 10**9
    encode = replica.tokenizer.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 100:
            assert go_on.wait(10)
            return [1, 2, 3]
        return encode(text)

    replica.tokenizer.encode = slow  # type: ignore[method-assign]
    stream = Stream(served)
    await stream.send(start_message("x" * 5000, request_id="long", max_tokens=2))
    await stream.send(start_message(request_id="short", max_tokens=2))
    await stream.read_until_ended("short")
    assert not stream.logs["long"].events
    go_on.set()
    await stream.read_until_ended("long")
    assert stream.logs["long"].finished.usage.prompt_tokens == 3
    assert await stream.finish() is grpc.StatusCode.OK


async def test_cancel_is_idempotent_and_ignores_unknown_ids(served: Running) -> None:
    stream = Stream(served)
    await stream.send(cancel_message("never"), start_message(request_id="a", max_tokens=2))
    await stream.read_until_ended("a")
    await stream.send(cancel_message("a"), cancel_message("a"), cancel_message(""))
    await stream.send(start_message(request_id="b", max_tokens=2))
    await stream.read_until_ended("b")
    assert stream.logs["a"].finish_reason() == "MAX_TOKENS"
    assert await stream.finish() is grpc.StatusCode.OK


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
async def test_cancel_twice_gives_one_last_event(served: Running, tokens: int) -> None:
    served.engine.step_delay = 0.003
    stream = Stream(served)
    await stream.send(start_message(request_id="a"))
    await stream.read_until_tokens("a", tokens)
    await stream.send(cancel_message("a"), cancel_message("a"))
    assert await stream.finish() is grpc.StatusCode.OK
    assert stream.logs["a"].kinds.count("finished") == 1


async def test_id_is_free_again_after_cancel(served: Running) -> None:
    stream = Stream(served)
    await stream.send(start_message(request_id="a"))
    await stream.read_until_tokens("a", 1)
    await stream.send(cancel_message("a"))
    await stream.read_until_ended("a")
    stream.logs.pop("a")
    await stream.send(start_message(request_id="a", max_tokens=2))
    await stream.read_until_ended("a")
    assert stream.logs["a"].text() == "ab"
    assert await stream.finish() is grpc.StatusCode.OK


# --- from outside ----------------------------------------------------------------------------------------------------


async def cancel_outside(served: Running, *ids: str) -> list[str]:
    request = pb.CancelGenerationsRequest(request_ids=ids, reason="test")
    return list((await served.generation.CancelGenerations(request, timeout=5)).cancelled_request_ids)


async def test_cancel_generations_by_engine_id_and_by_client_id(served: Running) -> None:
    served.engine.step_delay = 0.005
    stream = Stream(served)
    await stream.send(start_message(request_id="a"), start_message(request_id="b"))
    await stream.read_until_tokens("a", 1)
    await stream.read_until_tokens("b", 1)
    engine_id = stream.logs["a"].admitted.engine_request_id
    assert await cancel_outside(served, engine_id, "b", "unknown") == [engine_id, "b"]
    await stream.read_until_ended("a", "b")
    assert {stream.logs[i].finish_reason() for i in "ab"} == {"CANCELLED"}
    assert await cancel_outside(served, engine_id, "b") == []
    assert await stream.finish() is grpc.StatusCode.OK


async def test_cancel_generations_leaves_an_ambiguous_id_alone(served: Running) -> None:
    served.engine.step_delay = 0.005
    streams = [Stream(served), Stream(served)]
    for stream in streams:
        await stream.send(start_message(request_id="same", max_tokens=40))
        await stream.read_until_tokens("same", 1)
    assert await cancel_outside(served, "same") == []
    for stream in streams:
        assert await stream.finish() is grpc.StatusCode.OK
        assert stream.logs["same"].token_count() == 40


async def test_cancel_generations_ends_a_unary_call(served: Running) -> None:
    served.engine.step_delay = 0.005
    request = pb.GenerateUnaryRequest(start=start(request_id="u"))
    call = served.generation.GenerateUnary(request, timeout=10)
    await until(lambda: served.engine.live_requests == 1)
    assert await cancel_outside(served, "u") == ["u"]
    response = await call
    assert response.candidates[0].finish.reason == pb.FINISH_REASON_CANCELLED


# --- clients that go away --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", [True, False], ids=["queued", "running"])
async def test_cancelled_stream_frees_its_requests(served: Running, hold: bool) -> None:
    served.engine.hold = hold
    served.engine.step_delay = 0.005
    stream = Stream(served)
    await stream.send(*(start_message(request_id=f"r{i}") for i in range(5)))
    await until(lambda: served.engine.live_requests == 5)
    stream.call.cancel()
    await until(lambda: served.engine.live_requests == 0)
    await until(lambda: len(served.server.replica.live) == 0 and len(served.server.replica.streams) == 0)


async def test_cancelled_single_calls_free_their_requests(served: Running) -> None:
    served.engine.hold = True
    unary = served.generation.GenerateUnary(pb.GenerateUnaryRequest(start=start()), timeout=30)
    single = served.generation.GenerateStream(pb.GenerateStreamRequest(start=start()), timeout=30)
    await until(lambda: served.engine.live_requests == 2)
    unary.cancel()
    single.cancel()
    await until(lambda: served.engine.live_requests == 0)
    await until(lambda: len(served.server.replica.live) == 0)


async def test_closing_the_send_side_lets_requests_finish(served: Running) -> None:
    served.engine.step_delay = 0.003
    stream = Stream(served)
    await stream.send(start_message(request_id="a", max_tokens=20))
    assert await stream.finish() is grpc.StatusCode.OK
    assert stream.logs["a"].token_count() == 20


async def test_empty_stream_ends_with_ok(served: Running) -> None:
    assert await Stream(served).finish() is grpc.StatusCode.OK


KILLED_CLIENT = """
import asyncio, sys
sys.path[:0] = ["proto", "."]
from grpc import aio
from octavo.v1 import generation_pb2 as pb, generation_pb2_grpc as rpc

async def main():
    async with aio.insecure_channel(sys.argv[1]) as channel:
        call = rpc.GenerationServiceStub(channel).Generate()
        for index in range(3):
            await call.write(pb.GenerateRequest(start=pb.StartGeneration(request_id=str(index), text="hi")))
        async for message in call:
            print("message", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("hold", [True, False], ids=["queued", "running"])
async def test_killed_client_frees_its_requests_and_disturbs_no_other(served: Running, hold: bool) -> None:
    served.engine.step_delay = 0.01
    served.engine.plan = lambda _: Script()
    neighbour = Stream(served)
    await neighbour.send(start_message(request_id="n", max_tokens=150))
    await neighbour.read_until_tokens("n", 1)
    served.engine.hold = hold
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED_CLIENT, served.server.address), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    await asyncio.wait_for(client.stdout.readline(), 10)
    await until(lambda: served.engine.live_requests == 4)
    os.kill(client.pid, signal.SIGKILL)
    await client.wait()
    await until(lambda: served.engine.live_requests <= 1)
    assert await neighbour.finish() is grpc.StatusCode.OK
    assert neighbour.logs["n"].token_count() == 150
    served.engine.hold = False
    assert (await run_stream(served, start(max_tokens=3))).text() == "abc"
    assert served.engine.live_requests == 0
