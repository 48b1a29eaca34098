"""An engine in a process of its own, which alone owns the device and the KV pool.

Two processes, because one interpreter runs one thread of Python at a time: the step loop must not wait for the front
end's serialisation, nor the front end for a step. The child is spawned, never forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from engine import wire
from engine.client import EngineState
from engine.config import EngineConfig
from engine.dispatched_client import DispatchedClient
from engine.errors import EngineDiedError
from engine.socket_folder import SocketFolder
from engine.types import EngineInfo, EngineStats

_SHUTDOWN_SECONDS = 10.0
_ROOT = Path(__file__).resolve().parent.parent  # lets the child import this very engine


class ProcessEngineClient(DispatchedClient):
    """EngineClient over a child process: msgpack frames on a ZeroMQ pair socket, one a step. The child's death is
    noticed when it happens; the child ends with its parent, since it watches the other end of its standard input."""

    def __init__(
        self, config: EngineConfig, progress: Callable[[str], None] | None = None, worker: str = "engine.worker"
    ) -> None:
        """worker: the module that the child runs."""
        super().__init__()
        self._config = config
        self._worker = worker
        self._progress = progress or (lambda _: None)
        self._blame = ""
        self._process: asyncio.subprocess.Process | None = None
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._folder = SocketFolder()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        self._started: asyncio.Future[EngineInfo] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def blame(self, cause: str) -> None:
        """Says why the process is about to be killed, of which its exit code tells nothing."""
        self._blame = cause

    async def start(self) -> EngineInfo:
        endpoint = f"ipc://{self._folder.path}/engine"
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(endpoint)
        root = str(_ROOT)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._worker, endpoint, msgspec.json.encode(self._config).decode()),
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        self._loop.add_reader(self._descriptor, self._receive)
        self._receive()
        self._watching = asyncio.create_task(self._watch())
        try:
            self._info = await self._started
        except BaseException:
            await self.stop()
            raise
        self._dispatcher.set_state(EngineState.READY)
        return self._info

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._end(EngineState.STOPPED, "engine was stopped")
        if process.returncode is None:
            self._send(wire.Shutdown())
            try:
                await asyncio.wait_for(process.wait(), _SHUTDOWN_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._socket.close()
        self._context.term()
        self._folder.remove()

    @property
    def _descriptor(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def _send(self, command: wire.Command) -> None:
        # Without a high-water mark a send never waits.
        with contextlib.suppress(zmq.Again):
            self._socket.send(wire.encode(command), zmq.NOBLOCK)
        # ZeroMQ's descriptor signals once, and a send may take the signal for what has just arrived: look again.
        if self._loop is not None:
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        """Everything that has arrived; called whenever the socket's descriptor signals, and after every send."""
        while not self._socket.closed:
            try:
                report = wire.decode_report(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            match report:
                case wire.Stepped():
                    self._dispatcher.dispatch(report.frame)
                case wire.Beat():
                    self._dispatcher.beat(report.at)
                case wire.BeyondUse():
                    self._end(EngineState.FAILED, report.message)
                case wire.Progress():
                    self._progress(report.message)
                case wire.Started():
                    self._dispatcher.stats = EngineStats(heartbeat=time.monotonic())
                    self._resolve(report.info)
                case wire.StartFailed():
                    self._resolve(report.error)

    async def _watch(self) -> None:
        process = self._process
        assert process is not None
        code = await process.wait()
        self._receive()  # frames that had arrived come first
        self._end(EngineState.FAILED, self._blame or f"engine process ended with code {code}")
        self._resolve(EngineDiedError(f"engine process ended with code {code} while starting"))

    def _resolve(self, result: EngineInfo | Exception) -> None:
        if self._started is None or self._started.done():
            return
        if isinstance(result, Exception):
            self._started.set_exception(result)
        else:
            self._started.set_result(result)
