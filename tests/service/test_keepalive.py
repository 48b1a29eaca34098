"""Pings: a client may ping through a long silent prefill, and a client that is gone without a word is cut."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest
from grpc import aio

from service.config import ServiceConfig
from service.server import server_options
from tests.service.calls import Stream, run_stream, start, start_message
from tests.service.fake_engine import Script
from tests.service.process import ROOT
from tests.service.server import Running, until
from tests.service.test_cancel import KILLED_CLIENT

PINGING = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.use_local_subchannel_pool", 1),
]
SILENT_SECONDS = 7.0  # a server with gRPC's defaults ends such a call after 4 s, with "too_many_pings"
HASTY = {"grpc.keepalive_time_ms": 1000, "grpc.http2.ping_timeout_ms": 2000}


async def test_client_that_pings_every_second_survives_a_silent_prefill(served: Running) -> None:
    served.engine.plan = lambda _: Script(steps_before_first=10**9)
    async with aio.insecure_channel(served.server.address, PINGING) as channel:
        stream = Stream(Running(served.server, served.engine, channel), timeout=30)
        await stream.send(start_message(request_id="a", max_tokens=3))
        assert await stream.read()
        (live,) = served.engine.live
        await asyncio.sleep(SILENT_SECONDS)
        live.script = Script()
        await stream.read_until_ended("a")
        assert stream.logs["a"].text() == "abc"
        stream.call.cancel()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server asks sooner than it would, and waits less long for an answer."""
    usual = server_options(ServiceConfig())
    assert sum(dict(usual)[name] for name in HASTY) < 10_000
    hastened = [(name, HASTY.get(name, value)) for name, value in usual]
    monkeypatch.setattr("service.server.server_options", lambda config: hastened)


@pytest.mark.usefixtures("hasty")
async def test_frozen_client_is_cut_and_its_requests_are_freed(served: Running) -> None:
    served.engine.plan = lambda _: Script(steps_before_first=10**9)
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED_CLIENT, served.server.address), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        await until(lambda: served.engine.live_requests == 3)
        os.kill(client.pid, signal.SIGSTOP)
        await until(lambda: served.engine.live_requests == 0, seconds=20)
    finally:
        client.kill()
        await client.wait()
    served.engine.plan = lambda _: Script()
    assert (await run_stream(served, start(max_tokens=3))).text() == "abc"
