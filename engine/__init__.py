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
)
from engine.garbage import keep_loaded
from engine.model.source import resolve as _resolve
from engine.schedule.admission import too_late
from engine.schedule.queue_fill import QueueFill
from engine.text.output import Delta, OutputText
from engine.text.tokenizer import Tokenizer
from engine.types import (
    Admitted,
    BlockRemoved,
    BlockStored,
    CacheChange,
    CachePiece,
    CandidateFinish,
    EngineInfo,
    EngineStats,
    Event,
    FailureKind,
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    PromptScored,
    RequestFailed,
    RequestFinished,
    SamplingParameters,
    Scheduled,
    StepFrame,
    StopCriteria,
    Timing,
    TokenLogprob,
    TokensGenerated,
    Usage,
)

__all__ = [
    "Admitted",
    "AllocatorKind",
    "BlockRemoved",
    "BlockStored",
    "CacheChange",
    "CachePiece",
    "CandidateFinish",
    "ConfigurationError",
    "Delta",
    "Device",
    "EngineClient",
    "EngineConfig",
    "EngineDiedError",
    "EngineError",
    "EngineInfo",
    "EngineState",
    "EngineStats",
    "Event",
    "EventSink",
    "FailureKind",
    "FinishReason",
    "GenerationRequest",
    "Grammar",
    "GrammarKind",
    "InvalidRequestError",
    "LoadFormat",
    "OutputText",
    "PromptScored",
    "QueueFill",
    "RequestFailed",
    "RequestFinished",
    "SamplingParameters",
    "Scheduled",
    "StepFrame",
    "StopCriteria",
    "Timing",
    "TokenLogprob",
    "Tokenizer",
    "TokensGenerated",
    "Usage",
    "create_engine_client",
    "keep_loaded",
    "load_tokenizer",
    "too_late",
]


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of what `--model` names: "demo", a Hugging Face directory or a .gguf file. Raises
    ConfigurationError."""
    return Tokenizer.from_source(_resolve(model))


def create_engine_client(
    config: EngineConfig, *, in_process: bool = False, progress: Callable[[str], None] | None = None
) -> EngineClient:
    """An engine in a child process, or on a thread of this one. Nothing runs until its `start`."""
    if in_process:
        from engine.local import LocalEngineClient

        return LocalEngineClient(config, progress)
    from engine.process import ProcessEngineClient

    return ProcessEngineClient(config, progress)
