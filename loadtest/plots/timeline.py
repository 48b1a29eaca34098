"""What happened, second by second: within one level, and through an overload and the way back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from msgspec.structs import replace

from loadtest.judgements import Verdict
from loadtest.measure import LevelRows, reason_of
from loadtest.plots import axes
from loadtest.plots.figure import Axis, Band, Figure, Format, Kind, Panel, Rule, Scale, Series, drawn
from loadtest.quantity import number, seconds
from loadtest.reading import Reading
from loadtest.records import GpuSample, Outcome, TelemetryRow

BINS = 60  # at most; never shorter than SHORTEST
SHORTEST = 0.5
MOST_POINTS = 1500  # of a cloud
REASONS = ("amber", "red", "purple", "pink", "orange", "grey")

Bins = list[tuple[float, float]]


def levels(reading: Reading) -> list[Figure]:
    """One timeline for each group around the knee: of its last level that counts."""
    return [level_timeline(reading, verdict) for verdict in reading.around_knee]


def level_timeline(reading: Reading, verdict: Verdict) -> Figure:
    part = reading.parts_of(verdict)[-1]
    measures = verdict.measures
    return Figure(
        id=f"06-timeline-{verdict.group.replace(':', '-')}",
        title=f"Second by second at {axes.name(verdict)}: {verdict.level_class}",
        caption="The shaded stretch is the measured window, between warm-up and drain.",
        finding=f"Level {part.level.index}: {verdict.evidence}. On average {number(measures.in_flight)} in flight.",
        panels=_panels(part),
        wide=True,
    )


def recovery(reading: Reading) -> Figure | None:
    """Overload, then nothing but probes."""
    verdict = reading.recovery
    if verdict is None:
        return None
    part = reading.parts_of(verdict)[-1]
    level = part.level
    rules = [Rule(label="overload ends", x=_since(part, level.window_end), colour="grey")]
    back = verdict.measures.recovery
    if back is not None:
        rules.append(Rule(label=f"back after {seconds(back)}", x=_since(part, level.window_end + back), colour="green"))
    named = [_waits(part, reading.run.limits.ttft), *_panels(part)]
    unnamed = [replace(rule, label="") for rule in rules]
    panels = [replace(panel, rules=[*panel.rules, *(unnamed if index else rules)]) for index, panel in enumerate(named)]
    drain = verdict.measures.drain
    drained = f"Nothing was in flight {seconds(drain)} after the overload" if drain is not None else "It did not drain"
    times = f"{verdict.multiple:g} times the knee" if verdict.multiple is not None else axes.name(verdict)
    return Figure(
        id="09-recovery",
        title=f"Overload and recovery: {times}, then off",
        caption="The shaded stretch is the measured part of the overload. After it single probes go out until one has "
        "its first token as fast as a request alone, within a factor of 1.2.",
        finding=f"{drained}; {verdict.evidence}.",
        panels=panels,
        wide=True,
    )


def _panels(part: LevelRows) -> list[Panel]:
    bins = _bins(part)
    begin = [_since(part, low) for low, _ in bins]
    window = [Band(low=_since(part, part.begin), high=_since(part, part.end), label="window", colour="window")]

    def panel(title: str, y: Axis, series: Sequence[Series], height: float = 1.0) -> Panel:
        span = _since(part, part.level.end)
        x = Axis(label="since the level began", format=Format.SECONDS, low=0.0, high=span)
        return Panel(title=title, x=x, y=y, series=drawn(series), bands=window, height=height)

    count = Axis(label="requests", low=0.0)
    panels = [
        panel("Arrivals and how requests ended", Axis(label="requests/s", low=0.0), _ends(part, bins, begin)),
        panel("In flight: as clients see it, and as the service does", count, _in_flight(part, bins, begin)),
        panel("Tokens received", Axis(label="tokens/s", low=0.0), [_tokens(part, bins, begin)], 0.8),
        panel("KV cache in use", Axis(label="blocks", format=Format.SHARE, low=0.0, high=1.0), _kv(part), 0.6),
        panel("Preemptions", Axis(label="per second", low=0.0), _preemptions(part), 0.6),
        panel("CPU of the service", Axis(label="cores", low=0.0), [_plain(part, "service", _cpu, "purple")], 0.6),
        *[
            panel(title, axis, [_gpu(part, title, value, colour)], 0.6)
            for title, axis, value, colour in (
                ("GPU power", Axis(label="power", unit="W", low=0.0), lambda gpu: gpu.power, "amber"),
                ("GPU clock", Axis(label="SM clock", unit="MHz", low=0.0), lambda gpu: gpu.sm_clock, "sky"),
                ("GPU temperature", Axis(label="temperature", unit="°C"), lambda gpu: gpu.temperature, "red"),
            )
        ],
    ]
    return [panel for panel in panels if panel.series]


def _bins(part: LevelRows) -> Bins:
    level = part.level
    width = max(SHORTEST, math.ceil(2 * (level.end - level.start) / BINS) / 2)
    count = max(1, math.ceil((level.end - level.start) / width))
    return [(level.start + index * width, level.start + (index + 1) * width) for index in range(count)]


def _since(part: LevelRows, at: float) -> float:
    return at - part.level.start


def _rates(times: Sequence[float], bins: Bins) -> list[float | None]:
    begin, width = bins[0][0], bins[0][1] - bins[0][0]
    found = Counter(int((at - begin) / width) for at in times)
    return [found[index] / width for index in range(len(bins))]


def _ends(part: LevelRows, bins: Bins, begin: list[float]) -> list[Series]:
    ended = [row for row in part.rows if row.finish is not None and row.outcome is not Outcome.CENSORED]
    reasons = Counter(reason_of(row) for row in ended if row.outcome is not Outcome.COMPLETED)
    done = [row.finish for row in ended if row.outcome is Outcome.COMPLETED and row.finish is not None]
    stacked = [Series(name="completed", x=begin, y=_rates(done, bins), kind=Kind.AREA, colour="green", marks=False)]
    for index, (reason, _) in enumerate(reasons.most_common()):
        times = [
            row.finish
            for row in ended
            if row.finish is not None and row.outcome is not Outcome.COMPLETED and reason_of(row) == reason
        ]
        colour = REASONS[min(index, len(REASONS) - 1)]
        stacked.append(Series(name=reason, x=begin, y=_rates(times, bins), kind=Kind.AREA, colour=colour, marks=False))
    came = _rates([row.intended for row in part.rows], bins)
    return [*stacked, Series(name="arrivals", x=begin, y=came, kind=Kind.STEP, colour="blue", marks=False)]


def _in_flight(part: LevelRows, bins: Bins, begin: list[float]) -> list[Series]:
    y: list[float | None] = [part.in_flight_between(low, high) for low, high in bins]
    return [
        Series(name="in flight (clients)", x=begin, y=y, kind=Kind.STEP, colour="blue", marks=False),
        _plain(part, "running", lambda row: row.metrics.get("requests_running"), "green"),
        _plain(part, "waiting", lambda row: row.metrics.get("requests_waiting"), "orange"),
    ]


def _tokens(part: LevelRows, bins: Bins, begin: list[float]) -> Series:
    times = [stamp for stamp, count in part.stamps() for _ in range(count)]
    return Series(name="tokens", x=begin, y=_rates(times, bins), kind=Kind.BARS, colour="sky", marks=False)


def _kv(part: LevelRows) -> list[Series]:
    return [_plain(part, "in use", lambda row: row.metrics.get("kv_utilization"), "purple")]


def _preemptions(part: LevelRows) -> list[Series]:
    """Only where there were any."""
    seen = [(row.at, row.metrics["preemptions_total"]) for row in part.telemetry if "preemptions_total" in row.metrics]
    steps = [(at, (new - old) / (at - before)) for (before, old), (at, new) in pairwise(seen)]
    if not any(rate > 0 for _, rate in steps):
        return []
    x = [_since(part, at) for at, _ in steps]
    return [Series(name="preemptions", x=x, y=[rate for _, rate in steps], colour="red", marks=False)]


def _cpu(row: TelemetryRow) -> float | None:
    return row.server_cpu


def _gpu(part: LevelRows, name: str, value: Callable[[GpuSample], float], colour: str) -> Series:
    """Of the first GPU."""
    return _plain(part, name, lambda row: value(row.gpus[0]) if row.gpus else None, colour)


def _plain(part: LevelRows, name: str, value: Callable[[TelemetryRow], float | None], colour: str) -> Series:
    return Series(
        name=name,
        x=[_since(part, row.at) for row in part.telemetry],
        y=[value(row) for row in part.telemetry],
        colour=colour,
        marks=False,
    )


def _waits(part: LevelRows, limit: float) -> Panel:
    """Each accepted request's time to first token."""
    points = [(_since(part, row.intended), row.ttft, row.outcome) for row in part.rows if row.ttft is not None]
    step = max(1, math.ceil(len(points) / MOST_POINTS))
    kept = points[::step]
    thinned = f" (every {step}th)" if step > 1 else ""
    return Panel(
        title=f"Time to first token of accepted requests, by when they were sent{thinned}",
        x=Axis(label="since the level began", format=Format.SECONDS, low=0.0, high=_since(part, part.level.end)),
        y=Axis(label="time to first token", scale=Scale.LOG, format=Format.SECONDS),
        series=[
            Series(
                name="request",
                x=[at for at, _, _ in kept],
                y=[wait for _, wait, _ in kept],
                kind=Kind.POINTS,
                colour="blue",
            )
        ],
        rules=[Rule(label=f"limit {seconds(limit)}", y=limit)],
    )
