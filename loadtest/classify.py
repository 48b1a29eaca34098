"""What a level's measures say, by rule. "Slower under load" and "hung" are different findings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadtest.judgements import LevelClass, MachineSpeed, Measures, Slope, Verdict, Window
from loadtest.machine import Machine
from loadtest.measure import LevelRows, measure
from loadtest.records import Limits, Phase

KEEPS_UP = 0.98  # completions over arrivals
GROWTH = 1 - KEEPS_UP  # of the arrivals, that stay in flight: what a slope surely has to exceed
MOST_LUCK = 0.02  # with which a level that completes less still keeps up
ERRORS = 0.001  # of arrivals, that fail
COLLAPSE = 0.8  # of the best at a lower rate
FELT = 0.1  # of the mean TTFT, over a window
SILENCE = 5.0  # seconds without a sign of life while something was in flight
LATENESS = 0.005  # seconds; or LATENESS_SHARE of the mean gap, whichever is more
LATENESS_SHARE = 0.01
CLIENT_CPU = 0.8  # of a core
LITTLE = 0.05
CRASHED = frozenset({"ENGINE_DIED", "ENGINE_STALLED", "ENGINE_STARTING", "UNAVAILABLE", "DRAINING", "DRAIN_TIMEOUT"})


def voids(part: LevelRows) -> str:
    """Why a level does not count; empty if it does."""
    level = part.level
    if level.interrupted:
        return "interrupted"
    if level.rate is None:
        return ""
    if part.client_cap:
        return f"{part.client_cap} requests were not sent: the client was full"
    limit = max(LATENESS, LATENESS_SHARE / level.rate)
    if part.lateness_p99 > limit:
        return f"sends were late: p99 {part.lateness_p99 * 1e3:.1f} ms, at most {limit * 1e3:.1f} ms count"
    if part.client_cpu > CLIENT_CPU:
        return f"a client used {part.client_cpu:.0%} of a core"
    return ""


def grade(
    parts: Sequence[LevelRows], limits: Limits, lower: Sequence[Verdict] = (), machine: Machine | None = None
) -> Verdict:
    """The verdict of one group. lower: verdicts of groups of lower rates, which say what the best was. machine: of the
    whole run."""
    void = {str(part.level.index): cause for part in parts if (cause := voids(part))}
    counted = [part for part in parts if str(part.level.index) not in void]
    level = parts[-1].level
    measures = measure(counted or parts, limits)
    speed = machine.of_all([part.level for part in counted]) if machine is not None else None
    if not counted:
        level_class, evidence = LevelClass.VOID, "; ".join(sorted(set(void.values())))
    elif level.phase is Phase.RECOVERY:
        level_class, evidence = recovered(measures)
    else:
        level_class, evidence = classify(measures, lower, speed)
    return Verdict(
        group=level.group,
        levels=[part.level.index for part in parts],
        phase=level.phase,
        level_class=level_class,
        evidence=evidence,
        measures=measures,
        rate=level.rate,
        concurrency=level.concurrency,
        multiple=level.multiple,
        void=void,
        machine=speed,
        windows=[_window(part, level.rate) for part in counted if level.rate is not None],
    )


def _window(part: LevelRows, rate: float) -> Window:
    return Window(
        rate=rate,
        seconds=part.seconds,
        arrivals=len(part.arrived),
        completed=len(part.completions[0]),
        in_flight=part.in_flight,
    )


def classify(
    measures: Measures, lower: Sequence[Verdict] = (), speed: MachineSpeed | None = None
) -> tuple[LevelClass, str]:
    """The first rule that holds, from the worst to the best."""
    crashed = {reason: count for reason, count in measures.reasons.items() if reason in CRASHED}
    if crashed:
        return LevelClass.CRASHED, ", ".join(f"{count} x {reason}" for reason, count in sorted(crashed.items()))
    if measures.longest_silence > SILENCE:
        return LevelClass.HUNG, f"{measures.longest_silence:.1f} s without a token or a step, with requests in flight"
    if keeps_up(measures):
        if luck(measures) > MOST_LUCK and _completed_share(measures) < KEEPS_UP:
            return (
                LevelClass.CANNOT_TELL,
                f"{_shares(measures)}, in a window that is off by {luck(measures):.1%} itself",
            )
        return LevelClass.KEEPS_UP, _shares(measures)
    if speed is not None and slowed(measures, speed):
        return LevelClass.CANNOT_TELL, f"{_shares(measures)}, on a machine at {speed.value:.1%} of its mean speed"
    if (fall := collapse(measures, lower)) is not None:
        return LevelClass.COLLAPSING, fall
    if _answered_share(measures) >= KEEPS_UP and measures.refused and not _rises(measures):
        return LevelClass.SATURATED_STABLE, f"{_shares(measures)}; {measures.refused} refused, TTFT does not rise"
    return LevelClass.SATURATED_GROWING, f"{_shares(measures)}; {_what_grows(measures)}"


def keeps_up(measures: Measures) -> bool:
    """A refusal is no error here but an arrival that was not completed: a queue as short as a limit on the TTFT asks
    for is filled by a burst now and then at nine tenths of what the service can do, and a burst is more than ERRORS."""
    return measures.failed <= ERRORS * measures.arrivals and not falls_behind(measures)


def falls_behind(measures: Measures) -> bool:
    """Completions below 98 % of arrivals, by more than the window's edges explain; or a number in flight that surely
    rises by more than 2 % of the arrivals. That it surely rises is not enough: near the knee the batches that a slope
    is of depend on each other, and a queue that comes and goes looks like one that grows."""
    if not measures.offered:
        return False
    trend = measures.in_flight_slope
    if _completed_share(measures) < KEEPS_UP - luck(measures):
        return True
    return trend is not None and trend.low > GROWTH * measures.offered


def slowed(measures: Measures, speed: MachineSpeed) -> bool:
    """Whether it fell behind by no more than the machine was slower than it is on average."""
    enough = KEEPS_UP * measures.offered * min(1.0, speed.value)
    return measures.failed <= ERRORS * measures.arrivals and measures.completion_rate >= enough


def luck(measures: Measures) -> float:
    """By how much of the arrivals completions may be off since a window begins and ends somewhere: two standard
    deviations of what is in flight at its end less what was at its beginning. A queue near the knee varies more than a
    Poisson number does: in simulation each edge has about twice its variance."""
    return _luck(measures.in_flight * measures.windows, measures.arrivals)


def edge_luck(window: Window) -> float:
    """The same of one window."""
    return _luck(window.in_flight, window.arrivals)


def _luck(in_flight: float, arrivals: int) -> float:
    return 2 * math.sqrt(2 * 2 * in_flight) / arrivals if arrivals else 0.0


def collapse(measures: Measures, lower: Sequence[Verdict]) -> str | None:
    """Falls of goodput or of the token rate below the best at a lower rate, beyond the noise of so few requests."""
    noise = 2 / math.sqrt(measures.completed + 1)
    for name in ("token_rate", "goodput"):
        best = max((getattr(verdict.measures, name) for verdict in lower), default=0.0)
        value = getattr(measures, name)
        if value * (1 + noise) < COLLAPSE * best:
            return f"{name.replace('_', ' ')} {value:.4g}/s is {1 - value / best:.0%} below its best, {best:.4g}/s"
    return None


def recovered(measures: Measures) -> tuple[LevelClass, str]:
    """Of an overload with probes after it."""
    if measures.recovery is None:
        return LevelClass.NOT_RECOVERED, "no probe came back to within 1.2 of the floor"
    return LevelClass.RECOVERED, f"probes back within 1.2 of the floor {measures.recovery:.2f} s after the overload"


def _answered_share(measures: Measures) -> float:
    answered = measures.completion_rate * measures.seconds + measures.refused
    return answered / measures.arrivals if measures.arrivals else 1.0


def _rises(measures: Measures) -> bool:
    """Surely, and by as much as can be felt."""
    trend, ttft = measures.ttft_slope, measures.ttft
    if trend is None or ttft is None:
        return False
    return trend.low > 0 and trend.value * measures.seconds > FELT * ttft.mean.value


def _completed_share(measures: Measures) -> float:
    return measures.completion_rate / measures.offered if measures.offered else 1.0


def _shares(measures: Measures) -> str:
    return f"completions are {_completed_share(measures):.1%} of arrivals"


def _what_grows(measures: Measures) -> str:
    if measures.ttft_slope is not None and _rises(measures):
        return f"TTFT {_slope(measures.ttft_slope, 's')}, in flight {_slope(measures.in_flight_slope)}"
    return f"in flight {_slope(measures.in_flight_slope)}"


def _slope(trend: Slope | None, unit: str = "") -> str:
    """Change a second, with its interval."""
    if trend is None:
        return "unknown"
    return f"{trend.value:+.2g}{f' {unit}' * bool(unit)}/s ({trend.low:+.2g} to {trend.high:+.2g})"
