"""Logs that nobody reads hold up no request."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time

import pytest

from service.client import Client, prompt_request
from service.logs import BackgroundHandler, JsonFormatter
from tests.service.process import ROOT, server_process

REQUESTS = 600  # some 200 kB of log lines: several times what a pipe holds


async def test_server_whose_log_is_not_read_goes_on_and_ends() -> None:
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.service.fake_server"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=write,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    os.close(write)
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        async with Client(line.split()[3].rstrip(":")) as client, asyncio.timeout(60):
            for _ in range(REQUESTS):
                texts = [event.delta.text async for event in client.generate(prompt_request("x", max_tokens=1))]
                assert "".join(texts) == "a"
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
        os.close(read)


async def test_last_lines_are_written_before_the_process_is_gone() -> None:
    async with server_process("-m", "tests.service.fake_server") as server:
        server.process.terminate()
        assert await server.end() == 0
        async with asyncio.timeout(5):
            while not any('"stopped"' in line for line in server.log):
                await asyncio.sleep(0.01)


class Gate:
    """A stream that is written only while it is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.lines: list[dict[str, object]] = []
        self.entered = threading.Event()

    def write(self, text: str) -> None:
        self.entered.set()
        assert self.open.wait(10)
        self.lines += [json.loads(line) for line in text.splitlines()]

    def flush(self) -> None:
        pass


def test_lines_beyond_the_bound_are_counted() -> None:
    gate = Gate()
    handler = BackgroundHandler(gate, most=3)  # type: ignore[arg-type]
    handler.setFormatter(JsonFormatter())

    def log(text: str) -> None:
        handler.emit(logging.makeLogRecord({"name": "t", "levelno": logging.INFO, "levelname": "INFO", "msg": text}))

    log("first")
    assert gate.entered.wait(10)
    for index in range(8):
        log(str(index))  # three wait, five are lost
    gate.open.set()
    while len(gate.lines) < 4:
        pass
    log("last")
    handler.close()
    assert [line["message"] for line in gate.lines] == ["first", "0", "1", "2", "log lines were lost", "last"]
    assert gate.lines[4]["lines"] == 5


@pytest.mark.parametrize("problem", [OSError, ValueError])
def test_a_broken_stream_ends_nothing(problem: type[Exception]) -> None:
    class Broken:
        def write(self, text: str) -> None:
            raise problem

    handler = BackgroundHandler(Broken())  # type: ignore[arg-type]
    for _ in range(3):
        handler.emit(logging.makeLogRecord({"msg": "x"}))
    handler.close()


def test_a_line_that_cannot_be_made_ends_no_other() -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("odd")

    gate = Gate()
    gate.open.set()
    handler = BackgroundHandler(gate)  # type: ignore[arg-type]
    handler.setFormatter(JsonFormatter())
    handler.emit(logging.makeLogRecord({"msg": "of %s", "args": (Odd(),)}))
    handler.emit(logging.makeLogRecord({"msg": "last"}))
    handler.close()
    assert [line["message"] for line in gate.lines] == ["a log line could not be made", "last"]
    assert (gate.lines[0]["line"], gate.lines[0]["problem"]) == ("of %s", "RuntimeError")


def test_warnings_do_not_wait_for_lines_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.logs.GATHER_SECONDS", 3600.0)
    gate = Gate()
    gate.open.set()
    handler = BackgroundHandler(gate)  # type: ignore[arg-type]
    handler.setFormatter(JsonFormatter())
    for count, level in enumerate(("INFO", "WARNING", "ERROR"), start=1):
        handler.emit(logging.makeLogRecord({"msg": level, "levelname": level, "levelno": logging.getLevelName(level)}))
        until = time.monotonic() + 10
        while len(gate.lines) < count:
            assert time.monotonic() < until, level
    handler.close()


def test_lines_that_come_together_are_written_together() -> None:
    """A write a line wakes both ends of the pipe for each."""
    writes: list[str] = []

    class Counted(Gate):
        def write(self, text: str) -> None:
            super().write(text)
            writes.append(text)

    gate = Counted()
    handler = BackgroundHandler(gate)  # type: ignore[arg-type]
    handler.setFormatter(JsonFormatter())
    handler.emit(logging.makeLogRecord({"msg": "first"}))
    assert gate.entered.wait(10)
    for index in range(50):
        handler.emit(logging.makeLogRecord({"msg": str(index)}))
    gate.open.set()
    handler.close()
    assert [line["message"] for line in gate.lines] == ["first", *map(str, range(50))]
    assert len(writes) == 2
