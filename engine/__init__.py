"""Octavo's engine: continuous batching over a paged KV cache. No gRPC here; `service` uses exactly these names."""

from __future__ import annotations

from collections.abc import Callable

from engine.client import EngineClient, EngineState, EventSink
from engine.config import AllocatorKind, Device, EngineConfig, LoadFormat
from engine.errors import (
    ConfigurationError,
    EngineDiedError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)

__all__ = [
    "AllocatorKind",
    "ConfigurationError",
    "Device",
    "EngineClient",
    "EngineConfig",
    "EngineDiedError",
    "EngineError",
    "EngineState",
    "EventSink",
    "InvalidRequestError",
    "LoadFormat",
    "PromptTooLongError",
    "QueueFullError",
    "create_engine_client",
]


def create_engine_client(
    config: EngineConfig, *, in_process: bool = False, progress: Callable[[str], None] | None = None
) -> EngineClient:
    """An engine in a child process, or on a thread of this one. Nothing runs until its `start`."""
    if in_process:
        from engine.local import LocalEngineClient

        return LocalEngineClient(config, progress)
    from engine.process import ProcessEngineClient

    return ProcessEngineClient(config, progress)
