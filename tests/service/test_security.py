"""TLS, client certificates, bearer tokens, quotas, and the refusal to be open to the network by accident."""

from __future__ import annotations

import asyncio
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from engine import ConfigurationError
from octavo.v1 import capacity_pb2, capacity_pb2_grpc
from service.client import Client, GenerationError, prompt_request
from service.config import ServiceConfig
from service.health import HealthMessages
from service.quota import Quotas, TokenBucket
from service.security import SecurityConfig, check_exposure, is_loopback, server_credentials
from service.tokens import Principal, Right, TokenFile, parse_line, read_tokens
from tests.service import calls
from tests.service.certificates import Certificates, make_certificates
from tests.service.process import run_command
from tests.service.server import Running, free_port, running, until

ALICE = "alice-0123456789abcdef"
BOB = "bob-0123456789abcdef"
OPERATOR = "operator-0123456789abcdef"
CONFIG = ServiceConfig(drain_grace=0.0)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command, which makes the certificates, is not installed")
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(
        f"# callers\n\nalice {ALICE}\n"
        f"bob {BOB} live_requests=1 tokens_per_minute=600\noperator {OPERATOR} rights=admin\n"
    )
    return path


def tls(certificates: Certificates, *, mutual: bool = False) -> SecurityConfig:
    client_ca = certificates.ca if mutual else None
    return SecurityConfig(certificates.server_cert, certificates.server_key, client_ca)


def channel_credentials(certificates: Certificates, *, mutual: bool = False) -> grpc.ChannelCredentials:
    key = certificates.client_key.read_bytes() if mutual else None
    chain = certificates.client_cert.read_bytes() if mutual else None
    return grpc.ssl_channel_credentials(certificates.ca.read_bytes(), key, chain)


async def text(client: Client, max_tokens: int = 3) -> str:
    request = prompt_request("x", max_tokens=max_tokens)
    return "".join([event.delta.text async for event in client.generate(request)])


async def refusal(client: Client) -> GenerationError:
    with pytest.raises(GenerationError) as error:
        await text(client)
    return error.value


# --- exposure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True)])
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_beyond_loopback_needs_tls_and_known_clients(host: str, certificates: Certificates, tokens: Path) -> None:
    encrypted = tls(certificates)
    for config in (SecurityConfig(), SecurityConfig(tokens=tokens), encrypted):
        with pytest.raises(ConfigurationError, match="--insecure"):
            check_exposure(host, config)
    for config in (SecurityConfig(insecure=True), replace(encrypted, tokens=tokens), tls(certificates, mutual=True)):
        check_exposure(host, config)


def test_loopback_needs_nothing() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_exposure(host, SecurityConfig())


async def test_refusal_is_one_line_before_anything_is_loaded() -> None:
    command = (sys.executable, "-m", "service", "serve", "--model", "demo", "--host", "0.0.0.0")
    code, out, err = await run_command(*command, "--port", str(free_port()))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "--insecure" in err


# --- TLS -------------------------------------------------------------------------------------------------------------


async def test_tls(certificates: Certificates) -> None:
    async with running(config=replace(CONFIG, security=tls(certificates))) as served:
        address = served.server.address
        async with Client(address, credentials=channel_credentials(certificates)) as client:
            assert await text(client) == "abc"
        with pytest.raises(aio.AioRpcError) as error:
            await served.capacity.GetCapacity(capacity_pb2.GetCapacityRequest(), timeout=5)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_refuses_clients_without_a_certificate(certificates: Certificates) -> None:
    async with running(config=replace(CONFIG, security=tls(certificates, mutual=True))) as served:
        address = served.server.address
        async with Client(address, credentials=channel_credentials(certificates, mutual=True)) as client:
            assert await text(client) == "abc"
        async with aio.secure_channel(address, channel_credentials(certificates)) as channel:
            stub: capacity_pb2_grpc.CapacityServiceAsyncStub = capacity_pb2_grpc.CapacityServiceStub(channel)
            with pytest.raises(aio.AioRpcError) as error:
                await stub.GetCapacity(capacity_pb2.GetCapacityRequest(), timeout=5)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_files_that_are_no_certificates_are_named(certificates: Certificates, tmp_path: Path) -> None:
    """gRPC itself only says that it cannot listen, once the model has loaded."""
    cert, key, junk = certificates.server_cert, certificates.server_key, tmp_path / "junk.pem"
    junk.write_text("junk")
    server_credentials(SecurityConfig(cert, key, certificates.ca))
    for config, flag in (
        (SecurityConfig(junk, key), "--tls-cert"),
        (SecurityConfig(cert, junk), "--tls-key"),
        (SecurityConfig(cert, certificates.client_key), "--tls-key"),
        (SecurityConfig(cert, key, junk), "--tls-client-ca"),
    ):
        with pytest.raises(ConfigurationError, match=flag):
            server_credentials(config)


@pytest.mark.parametrize(
    "config",
    [
        SecurityConfig(tls_cert=Path("c")),
        SecurityConfig(tls_key=Path("k")),
        SecurityConfig(client_ca=Path("ca")),
        SecurityConfig(tls_cert=Path("/nowhere/c"), tls_key=Path("/nowhere/k")),
    ],
)
def test_incomplete_or_missing_files_are_a_configuration_error(config: SecurityConfig) -> None:
    with pytest.raises(ConfigurationError):
        server_credentials(config)


async def test_command_line_over_tls_with_a_token(certificates: Certificates, tokens: Path) -> None:
    security = replace(tls(certificates), tokens=tokens)
    async with running(config=replace(CONFIG, security=security)) as served:
        command = (sys.executable, "-m", "service", "generate", "x", "--max-tokens", "3", "--json")
        connection = ("--address", served.server.address, "--tls-ca", certificates.ca)
        code, out, err = await run_command(*command, *connection, env={"OCTAVO_TOKEN": ALICE})
        assert code == 0, err
        assert '"text": "abc"' in out
        code, _, err = await run_command(*command, *connection)
        assert code == 1
        assert "UNAUTHENTICATED TOKEN_MISSING" in err


# --- tokens ----------------------------------------------------------------------------------------------------------


async def test_tokens_open_the_service(tokens: Path) -> None:
    async with running(config=replace(CONFIG, security=SecurityConfig(tokens=tokens))) as served:
        address = served.server.address
        async with Client(address, token=ALICE) as client:
            assert await text(client) == "abc"
            assert (await client.capacity()).accepting
        async with Client(address) as client:
            error = await refusal(client)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_MISSING")
        async with Client(address, token=ALICE + "x") as client:
            error = await refusal(client)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_INVALID")
        async with Client(address, token=OPERATOR) as client:
            error = await refusal(client)
            assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "RIGHT_MISSING")
        assert len(served.engine.submitted) == 1


@pytest.mark.parametrize(
    "method", ["octavo.v1.TokenizationService/Tokenize", "octavo.v1.GenerationService/GenerateUnary"]
)
async def test_every_method_needs_a_token_and_health_none(tokens: Path, method: str) -> None:
    async with running(config=replace(CONFIG, security=SecurityConfig(tokens=tokens))) as served:
        with pytest.raises(aio.AioRpcError) as error:
            await served.channel.unary_unary(f"/octavo.v1.{method}", None, None)(b"", timeout=5)
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        messages = HealthMessages()
        check = served.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=messages.CheckRequest.SerializeToString,
            response_deserializer=messages.CheckResponse.FromString,
        )
        assert (await check(messages.CheckRequest(), timeout=5)).status == 1


async def test_tokens_are_read_again_when_the_file_changes(tokens: Path) -> None:
    async with running(config=replace(CONFIG, security=SecurityConfig(tokens=tokens))) as served:
        file = served.server.tokens
        assert file is not None
        await asyncio.to_thread(tokens.write_text, "carol carol-0123456789abcdef\n")
        await until(lambda: file.find("carol-0123456789abcdef") is not None)
        async with Client(served.server.address, token=ALICE) as client:
            assert (await refusal(client)).reason == "TOKEN_INVALID"
        await asyncio.to_thread(tokens.write_text, "carol short\n")
        file.reload_if_changed()
        async with Client(served.server.address, token="carol-0123456789abcdef") as client:
            assert await text(client) == "abc"


def test_token_file_has_rights_and_limits(tokens: Path) -> None:
    file = TokenFile(tokens)
    assert file.find(ALICE) == Principal("alice")
    assert file.find(BOB) == Principal("bob", live_requests=1, tokens_per_minute=600)
    assert file.find(OPERATOR) == Principal("operator", frozenset({Right.ADMIN}))
    assert file.find("") is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("alice", "NAME TOKEN"),
        ("alice short", "shorter"),
        (f"alice {ALICE} live_requests=0", "above 0"),
        (f"alice {ALICE} live_requests=many", "above 0"),
        (f"alice {ALICE} color=red", "unknown setting"),
        (f"alice {ALICE} rights=root", "root"),
        (f"alice {ALICE} rights", "KEY=VALUE"),
    ],
)
def test_bad_lines_are_named_without_their_token(line: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        parse_line(line)
    assert ALICE not in str(error.value)


@pytest.mark.parametrize("content", ["", "# none\n", f"a {ALICE}\nb {ALICE}\n", "a b\n"])
def test_bad_files_are_a_configuration_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=f"^--auth-tokens {path}:") as error:
        read_tokens(path)
    assert ALICE not in str(error.value)
    with pytest.raises(ConfigurationError):
        read_tokens(tmp_path / "missing")


# --- quotas ----------------------------------------------------------------------------------------------------------


async def test_live_request_quota(tokens: Path) -> None:
    async with running(config=replace(CONFIG, security=SecurityConfig(tokens=tokens))) as served:
        served.engine.step_delay = 0.01
        async with Client(served.server.address, token=BOB) as bob:
            first = asyncio.create_task(text(bob, 30))
            await until(lambda: served.engine.live_requests == 1)
            status = await calls.refusal(served, calls.start(), metadata=(("authorization", f"Bearer {BOB}"),))
            assert (status.code, status.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
            assert status.pushback_ms == round(status.retry_seconds * 1000) > 0
            async with Client(served.server.address, token=ALICE) as alice:
                assert await text(alice) == "abc"
            assert len(await first) == 30
            assert await text(bob) == "abc"


async def test_tokens_per_minute_quota_counts_what_was_used(tokens: Path) -> None:
    async with running(config=replace(CONFIG, security=SecurityConfig(tokens=tokens))) as served:
        quotas = served.server.replica.quotas
        bob = Principal("bob", live_requests=1, tokens_per_minute=600)
        async with Client(served.server.address, token=BOB) as client:
            assert len(await text(client, 100)) == 100
        assert quotas.refusal(bob) is None
        quotas.begin(bob)
        quotas.end(bob, 500)
        refused = quotas.refusal(bob)
        assert refused is not None
        assert refused.retry_after is not None
        assert 0 < refused.retry_after < 30


def test_bucket_fills_steadily_and_pays_its_debt() -> None:
    now = [0.0]
    bucket = TokenBucket(60, lambda: now[0])
    bucket.charge(90)
    assert bucket.wait() == pytest.approx(31.0)
    now[0] = 31.5
    assert bucket.wait() == 0.0
    now[0] = 1000.0
    bucket.charge(60)
    assert bucket.wait() == pytest.approx(1.0)


def test_quota_of_another_is_not_touched() -> None:
    quotas = Quotas()
    limited = Principal("a", live_requests=1)
    quotas.begin(limited)
    assert quotas.refusal(limited) is not None
    assert quotas.refusal(Principal("b", live_requests=1)) is None
    quotas.end(limited, 5)
    assert quotas.refusal(limited) is None


def test_served_address_of_ipv6() -> None:
    from service.security import listen_address

    assert listen_address("::1", 5) == "[::1]:5"
    assert listen_address("127.0.0.1", 5) == "127.0.0.1:5"


async def test_plain_server_serves_everybody(served: Running) -> None:
    async with Client(served.server.address, token="whatever") as client:
        assert await text(client) == "abc"


async def test_the_prefix_cache_is_shown_to_those_with_both_rights_only(tmp_path: Path) -> None:
    """Token ids of a block are what somebody sent."""
    router = "router-0123456789abcdef"
    path = tmp_path / "tokens"
    path.write_text(f"alice {ALICE}\nrouter {router} rights=generate,admin\n")
    async with running(config=replace(CONFIG, security=SecurityConfig(tokens=path))) as served:

        def watch(token: str) -> Any:
            metadata = (("authorization", f"Bearer {token}"),)
            return served.capacity.WatchCacheEvents(
                capacity_pb2.WatchCacheEventsRequest(), timeout=5, metadata=metadata
            )

        with pytest.raises(aio.AioRpcError) as error:
            await watch(ALICE).read()
        status = calls.error_status(error.value)
        assert (status.code, status.reason) == (grpc.StatusCode.PERMISSION_DENIED, "RIGHT_MISSING")
        assert status.message == "the token of 'alice' does not allow 'admin'"
        assert (await watch(router).read()).snapshot_end
