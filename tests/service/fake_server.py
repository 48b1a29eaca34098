"""`python -m tests.service.fake_server [PORT [ADMIN_PORT]]`: the real server process over the scripted engine.

A prompt that starts with "slow" gets a token every 20 ms; other requests are as fast as the scripted engine is.
FAKE_STOP_SECONDS: its stop takes so long, or until its process (a `sleep`) is killed; FAKE_SKIP_PORT_CHECK leaves a
taken port to be found by the start. FAKE_STEP_DELAY, FAKE_MAX_NUM_SEQS, FAKE_MAX_QUEUED_REQUESTS and FAKE_MAX_MODEL_LEN
set its speed and bounds. FAKE_PROCESS: the engine is a process of its own (scripted_worker); with FAKE_RESTART one that
dies is replaced.
"""

from __future__ import annotations

import asyncio
import os
import sys

import service.serve
from engine import EngineClient, EngineConfig, EngineInfo
from engine.process import ProcessEngineClient
from service.config import ServiceConfig
from service.logs import LogLevel, configure_logs
from service.serve import run, serve_engine
from service.supervise import SupervisedEngine
from tests.service.byte_tokenizer import byte_tokenizer
from tests.service.fake_engine import FakeEngineClient, slow_if_asked


class SlowToStop(FakeEngineClient):
    """Its stop waits for the end of a process, as a real engine's does."""

    pid: int

    async def start(self) -> EngineInfo:
        self._process = await asyncio.create_subprocess_exec("sleep", os.environ["FAKE_STOP_SECONDS"])
        self.pid = self._process.pid
        return await super().start()

    async def stop(self) -> None:
        await self._process.wait()
        await super().stop()


def in_this_process() -> EngineClient:
    engine = (SlowToStop if "FAKE_STOP_SECONDS" in os.environ else FakeEngineClient)(
        record=False,
        step_delay=float(os.environ.get("FAKE_STEP_DELAY", "0.001")),
        max_num_seqs=number("FAKE_MAX_NUM_SEQS", 64),
        max_context_tokens=number("FAKE_MAX_MODEL_LEN", 256),
        max_queued_requests=number("FAKE_MAX_QUEUED_REQUESTS", 64),
    )
    engine.plan = slow_if_asked
    return engine


def in_its_own_process() -> EngineClient:
    config = EngineConfig(
        max_num_seqs=number("FAKE_MAX_NUM_SEQS", 64),
        max_model_len=number("FAKE_MAX_MODEL_LEN", 256),
        max_queued_requests=number("FAKE_MAX_QUEUED_REQUESTS", 64),
    )
    return SupervisedEngine(
        lambda: ProcessEngineClient(config, worker="tests.service.scripted_worker"),
        restart="FAKE_RESTART" in os.environ,
    )


def number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def main() -> int:
    configure_logs(LogLevel.INFO)
    if "FAKE_SKIP_PORT_CHECK" in os.environ:
        service.serve.check_ports = lambda config: None  # type: ignore[attr-defined]  # an import of it
    engine = in_its_own_process() if "FAKE_PROCESS" in os.environ else in_this_process()
    port, admin_port = (*map(int, sys.argv[1:]), *([0, 0][len(sys.argv) - 1 :]))
    config = ServiceConfig(port=port, admin_port=admin_port or None)
    return run(lambda: serve_engine(engine, byte_tokenizer(), config))


if __name__ == "__main__":
    sys.exit(main())
