"""Processes that serve keep what they loaded out of garbage collections."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import msgspec
import pytest
import zmq

import service.serve
from engine import EngineConfig, keep_loaded, wire, worker
from service.config import ServiceConfig
from tests.service.byte_tokenizer import byte_tokenizer
from tests.service.fake_engine import FakeEngineClient
from tests.service.scripted_worker import ScriptedEngine


def test_what_was_loaded_is_not_looked_at_again() -> None:
    try:
        keep_loaded()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


class ToldToEnd:
    """The engine's end of the socket, through which only Shutdown comes."""

    def __init__(self) -> None:
        self._messages = [wire.encode(wire.Shutdown())]

    def poll(self, timeout: int) -> bool:
        return True

    def recv(self, flags: int) -> bytes:
        if not self._messages:
            raise zmq.Again
        return self._messages.pop()


def test_the_engines_process_does_so_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(worker, "keep_loaded", lambda: done.append("kept"))
    socket: Any = ToldToEnd()
    config = msgspec.json.encode(EngineConfig()).decode()
    assert worker._run(socket, lambda report: done.append(type(report).__name__), config, ScriptedEngine) == 0
    assert done[:2] == ["kept", "Started"]


async def test_the_service_does_so_when_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service.serve, "keep_loaded", lambda: os.kill(os.getpid(), signal.SIGTERM))
    config = ServiceConfig(port=0, drain_grace=0.0)
    assert await service.serve.serve_engine(FakeEngineClient(), byte_tokenizer(), config) == 0
    assert "octavo ready" in capsys.readouterr().out
