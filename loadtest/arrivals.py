"""Arrival times, computed before anything is sent: from a seed alone, or from a file.

A schedule has exactly as many arrivals as its rate says: gaps are drawn and then scaled to fill the time, which for
exponential gaps is a Poisson process given its count. Two levels of a rate therefore differ in their order and
clustering, and not in their load.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadtest.records import Arrival, ArrivalProcess
from loadtest.result import read_schedule


class ScheduleError(Exception):
    """A schedule that cannot be made; the message says why."""


@dataclass(frozen=True)
class Segment:
    """A stretch of `seconds` in which the rate goes linearly from `begin` to `end` arrivals a second."""

    seconds: float
    begin: float
    end: float

    @property
    def mass(self) -> float:
        """Arrivals expected in it."""
        return self.seconds * (self.begin + self.end) / 2


def flat(rate: float, seconds: float) -> list[Segment]:
    return [Segment(seconds, rate, rate)]


def ramp(begin: float, end: float, seconds: float) -> list[Segment]:
    return [Segment(seconds, begin, end)]


def steps(rates: Sequence[float], seconds: float) -> list[Segment]:
    """Each rate for an equal part of the time."""
    return [Segment(seconds / len(rates), rate, rate) for rate in rates]


def spike(rate: float, height: float, seconds: float, width: float) -> list[Segment]:
    """`rate`, then `height` times that for `width` seconds in the middle, then `rate` again."""
    side = (seconds - width) / 2
    if side < 0:
        raise ScheduleError(f"a spike of {width} s does not fit {seconds} s")
    return [Segment(side, rate, rate), Segment(width, rate * height, rate * height), Segment(side, rate, rate)]


def times(
    segments: Sequence[Segment], process: ArrivalProcess, generator: random.Random, *, cv: float = 2.0, size: int = 8
) -> list[float]:
    """Arrival times in seconds, ascending. The process sets the gaps: regular for CONSTANT, gamma with coefficient of
    variation `cv` for GAMMA, groups of `size` at once for BURST, exponential for the others."""
    mass = sum(segment.mass for segment in segments)
    count = round(mass)
    groups = -(-count // size) if process is ArrivalProcess.BURST else count
    gaps = _gaps(process, groups, generator, cv)
    scale = mass / sum(gaps) if gaps else 0.0
    marks = [mark * scale for mark in itertools.accumulate(gaps[:-1])]
    arrivals = _at(segments, marks)
    if process is ArrivalProcess.BURST:
        return [at for at in arrivals for _ in range(size)][:count]
    return arrivals


def _gaps(process: ArrivalProcess, count: int, generator: random.Random, cv: float) -> list[float]:
    """One more than arrivals: the last one ends the schedule."""
    if process is ArrivalProcess.CONSTANT:
        return [0.5, *[1.0] * (count - 1), 0.5] if count else []
    if process is ArrivalProcess.GAMMA:
        shape = 1 / cv**2
        return [generator.gammavariate(shape, 1.0) for _ in range(count + 1)]
    return [generator.expovariate(1.0) for _ in range(count + 1)]


def _at(segments: Sequence[Segment], marks: Sequence[float]) -> list[float]:
    """The times at which the expected number of arrivals reaches each mark."""
    masses = [0.0, *itertools.accumulate(segment.mass for segment in segments)]
    starts = [0.0, *itertools.accumulate(segment.seconds for segment in segments)]
    found = []
    for mark in marks:
        index = min(bisect_right(masses, mark), len(segments)) - 1
        found.append(starts[index] + _within(segments[index], mark - masses[index]))
    return found


def _within(segment: Segment, mass: float) -> float:
    """Seconds into a segment at which `mass` arrivals are expected: the root of begin t + growth t^2 / 2 = mass."""
    growth = (segment.end - segment.begin) / segment.seconds
    root = math.sqrt(max(0.0, segment.begin**2 + 2 * growth * mass))
    return min(segment.seconds, 2 * mass / (segment.begin + root))


def replay(path: Path) -> list[Arrival]:
    """A schedule of an earlier result (`schedules/INDEX.jsonl.xz`), or a trace of lines {"timestamp": ms,
    "input_length": tokens, "output_length": tokens}. Raises ResultError, ScheduleError."""
    if ".jsonl.xz" in path.name:
        return read_schedule(path)
    try:
        lines = [msgspec.json.decode(line, type=TraceLine) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, msgspec.MsgspecError) as error:
        raise ScheduleError(f"{path}: {error}") from None
    if not lines:
        raise ScheduleError(f"{path}: no arrivals")
    lines.sort(key=lambda line: line.timestamp)
    first = lines[0].timestamp
    return [
        Arrival(
            at=(line.timestamp - first) / 1e3,
            kind="replay",
            seed=index,
            prompt_tokens=line.input_length,
            output_tokens=line.output_length,
        )
        for index, line in enumerate(lines)
    ]


def stretched(trace: Sequence[Arrival], count: int, seconds: float, begin: int = 0) -> list[Arrival]:
    """`count` arrivals of a trace from its `begin`th on, around its end if need be, over so many seconds: gaps keep
    their proportions. Raises ScheduleError for a trace without time in it."""
    if len(trace) < 2 or trace[-1].at <= trace[0].at:
        raise ScheduleError("a trace to stretch needs two arrivals at different times")
    gaps = [after.at - before.at for before, after in itertools.pairwise(trace)]
    gaps.append(sum(gaps) / len(gaps))  # from its end to its beginning
    places = [(begin + index) % len(trace) for index in range(count)]
    whole = sum(gaps[place] for place in places) or 1.0
    marks = itertools.accumulate((gaps[place] for place in places[:-1]), initial=0.0)
    return [
        msgspec.structs.replace(trace[place], at=round(mark * seconds / whole, 6))
        for place, mark in zip(places, marks, strict=False)
    ]


class TraceLine(msgspec.Struct, frozen=True):
    """A line of a trace as public ones are."""

    timestamp: float
    input_length: int
    output_length: int
