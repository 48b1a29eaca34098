"""What passes between a client and its engine, by thread or by process: msgpack frames of these unions."""

from __future__ import annotations

import msgspec

from engine.errors import ConfigurationError, EngineError
from engine.types import EngineInfo, GenerationRequest, StepFrame


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: GenerationRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: str


class StopCandidate(msgspec.Struct, frozen=True, tag="stop_candidate"):
    request_id: str
    candidate: int


class ReadCache(msgspec.Struct, frozen=True, tag="read_cache"):
    """Asks for a CachePiece, and for every change of the prefix cache from then on."""

    start: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


Command = Submit | Cancel | StopCandidate | ReadCache | Shutdown


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A step of the start, for people."""

    message: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """`configuration`: the user can mend it; else it is a fault of ours. `settings`: as ConfigurationError has them."""

    message: str
    configuration: bool
    settings: tuple[str, ...] = ()

    @property
    def error(self) -> EngineError:
        return ConfigurationError(self.message, *self.settings) if self.configuration else EngineError(self.message)


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A step advances. at: `time.monotonic()` seconds."""

    at: float


class BeyondUse(msgspec.Struct, frozen=True, tag="beyond_use"):
    """The engine ends itself. message: why, in a line."""

    message: str


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    frame: StepFrame


Report = Progress | Started | StartFailed | Beat | BeyondUse | Stepped

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
