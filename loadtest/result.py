"""A result is a folder:

    run.json                  `Run`: what ran, where, with which hypotheses; written before the first request
    schedules/INDEX.jsonl.xz  `Arrival`s of a level, as they were dealt out, in columns (see `loadtest.columns`)
    requests.jsonl.xz         `RequestRow`s: a line of columns for each level, appended
    telemetry.jsonl.xz        `TelemetryRow`s, appended level by level
    levels.jsonl              `Level`s, each appended after its rows: a row without its level was cut off and is ignored
    verdicts.jsonl            `Verdict`s   } judgements: rewritten by `python -m loadtest grade`
    summary.json              `Summary`    }
    faults.jsonl              `FaultCell`s, of a fault matrix
    overhead.jsonl            `OverheadRow`s, of an overhead run
    plots/ report.html        made from the above by `python -m loadtest report`

Compressed files are xz streams one after another, so that appending is safe and `xzcat` reads them.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from loadtest.columns import Columns, arrival_columns, arrivals_of, request_columns, request_rows
from loadtest.judgements import FaultCell, OverheadRow, Summary, Verdict
from loadtest.records import SCHEMA, Arrival, Level, RequestRow, Run, TelemetryRow

Row = TypeVar("Row", bound=msgspec.Struct)
Value = TypeVar("Value")


class ResultError(Exception):
    """The folder is no result, or of another schema; the message says which file."""


def holds_result(folder: Path) -> bool:
    return (folder / "run.json").exists()


class Result:
    """Reads and writes one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, folder: Path, run: Run) -> Result:
        """Raises ResultError if the folder already holds a result."""
        if holds_result(folder):
            raise ResultError(f"{folder} already holds a result")
        (folder / "schedules").mkdir(parents=True, exist_ok=True)
        result = cls(folder)
        result._write("run.json", run)
        return result

    @classmethod
    def open(cls, folder: Path) -> Result:
        """Raises ResultError."""
        result = cls(folder)
        if not holds_result(folder):
            raise ResultError(f"{folder}: no run.json")
        if result.run.schema != SCHEMA:
            raise ResultError(f"{folder}: schema {result.run.schema}; this version reads {SCHEMA}")
        return result

    # --- facts ------------------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        return self._read("run.json", Run)

    def append_level(
        self, level: Level, requests: Sequence[RequestRow], telemetry: Sequence[TelemetryRow] = ()
    ) -> None:
        """The level goes last: what an interrupted write leaves behind has no level."""
        self._append("requests.jsonl.xz", [request_columns(level.index, requests)])
        self._append("telemetry.jsonl.xz", telemetry)
        self._append("levels.jsonl", [level])

    @property
    def levels(self) -> list[Level]:
        return self._rows("levels.jsonl", Level)

    @property
    def requests(self) -> list[RequestRow]:
        """Raises ResultError."""
        known = {level.index for level in self.levels}
        path = self.folder / "requests.jsonl.xz"
        blocks = read_rows(path, Columns) if path.exists() else []
        return [row for block in blocks if block.get("level") in known for row in _whole(path, request_rows, block)]

    @property
    def telemetry(self) -> list[TelemetryRow]:
        known = {level.index for level in self.levels}
        return [row for row in self._rows("telemetry.jsonl.xz", TelemetryRow) if row.level in known]

    def write_schedule(self, index: int, arrivals: Sequence[Arrival]) -> str:
        """Returns its path within the result."""
        name = f"schedules/{index}.jsonl.xz"
        write_rows(self.folder / name, [arrival_columns(arrivals)])
        return name

    def schedule(self, level: Level) -> list[Arrival]:
        return read_schedule(self.folder / level.schedule)

    # --- judgements -------------------------------------------------------------------------------------------------

    def write_judgement(self, verdicts: Sequence[Verdict], summary: Summary) -> None:
        write_rows(self.folder / "verdicts.jsonl", verdicts)
        self._write("summary.json", summary)

    @property
    def verdicts(self) -> list[Verdict]:
        return self._rows("verdicts.jsonl", Verdict)

    @property
    def summary(self) -> Summary:
        return self._read("summary.json", Summary)

    def write_faults(self, cells: Sequence[FaultCell]) -> None:
        write_rows(self.folder / "faults.jsonl", cells)

    @property
    def faults(self) -> list[FaultCell]:
        return self._rows("faults.jsonl", FaultCell)

    def write_overhead(self, rows: Sequence[OverheadRow]) -> None:
        write_rows(self.folder / "overhead.jsonl", rows)

    @property
    def overhead(self) -> list[OverheadRow]:
        return self._rows("overhead.jsonl", OverheadRow)

    # --- files ------------------------------------------------------------------------------------------------------

    def _write(self, name: str, record: msgspec.Struct) -> None:
        (self.folder / name).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")

    def _read(self, name: str, kind: type[Row]) -> Row:
        try:
            return msgspec.json.decode((self.folder / name).read_bytes(), type=kind)
        except (OSError, msgspec.MsgspecError) as error:
            raise ResultError(f"{self.folder / name}: {error}") from None

    def _append(self, name: str, rows: Iterable[msgspec.Struct | Columns]) -> None:
        with (self.folder / name).open("ab") as file:
            file.write(_encoded(name, rows))

    def _rows(self, name: str, kind: type[Row]) -> list[Row]:
        path = self.folder / name
        return read_rows(path, kind) if path.exists() else []


def read_schedule(path: Path) -> list[Arrival]:
    """Raises ResultError."""
    return [arrival for block in read_rows(path, Columns) for arrival in _whole(path, arrivals_of, block)]


def write_rows(path: Path, rows: Iterable[msgspec.Struct | Columns]) -> None:
    path.write_bytes(_encoded(path.name, rows))


def read_rows(path: Path, kind: type[Value]) -> list[Value]:
    """Raises ResultError. A cut last line (the process was killed while it wrote) is left out."""
    try:
        data = path.read_bytes()
        lines = (_streams(data) if path.suffix == ".xz" else data).split(b"\n")
        return [msgspec.json.decode(line, type=kind) for line in lines[:-1]]
    except (OSError, lzma.LZMAError, msgspec.MsgspecError) as error:
        raise ResultError(f"{path}: {error}") from None


def _whole(path: Path, make: Callable[[Columns], list[Value]], block: Columns) -> list[Value]:
    try:
        return make(block)
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise ResultError(f"{path}: columns that are no rows: {error!r}") from None


def _encoded(name: str, rows: Iterable[msgspec.Struct | Columns]) -> bytes:
    encoder = msgspec.json.Encoder()
    lines = b"".join(encoder.encode(row) + b"\n" for row in rows)
    return lzma.compress(lines) if name.endswith(".xz") else lines


def _streams(data: bytes) -> bytes:
    """All whole xz streams; a cut last one gives what can be read of it."""
    parts: list[bytes] = []
    while data:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        parts.append(stream.decompress(data))
        data = stream.unused_data
    return b"".join(parts)
