"""From raw rows to the measures of a group of levels. Only what lies in the levels' windows counts: requests by their
intended time, rates by when things happened."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from loadtest.judgements import Distribution, Measures, Quantile, Slope
from loadtest.records import Level, Limits, Outcome, RequestRow, TelemetryRow

Floats = NDArray[np.float64]
Points = tuple[Floats, Floats]  # times, values
BATCHES = 10
LITTLE = {"requests_running", "requests_waiting", "request_seconds_sum"}
LEAST_SAMPLES = 5
# Student's t, two-sided 95 %, by degrees of freedom (index 0: 1).
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def distribution(values: Sequence[float] | Floats, censored: Sequence[float] = ()) -> Distribution | None:
    """Censored values are lower bounds: a quantile at or above the least of them is one, too."""
    merged = np.sort(np.concatenate([np.asarray(values, dtype=float), np.asarray(censored, dtype=float)]))
    if not len(merged):
        return None
    least_bound = min(censored, default=math.inf)

    def quantile(share: float) -> Quantile:
        value = float(merged[max(0, math.ceil(share * len(merged)) - 1)])
        return Quantile(value=value, censored=value >= least_bound)

    return Distribution(
        count=len(merged),
        censored=len(censored),
        mean=Quantile(value=float(merged.mean()), censored=bool(censored)),
        p50=quantile(0.50),
        p90=quantile(0.90),
        p95=quantile(0.95),
        p99=quantile(0.99),
    )


def slope(points: Sequence[tuple[float, float]]) -> Slope | None:
    """Least squares through batches' means (time, value); None below four of them."""
    count = len(points)
    if count < 4:
        return None
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    value = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - value * (x - mean_x)) ** 2 for x, y in points)
    half = STUDENT[min(count - 2, len(STUDENT)) - 1] * math.sqrt(rest / (count - 2) / spread)
    return Slope(value=value, low=value - half, high=value + half)


def pooled_slope(slopes: Sequence[Slope | None]) -> Slope | None:
    """The mean of independent slopes, and the interval of that mean."""
    known = [found for found in slopes if found is not None]
    if not known:
        return None
    value = sum(found.value for found in known) / len(known)
    half = math.sqrt(sum(((found.high - found.low) / 2) ** 2 for found in known)) / len(known)
    return Slope(value=value, low=value - half, high=value + half)


class LevelRows:
    """One level with its rows."""

    def __init__(self, level: Level, rows: Sequence[RequestRow], telemetry: Sequence[TelemetryRow] = ()) -> None:
        self.level = level
        self.rows = rows
        self.telemetry = telemetry
        self.begin, self.end = level.window_start, level.window_end

    @cached_property
    def arrived(self) -> list[RequestRow]:
        """Intended in the window."""
        return [row for row in self.rows if self.begin <= row.intended < self.end]

    @cached_property
    def ended(self) -> list[RequestRow]:
        """Finished in the window, whenever they arrived."""
        return [row for row in self.rows if row.finish is not None and self.begin <= row.finish < self.end]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @cached_property
    def _spans(self) -> tuple[Floats, Floats]:
        """Intended times and ends of all that was sent."""
        sent = [row for row in self.rows if _sent(row) and row.finish is not None]
        return np.array([row.intended for row in sent]), np.array([row.finish for row in sent], dtype=float)

    @cached_property
    def messages(self) -> Points:
        """Times and token counts of every message with tokens."""
        sent = [row for row in self.rows if row.sent is not None and row.chunk_us]
        counts = _joined(row.chunk_tokens or [1] * len(row.chunk_us) for row in sent)
        begin = _joined([row.sent or 0.0] * len(row.chunk_us) for row in sent)
        return _joined(row.chunk_us for row in sent) / 1e6 + begin, counts

    def stamps(self) -> list[tuple[float, int]]:
        """(time, tokens) of every message with tokens."""
        times, counts = self.messages
        return [(at, int(count)) for at, count in zip(times.tolist(), counts.tolist(), strict=True)]

    def batches(self) -> list[tuple[float, float]]:
        width = self.seconds / BATCHES
        return [(self.begin + index * width, self.begin + (index + 1) * width) for index in range(BATCHES)]

    def in_flight_between(self, begin: float, end: float) -> float:
        """Time average in [begin, end]."""
        intended, finish = self._spans
        overlaps = np.minimum(finish, end) - np.maximum(intended, begin)
        return float(np.maximum(overlaps, 0.0).sum()) / (end - begin)

    @cached_property
    def in_flight(self) -> float:
        return self.in_flight_between(self.begin, self.end)

    @cached_property
    def in_flight_slope(self) -> Slope | None:
        return slope([((low + high) / 2, self.in_flight_between(low, high)) for low, high in self.batches()])

    @cached_property
    def ttft_slope(self) -> Slope | None:
        """Of accepted requests; one that has no token yet counts with the time it has waited."""
        waits = [(row.intended, wait) for row in self.arrived if (wait := _wait(row)) is not None]
        points = []
        for low, high in self.batches():
            batch = [wait for at, wait in waits if low <= at < high]
            if batch:
                points.append(((low + high) / 2, sum(batch) / len(batch)))
        return slope(points)

    @cached_property
    def tokens(self) -> int:
        """Received in the window."""
        stamps, counts = self.messages
        return int(counts[(stamps >= self.begin) & (stamps < self.end)].sum())

    @cached_property
    def longest_silence(self) -> float:
        """The longest time in the level without a token or an answer of any kind while something accepted was in
        flight, by steps of the service's own counter where telemetry has it."""
        signs = [at for row in self.rows for at in (row.accepted, row.finish) if at is not None and _answered(row)]
        signs += _steps(self.telemetry)
        ordered = np.sort(np.concatenate([np.array(signs, dtype=float), self.messages[0]]))
        busy = _union([(row.accepted, row.finish) for row in self.rows if row.accepted is not None])
        return max((_longest_gap(ordered, low, high) for low, high in busy), default=0.0)

    @cached_property
    def little(self) -> float | None:
        """|L - lambda W| / L over requests that ended in the window."""
        whole = sum(row.finish - row.intended for row in self.ended if row.finish is not None and _sent(row))
        return abs(self.in_flight - whole / self.seconds) / self.in_flight if self.in_flight > 0 else None

    @cached_property
    def server_little(self) -> float | None:
        """The same inside the service, by its own gauges (a sample a second) and its own request times."""
        seen = [row for row in self.telemetry if self.begin <= row.at < self.end and row.metrics.keys() >= LITTLE]
        if len(seen) < LEAST_SAMPLES:
            return None
        load = sum(row.metrics["requests_running"] + row.metrics["requests_waiting"] for row in seen) / len(seen)
        spent = seen[-1].metrics["request_seconds_sum"] - seen[0].metrics["request_seconds_sum"]
        return abs(load - spent / (seen[-1].at - seen[0].at)) / load if load > 0 else None

    @cached_property
    def drain(self) -> float | None:
        """Seconds from the end of arrivals until nothing was in flight; None if it was cut off."""
        if any(row.outcome is Outcome.CENSORED for row in self.rows):
            return None
        return max(0.0, max((row.finish - self.end for row in self.rows if row.finish is not None), default=0.0))

    @cached_property
    def gaps(self) -> Floats:
        """Between tokens, of all that was served, as `RequestRow.gaps`; those between messages first."""
        rows = [row for row in self.served if row.chunk_us]
        ends = np.cumsum([len(row.chunk_us) for row in rows], dtype=int)
        between = np.delete(np.diff(_joined(row.chunk_us for row in rows)), ends[:-1] - 1) / 1e6
        return np.concatenate([between, np.zeros(sum(row.tokens - len(row.chunk_us) for row in rows))])

    @cached_property
    def waits(self) -> Points:
        """TTFTs of all that was served. One that has no token yet counts with the time that it has waited."""
        return _points((row.intended, row.ttft if row.ttft is not None else row.e2e) for row in self.served)

    @cached_property
    def tpots(self) -> Points:
        return _points((row.intended, row.tpot) for row in self.served)

    @cached_property
    def e2es(self) -> Points:
        return _points((row.intended, row.e2e) for row in self.served)

    @cached_property
    def completions(self) -> Points:
        """One at the end of each request that completed."""
        return _points((row.finish, 1.0) for row in self.ended if row.outcome is Outcome.COMPLETED)

    @property
    def client_cap(self) -> int:
        return sum(row.outcome is Outcome.CLIENT_CAP for row in self.arrived)

    @property
    def lateness_p99(self) -> float:
        return lateness_p99(self.arrived)

    @property
    def client_cpu(self) -> float:
        """Of the busiest."""
        return max((report.cpu for report in self.level.clients), default=0.0)

    @cached_property
    def served(self) -> list[RequestRow]:
        return [row for row in self.arrived if row.outcome in (Outcome.COMPLETED, Outcome.CENSORED)]


def measure(parts: Sequence[LevelRows], limits: Limits) -> Measures:
    """Of levels of one group, pooled: counts and times add up, quantiles are of all rows, slopes are averaged."""
    seconds = sum(part.seconds for part in parts)
    arrived = [row for part in parts for row in part.arrived]
    ended = [row for part in parts for row in part.ended]
    outcomes = Counter(row.outcome for row in arrived)
    completions = [row for row in ended if row.outcome is Outcome.COMPLETED]
    accepted = served(arrived)
    drains = [part.drain for part in parts]
    gaps = [part.little for part in parts]
    clients = [report for part in parts for report in part.level.clients]
    good = sum(is_good(row, limits) for row in arrived)
    return Measures(
        seconds=seconds,
        windows=len(parts),
        arrivals=len(arrived),
        completed=outcomes[Outcome.COMPLETED],
        refused=outcomes[Outcome.REFUSED],
        failed=outcomes[Outcome.FAILED],
        cancelled=outcomes[Outcome.CANCELLED],
        censored=outcomes[Outcome.CENSORED],
        client_cap=outcomes[Outcome.CLIENT_CAP],
        offered=len(arrived) / seconds,
        completion_rate=len(completions) / seconds,
        goodput=good / seconds,
        token_rate=sum(part.tokens for part in parts) / seconds,
        in_flight=sum(part.in_flight * part.seconds for part in parts) / seconds,
        in_flight_slope=pooled_slope([part.in_flight_slope for part in parts]),
        ttft_slope=pooled_slope([part.ttft_slope for part in parts]),
        server_little_gap=max((part.server_little for part in parts if part.server_little is not None), default=None),
        little_gap=max((gap for gap in gaps if gap is not None), default=None),
        ttft=_times(accepted, lambda row: row.ttft, lambda row: row.intended),
        service_ttft=_times(accepted, lambda row: row.service_ttft, lambda row: row.sent),
        tpot=distribution(np.concatenate([part.tpots[1] for part in parts])),
        itl=distribution(np.concatenate([part.gaps for part in parts])),
        e2e=distribution(
            [row.e2e for row in accepted if row.outcome is Outcome.COMPLETED and row.e2e is not None],
            [row.e2e for row in accepted if row.outcome is Outcome.CENSORED and row.e2e is not None],
        ),
        refusal=distribution(
            [
                row.finish - row.sent
                for row in arrived
                if row.outcome is Outcome.REFUSED and row.finish is not None and row.sent is not None
            ]
        ),
        lateness_p99=lateness_p99(arrived),
        lag_p99=max((report.lag_p99 for report in clients), default=0.0),
        client_cpu=max(part.client_cpu for part in parts),
        preemptions=sum(_growth(part, "preemptions_total") for part in parts) / seconds,
        cached_share=_cached_share(arrived),
        drain=None if None in drains else max((drain for drain in drains if drain is not None), default=None),
        recovery=max((part.level.recovery for part in parts if part.level.recovery is not None), default=None),
        longest_silence=max((part.longest_silence for part in parts), default=0.0),
        reasons=dict(Counter(reason_of(row) for row in arrived if row.outcome is not Outcome.COMPLETED)),
    )


def lateness_p99(rows: Iterable[RequestRow]) -> float:
    found = distribution([late for row in rows if (late := row.lateness) is not None])
    return found.p99.value if found else 0.0


def is_good(row: RequestRow, limits: Limits) -> bool:
    """Completed with every limit kept."""
    ttft, tpot = row.ttft, row.tpot
    return (
        row.outcome is Outcome.COMPLETED
        and ttft is not None
        and ttft <= limits.ttft
        and (tpot is None or tpot <= limits.tpot)
    )


def served(rows: Iterable[RequestRow]) -> list[RequestRow]:
    """Those whose latencies count: completed ones, and as lower bounds those that were cut off."""
    return [row for row in rows if row.outcome in (Outcome.COMPLETED, Outcome.CENSORED)]


def by_level(rows: Iterable[RequestRow]) -> Mapping[int, list[RequestRow]]:
    found: defaultdict[int, list[RequestRow]] = defaultdict(list)
    for row in rows:
        found[row.level].append(row)
    return found


def _times(
    rows: Iterable[RequestRow],
    time: Callable[[RequestRow], float | None],
    origin: Callable[[RequestRow], float | None],
) -> Distribution | None:
    """Those without a first token yet count as lower bounds, from their origin to when the client stopped looking."""
    known, bounds = [], []
    for row in rows:
        value, begin = time(row), origin(row)
        if value is not None:
            known.append(value)
        elif row.outcome is Outcome.CENSORED and row.finish is not None and begin is not None:
            bounds.append(row.finish - begin)
    return distribution(known, bounds)


def _wait(row: RequestRow) -> float | None:
    if row.outcome in (Outcome.REFUSED, Outcome.CLIENT_CAP, Outcome.FAILED):
        return None
    if row.ttft is not None:
        return row.ttft
    return row.e2e


def _points(found: Iterable[tuple[float | None, float | None]]) -> Points:
    """Of pairs that are whole."""
    known = [pair for pair in found if None not in pair]
    times, values = np.array(known, dtype=float).reshape(-1, 2).T
    return times, values


def _joined(numbers: Iterable[Sequence[float]]) -> Floats:
    return np.fromiter(itertools.chain.from_iterable(numbers), dtype=float)


def _sent(row: RequestRow) -> bool:
    return row.outcome is not Outcome.CLIENT_CAP


def _answered(row: RequestRow) -> bool:
    """Its end came from the service."""
    return row.outcome not in (Outcome.CENSORED, Outcome.CANCELLED, Outcome.CLIENT_CAP)


def _steps(telemetry: Sequence[TelemetryRow]) -> list[float]:
    """Times at which the service's step counter was seen to have moved."""
    found, last = [], None
    for row in telemetry:
        steps = row.metrics.get("steps_total")
        if steps is not None and last is not None and steps > last:
            found.append(row.at)
        last = steps if steps is not None else last
    return found


def _union(spans: Iterable[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for low, high in sorted((low, high) for low, high in spans if low is not None and high is not None):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _longest_gap(signs: Floats, low: float, high: float) -> float:
    """signs: ascending. The longest stretch of [low, high] without one."""
    inside = signs[np.searchsorted(signs, low, "right") : np.searchsorted(signs, high, "left")]
    return float(np.diff(np.concatenate([[low], inside, [high]])).max())


def _growth(part: LevelRows, metric: str) -> float:
    """Of a counter, over the window."""
    seen = [row.metrics[metric] for row in part.telemetry if part.begin <= row.at < part.end and metric in row.metrics]
    return seen[-1] - seen[0] if seen else 0.0


def _cached_share(rows: Sequence[RequestRow]) -> float | None:
    done = [row for row in rows if row.outcome is Outcome.COMPLETED]
    prompt = sum(row.prompt_tokens for row in done)
    return sum(row.cached_prompt_tokens for row in done) / prompt if prompt else None


def reason_of(row: RequestRow) -> str:
    """Why it did not complete, as short as can be."""
    return row.reason or row.code or row.cause or str(row.outcome)
