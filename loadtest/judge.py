"""Verdicts and summary of a whole run, from its rows alone: what `python -m loadtest grade` does again at any time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from loadtest.classify import KEEPS_UP, grade, luck
from loadtest.judgements import Interval, LevelClass, MeanKnee, Measures, Score, Summary, Verdict
from loadtest.machine import Machine
from loadtest.mean_knee import TYPICAL, mean_knee
from loadtest.measure import LevelRows
from loadtest.records import Hypothesis, Limits, Phase, Run
from loadtest.usl import fit

SLO_SHARE = 0.99
# Times the knee, between which a service is full: nearer to it the queue may just be filling up, farther away it is how
# the service copes that shows.
FULL = (1.1, 1.5)
NEAR = 0.005  # rates that differ by less are one rate
SWEEP = frozenset({Phase.LADDER, Phase.BISECT, Phase.REFINE, Phase.BEYOND})


@dataclass(frozen=True)
class Bracket:
    """Rates between which a property is lost: the highest that has it and the lowest that has not. Where verdicts are
    not in order (a rate has it and a lower one has not), the bracket spans the disorder."""

    low: float | None
    high: float | None


def bracket(verdicts: Iterable[Verdict], good: Callable[[Verdict], bool]) -> Bracket:
    """verdicts: of open-loop groups that count."""
    known = [(verdict.rate, good(verdict)) for verdict in told(verdicts, good) if verdict.rate is not None]
    having = [rate for rate, has in known if has]
    lacking = [rate for rate, has in known if not has]
    if not having or not lacking:
        return Bracket(max(having, default=None), min(lacking, default=None))
    if max(having) < min(lacking):
        return Bracket(max(having), min(lacking))
    below = [rate for rate in having if rate < min(lacking)]
    above = [rate for rate in lacking if rate > max(having)]
    return Bracket(max(below, default=None), min(above, default=None))


def keeps_up(verdict: Verdict) -> bool:
    return verdict.level_class is LevelClass.KEEPS_UP


def told(verdicts: Iterable[Verdict], good: Callable[[Verdict], bool] = keeps_up) -> list[Verdict]:
    """Without those that cannot tell and lack the property, of which it may be luck or the machine."""
    return [verdict for verdict in verdicts if good(verdict) or verdict.level_class is not LevelClass.CANNOT_TELL]


def contradictions(verdicts: Iterable[Verdict], good: Callable[[Verdict], bool]) -> list[Verdict]:
    """Those that have a property which a lower rate lacks, and those that lack what a higher rate has."""
    known = told(verdicts, good)
    least = min((verdict.rate or 0.0 for verdict in known if not good(verdict)), default=math.inf)
    most = max((verdict.rate or 0.0 for verdict in known if good(verdict)), default=0.0)
    return [v for v in known if ((v.rate or 0.0) > least if good(v) else (v.rate or 0.0) < most)]


def in_order(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Those of the sweep that count, by rate."""
    counted = [
        verdict
        for verdict in verdicts
        if verdict.rate is not None and verdict.phase in SWEEP and verdict.level_class is not LevelClass.VOID
    ]
    return sorted(counted, key=lambda verdict: verdict.rate or 0.0)


def meets_limits(verdict: Verdict) -> bool:
    """At least 99 % of the arrivals completed within all limits."""
    return verdict.measures.goodput >= SLO_SHARE * verdict.measures.offered


def judge_levels(parts: Sequence[LevelRows], limits: Limits) -> list[Verdict]:
    """One verdict a group, in the order in which the groups came up."""
    groups: defaultdict[str, list[LevelRows]] = defaultdict(list)
    for part in parts:
        groups[part.level.group].append(part)
    verdicts: dict[str, Verdict] = {}
    machine = Machine([part.level for part in parts])
    for group in sorted(groups, key=lambda name: groups[name][0].level.rate or 0.0):
        rate = groups[group][0].level.rate or 0.0
        lower = [known for known in in_order(verdicts.values()) if (known.rate or 0.0) < rate]
        verdicts[group] = grade(groups[group], limits, lower, machine)
    return [verdicts[group] for group in groups]


def summarize(
    run: Run, verdicts: Sequence[Verdict], *, complete: bool, notes: Sequence[str] = (), extra: Mapping[str, float] = {}
) -> Summary:
    """extra: measures that verdicts do not have, such as the time that it all took."""
    sweep = in_order(verdicts)
    knee, mean = knee_of(sweep), mean_knee_of(sweep)
    measures = {**measures_of(sweep, verdicts, knee, mean), **extra}
    return Summary(
        knee=knee,
        slo=slo_of(sweep),
        complete=complete,
        measures=measures,
        scores=[score(hypothesis, measures) for hypothesis in run.hypotheses],
        usl=fit([(v.concurrency, v.measures.completion_rate) for v in verdicts if v.concurrency is not None]),
        notes=list(notes),
        corrected_knee=corrected_knee_of(sweep),
        mean_knee=mean,
    )


def knee_of(sweep: Sequence[Verdict]) -> Interval | None:
    """From the most that a rate which keeps up surely served to the lowest rate that does not keep up."""
    found = bracket(sweep, keeps_up)
    if found.low is None or found.high is None:
        return None
    kept = [verdict for verdict in sweep if keeps_up(verdict) and (verdict.rate or 0.0) <= found.low]
    return Interval(low=max(map(surely_served, kept)), high=found.high)


def surely_served(verdict: Verdict) -> float:
    """Of a level that keeps up: 98 % of its rate, since that is what keeping up promises, less two standard deviations
    of the number in flight, which is by how much completions may have been counted into the window by luck; over the
    machine's speed where that was surely above its mean."""
    speed = verdict.machine
    fast = 1.0 if speed is None else max(1.0, speed.value - 2 * speed.error)
    return (verdict.rate or 0.0) * (KEEPS_UP - luck(verdict.measures)) / fast


def corrected_knee_of(sweep: Sequence[Verdict]) -> Interval | None:
    """The same of rates over the machine's speed: a rate that was kept up with on a machine that was slower just then
    counts for more. None where a speed is not known."""
    if any(verdict.machine is None for verdict in sweep):
        return None
    return knee_of([replace(verdict, rate=corrected(verdict, verdict.rate or 0.0), machine=None) for verdict in sweep])


def mean_knee_of(sweep: Sequence[Verdict]) -> MeanKnee | None:
    return mean_knee([window for verdict in sweep for window in verdict.windows])


def slo_of(sweep: Sequence[Verdict]) -> Interval | None:
    """From what the highest rate that meets the limits promises to the lowest that does not meet them."""
    found = bracket(sweep, meets_limits)
    if found.low is None or found.high is None:
        return None
    return Interval(low=found.low * SLO_SHARE, high=found.high)


def measures_of(
    sweep: Sequence[Verdict], verdicts: Sequence[Verdict], knee: Interval | None, mean: MeanKnee | None = None
) -> dict[str, float]:
    """What hypotheses can speak of. Names with `at_N` are of N times the knee."""
    found: dict[str, float] = {}
    if knee is not None:
        found |= {"knee_low": knee.low, "knee_high": knee.high, "knee_width": knee.width}
    if sweep:
        found["best_goodput"] = max(served_goodput(verdict.measures) for verdict in sweep)
        found["peak_goodput"] = peak_of(sweep).value
        found["peak_token_rate"] = max(verdict.measures.token_rate for verdict in verdicts)
    keeping = [verdict for verdict in sweep if keeps_up(verdict)]
    gaps = [v.measures.little_gap for v in keeping if v.measures.little_gap is not None]
    if gaps:
        found["little_gap"] = max(gaps)
    scatter = None if mean is None else mean.scatter
    for multiple in {verdict.multiple for verdict in sweep if verdict.multiple is not None}:
        beyond = [verdict for verdict in verdicts if verdict.multiple == multiple]
        found |= _beyond(beyond, peak_of(sweep), found["best_goodput"], scatter)
    for verdict in verdicts:
        found |= _special(verdict)
    speeds = [verdict.machine for verdict in verdicts if verdict.machine is not None]
    if speeds:
        found["machine_slowest"] = min(speed.value for speed in speeds)
        found["machine_fastest"] = max(speed.value for speed in speeds)
        found["machine_unsteady_levels"] = sum(len(speed.unsteady) for speed in speeds)
    for name in (LevelClass.HUNG, LevelClass.CRASHED):
        found[f"levels_{name}"] = sum(verdict.level_class is name for verdict in verdicts)
    return found


def corrected(verdict: Verdict, rate: float) -> float:
    """Over the machine's speed, where that is known: what it would be on the machine as it was on average."""
    return rate if verdict.machine is None else rate / verdict.machine.value


@dataclass(frozen=True)
class Goodput:
    """Requests/s in the windows of some groups together, `seconds` long in all."""

    value: float
    seconds: float

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> Goodput:
        seconds = sum(verdict.measures.seconds for verdict in verdicts)
        served = sum(served_goodput(verdict.measures) * verdict.measures.seconds for verdict in verdicts)
        return cls(value=served / seconds, seconds=seconds)


def peak_of(sweep: Sequence[Verdict]) -> Goodput:
    """What the service can do: at the highest rate that it keeps up with, or, if that is more, in all levels from 1.1
    to 1.5 times it. The best of many levels would be a lucky one, and the better the more levels there are; where
    nothing keeps up, it has to do. sweep: not empty."""
    low = bracket(sweep, keeps_up).low
    if low is None:
        groups = [[verdict] for verdict in sweep]
    else:
        least, most = FULL[0] * low, FULL[1] * low * (1 + NEAR)
        groups = [[v for v in sweep if v.rate == low], [v for v in sweep if least <= (v.rate or 0.0) <= most]]
    return max((Goodput.of(group) for group in groups if group), key=lambda goodput: goodput.value)


def _beyond(verdicts: Sequence[Verdict], peak: Goodput, best: float, scatter: float | None) -> dict[str, float]:
    """verdicts: of one multiple of the knee, the level before recovery among them. best: goodput of the best level.
    scatter: of windows of one service, as of `MeanKnee`."""
    suffix, goodput = f"_at_{verdicts[0].multiple:g}", Goodput.of(verdicts)
    share = goodput.value / peak.value if peak.value else 0.0
    found = {
        f"goodput_share{suffix}": share,
        f"best_goodput_share{suffix}": goodput.value / best if best else 0.0,
        f"failed{suffix}": sum(verdict.measures.failed for verdict in verdicts),
    }
    if scatter is not None:
        windows = TYPICAL / goodput.seconds + TYPICAL / peak.seconds
        found[f"goodput_share{suffix}_error"] = share * scatter * math.sqrt(windows)
    for name in ("ttft", "refusal"):
        times = [getattr(verdict.measures, name) for verdict in verdicts]
        if known := [time.p99.value for time in times if time is not None]:
            found[f"{name}_p99{suffix}"] = max(known)
    return found


def served_goodput(measures: Measures) -> float:
    """Of what the window saw completed: goodput counts requests by when they arrived, so while a queue fills up it
    includes what is served only after the window."""
    return min(measures.goodput, measures.completion_rate)


def _special(verdict: Verdict) -> dict[str, float]:
    if verdict.concurrency == 1 and verdict.measures.service_ttft is not None:
        floor = {"floor_ttft": verdict.measures.service_ttft.p50.value}
        if verdict.measures.tpot is not None:
            floor["floor_tpot"] = verdict.measures.tpot.p50.value
        return floor
    if verdict.level_class is LevelClass.RECOVERED and verdict.measures.recovery is not None:
        return {"recovery": verdict.measures.recovery}
    return {}


def score(hypothesis: Hypothesis, measures: Mapping[str, float]) -> Score:
    measured = measures.get(hypothesis.measure)
    if measured is None:
        return Score(hypothesis=hypothesis.id, holds=None, measured=None)
    holds = {
        "<=": measured <= hypothesis.bound,
        ">=": measured >= hypothesis.bound,
        "==": measured == hypothesis.bound,
    }[hypothesis.relation]
    return Score(hypothesis=hypothesis.id, holds=holds, measured=measured)
