"""The classes of levels, each by the rows that make it one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from loadtest.classify import classify, grade, luck
from loadtest.judge import score
from loadtest.judgements import LevelClass, MachineSpeed, Verdict
from loadtest.measure import LevelRows, distribution, measure, slope
from loadtest.records import ClientReport, Hypothesis, Level, Limits, Outcome, Phase, RequestRow, TelemetryRow
from loadtest.usl import fit
from tests.loadtest.playing import level_of

LIMITS = Limits(ttft=1.0, tpot=0.1)
SECONDS, RATE = 40.0, 10.0


def completed(index: int, *, ttft: float = 0.1, took: float = 0.5) -> RequestRow:
    at = index / RATE
    return RequestRow(
        level=0,
        index=index,
        kind="chat",
        outcome=Outcome.COMPLETED,
        intended=at,
        sent=at,
        accepted=at,
        first=at + ttft,
        finish=at + took,
        chunk_us=[round(ttft * 1e6), round(took * 1e6)],
        code="OK",
    )


def ended(index: int, outcome: Outcome, code: str, reason: str, after: float = 0.01) -> RequestRow:
    return msgspec.structs.replace(
        completed(index),
        outcome=outcome,
        first=None,
        chunk_us=[],
        finish=index / RATE + after,
        code=code,
        reason=reason,
    )


def part_of(row: Callable[[int], RequestRow], telemetry: Sequence[TelemetryRow] = (), **level: object) -> LevelRows:
    """The rows go back to ten seconds before the window: it begins in balance."""
    rows = [row(index) for index in range(-100, int(SECONDS * RATE))]
    found: Level = msgspec.structs.replace(level_of(0.0, SECONDS, RATE), **level)
    return LevelRows(found, rows, telemetry)


def class_of(part: LevelRows, lower: Sequence[Verdict] = ()) -> tuple[LevelClass, str]:
    verdict = grade([part], LIMITS, lower)
    return verdict.level_class, verdict.evidence


def test_a_level_that_keeps_up() -> None:
    assert class_of(part_of(completed))[0] is LevelClass.KEEPS_UP


def test_slower_is_not_hung() -> None:
    """Ten times slower, in step with its arrivals: another latency and the same class."""
    assert class_of(part_of(lambda index: completed(index, ttft=4.0, took=4.9)))[0] is LevelClass.KEEPS_UP


def test_a_few_errors_are_enough_not_to_keep_up() -> None:
    def row(index: int) -> RequestRow:
        return ended(index, Outcome.FAILED, "INTERNAL", "ENGINE_ERROR") if index % 100 == 0 else completed(index)

    assert class_of(part_of(row))[0] is not LevelClass.KEEPS_UP


def test_growing() -> None:
    found, evidence = class_of(part_of(lambda index: completed(index, ttft=index / 40, took=index / 40 + 0.4)))
    assert found is LevelClass.SATURATED_GROWING
    assert "in flight +" in evidence


def test_too_few_completions_are_enough_however_the_number_in_flight_goes() -> None:
    """Every twentieth is cancelled at once: nothing piles up, and 5 % of the arrivals do not come out."""

    def row(index: int) -> RequestRow:
        return ended(index, Outcome.CANCELLED, "CANCELLED", "") if index % 20 == 0 else completed(index)

    found, evidence = class_of(part_of(row))
    assert found is LevelClass.SATURATED_GROWING
    assert "95.0%" in evidence


def test_a_number_in_flight_that_surely_rises_is_enough_whatever_the_edges_make_of_the_completions() -> None:
    """It rises by a tenth of the arrivals, and falls back just before the window ends."""

    def row(index: int) -> RequestRow:
        return completed(index, took=min(0.5 + max(index, 0) / RATE / 10, SECONDS - 0.01 - min(index, 395) / RATE))

    found, evidence = class_of(part_of(row))
    assert "100.2%" in evidence
    assert found is LevelClass.SATURATED_GROWING


def test_what_the_edges_of_a_window_explain_is_no_loss() -> None:
    """Five in flight of 400: 2.2 % of the arrivals may be missing by luck, and of a pair of such windows 1.6 %."""
    late = part_of(lambda index: completed(index, took=1.6 if index >= 384 else 0.5))
    two = grade([late, late], LIMITS)
    assert "97.2%" in two.evidence
    assert two.level_class is LevelClass.KEEPS_UP


def test_a_window_so_short_that_luck_decides_cannot_tell() -> None:
    found, evidence = class_of(part_of(lambda index: completed(index, took=1.6 if index >= 384 else 0.5)))
    assert found is LevelClass.CANNOT_TELL
    assert "97.2%" in evidence
    assert "off by 2." in evidence
    assert class_of(part_of(completed))[0] is LevelClass.KEEPS_UP  # all of its arrivals


@pytest.mark.parametrize(
    ("speed", "share", "expected"),
    [
        (None, 20, LevelClass.SATURATED_GROWING),
        (1.02, 20, LevelClass.SATURATED_GROWING),
        (1.0, 20, LevelClass.SATURATED_GROWING),
        (0.98, 20, LevelClass.SATURATED_GROWING),
        (0.96, 20, LevelClass.CANNOT_TELL),
        (0.96, 10, LevelClass.SATURATED_GROWING),
        (0.9, 10, LevelClass.CANNOT_TELL),
    ],
)
def test_a_level_that_a_slower_machine_explains_cannot_tell(
    speed: float | None, share: int, expected: LevelClass
) -> None:
    """One of `share` is cancelled at once."""

    def row(index: int) -> RequestRow:
        return ended(index, Outcome.CANCELLED, "CANCELLED", "") if index % share == 0 else completed(index)

    machine = None if speed is None else MachineSpeed(value=speed, error=0.01)
    found, evidence = classify(measure([part_of(row)], LIMITS), (), machine)
    assert found is expected
    assert ("at 9" in evidence) == (expected is LevelClass.CANNOT_TELL)


def test_a_queue_that_comes_and_goes_is_no_growth() -> None:
    """It surely rises, by some 3 % of the arrivals, but not surely by 2 %, and nothing is left when the window ends."""

    def row(index: int) -> RequestRow:
        at = max(index, 0) / RATE
        wave = 0.025 * at + (1.0 if int(at / 4) % 2 else 0.0)
        return completed(index, took=min(0.5 + wave, SECONDS - 0.01 - min(index, 395) / RATE))

    part = part_of(row)
    trend = measure([part], LIMITS).in_flight_slope
    assert trend is not None
    assert 0 < trend.low < 0.02 * RATE < trend.value
    assert class_of(part)[0] is LevelClass.KEEPS_UP


def test_a_few_refusals_are_arrivals_not_completed_and_no_failures() -> None:
    def row(index: int) -> RequestRow:
        refused = index % 100 == 0
        return ended(index, Outcome.REFUSED, "RESOURCE_EXHAUSTED", "QUEUE_FULL") if refused else completed(index)

    found, evidence = class_of(part_of(row))
    assert found is LevelClass.KEEPS_UP
    assert "99.0%" in evidence


def test_luck_shrinks_with_windows() -> None:
    """Five in flight of 400: 4 sqrt(5) of the arrivals of one window, half the share of four."""
    part = part_of(completed)
    one, four = measure([part], LIMITS), measure([part] * 4, LIMITS)
    assert luck(one) == pytest.approx(4 * one.in_flight**0.5 / 400)
    assert luck(four) == pytest.approx(luck(one) / 2)


def test_refusals_that_fill_the_gap_are_stable() -> None:
    def row(index: int) -> RequestRow:
        return ended(index, Outcome.REFUSED, "RESOURCE_EXHAUSTED", "QUEUE_FULL") if index % 2 else completed(index)

    found, evidence = class_of(part_of(row))
    assert found is LevelClass.SATURATED_STABLE
    assert "200 refused" in evidence


def test_waits_that_grow_beside_refusals_are_named() -> None:
    """Half is refused, nothing piles up, and first tokens come later and later."""

    def row(index: int) -> RequestRow:
        if index % 2:
            return ended(index, Outcome.REFUSED, "RESOURCE_EXHAUSTED", "QUEUE_FULL")
        return completed(index, ttft=0.1 + max(index, 0) / RATE / 200)

    found, evidence = class_of(part_of(row))
    assert found is LevelClass.SATURATED_GROWING
    assert "TTFT +0.005 s/s" in evidence


def test_collapse_is_a_fall_below_the_best_at_a_lower_rate() -> None:
    def row(index: int) -> RequestRow:
        return ended(index, Outcome.REFUSED, "RESOURCE_EXHAUSTED", "QUEUE_FULL") if index % 2 else completed(index)

    best = grade([part_of(completed, rate=8.0)], LIMITS)
    found, evidence = class_of(part_of(row), [best])
    assert found is LevelClass.COLLAPSING
    assert "below its best" in evidence


@pytest.mark.parametrize("reason", ["ENGINE_DIED", "ENGINE_STALLED", ""])
def test_a_crash(reason: str) -> None:
    def row(index: int) -> RequestRow:
        return ended(index, Outcome.FAILED, "UNAVAILABLE", reason) if index == 5 else completed(index)

    found, evidence = class_of(part_of(row))
    assert found is LevelClass.CRASHED
    assert evidence == f"1 x {reason or 'UNAVAILABLE'}"


def hanging(index: int) -> RequestRow:
    return completed(index) if index < 100 else ended(index, Outcome.CENSORED, "", "", after=SECONDS - index / RATE)


def test_no_token_and_no_step_while_something_is_in_flight_is_a_hang() -> None:
    found, evidence = class_of(part_of(hanging))
    assert found is LevelClass.HUNG
    assert "without a token or a step" in evidence


def test_steps_without_tokens_are_no_hang() -> None:
    """A long prompt: nothing comes out for a while, but the service's own step counter moves."""
    steps = [TelemetryRow(at=float(at), level=0, metrics={"steps_total": float(at)}) for at in range(int(SECONDS))]
    assert class_of(part_of(hanging, steps))[0] is not LevelClass.HUNG


def test_silence_while_nothing_is_in_flight_is_no_hang() -> None:
    rows = [completed(index) for index in (0, 1, 300, 301)]
    verdict = grade([LevelRows(level_of(0.0, SECONDS, 0.1), rows)], LIMITS)
    assert verdict.level_class is LevelClass.KEEPS_UP


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"clients": [ClientReport(client=0, cpu=0.9, lag_p50=0.0, lag_p99=0.0, lag_max=0.0)]}, "90% of a core"),
        ({"interrupted": True}, "interrupted"),
    ],
)
def test_void_levels(change: dict[str, object], cause: str) -> None:
    found, evidence = class_of(part_of(completed, **change))
    assert found is LevelClass.VOID
    assert cause in evidence


def test_late_sends_void_a_level() -> None:
    late = part_of(lambda index: msgspec.structs.replace(completed(index), sent=index / RATE + 0.006))
    assert "sends were late: p99 6.0 ms" in class_of(late)[1]
    in_time = part_of(lambda index: msgspec.structs.replace(completed(index), sent=index / RATE + 0.004))
    assert class_of(in_time)[0] is LevelClass.KEEPS_UP


def test_recovery_is_what_the_probes_say() -> None:
    assert class_of(part_of(completed, phase=Phase.RECOVERY, recovery=1.5))[0] is LevelClass.RECOVERED
    assert class_of(part_of(completed, phase=Phase.RECOVERY))[0] is LevelClass.NOT_RECOVERED


def test_quantiles_that_fall_among_lower_bounds_are_lower_bounds() -> None:
    found = distribution([1.0] * 94, [5.0] * 6)
    assert found is not None
    assert (found.p50.value, found.p50.censored) == (1.0, False)
    assert (found.p95.value, found.p95.censored) == (5.0, True)
    assert found.mean.censored
    assert distribution([]) is None


def test_a_known_value_above_a_lower_bound_is_not_certain() -> None:
    found = distribution([1.0, 2.0, 3.0, 10.0], [2.5])
    assert found is not None
    assert not found.p50.censored or found.p50.value == 2.5
    assert (found.p99.value, found.p99.censored) == (10.0, True)


def test_slopes_say_how_sure_they_are() -> None:
    sure = slope([(float(x), 2.0 * x + (-1) ** x * 0.01) for x in range(10)])
    assert sure is not None
    assert sure.low < 2.0 < sure.high
    assert sure.low > 1.9
    unsure = slope([(float(x), (-1.0) ** x) for x in range(10)])
    assert unsure is not None
    assert unsure.low < 0 < unsure.high
    assert slope([(0.0, 1.0)]) is None


def test_goodput_wants_every_limit_kept() -> None:
    def row(index: int) -> RequestRow:
        return completed(index, ttft=(0.1, 2.0, 0.1)[index % 3], took=(0.15, 2.05, 5.0)[index % 3])

    measures = measure([part_of(row)], LIMITS)
    assert measures.goodput == pytest.approx(RATE / 3, rel=0.01)


def test_littles_law_finds_lost_ends() -> None:
    whole = measure([part_of(completed)], LIMITS)
    assert whole.little_gap is not None
    assert whole.little_gap < 0.05
    lost = part_of(lambda index: completed(index, took=100.0) if index % 4 == 0 else completed(index))
    assert (measure([lost], LIMITS).little_gap or 0.0) > 0.5


def test_littles_law_inside_the_service() -> None:
    """Ten requests/s of half a second each: five in flight."""

    def telemetry(in_flight: float) -> list[TelemetryRow]:
        return [
            TelemetryRow(
                at=float(at),
                level=0,
                metrics={"requests_running": in_flight, "requests_waiting": 1.0, "request_seconds_sum": 5.0 * at},
            )
            for at in range(int(SECONDS))
        ]

    assert measure([part_of(completed, telemetry(4.0))], LIMITS).server_little_gap == pytest.approx(0.0, abs=1e-9)
    assert measure([part_of(completed, telemetry(9.0))], LIMITS).server_little_gap == pytest.approx(0.5)
    assert measure([part_of(completed)], LIMITS).server_little_gap is None


def test_a_group_pools_its_levels() -> None:
    first = part_of(completed)
    second = part_of(lambda index: completed(index, ttft=0.3))
    verdict = grade([first, second], LIMITS)
    assert verdict.measures.arrivals == 800
    assert verdict.measures.seconds == 2 * SECONDS
    assert verdict.measures.ttft is not None
    assert verdict.measures.ttft.mean.value == pytest.approx(0.2)


def test_hypotheses_are_scored_by_code() -> None:
    def of(relation: str, bound: float, measure: str = "x") -> bool | None:
        hypothesis = Hypothesis(id="h", text="t", measure=measure, relation=relation, bound=bound)
        return score(hypothesis, {"x": 2.0}).holds

    assert (of("<=", 2.0), of("<=", 1.9), of(">=", 2.0), of(">=", 2.1), of("==", 2.0)) == (
        True,
        False,
        True,
        False,
        True,
    )
    assert of("<=", 2.0, "y") is None


def test_the_scalability_law_is_fitted_where_it_holds_and_refused_below_six_points() -> None:
    def rate(n: int) -> float:
        return 10.0 * n / (1 + 0.05 * (n - 1) + 0.001 * n * (n - 1))

    found = fit([(n, rate(n)) for n in (1, 2, 4, 8, 16, 32, 64)])
    assert found is not None
    assert (found.rate, found.contention, found.coherency) == pytest.approx((10.0, 0.05, 0.001), rel=1e-3)
    assert found.peak == pytest.approx((0.95 / 0.001) ** 0.5, rel=1e-3)
    assert found.residual < 1e-6
    assert fit([(n, rate(n)) for n in (1, 2, 4, 8, 16)]) is None
    linear = fit([(n, 3.0 * n) for n in (1, 2, 4, 8, 16, 32)])
    assert linear is not None
    assert linear.peak is None
