"""Two results, paired level by level: do they agree, or is the second faster or slower, or can it not be told?

Every figure of a pair becomes a ratio with a bootstrap interval, turned so that above 1 means "the second is faster".
Inside a margin around 1 they are the same; off 1 with its middle beyond the margin, one is faster; else it cannot be
told. The margin stands for what differs between two runs of the same thing, which no interval of one run has in it.

Where both runs measured the machine's speed, ratios are of times at one speed of it, and intervals include how well
that is known; the ratios as measured stand beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from loadtest.bootstrap import DRAWS, Batches, Samples, interval
from loadtest.correction import Correction
from loadtest.judge import corrected, keeps_up, told
from loadtest.judgements import Distribution, LevelClass, Measures, Verdict
from loadtest.measure import LevelRows, Points, is_good, measure
from loadtest.plots import axes
from loadtest.plots.figure import Format
from loadtest.quantity import seconds
from loadtest.reading import Reading
from loadtest.records import Limits, Phase

MARGIN = 0.05  # within it two figures are the same
KNEE_MARGIN = 0.10  # of two intervals of up to 5 %
CONFIDENCE = 0.95
NEAR = 0.005  # rates that differ by less are one rate
BELOW_KNEE = 0.9  # of the knee; above it latencies are a queue's, which doubles where the service is 1 % slower


class CompareError(Exception):
    """The two cannot be compared; the message says why."""


class Finding(StrEnum):
    """Of the second result against the first."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class Figure:
    """What is compared. `decides`: without it being the same, the whole is not called the same. `load_bound`: a level
    that keeps up has it from the load and not from the service."""

    name: str
    format: Format
    lower_is_better: bool
    value: Callable[[Measures], float | None]
    samples: Callable[[Batches, Limits], Samples]
    decides: bool = True
    load_bound: bool = False


@dataclass(frozen=True)
class Change:
    """`speed`: how many times as fast the second is on an equally fast machine, with its interval; None where it could
    not be had. `raw`, `first`, `second`: as measured."""

    figure: str
    finding: Finding
    speed: float | None = None
    low: float | None = None
    high: float | None = None
    raw: float | None = None
    first: float | None = None
    second: float | None = None


@dataclass(frozen=True)
class Side:
    """One side of a pair: its measures under common limits, its batches drawn again and again, and draws of what the
    machine's speed may have been besides."""

    measures: Measures
    batches: Batches
    doubts: Samples

    @classmethod
    def both(
        cls,
        first: Sequence[LevelRows],
        second: Sequence[LevelRows],
        limits: Limits,
        correction: Correction,
        generator: np.random.Generator,
    ) -> tuple[Side, Side]:
        """Drawn together where they had the same arrivals."""
        speeds = [correction.speeds(side, parts) for side, parts in enumerate((first, second))]
        one = Batches.draw(first, generator, speeds[0])
        if same_arrivals(first, second):
            other = one.alongside(second, speeds[1])
        else:
            other = Batches.draw(second, generator, speeds[1])
        errors = [correction.error(side, parts) for side, parts in enumerate((first, second))]
        doubts = [np.exp(generator.normal(0.0, error, DRAWS)) for error in errors]
        return cls(measure(first, limits), one, doubts[0]), cls(measure(second, limits), other, doubts[1])


@dataclass(frozen=True)
class Pair:
    """`near_knee`: of either run."""

    name: str
    first: Verdict
    second: Verdict
    changes: list[Change]
    near_knee: bool = False


@dataclass(frozen=True)
class Comparison:
    """`overall`: over all pairs that can show a figure, and the knee. `unpaired`: levels of either that have no
    partner. `cautions`: in what the two runs differ besides what they measured. `correction`: for the machine."""

    first: Reading
    second: Reading
    pairs: list[Pair]
    overall: list[Change]
    finding: Finding
    reason: str
    correction: Correction
    unpaired: list[str] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)


def compare(first: Reading, second: Reading, seed: int = 1) -> Comparison:
    """Raises CompareError if no level of the one has a partner in the other."""
    partners = pair_up(first, second)
    if not partners:
        raise CompareError("no level of the one result has a partner in the other")
    generator = np.random.default_rng(seed)
    limits, correction = first.run.limits, Correction.between(first, second)
    pairs, drawn = [], []
    for name, one, other in partners:
        sides = Side.both(first.parts_of(one), second.parts_of(other), limits, correction, generator)
        speeds = {figure.name: _speeds(figure, *sides, limits) for figure in FIGURES}
        changes = [_change(figure, *sides, speeds[figure.name], limits) for figure in FIGURES]
        pairs.append(Pair(name, one, other, changes, near_knee(first, one) or near_knee(second, other)))
        drawn.append(speeds)
    overall = _overall(pairs, drawn)
    overall += [knee] if (knee := knee_change(first, second, correction)) is not None else []
    return Comparison(
        first,
        second,
        pairs,
        overall,
        *conclude(overall),
        correction,
        unpaired(first, second, partners),
        cautions(first, second, correction),
    )


# --- pairs -----------------------------------------------------------------------------------------------------------


def pair_up(first: Reading, second: Reading) -> list[tuple[str, Verdict, Verdict]]:
    """The same concurrency; the same rate; else the same multiple of each one's own knee. Void levels have none."""
    others = [verdict for verdict in second.verdicts if verdict.level_class is not LevelClass.VOID]
    found = []
    for verdict in first.verdicts:
        if verdict.level_class is LevelClass.VOID:
            continue
        for name, matches in _partners(verdict):
            other = next((other for other in others if matches(other)), None)
            if other is not None:
                others.remove(other)
                found.append((name, verdict, other))
                break
    return found


def same_arrivals(first: Sequence[LevelRows], second: Sequence[LevelRows]) -> bool:
    """Whether two groups' levels had the same schedules, be it stretched in time: classes, lengths and gaps are of the
    seed alone, and in closed loops the service decides when what comes."""

    def drawn(parts: Sequence[LevelRows]) -> list[tuple[int, str, int]]:
        return [(part.level.seed, part.level.process, len(part.arrived)) for part in parts]

    return all(part.level.rate is not None for part in (*first, *second)) and drawn(first) == drawn(second)


def near_knee(reading: Reading, verdict: Verdict) -> bool:
    """On a slower machine the knee is nearer."""
    knee = reading.summary.corrected_knee or reading.summary.knee
    if knee is None or verdict.rate is None:
        return False
    rate = corrected(verdict, verdict.rate) if reading.summary.corrected_knee else verdict.rate
    return rate > BELOW_KNEE * knee.low


def _partners(verdict: Verdict) -> list[tuple[str, Callable[[Verdict], bool]]]:
    """Ways to find a partner, best first, with what such a pair is called."""
    ways: list[tuple[str, Callable[[Verdict], bool]]] = [(axes.name(verdict), lambda o: o.group == verdict.group)]
    rate = verdict.rate
    if rate is not None and verdict.group.startswith("rate:"):
        ways.append(
            (
                axes.name(verdict),
                lambda o: o.group.startswith("rate:") and abs((o.rate or 0.0) / rate - 1) < NEAR,
            )
        )
    if verdict.phase is Phase.BEYOND and verdict.multiple is not None:
        times = verdict.multiple
        ways.append((f"{times:g} × its own knee", lambda o: o.phase is Phase.BEYOND and o.multiple == times))
    if verdict.phase is Phase.RECOVERY:
        ways = [(f"recovery from {ways[0][0]}", ways[0][1])]
    return ways


def unpaired(first: Reading, second: Reading, partners: Sequence[tuple[str, Verdict, Verdict]]) -> list[str]:
    paired = {id(verdict) for _, *both in partners for verdict in both}
    return [
        f"{name}: {axes.name(verdict)}"
        for name, reading in (("first", first), ("second", second))
        for verdict in reading.verdicts
        if id(verdict) not in paired
    ]


def _limits(limits: Limits) -> str:
    return f"TTFT {seconds(limits.ttft)}, TPOT {seconds(limits.tpot)}"


def cautions(first: Reading, second: Reading, correction: Correction) -> list[str]:
    one, other = first.run, second.run
    fields = (
        ("machine", one.fingerprint.cpu, other.fingerprint.cpu),
        ("cores", one.fingerprint.cores, other.fingerprint.cores),
        ("GPUs", [gpu.name for gpu in one.fingerprint.gpus], [gpu.name for gpu in other.fingerprint.gpus]),
        ("model", one.target.model, other.target.model),
        ("mix", one.mix, other.mix),
        ("limits (the first's are used for both)", _limits(one.limits), _limits(other.limits)),
    )
    found = [f"They differ in {name}: {a} and {b}." for name, a, b in fields if a != b]
    found += [
        f"The {name} run did not finish."
        for name, reading in (("first", first), ("second", second))
        if not reading.summary.complete
    ]
    if correction.why:
        found.append(f"Not corrected for the machine's speed: {correction.why}.")
    return found


# --- figures ---------------------------------------------------------------------------------------------------------


def _of(name: str, share: str) -> Callable[[Measures], float | None]:
    def value(measures: Measures) -> float | None:
        found: Distribution | None = getattr(measures, name)
        return None if found is None else float(getattr(found, share).value)

    return value


def _good(part: LevelRows, limits: Limits, speed: float) -> Points:
    """On a machine of this speed, where times keep the limits at speed 1."""
    there = Limits(ttft=limits.ttft / speed, tpot=limits.tpot / speed)
    times = np.array([row.intended for row in part.arrived if is_good(row, there)])
    return times, np.ones(len(times))


def _latency(name: str, share: str, values: Callable[[LevelRows], Points], *, decides: bool) -> Figure:
    quantile = int(share.removeprefix("p")) / 100
    return Figure(
        name=f"{name.upper()} {share}",
        format=Format.SECONDS,
        lower_is_better=True,
        value=_of(name, share),
        samples=lambda batches, limits: batches.quantiles(values, quantile),
        decides=decides,
    )


# End-to-end latency follows the lengths of the outputs, which another seed draws anew, and goodput beyond the knee
# jumps where the wait in a full queue passes the limit: without them two results can agree.
FIGURES = (
    _latency("ttft", "p50", lambda part: part.waits, decides=True),
    _latency("ttft", "p99", lambda part: part.waits, decides=False),
    _latency("tpot", "p50", lambda part: part.tpots, decides=True),
    _latency("tpot", "p99", lambda part: part.tpots, decides=False),
    _latency("e2e", "p50", lambda part: part.e2es, decides=False),
    _latency("e2e", "p99", lambda part: part.e2es, decides=False),
    Figure(
        name="completed/s",
        format=Format.NUMBER,
        lower_is_better=False,
        value=lambda measures: measures.completion_rate,
        samples=lambda batches, limits: batches.rates(lambda part, speed: part.completions),
        load_bound=True,
    ),
    Figure(
        name="goodput/s",
        format=Format.NUMBER,
        lower_is_better=False,
        value=lambda measures: measures.goodput,
        samples=lambda batches, limits: batches.rates(lambda part, speed: _good(part, limits, speed)),
        decides=False,
        load_bound=True,
    ),
    Figure(
        name="tokens/s",
        format=Format.NUMBER,
        lower_is_better=False,
        value=lambda measures: measures.token_rate,
        samples=lambda batches, limits: batches.rates(lambda part, speed: part.messages),
        load_bound=True,
    ),
)


def shows(figure: Figure, pair: Pair) -> bool:
    """Whether a pair can show a difference of the service. Latencies of a level that does not keep up, or hardly does,
    are those of its queue; rates of one that does are those of the load."""
    if pair.first.concurrency is not None:
        return True
    known = told((pair.first, pair.second))
    both = len(known) == 2 and all(map(keeps_up, known))
    neither = len(known) == 2 and not any(map(keeps_up, known))
    return neither if figure.load_bound else both and not pair.near_knee


# --- judgements ------------------------------------------------------------------------------------------------------


def find(low: float, high: float, margin: float = MARGIN) -> Finding:
    """Of an interval of a speed."""
    if low >= 1 / (1 + margin) and high <= 1 + margin:
        return Finding.SAME
    middle = math.sqrt(max(0.0, low * high))
    if low > 1 and middle > 1 + margin:
        return Finding.FASTER
    return Finding.SLOWER if high < 1 and middle < 1 / (1 + margin) else Finding.CANNOT_TELL


def knee_change(first: Reading, second: Reading, correction: Correction) -> Change | None:
    """Of their middles; the intervals are independent, so their widths add up as squares. None where a run has no
    knee."""
    one, other = correction.knees(first, second)
    measured = first.summary.knee, second.summary.knee
    if one is None or other is None or measured[0] is None or measured[1] is None:
        return None
    speed, width = other.middle / one.middle, math.hypot(one.width, other.width)
    low, high = speed * (1 - width / 2), speed * (1 + width / 2)
    raw = [knee.middle for knee in measured if knee is not None]
    return Change("knee", find(low, high, KNEE_MARGIN), speed, low, high, raw[1] / raw[0], *raw)


def conclude(overall: Sequence[Change]) -> tuple[Finding, str]:
    """The whole from its figures."""
    faster = [change for change in overall if change.finding is Finding.FASTER]
    slower = [change for change in overall if change.finding is Finding.SLOWER]
    if faster and slower:
        return Finding.CANNOT_TELL, f"faster in {_names(faster)}, slower in {_names(slower)}"
    if faster or slower:
        finding = Finding.FASTER if faster else Finding.SLOWER
        every = len(faster or slower) == len(overall)
        return finding, "in every figure" if every else f"in {_names(faster or slower)}"
    deciding = {figure.name for figure in FIGURES if figure.decides} | {"knee"}
    open_ones = [c for c in overall if c.finding is Finding.CANNOT_TELL and c.figure in deciding]
    if open_ones:
        return Finding.CANNOT_TELL, f"the intervals are too wide in {_names(open_ones)}"
    return Finding.SAME, f"within {MARGIN:.0%} ({KNEE_MARGIN:.0%} for the knee)"


def _names(changes: Sequence[Change]) -> str:
    return ", ".join(change.figure for change in changes)


def _speeds(figure: Figure, first: Side, second: Side, limits: Limits) -> Samples:
    """Draws of how many times as fast the second is; empty where a side has no value."""
    before, after = figure.samples(first.batches, limits), figure.samples(second.batches, limits)
    if not len(before) or not len(after):
        return np.array([])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (before / after if figure.lower_is_better else after / before) * first.doubts / second.doubts
    return np.where(np.isfinite(ratio) & (ratio > 0), ratio, np.nan)


def _change(figure: Figure, first: Side, second: Side, speeds: Samples, limits: Limits) -> Change:
    before, after = figure.value(first.measures), figure.value(second.measures)
    found = interval(speeds, CONFIDENCE) if len(speeds) else None
    if found is None or not before or not after:
        return Change(figure.name, Finding.CANNOT_TELL, first=before, second=after)
    fair = [float(figure.samples(side.batches.once, limits)[0]) for side in (first, second)]
    speed, raw = (a / b if figure.lower_is_better else b / a for a, b in (fair, (before, after)))
    return Change(figure.name, find(*found), speed, *found, raw, before, after)


def _overall(pairs: Sequence[Pair], drawn: Sequence[dict[str, Samples]]) -> list[Change]:
    """Geometric means over the pairs that can show a figure. Their intervals hold all at once (Bonferroni)."""
    confidence = 1 - (1 - CONFIDENCE) / len(FIGURES)
    found = []
    for figure in FIGURES:
        logs, points, raws = [], [], []
        for pair, speeds in zip(pairs, drawn, strict=True):
            change = next(change for change in pair.changes if change.figure == figure.name)
            if shows(figure, pair) and change.speed is not None and change.raw is not None:
                logs.append(np.log(speeds[figure.name]))
                points.append(math.log(change.speed))
                raws.append(math.log(change.raw))
        ends = interval(np.exp(np.mean(logs, axis=0)), confidence) if logs else None
        if ends is None:
            continue
        speed, raw = (math.exp(sum(values) / len(values)) for values in (points, raws))
        found.append(Change(figure.name, find(*ends), speed, *ends, raw))
    return found
