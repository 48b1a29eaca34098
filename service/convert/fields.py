"""Single fields of messages: read, checked, and named in the refusal if they are wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from google.protobuf import duration_pb2

from engine import EngineInfo
from service.status import Failure, RequestRefusedError, invalid

MAX_TIMEOUT_SECONDS = 7 * 24 * 3600.0


def refuse(failure: Failure) -> RequestRefusedError:
    return RequestRefusedError(failure)


def check_ids(path: str, ids: Iterable[int], info: EngineInfo) -> None:
    """Raises RequestRefusedError for an id outside the vocabulary."""
    for index, token_id in enumerate(ids):
        check_id(f"{path}[{index}]", token_id, info)


def check_id(path: str, token_id: int, info: EngineInfo) -> None:
    if token_id >= info.vocab_size:
        raise refuse(invalid(path, f"is {token_id}, outside the vocabulary of {info.vocab_size}"))


def number(
    message: Any,
    name: str,
    default: float,
    path: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> float:
    """A finite number, or the default if it is not set. Raises RequestRefusedError outside the bounds."""
    if not message.HasField(name):
        return default
    value = float(getattr(message, name))
    if not math.isfinite(value):
        raise refuse(invalid(f"{path}.{name}", f"is {value}, not a finite number"))
    if value < least:
        raise refuse(invalid(f"{path}.{name}", f"is {value:g}, below {least:g}"))
    if value <= above:
        raise refuse(invalid(f"{path}.{name}", f"is {value:g}, not above {above:g}"))
    if value > most:
        raise refuse(invalid(f"{path}.{name}", f"is {value:g}, above {most:g}"))
    return value


def count(message: Any, name: str, default: int, path: str, *, least: int, most: int) -> int:
    """An integer field, or the default if it is not set. Raises RequestRefusedError outside the bounds."""
    if not message.HasField(name):
        return default
    value = int(getattr(message, name))
    if not least <= value <= most:
        raise refuse(invalid(f"{path}.{name}", f"is {value}, not within {least} to {most}"))
    return value


def or_default(message: Any, name: str, default: bool) -> bool:
    return bool(getattr(message, name)) if message.HasField(name) else default


def seconds_of(duration: duration_pb2.Duration, path: str) -> float:
    """Raises RequestRefusedError for nanos that are no fraction of a second, or that have another sign."""
    if abs(duration.nanos) > 999_999_999:
        raise refuse(invalid(path, f"has {duration.nanos} nanos, more than a second"))
    if duration.seconds * duration.nanos < 0:
        raise refuse(invalid(path, "has seconds and nanos of different signs"))
    return duration.seconds + duration.nanos / 1e9


def fill_duration(message: duration_pb2.Duration, seconds: float) -> None:
    message.FromNanoseconds(max(0, round(seconds * 1e9)))
