"""Server processes for tests: started, awaited, ended whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READY = re.compile(r"octavo ready on (\S+?): (.*)")
BIN = Path(sys.executable).parent


@dataclass
class Process:
    process: asyncio.subprocess.Process
    address: str
    ready_line: str
    log: list[str] = field(default_factory=list)

    async def end(self, seconds: float = 15.0) -> int:
        """The exit code. Fails if the process does not end."""
        return await asyncio.wait_for(self.process.wait(), seconds)


@asynccontextmanager
async def server_process(
    *arguments: str, seconds: float = 30.0, env: Mapping[str, str] | None = None
) -> AsyncIterator[Process]:
    """`python ARGUMENTS` from the repository's root, once it has said that it is ready."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reading = asyncio.create_task(_collect(process.stderr, log))
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), seconds)).decode()
        match = READY.match(line)
        assert match, f"not ready: {line!r} {log}"
        yield Process(process, match[1], line, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        reading.cancel()


async def _collect(stream: asyncio.StreamReader, lines: list[str]) -> None:
    while line := await stream.readline():
        lines.append(line.decode().rstrip("\n"))


async def run_command(
    *command: str | Path, seconds: float = 60.0, env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of a command run in the repository's root."""
    process = await asyncio.create_subprocess_exec(
        *(str(part) for part in command),
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()
