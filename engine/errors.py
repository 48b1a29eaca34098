"""Errors that cross the engine's boundary. Each names its cause in one line; none is ever swallowed."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""


class ConfigurationError(EngineError):
    """The engine cannot start as asked: unknown path, architecture, quantisation, damaged file, too little memory."""


class InvalidRequestError(EngineError):
    """A request that can never be served. `field` is its path in `GenerationRequest`, as in the public proto."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


class PromptTooLongError(InvalidRequestError):
    """The prompt (or prompt plus one token) cannot fit the context or the KV pool."""

    def __init__(self, message: str, *, prompt_tokens: int, max_prompt_tokens: int, max_context_tokens: int) -> None:
        super().__init__("prompt", message)
        self.prompt_tokens = prompt_tokens
        self.max_prompt_tokens = max_prompt_tokens
        self.max_context_tokens = max_context_tokens


class QueueFullError(EngineError):
    """Admission is bounded and the bound is reached. `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDiedError(EngineError):
    """The engine process or its step loop is gone; every live request failed with it."""


class OutOfBlocksError(EngineError):
    """The KV pool has fewer free blocks than asked for. Nothing was allocated."""
