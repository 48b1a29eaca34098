"""The server: options, services, start and the way it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from typing import Any

import grpc
from grpc import aio
from grpc_channelz.v1 import channelz

from engine import ConfigurationError, EngineClient, Tokenizer
from octavo.v1 import admin_pb2_grpc, capacity_pb2_grpc, generation_pb2_grpc, tokenization_pb2_grpc
from service.admin import AdminService
from service.capacity import CapacityService
from service.config import ServiceConfig
from service.generation import GenerationService
from service.health import HealthMessages, HealthService
from service.interceptors import BearerAuthentication, MalformedRequests
from service.metrics import MetricsServer
from service.orca import OpenRcaService
from service.ports import cannot_listen, try_ports
from service.reflection import ADMIN_SERVICES, SERVICES, enable_reflection
from service.replica import Replica
from service.security import check_exposure, listen_address, server_credentials
from service.spans import NoSpans, Spans
from service.status import drain_timeout, draining
from service.supervise import engine_pid
from service.tokenization import TokenizationService
from service.tokens import Right, TokenFile
from service.tracing import TraceParents, open_spans

LOGGER = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.02
LAST_EVENTS_SECONDS = 2.0
STOP_GRACE_SECONDS = 0.5
SPANS_SECONDS = 2.0
HURRIED_SECONDS = 0.2  # what each of three steps gets of it once nobody wants to wait
TOKENS_RELOAD_SECONDS = 1.0
LOOPBACK = "127.0.0.1"
MOST_PENDING_CALLS = 1 << 16  # that wait for this process to look at them


def server_options(config: ServiceConfig) -> list[tuple[str, int]]:
    """gRPC's channel arguments. Pings: clients may ping every half second, also during a long silent prefill, and a
    client that is gone without a word is cut after 10 s at most. Pending requests: gRPC would cancel some of a burst
    from a thousand calls on, without a reason; it is for this service to refuse them."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 4_000),
        ("grpc.http2.ping_timeout_ms", 4_000),  # without it gRPC 1.84 waits a minute, whatever the line above says
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server.max_pending_requests", MOST_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING_CALLS),
    ]


def check_security(config: ServiceConfig) -> None:
    """Raises ConfigurationError for an address that is too open, for certificates or tokens that are no good."""
    check_exposure(config.host, config.security)
    server_credentials(config.security)
    if config.security.tokens is not None:
        TokenFile(config.security.tokens)


def check_ports(config: ServiceConfig) -> None:
    """Raises ConfigurationError for a port that cannot be had now."""
    admin = ("--admin-port", LOOPBACK, config.admin_port)
    try_ports([("--port", config.host, config.port), ("--metrics-port", config.host, config.metrics_port), admin])


class Server:
    """A gRPC server over a started engine. Keep a reference to it while it serves."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, config: ServiceConfig, spans: Spans | None = None
    ) -> None:
        """spans: None for those that the configuration asks for. Raises ConfigurationError as `check_security` and
        `check_traces` do."""
        check_security(config)
        self.config = config
        self._spans = spans or open_spans(config.otlp_traces_endpoint, engine.info.model)
        self.replica = Replica(engine, tokenizer, config, self._spans)
        self.port = 0
        self.admin_port = 0
        self.drain_requested = asyncio.Event()
        self.drain_timeout = config.drain_timeout
        self.tokens = TokenFile(config.security.tokens) if config.security.tokens is not None else None
        self._credentials = server_credentials(config.security)
        self._grpc = aio.server(options=server_options(config), interceptors=self._interceptors(Right.GENERATE))
        self._admin = aio.server(options=server_options(config), interceptors=self._interceptors(Right.ADMIN))
        self._metrics: MetricsServer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._add_services()

    @property
    def address(self) -> str:
        return listen_address(self.config.host, self.port)

    def _interceptors(self, right: Right) -> list[aio.ServerInterceptor[Any, Any]]:
        authentication = [] if self.tokens is None else [BearerAuthentication(self.tokens, right)]
        tracing = [] if isinstance(self._spans, NoSpans) else [TraceParents()]
        return [*authentication, *tracing, MalformedRequests()]

    def _add_services(self) -> None:
        replica, server = self.replica, self._grpc
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(replica), server)
        tokenization_pb2_grpc.add_TokenizationServiceServicer_to_server(TokenizationService(replica), server)
        capacity_pb2_grpc.add_CapacityServiceServicer_to_server(CapacityService(replica), server)
        health, orca = HealthService(replica, HealthMessages()), OpenRcaService(replica)
        server.add_generic_rpc_handlers((health.handler(), orca.handler()))
        enable_reflection(server, SERVICES)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(replica, self.request_drain), self._admin)
        channelz.add_channelz_servicer(self._admin)  # type: ignore[arg-type]  # takes both kinds of server
        enable_reflection(self._admin, ADMIN_SERVICES)

    def request_drain(self, timeout: float | None = None) -> None:
        """Asks whoever runs this server to drain it. timeout: seconds for running requests."""
        if timeout is not None:
            self.drain_timeout = timeout
        self.drain_requested.set()

    async def start(self) -> None:
        """Listens. Raises ConfigurationError if a port cannot be had."""
        config = self.config
        self.port = add_port(self._grpc, "--port", config.host, config.port, self._credentials)
        if config.admin_port is not None:
            self.admin_port = add_port(self._admin, "--admin-port", LOOPBACK, config.admin_port, None)
            await self._admin.start()
        if config.metrics_port is not None:
            try:
                self._metrics = MetricsServer(self.replica.metrics, config.host, config.metrics_port)
            except OSError as error:
                problem = cannot_listen("--metrics-port", config.host, config.metrics_port, error)
                raise ConfigurationError(problem) from None
        await self._grpc.start()
        self._watching = asyncio.create_task(self._watch_tokens())
        self.replica.start_watching()
        self.replica.refresh()

    async def drain(self, stop_now: asyncio.Event | None = None) -> None:
        """Refuses new requests, lets running ones end within the drain time or until `stop_now`, then stops."""
        replica, timeout = self.replica, self.drain_timeout
        stop_now = stop_now or asyncio.Event()
        LOGGER.info("draining", extra={"live_requests": len(replica.live)})
        started = time.monotonic()
        replica.begin_drain()
        await self._wait_idle(started + timeout, stop_now)
        await _wait_event(stop_now, started + min(self.config.drain_grace, timeout))
        if self._has_work():
            for request in replica.live:
                request.cancel_with(drain_timeout())
            last_events = asyncio.create_task(self._wait_idle(time.monotonic() + LAST_EVENTS_SECONDS, asyncio.Event()))
            await _wait_either(last_events, stop_now, HURRIED_SECONDS)
            last_events.cancel()
        await self.stop(stop_now)

    async def stop(self, stop_now: asyncio.Event | None = None) -> None:
        """Ends every RPC and the engine; with `stop_now` within a fraction of a second. Idempotent."""
        stop_now = stop_now or asyncio.Event()
        self.replica.begin_stop()
        self.replica.streams.fail_all(draining())
        grpc_ends = asyncio.gather(self._grpc.stop(STOP_GRACE_SECONDS), self._admin.stop(STOP_GRACE_SECONDS))
        await _wait_either(grpc_ends, stop_now, HURRIED_SECONDS)
        if self._watching is not None:
            self._watching.cancel()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
            self._metrics = None
        await self._stop_engine(stop_now)
        await asyncio.to_thread(self._spans.close, HURRIED_SECONDS if stop_now.is_set() else SPANS_SECONDS)
        await self.replica.close()
        LOGGER.info("stopped")

    async def _stop_engine(self, stop_now: asyncio.Event) -> None:
        engine = self.replica.engine
        pid = engine_pid(engine)  # an engine that stops does not tell any more
        stopping = asyncio.create_task(engine.stop())
        await _wait_either(stopping, stop_now, HURRIED_SECONDS)
        if not stopping.done() and pid is not None:
            LOGGER.warning("engine did not stop in time; killing it")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await stopping

    async def _watch_tokens(self) -> None:
        while self.tokens is not None:
            await asyncio.sleep(TOKENS_RELOAD_SECONDS)
            self.tokens.reload_if_changed()

    def _has_work(self) -> bool:
        return len(self.replica.live) > 0 or self.replica.streams.has_output

    async def _wait_idle(self, until: float, stop_now: asyncio.Event) -> None:
        while self._has_work() and time.monotonic() < until and not stop_now.is_set():  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_SECONDS)


def add_port(server: aio.Server, flag: str, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """The port that was taken. Raises ConfigurationError."""
    address = listen_address(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        raise ConfigurationError(cannot_listen(flag, host, port)) from None


async def _wait_either(work: asyncio.Future[Any], stop_now: asyncio.Event, hurried: float) -> None:
    """Waits for work; once `stop_now` is set, only `hurried` seconds longer. The work goes on by itself then."""
    stopping = asyncio.ensure_future(stop_now.wait())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await asyncio.wait({work}, timeout=hurried)
    if work.done():
        work.result()


async def _wait_event(event: asyncio.Event, until: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, until - time.monotonic())):
            await event.wait()
