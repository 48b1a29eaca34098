"""Errors that cross the engine's boundary. Each names its cause in one line; none is ever swallowed."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""


class ConfigurationError(EngineError):
    """The engine cannot start as asked: unknown path, architecture, quantisation, damaged file, too little memory.
    `settings`: the fields of EngineConfig that the message names, each where its name stands first, for those who call
    them otherwise."""

    def __init__(self, message: str, *settings: str) -> None:
        super().__init__(message)
        self.settings = settings


class InvalidRequestError(EngineError):
    """A request that can never be served. `field` is its path in `GenerationRequest`, as in the public proto."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


class EngineDiedError(EngineError):
    """The engine process or its step loop is gone; every live request failed with it."""


class OutOfBlocksError(EngineError):
    """The KV pool has fewer free blocks than asked for. Nothing was allocated."""
