"""The admin port: drain by RPC and channelz; nothing of it on the public port."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from octavo.v1 import admin_pb2, admin_pb2_grpc
from service.client import Client, prompt_request
from service.config import ServiceConfig
from service.security import SecurityConfig
from tests.service.calls import Stream, error_status, start_message
from tests.service.process import server_process
from tests.service.server import Running, free_port, running

CONFIG = ServiceConfig(drain_grace=0.0, admin_port=0)
OPERATOR = "operator-0123456789abcdef"
CALLER = "caller-0123456789abcdef"


@asynccontextmanager
async def admin_channel(served: Running) -> Any:
    async with aio.insecure_channel(f"127.0.0.1:{served.server.admin_port}") as channel:
        yield channel


def drain(channel: aio.Channel, **fields: Any) -> Any:
    metadata = fields.pop("metadata", ())
    stub: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(channel)
    return stub.Drain(admin_pb2.DrainRequest(**fields), timeout=5, metadata=metadata)


async def test_drain_asks_the_process_to_drain() -> None:
    async with running(config=CONFIG) as served, admin_channel(served) as channel:
        served.engine.step_delay = 0.01
        stream = Stream(served)
        await stream.send(start_message(request_id="a", max_tokens=50))
        await stream.read_until_tokens("a", 1)
        response = await drain(channel, timeout=Duration(seconds=7))
        assert response.live_requests == 1
        assert served.server.drain_requested.is_set()
        assert served.server.drain_timeout == 7.0
        assert (await drain(channel)).live_requests == 1
        await stream.read_until_ended("a")
        stream.call.cancel()


async def test_negative_drain_time_is_named() -> None:
    async with running(config=CONFIG) as served, admin_channel(served) as channel:
        with pytest.raises(aio.AioRpcError) as error:
            await drain(channel, timeout=Duration(seconds=-1))
        assert error_status(error.value).fields == ["timeout"]
        assert not served.server.drain_requested.is_set()


async def test_drain_by_rpc_ends_the_process_with_0() -> None:
    port = free_port()
    async with (
        server_process("-m", "tests.service.fake_server", "0", str(port)) as server,
        Client(server.address) as client,
        aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        texts = [event.delta.text async for event in client.generate(prompt_request("x", max_tokens=3))]
        assert "".join(texts) == "abc"
        await drain(channel)
        assert await server.end() == 0


async def test_channelz_shows_the_servers() -> None:
    async with running(config=CONFIG) as served, admin_channel(served) as channel:
        stub: Any = channelz_pb2_grpc.ChannelzStub(channel)
        response = await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=5)
        assert len(response.server) >= 2


@pytest.mark.parametrize("method", ["octavo.v1.AdminService/Drain", "grpc.channelz.v1.Channelz/GetServers"])
async def test_public_port_has_no_admin_methods(method: str) -> None:
    async with running(config=CONFIG) as served:
        with pytest.raises(aio.AioRpcError) as error:
            await served.channel.unary_unary(f"/{method}", None, None)(b"", timeout=5)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_admin_methods_need_the_admin_right(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    await asyncio.to_thread(tokens.write_text, f"o {OPERATOR} rights=admin\nc {CALLER}\n")
    config = replace(CONFIG, security=SecurityConfig(tokens=tokens))
    async with running(config=config) as served, admin_channel(served) as channel:
        for metadata, code in (
            ((), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", f"Bearer {CALLER}"),), grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(aio.AioRpcError) as error:
                await drain(channel, metadata=metadata)
            assert error_status(error.value).code is code
        await drain(channel, metadata=(("authorization", f"Bearer {OPERATOR}"),))
        assert served.server.drain_requested.is_set()


async def test_without_the_flag_there_is_no_admin_port(served: Running) -> None:
    assert served.server.admin_port == 0
