"""Clients that nobody here wrote, through reflection: `buf curl` and `grpcurl`."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from google.rpc import error_details_pb2

from tests.service.process import BIN, Process, run_command, server_process

SERVICE = "octavo.v1.GenerationService"
START = {"requestId": "a", "text": "hello", "stop": {"maxTokens": 4}, "output": {"tokenIds": True}}


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Process]:
    async with server_process("-m", "tests.service.fake_server") as process:
        yield process


async def buf(server: Process, method: str, data: str, *, expect: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Messages of the answer, and what stood on standard error."""
    url = f"http://{server.address}/{method}"
    code, out, err = await run_command(
        *(BIN / "buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", data, url), seconds=30
    )
    assert (code == 0) == (expect == 0), err
    return messages(out), err


async def grpcurl(server: Process, *arguments: str, expect: int = 0) -> tuple[list[dict[str, Any]], str]:
    code, out, err = await run_command(BIN / "grpcurl", "-plaintext", *arguments, seconds=30)
    assert code == expect, err
    return messages(out) if out.startswith("{") else [], out + err


def messages(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a text that has nothing else between them."""
    decoder, found, position = json.JSONDecoder(), [], 0
    while position < len(text.rstrip()):
        message, position = decoder.raw_decode(text, position)
        found.append(message)
        position += len(text[position:]) - len(text[position:].lstrip())
    return found


def events(responses: list[dict[str, Any]], request_id: str = "a") -> list[dict[str, Any]]:
    return [event for response in responses for event in response["events"] if event["requestId"] == request_id]


def text_of(request_events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"].get("text", "") for event in request_events if "delta" in event)


def check_events(found: list[dict[str, Any]]) -> None:
    assert [int(event.get("sequence", 0)) for event in found] == list(range(len(found)))
    assert "admitted" in found[0]
    assert "finished" in found[-1]
    assert text_of(found) == "abcd"


# --- buf curl --------------------------------------------------------------------------------------------------------


async def test_buf_unary(server: Process) -> None:
    (response,), _ = await buf(server, f"{SERVICE}/GenerateUnary", json.dumps({"start": START}))
    assert response["candidates"][0]["text"] == "abcd"
    assert response["candidates"][0]["finish"]["reason"] == "FINISH_REASON_MAX_TOKENS"
    assert response["usage"] == {"promptTokens": 5, "completionTokens": 4}


async def test_buf_server_stream(server: Process) -> None:
    responses, _ = await buf(server, f"{SERVICE}/GenerateStream", json.dumps({"start": START}))
    check_events(events(responses))


async def test_buf_bidi_multiplexes(server: Process) -> None:
    requests = [{"start": START}, {"start": {**START, "requestId": "b"}}, {"cancel": {"requestId": "nobody"}}]
    responses, _ = await buf(server, f"{SERVICE}/Generate", "".join(map(json.dumps, requests)))
    check_events(events(responses, "a"))
    check_events(events(responses, "b"))


async def test_buf_shows_a_typed_error(server: Process) -> None:
    bad = {"start": {**START, "sampling": {"temperature": -1}}}
    _, err = await buf(server, f"{SERVICE}/GenerateUnary", json.dumps(bad), expect=3)
    error = json.loads(err)
    assert error["code"] == "invalid_argument"
    details = {detail["type"]: base64.b64decode(detail["value"] + "==") for detail in error["details"]}
    assert error_details_pb2.ErrorInfo.FromString(details["google.rpc.ErrorInfo"]).reason == "INVALID_PARAMETER"


async def test_buf_health_and_capacity(server: Process) -> None:
    (health,), _ = await buf(server, "grpc.health.v1.Health/Check", json.dumps({"service": SERVICE}))
    assert health == {"status": "SERVING"}
    (listed,), _ = await buf(server, "grpc.health.v1.Health/List", "{}")
    assert listed["statuses"][SERVICE] == {"status": "SERVING"}
    (capacity,), _ = await buf(server, "octavo.v1.CapacityService/GetCapacity", "{}")
    assert capacity["capacity"]["state"] == "REPLICA_STATE_READY"


async def test_buf_tokenizes(server: Process) -> None:
    (response,), _ = await buf(server, "octavo.v1.TokenizationService/Tokenize", json.dumps({"text": "abc"}))
    assert response["tokenIds"] == [97, 98, 99]


# --- grpcurl ---------------------------------------------------------------------------------------------------------


async def test_grpcurl_lists_and_describes(server: Process) -> None:
    _, listed = await grpcurl(server, server.address, "list")
    assert {
        "grpc.health.v1.Health",
        "octavo.v1.CapacityService",
        "octavo.v1.GenerationService",
        "octavo.v1.TokenizationService",
    } <= set(listed.split())
    _, described = await grpcurl(server, server.address, "describe", SERVICE)
    assert (
        "rpc Generate ( stream .octavo.v1.GenerateRequest ) returns ( stream .octavo.v1.GenerateResponse )" in described
    )
    _, described = await grpcurl(server, server.address, "describe", "grpc.health.v1.Health")
    assert "rpc List" in described


async def test_grpcurl_unary(server: Process) -> None:
    data = json.dumps({"start": START})
    (response,), _ = await grpcurl(server, "-d", data, server.address, f"{SERVICE}/GenerateUnary")
    assert response["candidates"][0]["text"] == "abcd"


async def test_grpcurl_server_stream(server: Process) -> None:
    data = json.dumps({"start": START})
    responses, _ = await grpcurl(server, "-d", data, server.address, f"{SERVICE}/GenerateStream")
    check_events(events(responses))


async def test_grpcurl_bidi(server: Process) -> None:
    data = json.dumps({"start": START}) + json.dumps({"start": {**START, "requestId": "b"}})
    responses, _ = await grpcurl(server, "-d", data, server.address, f"{SERVICE}/Generate")
    check_events(events(responses, "a"))
    check_events(events(responses, "b"))


async def test_grpcurl_shows_a_typed_error(server: Process) -> None:
    data = json.dumps({"start": {**START, "model": "other"}})
    _, output = await grpcurl(server, "-d", data, server.address, f"{SERVICE}/GenerateUnary", expect=64 + 5)
    assert "NotFound" in output
    assert "google.rpc.ResourceInfo" in output
