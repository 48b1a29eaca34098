"""Structured logs: one JSON object a line, with request ids and without prompt or output text."""

from __future__ import annotations

import atexit
import contextlib
import enum
import json
import logging
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import TextIO

CLOSE_SECONDS = 1.0
# A line wakes the writer, which then takes all lines of so long at once: each waking takes the interpreter from a step,
# and the first line of several costs ten times what the others do. Warnings and errors do not wait.
GATHER_SECONDS = 0.1
MOST_LINES_AT_ONCE = 1000
_PATIENT = frozenset({"DEBUG", "INFO"})

_to_json = json.JSONEncoder(default=str).encode
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _to_json(line)


class BackgroundHandler(logging.Handler):
    """Makes and writes lines in a thread of its own: whoever reads standard error slowly, or not at all, holds up no
    request.

    most: lines that may wait; what comes beyond is counted, and the count is written when there is room again.
    """

    def __init__(self, stream: TextIO, most: int = 10_000) -> None:
        super().__init__()
        self._stream = stream
        self._most = most
        self._records: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._lost = 0
        self._hurry = threading.Event()
        self._writer = threading.Thread(target=self._write, name="octavo-log", daemon=True)
        self._writer.start()
        atexit.register(self.close)

    def emit(self, record: logging.LogRecord) -> None:
        if self._records.qsize() >= self._most:
            self._lost += 1
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            self._records.put(lost_lines(lost))
        self._records.put(record)
        if record.levelname not in _PATIENT:
            self._hurry.set()

    def close(self) -> None:
        """Waits for what is to be written, but not for a reader that is gone."""
        self._records.put(None)
        self._hurry.set()
        self._writer.join(CLOSE_SECONDS)
        super().close()

    def _write(self) -> None:
        ended = False
        while not ended:
            records = [self._records.get()]
            with contextlib.suppress(queue.Empty):
                while len(records) < MOST_LINES_AT_ONCE:
                    records.append(self._records.get_nowait())
            ended = None in records
            lines = [self._line(record) for record in records if record is not None]
            with contextlib.suppress(OSError, ValueError):  # nobody is left to be told
                self._stream.write("".join(lines))
                self._stream.flush()
            self._hurry.wait(0.0 if ended else GATHER_SECONDS)
            self._hurry.clear()

    def _line(self, record: logging.LogRecord) -> str:
        try:
            return self.format(record) + "\n"
        except Exception as error:  # of an argument's own making; the writer goes on
            return self.format(unsaid_line(record.msg, error)) + "\n"


def lost_lines(count: int) -> logging.LogRecord:
    fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": "log lines were lost"}
    return logging.makeLogRecord({**fields, "lines": count})


def unsaid_line(message: object, error: Exception) -> logging.LogRecord:
    fields = {"name": __name__, "levelno": logging.ERROR, "levelname": "ERROR", "msg": "a log line could not be made"}
    return logging.makeLogRecord({**fields, "line": str(message), "problem": type(error).__name__})


def configure_logs(level: LogLevel) -> None:
    handler = BackgroundHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    # Code, threads and processes are in no line and need no looking up (see "Optimization" in Python's logging HOWTO).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
