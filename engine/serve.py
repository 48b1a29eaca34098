"""Drives an Engine from a mailbox of commands until told to shut down: the body of the step thread and of the
process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine.engine import Engine
from engine.types import StepFrame
from engine.wire import Cancel, Command, ReadCache, Shutdown, StopCandidate, Submit

HEARTBEAT_SECONDS = 0.25
_NO_PROGRESS_PAUSE_SECONDS = 0.001

Receive = Callable[[float], Sequence[Command]]  # waits up to so many seconds for commands; [] if none came
Send = Callable[[StepFrame], None]


def serve(engine: Engine, receive: Receive, send: Send) -> None:
    """Returns at Shutdown. Sends a frame for every step with something to tell, and at least one a heartbeat while
    steps advance: the heartbeat comes from this loop itself, so a hung step shows."""
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
            last_sent = now
        elif engine.steps == before:
            time.sleep(_NO_PROGRESS_PAUSE_SECONDS)


def apply(engine: Engine, command: Command) -> None:
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
