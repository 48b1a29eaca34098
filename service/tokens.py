"""Bearer tokens and what each of them allows, from a file that is read again when it changes.

One token a line: `NAME TOKEN [KEY=VALUE ...]`; empty lines and lines that begin with # are ignored. NAME appears in
logs, TOKEN never does. Keys: `rights` (comma-separated: generate, admin; default generate), `live_requests` (how many
at once), `tokens_per_minute` (prompt and output tokens).
"""

from __future__ import annotations

import enum
import hashlib
import logging
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from engine import ConfigurationError

LOGGER = logging.getLogger(__name__)

LEAST_TOKEN_LENGTH = 16


class Right(enum.StrEnum):
    GENERATE = "generate"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. None for a limit: no limit."""

    name: str
    rights: frozenset[Right] = frozenset({Right.GENERATE})
    live_requests: int | None = None
    tokens_per_minute: int | None = None


EVERYBODY = Principal("", frozenset(Right))

# Set for each call by the interceptor that knows the caller.
CALLER: ContextVar[Principal] = ContextVar("octavo_caller", default=EVERYBODY)


class TokenFile:
    """Raises ConfigurationError when it is first read; later a broken file leaves the tokens as they were."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._read_stamp()
        self._principals = read_tokens(path)

    def find(self, token: str) -> Principal | None:
        # By digest: the look-up's time says nothing about how much of a token is right.
        return self._principals.get(digest(token))

    def reload_if_changed(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._principals = read_tokens(self._path)
            LOGGER.info("tokens were read again", extra={"tokens": len(self._principals)})
        except ConfigurationError as error:
            LOGGER.error("tokens stay as they were", extra={"problem": str(error)})

    def _read_stamp(self) -> tuple[int, int]:
        try:
            status = self._path.stat()
        except OSError:
            return (0, 0)
        return status.st_mtime_ns, status.st_size


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def read_tokens(path: Path) -> dict[bytes, Principal]:
    """Principals by their token's digest."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problem = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigurationError(f"--auth-tokens {path}: cannot be read: {problem}") from None
    principals: dict[bytes, Principal] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            token, principal = parse_line(line)
        except ValueError as error:
            raise ConfigurationError(f"--auth-tokens {path}:{number}: {error}") from None
        if digest(token) in principals:
            problem = f"the token of {principal.name!r} stands there twice"
            raise ConfigurationError(f"--auth-tokens {path}:{number}: {problem}")
        principals[digest(token)] = principal
    if not principals:
        raise ConfigurationError(f"--auth-tokens {path}: has no token")
    return principals


def parse_line(line: str) -> tuple[str, Principal]:
    """Raises ValueError, whose text never has the token."""
    name, *rest = line.split()
    if not rest:
        raise ValueError("needs NAME TOKEN")
    token, *settings = rest
    if len(token) < LEAST_TOKEN_LENGTH:
        raise ValueError(f"the token of {name!r} is shorter than {LEAST_TOKEN_LENGTH} characters")
    values = dict(_setting(setting) for setting in settings)
    if unknown := values.keys() - {"rights", "live_requests", "tokens_per_minute"}:
        raise ValueError(f"unknown setting {sorted(unknown)[0]!r}")
    rights = values.get("rights", Right.GENERATE)
    return token, Principal(
        name,
        frozenset(Right(right) for right in rights.split(",")),
        _positive(values.get("live_requests")),
        _positive(values.get("tokens_per_minute")),
    )


def _setting(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not value:
        raise ValueError(f"{text!r} is not KEY=VALUE")
    return key, value


def _positive(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{text!r} is no number above 0")
    return int(text)
