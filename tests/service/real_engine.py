"""A server over the real engine on a thread of this process, with a tiny model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig, load_tokenizer, ops
from engine.local import LocalEngineClient
from service.config import ServiceConfig
from service.server import Server

DEFAULTS = {"max_num_seqs": 4, "max_model_len": 400, "block_size": 4, "num_threads": 1, "admission_forecast": False}


@asynccontextmanager
async def serving(
    path: Path, config: ServiceConfig | None = None, **options: Any
) -> AsyncIterator[tuple[LocalEngineClient, Server]]:
    """options: the engine's. Whenever its work had drained, it held nothing."""
    engine = LocalEngineClient(EngineConfig(model=str(path), **{**DEFAULTS, **options}))
    await engine.start()
    server = Server(engine, load_tokenizer(str(path)), config or ServiceConfig(port=0, drain_grace=0.0))
    await server.start()
    try:
        yield engine, server
        assert engine.stats.integrity_errors == 0
    finally:
        await server.stop()


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.003) -> None:
    """Steps take so much longer for each layer: slow enough to be met in any state."""
    silu_mul = ops.silu_mul  # once a layer

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return silu_mul(*arguments, **options)

    monkeypatch.setattr(ops, "silu_mul", slow)
