"""A service of one's own for a run: `python -m service serve` as a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

READY = re.compile(r"octavo ready on (\S+?): ")
START_SECONDS = 300.0
STOP_SECONDS = 40.0
LOG_LINES = 50


class LaunchError(Exception):
    """The service did not come up; the message says how it ended."""


@dataclass
class Service:
    """`async with Service(arguments) as service`. arguments: of `serve`, or a whole command of Python if `module` is
    given. At the end it gets SIGTERM, then SIGKILL. `log`: its last lines on standard error."""

    arguments: Sequence[str]
    module: str = "service"
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: Sequence[int] = ()
    address: str = ""
    metrics_url: str | None = None
    log: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def command(self) -> list[str]:
        """As a person would type it."""
        return ["python", "-m", self.module, *self.arguments]

    async def __aenter__(self) -> Service:
        arguments = list(self.arguments)
        if self.module == "service":
            port = free_port()
            self.metrics_url = f"http://127.0.0.1:{port}/metrics"
            arguments = ["serve", *arguments, "--port", "0", "--metrics-port", str(port)]
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self.module, *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        if self.cores:
            os.sched_setaffinity(self.process.pid, self.cores)
        self._logging = asyncio.create_task(self._collect())
        try:
            async with asyncio.timeout(START_SECONDS):
                self.address = await self._ready()
        except BaseException:
            await self._end()
            raise
        self._draining = asyncio.create_task(self._discard())
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._end()

    async def terminate(self) -> int:
        """SIGTERM; returns the exit code. Raises TimeoutError if it does not end."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), STOP_SECONDS)

    async def _ready(self) -> str:
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).decode():
            if match := READY.match(line):
                return match[1]
        code = await self.process.wait()
        await self._logging
        raise LaunchError(f"the service ended with exit code {code}: {' | '.join(list(self.log)[-3:])}")

    async def _collect(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.log.append(line.decode(errors="replace").rstrip("\n"))

    async def _discard(self) -> None:
        assert self.process.stdout is not None
        while await self.process.stdout.readline():
            pass

    async def _end(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                await self.terminate()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # whatever is left of its children
        await self.process.wait()
        self._logging.cancel()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
