"""Megabytes of prompt: refused by their size where they cannot fit, else tokenized while everything else goes on."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import grpc
import pytest

from octavo.v1 import generation_pb2 as pb
from tests.service.calls import Stream, refusal, run_stream, start
from tests.service.fake_engine import FakeEngineClient
from tests.service.server import Running, running
from tests.service.test_health import SERVING, check

TEXT = "word " * 300_000


def large_engine() -> FakeEngineClient:
    return FakeEngineClient(max_context_tokens=1 << 22, max_queued_tokens=1 << 22)


def chat(content: str = "hello", arguments: dict[str, Any] | None = None) -> pb.Chat:
    written = "" if arguments is None else json.dumps(arguments)
    return pb.Chat(messages=[pb.ChatMessage(role="user", content=content)], template_arguments_json=written)


@pytest.mark.parametrize("prompt", [{"text": TEXT}, {"chat": chat(TEXT)}], ids=["text", "chat"])
async def test_health_and_other_streams_go_on_while_a_prompt_is_tokenized(prompt: dict[str, Any]) -> None:
    async with running(large_engine()) as served:
        other, long = Stream(served, timeout=100), Stream(served, timeout=100)
        await other.send(pb.GenerateRequest(start=start("x", max_tokens=100_000, request_id="other")))
        await other.read_until_tokens("other", 1)
        await long.send(pb.GenerateRequest(start=pb.StartGeneration(**prompt, request_id="long")))
        reading = asyncio.create_task(long.read())
        checks, before = 0, other.logs["other"].token_count()
        while not reading.done():
            assert await check(served) == SERVING
            await other.read()
            checks += not reading.done()
        assert checks >= 10
        assert other.logs["other"].token_count() >= before + 10
        assert long.logs["long"].admitted.prompt_tokens >= len(TEXT)
        other.call.cancel()
        long.call.cancel()


async def test_template_arguments_count_as_text(served: Running) -> None:
    """They are tokenized too, so they have the same bound and the same threads."""
    threads: list[str] = []
    tokenizer = served.server.replica.tokenizer
    encode = tokenizer.encode_chat

    def watched(*arguments: Any) -> tuple[list[int], str]:
        threads.append(threading.current_thread().name)
        return encode(*arguments)

    tokenizer.encode_chat = watched  # type: ignore[method-assign]
    status = await refusal(served, start(chat=chat(arguments={"tools": "x" * (255 * 12)})))
    assert (status.code, status.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
    assert threads == []
    served.server.replica.max_prompt_bytes = 1 << 20
    await run_stream(served, start(chat=chat(arguments={"tools": "x"}), max_tokens=1))
    await run_stream(served, start(chat=chat(arguments={"tools": "x" * 5000}), max_tokens=1))
    main = threading.main_thread().name
    assert [name == main for name in threads] == [True, False]


EMPTY: list[tuple[dict[str, Any], str]] = [
    ({"text": ""}, "start.text"),
    ({"token_ids": pb.TokenIds()}, "start.token_ids"),
    ({"chat": pb.Chat()}, "start.chat.messages"),
    ({"chat": chat("renders to nothing")}, "start.prompt"),
]


@pytest.mark.parametrize(("prompt", "field"), EMPTY, ids=["text", "ids", "chat", "template"])
async def test_empty_prompts_hurt_nobody(served: Running, prompt: dict[str, Any], field: str) -> None:
    golden = await run_stream(served, start("canary", max_tokens=5))
    if field == "start.prompt":
        served.server.replica.tokenizer.encode_chat = lambda *_: ([], "")  # type: ignore[method-assign]
    status = await refusal(served, start(**prompt))
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT
    assert status.fields == [field]
    canary = await run_stream(served, start("canary", max_tokens=5))
    assert canary.token_ids() == golden.token_ids()
    assert await check(served) == SERVING
