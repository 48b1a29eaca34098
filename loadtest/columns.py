"""Request rows and schedules as columns: one JSON object for each level, which compresses to less than half of what an
object for each row does.

Times are whole microseconds there, and each column says by how much it is later than another one of the same row, or
than itself in the row before. A column of one value is that value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import msgspec

from loadtest.records import Arrival, RequestRow

Columns = dict[str, Any]
Row = TypeVar("Row", bound=msgspec.Struct)
Time = int | None

MICRO = 1_000_000
# Of request rows: what is told as it stands, and what a time counts from; the last two mostly are those of a message.
PLAIN = (
    *("kind", "outcome", "prompt_tokens", "asked_tokens", "completion_tokens", "cached_prompt_tokens"),
    *("preemptions", "code", "reason", "cause", "client"),
)
SINCE = {"sent": "intended", "accepted": "sent", "first": "first_message", "finish": "last_message"}


def request_columns(level: int, rows: Sequence[RequestRow]) -> Columns:
    """rows: of that level."""
    found: Columns = {"level": level, "rows": len(rows), **_plain(rows, PLAIN)}
    times = {name: [_micros(getattr(row, name)) for row in rows] for name in ("intended", "queued", *SINCE)}
    times |= _messages(times["sent"], [row.chunk_us for row in rows])
    found["index"] = _steps([row.index for row in rows])
    found["intended"] = _steps([at or 0 for at in times["intended"]])
    found["queued"] = times["queued"]
    for name, origin in SINCE.items():
        found[name] = [None if at is None else at - (since or 0) for at, since in _both(times[name], times[origin])]
    found["chunks"] = [len(row.chunk_us) for row in rows]
    found["chunk_us"] = [step for row in rows for step in _steps(row.chunk_us)]
    found["chunk_tokens"] = {at: row.chunk_tokens for at, row in enumerate(rows) if row.chunk_tokens}
    return found


def request_rows(columns: Columns) -> list[RequestRow]:
    """Raises KeyError, TypeError, ValueError or msgspec.ValidationError where the columns are not those of rows."""
    count, level = columns["rows"], columns["level"]
    times: dict[str, list[Time]] = {"intended": [*_sums(columns["intended"])], "queued": columns["queued"]}
    ends = [0, *accumulate(columns["chunks"])]
    chunks = [_sums(columns["chunk_us"][begin:end]) for begin, end in pairwise(ends)]
    for name, origin in SINCE.items():
        if origin not in times:
            times |= _messages(times["sent"], chunks)
        pairs = _both(columns[name], times[origin])
        times[name] = [None if at is None else at + (since or 0) for at, since in pairs]
    values = _values(columns, PLAIN, count)
    for name in ("intended", "queued", *SINCE):
        values[name] = [None if at is None else at / MICRO for at in times[name]]
    values["index"], values["chunk_us"] = _sums(columns["index"]), chunks
    tokens = {int(at): counts for at, counts in columns["chunk_tokens"].items()}
    values["chunk_tokens"] = [tokens.get(at, []) for at in range(count)]
    return [msgspec.convert({"level": level, **row}, RequestRow) for row in _transposed(values)]


def arrival_columns(arrivals: Sequence[Arrival]) -> Columns:
    return {
        "rows": len(arrivals),
        "at": _steps([_micros(arrival.at) or 0 for arrival in arrivals]),
        "seed": _steps([arrival.seed for arrival in arrivals]),
        **_plain(arrivals, ("kind", "prompt_tokens", "output_tokens")),
    }


def arrivals_of(columns: Columns) -> list[Arrival]:
    """Raises as `request_rows`."""
    values = _values(columns, ("kind", "prompt_tokens", "output_tokens"), columns["rows"])
    values["at"] = [at / MICRO for at in _sums(columns["at"])]
    values["seed"] = _sums(columns["seed"])
    return [Arrival(**row) for row in _transposed(values)]


def _messages(sent: Sequence[Time], chunks: Sequence[Sequence[int]]) -> dict[str, list[Time]]:
    """When the first and the last message with tokens came; where there was none, when the request was sent."""
    return {
        "first_message": [(at or 0) + (stamps[0] if stamps else 0) for at, stamps in zip(sent, chunks, strict=True)],
        "last_message": [(at or 0) + (stamps[-1] if stamps else 0) for at, stamps in zip(sent, chunks, strict=True)],
    }


def _micros(at: float | None) -> Time:
    return None if at is None else round(at * MICRO)


def _steps(values: Sequence[int]) -> list[int]:
    return [value - before for before, value in pairwise([0, *values])]


def _sums(steps: Iterable[int]) -> list[int]:
    return list(accumulate(steps))


def _both(column: Sequence[Time], other: Sequence[Time]) -> Iterable[tuple[Time, Time]]:
    return zip(column, other, strict=True)


def _plain(rows: Sequence[msgspec.Struct], names: Sequence[str]) -> Columns:
    found: Columns = {}
    for name in names:
        column = [getattr(row, name) for row in rows]
        if any(value != column[0] for value in column[1:]):
            found[name] = column
        elif column:
            found[name] = column[0]
    return found


def _values(columns: Columns, names: Sequence[str], count: int) -> Columns:
    """A value that is not a list is that of every row."""
    found = {name: columns.get(name) for name in names} if count else {name: [] for name in names}
    return {name: value if isinstance(value, list) else [value] * count for name, value in found.items()}


def _transposed(values: Columns) -> Iterable[Columns]:
    names = list(values)
    return (dict(zip(names, row, strict=True)) for row in zip(*values.values(), strict=True))
