"""Drives an engine from a mailbox of commands until told to shut down: the body of the step thread and of the
process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.errors import EngineError
from engine.pulse import HEARTBEAT_SECONDS, Pulse
from engine.types import EngineInfo, GenerationRequest, StepFrame
from engine.wire import Cancel, Command, ReadCache, Shutdown, StopCandidate, Submit

MAX_FAILED_STEPS = 3
_NO_PROGRESS_PAUSE_SECONDS = 0.001

Receive = Callable[[float], Sequence[Command]]  # waits up to so many seconds for commands; [] if none came
Send = Callable[[StepFrame], None]
Beat = Callable[[float], None]


class DrivenEngine(Protocol):
    """What is driven here: `Engine`, or one that a test scripts."""

    pulse: Pulse

    @property
    def info(self) -> EngineInfo: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    @property
    def failed_steps(self) -> int:
        """Steps in a row that raised, up to now."""
        ...

    def submit(self, request: GenerationRequest) -> None: ...

    def cancel(self, request_id: str) -> bool: ...

    def stop_candidate(self, request_id: str, candidate: int) -> None: ...

    def read_cache(self, start: int) -> None: ...

    def step(self) -> StepFrame: ...

    def close(self) -> None: ...


def serve(engine: DrivenEngine, receive: Receive, send: Send, beat: Beat) -> None:
    """Returns at Shutdown. Sends a frame for every step with something to tell, and at least one a heartbeat while
    steps advance; inside a long step `beat` says that it does. Both come from the work itself, so a hung step shows.

    Raises EngineError after several steps in a row that failed: a device in that state fails every step to come.
    """
    engine.pulse.listener = beat
    last_sent = 0.0
    while True:
        for command in receive(0.0 if engine.has_work else HEARTBEAT_SECONDS):
            if isinstance(command, Shutdown):
                engine.close()
                return
            apply(engine, command)
        before = engine.steps if engine.has_work else -1
        frame = engine.step()
        now = time.monotonic()
        if frame.events or frame.cache_changes or frame.cache_pieces or now - last_sent >= HEARTBEAT_SECONDS:
            send(frame)
            engine.pulse.told()
            last_sent = now
        elif engine.steps == before:
            time.sleep(_NO_PROGRESS_PAUSE_SECONDS)
        if engine.failed_steps >= MAX_FAILED_STEPS:
            engine.close()
            raise EngineError(f"{engine.failed_steps} steps in a row failed")


def apply(engine: DrivenEngine, command: Command) -> None:
    match command:
        case Submit():
            engine.submit(command.request)
        case Cancel():
            engine.cancel(command.request_id)
        case StopCandidate():
            engine.stop_candidate(command.request_id, command.candidate)
        case ReadCache():
            engine.read_cache(command.start)
        case Shutdown():
            raise ValueError("Shutdown ends the loop and is not applied")
