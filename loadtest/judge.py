"""Verdicts and summary of a whole run, from its rows alone: what `python -m loadtest grade` does again at any time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from loadtest.classify import KEEPS_UP, grade, luck
from loadtest.judgements import Interval, LevelClass, Measures, Score, Summary, Verdict
from loadtest.machine import Machine
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
    known = [(verdict.rate, good(verdict)) for verdict in verdicts if verdict.rate is not None]
    having = [rate for rate, has in known if has]
    lacking = [rate for rate, has in known if not has]
    if not having or not lacking:
        return Bracket(max(having, default=None), min(lacking, default=None))
    if max(having) < min(lacking):
        return Bracket(max(having), min(lacking))
    below = [rate for rate in having if rate < min(lacking)]
    above = [rate for rate in lacking if rate > max(having)]
    return Bracket(max(below, default=None), min(above, default=None))


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
    for group in sorted(groups, key=lambda name: groups[name][0].level.rate or 0.0):
        rate = groups[group][0].level.rate or 0.0
        lower = [known for known in in_order(verdicts.values()) if (known.rate or 0.0) < rate]
        verdicts[group] = grade(groups[group], limits, lower)
    machine = Machine([part.level for part in parts])
    return [machine.with_speed(verdicts[group]) for group in groups]


def summarize(
    run: Run, verdicts: Sequence[Verdict], *, complete: bool, notes: Sequence[str] = (), extra: Mapping[str, float] = {}
) -> Summary:
    """extra: measures that verdicts do not have, such as the time that it all took."""
    sweep = in_order(verdicts)
    knee = knee_of(sweep)
    measures = {**measures_of(sweep, verdicts, knee), **extra}
    return Summary(
        knee=knee,
        slo=_interval(bracket(sweep, meets_limits), SLO_SHARE),
        complete=complete,
        measures=measures,
        scores=[score(hypothesis, measures) for hypothesis in run.hypotheses],
        usl=fit([(v.concurrency, v.measures.completion_rate) for v in verdicts if v.concurrency is not None]),
        notes=list(notes),
        corrected_knee=corrected_knee_of(sweep),
    )


def knee_of(sweep: Sequence[Verdict]) -> Interval | None:
    """Its low end is what the highest rate that keeps up surely served: 98 % of it, since that is what keeping up
    promises, less two standard deviations of the number in flight, which is by how much completions may have been
    counted into the window by luck. Its high end is the lowest rate that does not keep up."""
    found = _knee_bracket(sweep)
    if found.low is None:
        return None
    kept = next(verdict.measures for verdict in sweep if verdict.rate == found.low)
    return _interval(found, KEEPS_UP - luck(kept))


def _knee_bracket(sweep: Iterable[Verdict]) -> Bracket:
    return bracket(filter(_can_tell, sweep), lambda verdict: verdict.level_class is LevelClass.KEEPS_UP)


def _can_tell(verdict: Verdict) -> bool:
    """Not of a level beyond the knee that only luck lets keep up: its window is short, since it is to show something
    else, and 95 % completed may then be 98."""
    measures = verdict.measures
    lucky = verdict.level_class is LevelClass.KEEPS_UP and measures.completion_rate < KEEPS_UP * measures.offered
    return verdict.phase is not Phase.BEYOND or not lucky


def corrected_knee_of(sweep: Sequence[Verdict]) -> Interval | None:
    """The same of rates over the machine's speed: a rate that was kept up with on a machine that was slower just then
    counts for more. None where a speed is not known."""
    if any(verdict.machine is None for verdict in sweep):
        return None
    return knee_of([replace(verdict, rate=corrected(verdict, verdict.rate or 0.0)) for verdict in sweep])


def _interval(found: Bracket, share: float) -> Interval | None:
    """From the rate that was surely served (the property promises `share` of it) to the rate that was surely not."""
    if found.low is None or found.high is None:
        return None
    return Interval(low=found.low * share, high=found.high)


def measures_of(sweep: Sequence[Verdict], verdicts: Sequence[Verdict], knee: Interval | None) -> dict[str, float]:
    """What hypotheses can speak of. Names with `at_N` are of N times the knee."""
    found: dict[str, float] = {}
    if knee is not None:
        found |= {"knee_low": knee.low, "knee_high": knee.high, "knee_width": knee.width}
    if sweep:
        found["best_goodput"] = max(served_goodput(verdict.measures) for verdict in sweep)
        found["peak_goodput"] = _corrected_goodput(peak_of(sweep))
        found["peak_token_rate"] = max(verdict.measures.token_rate for verdict in verdicts)
    keeping = [verdict for verdict in sweep if verdict.level_class is LevelClass.KEEPS_UP]
    gaps = [v.measures.little_gap for v in keeping if v.measures.little_gap is not None]
    if gaps:
        found["little_gap"] = max(gaps)
    for verdict in sweep:
        if verdict.multiple is not None:
            found |= _beyond(verdict, peak_of(sweep), found["best_goodput"])
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


def _corrected_goodput(verdict: Verdict) -> float:
    return corrected(verdict, served_goodput(verdict.measures))


def peak_of(sweep: Sequence[Verdict]) -> Verdict:
    """The group that shows what the service can do: the highest rate that it keeps up with, or, if that is more, the
    median group from 1.1 to 1.5 times it. The best of many levels would be a lucky one, and the better the more levels
    there are; where nothing keeps up, it has to do. sweep: not empty."""
    low = _knee_bracket(sweep).low
    ordered = sorted(sweep, key=_corrected_goodput)
    if low is None:
        return ordered[-1]
    least, most = FULL[0] * low, FULL[1] * low * (1 + NEAR)
    full = [verdict for verdict in ordered if least <= (verdict.rate or 0.0) <= most]
    knee = next(verdict for verdict in ordered if verdict.rate == low)
    return max([knee, *full[len(full) // 2 :][:1]], key=_corrected_goodput)


def _beyond(verdict: Verdict, peak: Verdict, best: float) -> dict[str, float]:
    """`best_goodput_share`: uncorrected, of the best of all."""
    measures, suffix = verdict.measures, f"_at_{verdict.multiple:g}"
    most = _corrected_goodput(peak)
    share = _corrected_goodput(verdict) / most if most else 0.0
    found = {
        f"goodput_share{suffix}": share,
        f"best_goodput_share{suffix}": served_goodput(measures) / best if best else 0.0,
    }
    if verdict.machine is not None and peak.machine is not None and verdict is not peak:
        found[f"goodput_share{suffix}_error"] = share * math.hypot(verdict.machine.error, peak.machine.error)
    if measures.ttft is not None:
        found[f"ttft_p99{suffix}"] = measures.ttft.p99.value
    if measures.refusal is not None:
        found[f"refusal_p99{suffix}"] = measures.refusal.p99.value
    found[f"failed{suffix}"] = measures.failed
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
