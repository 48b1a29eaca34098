"""The engine process: `python -m engine.worker ENDPOINT CONFIG_JSON`, started by ProcessEngineClient."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec
import zmq

from engine import wire
from engine.config import EngineConfig
from engine.errors import ConfigurationError, EngineError
from engine.garbage import keep_loaded
from engine.serve import DrivenEngine, serve

Create = Callable[[EngineConfig, Callable[[str], None]], DrivenEngine]


def create_engine(config: EngineConfig, progress: Callable[[str], None]) -> DrivenEngine:
    from engine.engine import Engine  # with torch, which takes a while

    return Engine(config, progress, warm_grammars=True)


def main(endpoint: str, config_json: str, *, create: Create = create_engine) -> int:
    """Exit code 2 if the configuration cannot be served, as the client was told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C and SIGTERM are the parent's to handle: it drains first
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(endpoint)

    def send(report: wire.Report) -> None:
        socket.send(wire.encode(report))

    code = _run(socket, send, config_json, create)
    socket.close()
    zmq.Context.instance().term()
    return code


def _run(socket: zmq.Socket[bytes], send: Callable[[wire.Report], None], config_json: str, create: Create) -> int:
    try:
        config = msgspec.json.decode(config_json, type=EngineConfig)
        engine = create(config, lambda message: send(wire.Progress(message)))
    except Exception as error:
        if isinstance(error, ConfigurationError):
            send(wire.StartFailed(str(error), True, error.settings))
            return 2
        send(wire.StartFailed(f"{type(error).__name__}: {error}", False))
        return 1
    keep_loaded()
    send(wire.Started(engine.info))
    try:
        serve(
            engine,
            lambda timeout: _receive(socket, timeout),
            lambda frame: send(wire.Stepped(frame)),
            lambda at: send(wire.Beat(at)),
        )
    except EngineError as error:
        send(wire.BeyondUse(str(error)))
        return 1
    return 0


def _receive(socket: zmq.Socket[bytes], timeout: float) -> Sequence[wire.Command]:
    if not socket.poll(int(timeout * 1000)):
        return []
    commands: list[wire.Command] = []
    while True:
        try:
            commands.append(wire.decode_command(socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return commands


def _end_with_parent() -> None:
    """Standard input is a pipe that only the parent holds open: its end means that the parent is gone."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
