"""The server: options, services, start and the way it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from wsgiref.simple_server import WSGIServer

from grpc import aio

from engine import EngineClient, Tokenizer
from octavo.v1 import capacity_pb2_grpc, generation_pb2_grpc, tokenization_pb2_grpc
from service.capacity import CapacityService
from service.config import ServiceConfig
from service.generation import GenerationService
from service.health import HealthMessages, HealthService
from service.metrics import serve_metrics
from service.reflection import enable_reflection
from service.replica import Replica
from service.status import drain_timeout, draining
from service.tokenization import TokenizationService

LOGGER = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.02
LAST_EVENTS_SECONDS = 2.0
STOP_GRACE_SECONDS = 0.5


def server_options(config: ServiceConfig) -> list[tuple[str, int]]:
    """gRPC's channel arguments. Pings: clients may ping every half second, also during a long silent prefill, and a
    client that is gone without a word is cut after 10 s at most."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 4_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
    ]


class Server:
    """A gRPC server over a started engine. Keep a reference to it while it serves."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        config: ServiceConfig,
    ) -> None:
        self.config = config
        self.replica = Replica(engine, tokenizer, config)
        self.port = 0
        self._grpc = aio.server(options=server_options(config))
        self._metrics: WSGIServer | None = None
        self._add_services()

    @property
    def address(self) -> str:
        return f"{self.config.host}:{self.port}"

    def _add_services(self) -> None:
        replica, server = self.replica, self._grpc
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(replica), server)
        tokenization_pb2_grpc.add_TokenizationServiceServicer_to_server(TokenizationService(replica), server)
        capacity_pb2_grpc.add_CapacityServiceServicer_to_server(CapacityService(replica), server)
        server.add_generic_rpc_handlers((HealthService(replica, HealthMessages()).handler(),))
        enable_reflection(server)

    async def start(self) -> None:
        """Listens. Raises OSError if a port cannot be had."""
        config = self.config
        try:
            self.port = self._grpc.add_insecure_port(f"{config.host}:{config.port}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {config.host}:{config.port}: {error}") from error
        if config.metrics_port is not None:
            self._metrics = serve_metrics(self.replica.metrics, config.host, config.metrics_port)
        await self._grpc.start()
        self.replica.start_watching()
        self.replica.refresh()

    async def drain(self, stop_now: asyncio.Event | None = None) -> None:
        """Refuses new requests, lets running ones end within `drain_timeout` or until `stop_now`, then stops."""
        replica, config = self.replica, self.config
        stop_now = stop_now or asyncio.Event()
        LOGGER.info("draining", extra={"live_requests": len(replica.live)})
        started = time.monotonic()
        replica.begin_drain()
        await self._wait_idle(started + config.drain_timeout, stop_now)
        await _wait_event(stop_now, started + min(config.drain_grace, config.drain_timeout))
        if self._has_work():
            for request in replica.live:
                request.cancel_with(drain_timeout())
            await self._wait_idle(time.monotonic() + LAST_EVENTS_SECONDS, asyncio.Event())
        await self.stop()

    async def stop(self) -> None:
        """Ends every RPC and the engine. Idempotent."""
        self.replica.begin_stop()
        self.replica.streams.fail_all(draining())
        await self._grpc.stop(STOP_GRACE_SECONDS)
        if self._metrics is not None:
            self._metrics.shutdown()
            self._metrics.server_close()
            self._metrics = None
        await self.replica.engine.stop()
        await self.replica.close()
        LOGGER.info("stopped")

    def _has_work(self) -> bool:
        return len(self.replica.live) > 0 or self.replica.streams.has_output

    async def _wait_idle(self, until: float, stop_now: asyncio.Event) -> None:
        while self._has_work() and time.monotonic() < until and not stop_now.is_set():  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_SECONDS)


async def _wait_event(event: asyncio.Event, until: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, until - time.monotonic())):
            await event.wait()
