"""From a configuration to a serving process and its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import replace

from engine import (
    ConfigurationError,
    EngineClient,
    EngineConfig,
    EngineError,
    EngineInfo,
    Tokenizer,
    create_engine_client,
    keep_loaded,
    load_tokenizer,
)
from service.config import ServiceConfig
from service.server import Server, check_ports, check_security
from service.supervise import SupervisedEngine, kill_process
from service.tracing import check_traces

LOGGER = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAULT = 1
EXIT_CONFIGURATION = 2


class Signals:
    """SIGTERM and SIGINT: the first asks for a drain, the second for the end."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.drain.is_set():
            self.stop.set()
        self.drain.set()


async def serve(engine_config: EngineConfig, service_config: ServiceConfig, *, in_process_engine: bool = False) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code. What cannot be served is one line on standard error,
    before any port is opened."""
    try:
        check_security(service_config)
        check_traces(service_config.otlp_traces_endpoint)
        check_ports(service_config)
        tokenizer = await asyncio.to_thread(load_tokenizer, engine_config.model)
    except ConfigurationError as error:
        return _fail(with_flags(error), EXIT_CONFIGURATION)
    engine = SupervisedEngine(
        lambda: create_engine_client(engine_config, in_process=in_process_engine, progress=_progress),
        restart=service_config.restart_engine,
        hang_timeout=service_config.hang_timeout,
    )
    # What --model said is a name that its clients know, too.
    aliases = service_config.model_aliases | {engine_config.model}
    return await serve_engine(engine, tokenizer, replace(service_config, model_aliases=aliases))


async def serve_engine(engine: EngineClient, tokenizer: Tokenizer, config: ServiceConfig) -> int:
    """As `serve`, over any engine. The engine's process is spawned before gRPC starts its threads."""
    signals = Signals()
    try:
        check_security(config)
        check_ports(config)
        if not await _start_engine(engine, signals):
            return EXIT_OK
        server = Server(engine, tokenizer, config)
        await server.start()
    except ConfigurationError as error:
        await engine.stop()
        return _fail(with_flags(error), EXIT_CONFIGURATION)
    except EngineError as error:
        await engine.stop()
        return _fail(str(error), EXIT_FAULT)
    if config.admin_port is not None:
        LOGGER.info("admin port is open", extra={"port": server.admin_port})
    keep_loaded()
    print(ready_line(server.address, engine.info), flush=True)
    await _first(signals.drain, server.drain_requested)
    await server.drain(signals.stop)
    return EXIT_OK


async def _start_engine(engine: EngineClient, signals: Signals) -> bool:
    """False if a signal came first; then the engine is stopped."""
    starting = asyncio.ensure_future(engine.start())
    stopping = asyncio.ensure_future(signals.drain.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        starting.result()
        return True
    kill_process(engine)  # one that loads listens to nobody, and has nothing to lose
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError, EngineError):
        await starting
    await engine.stop()
    return False


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def ready_line(address: str, info: EngineInfo) -> str:
    return (
        f"octavo ready on {address}: model {info.model}, {info.kv_cache_tokens} KV-cache tokens, "
        f"context {info.max_context_tokens}, device {info.device} ({info.dtype})"
    )


def run(main: Callable[[], object]) -> int:
    """Runs a coroutine function on uvloop, where there is one, and returns its exit code."""
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return asyncio.run(main())  # type: ignore[arg-type]
    return uvloop.run(main())  # type: ignore[arg-type]


def with_flags(error: ConfigurationError) -> str:
    """The error's message, with the names that the settings it speaks of have on the command line."""
    message = str(error)
    for setting in error.settings:
        message = message.replace(setting, flag_of(setting), 1)
    return message


def flag_of(setting: str) -> str:
    """What a field of EngineConfig is called on the command line."""
    return "--" + setting.replace("_", "-")


def _progress(message: str) -> None:
    print(f"octavo: {message}", file=sys.stderr, flush=True)


def _fail(message: str, code: int) -> int:
    print(f"octavo: {message}", file=sys.stderr, flush=True)
    return code
