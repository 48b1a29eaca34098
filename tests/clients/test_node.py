"""A client in Node, with gRPC's own JavaScript implementation: unary, server stream, cancelling on the bidi stream."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.service.process import Process, run_command, server_process

FOLDER = Path(__file__).parent / "node"
INSTALL = ("npm", "ci", "--prefix", FOLDER, "--no-audit", "--no-fund", "--ignore-scripts")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Process]:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    if not (FOLDER / "node_modules").is_dir():
        code, _, err = await run_command(*INSTALL, seconds=90)
        if code != 0:
            pytest.skip(f"npm cannot install @grpc/grpc-js: {err.splitlines()[-1] if err else code}")
    async with server_process("-m", "tests.service.fake_server") as process:
        yield process


async def scenario(server: Process, name: str) -> dict[str, Any]:
    code, out, err = await run_command("node", FOLDER / "client.js", server.address, name, seconds=30)
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def of(result: dict[str, Any], request_id: str) -> list[dict[str, Any]]:
    found = [event for event in result["events"] if event["requestId"] == request_id]
    assert [event.get("sequence", 0) for event in found] == list(range(len(found)))
    assert found[0]["event"] == "admitted"
    return found


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"].get("text", "") for event in events if event["event"] == "delta")


async def test_unary(server: Process) -> None:
    (candidate,) = (await scenario(server, "unary"))["response"]["candidates"]
    assert (candidate["text"], candidate["finish"]["reason"]) == ("abcd", "FINISH_REASON_MAX_TOKENS")


async def test_refusal_has_a_code_and_details(server: Process) -> None:
    status = (await scenario(server, "refused"))["status"]
    assert status["code"] == 3
    assert "temperature" in status["message"]
    assert "grpc-status-details-bin" in status["trailers"]


async def test_stream(server: Process) -> None:
    result = await scenario(server, "stream")
    events = of(result, "a")
    assert result["status"]["code"] == 0
    assert text_of(events) == "abcd"
    assert events[-1]["event"] == "finished"


async def test_bidi_multiplexes_and_cancels(server: Process) -> None:
    result = await scenario(server, "bidi")
    assert result["status"]["code"] == 0
    assert text_of(of(result, "a")) == "abcd"
    cancelled = of(result, "b")
    assert cancelled[-1]["event"] == "finished"
    assert cancelled[-2]["delta"]["finish"]["reason"] == "FINISH_REASON_CANCELLED"
