"""The real client against servers of known behaviour: what the instrument says is what was there."""

from __future__ import annotations

import os
import random
import statistics
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from loadtest.arrivals import flat, times
from loadtest.classify import grade
from loadtest.judgements import LevelClass
from loadtest.measure import measure
from loadtest.orders import Entry, Manner, Transport
from loadtest.records import ArrivalProcess, Limits, Outcome
from tests.loadtest.known_server import Behaviour
from tests.loadtest.playing import play, waits
from tests.loadtest.simulated import queue_waits

LIMITS = Limits(ttft=1.0, tpot=0.1)
POISSON = ArrivalProcess.POISSON


def may_go_first() -> bool:
    """Whether this process may have itself scheduled before all others; tried in a thread, which has it to itself."""

    def attempt() -> bool:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        except PermissionError:
            return False
        return True

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(attempt).result()


def poisson(rate: float, seconds: float, seed: int = 1) -> list[float]:
    return times(flat(rate, seconds), POISSON, random.Random(seed))


async def test_a_freeze_of_five_seconds_shows_in_every_request_that_it_held_up() -> None:
    """A client that waits for answers would have sent one request in these five seconds, and seen one slow answer."""
    frozen = Behaviour(mode="queue", mean=0.002, freeze_after=1.0, freeze=5.0)
    part = await play(frozen, times(flat(50, 7.0), ArrivalProcess.CONSTANT, random.Random(1)), 7.0)
    assert len(part.rows) == 350
    held = [wait for wait in waits(part.rows) if wait > 0.1]
    assert 244 <= len(held) <= 300  # 245; a few more where the machine, too, is slow
    assert max(held) > 4.5
    assert statistics.median(held) == pytest.approx(2.5, abs=0.5)
    assert measure([part], LIMITS).ttft.p90.value > 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize("transport", list(Transport))
async def test_waiting_times_are_those_of_the_queue_that_the_schedule_makes(transport: Transport) -> None:
    """A queue with constant service times, whose ends follow from the arrival times alone: none can come sooner, and
    most do not come later by a service time unless the machine holds them up."""
    arrivals, mean = poisson(20.0, 4.0, seed=7), 0.03
    part = await play(Behaviour(mode="queue", mean=mean), arrivals, 4.0, clients=2, transport=transport)
    expected = [end for _, end in queue_waits(arrivals, 1, lambda: mean)]
    assert max(end - at for at, end in zip(arrivals, expected, strict=True)) > 3 * mean
    ends = sorted(row.intended - part.begin + wait for row, wait in zip(part.rows, waits(part.rows), strict=True))
    late = [end - least for end, least in zip(ends, expected, strict=True)]
    assert min(late) > -0.001
    assert statistics.median(late) < mean


@pytest.mark.parametrize("transport", list(Transport))
async def test_tokens_come_with_stamps_counts_and_lags(transport: Transport) -> None:
    pace = Behaviour(mode="pace", period=0.01, tokens_per_period=2)
    part = await play(pace, poisson(40.0, 1.0), 1.0, transport=transport, tokens=(5, 5), stamps=True, clients=2)
    assert [row.outcome for row in part.rows] == [Outcome.COMPLETED] * 40
    for row in part.rows:
        assert row.tokens == row.asked_tokens == row.completion_tokens == 5
        assert sum(row.chunk_tokens) == 5
        assert row.chunk_us == sorted(row.chunk_us)
        assert row.accepted is not None
        assert row.first is not None
        assert row.intended <= row.sent <= row.accepted <= row.first <= row.finish  # type: ignore[operator]
        assert 4 <= row.prompt_tokens <= 12
    assert {report.client for report in part.level.clients} == {0, 1}
    assert all(report.receive_lag_p99 is not None for report in part.level.clients)
    assert all(report.nice <= os.getpriority(os.PRIO_PROCESS, 0) for report in part.level.clients)
    assert {report.first for report in part.level.clients} == {may_go_first()}
    received = sum(count for at, count in part.stamps() if at < part.end)
    assert sum(report.tokens_per_second for report in part.level.clients) == pytest.approx(received, abs=5)


@pytest.mark.parametrize("transport", list(Transport))
async def test_what_still_runs_at_the_end_is_a_lower_bound(transport: Transport) -> None:
    """Two requests that would take five seconds each, cut off after half of one."""
    part = await play(Behaviour(mode="queue", mean=5.0, servers=2), [0.0, 0.01], 0.3, drain=0.2, transport=transport)
    assert [row.outcome for row in part.rows] == [Outcome.CENSORED] * 2
    assert all(row.first is None and 0.4 < (row.e2e or 0.0) < 5.0 for row in part.rows)
    ttft = measure([part], LIMITS).ttft
    assert ttft is not None
    assert ttft.p50.censored
    assert ttft.censored == 2


@pytest.mark.parametrize("transport", list(Transport))
async def test_refusals_are_told_from_failures(transport: Transport) -> None:
    full = Behaviour(mode="step", base=0.05, seats=1, queue=1)
    part = await play(full, [0.02 * index for index in range(10)], 0.5, tokens=(4, 4), transport=transport)
    outcomes = [row.outcome for row in part.rows]
    assert set(outcomes) == {Outcome.COMPLETED, Outcome.REFUSED}
    refused = [row for row in part.rows if row.outcome is Outcome.REFUSED]
    assert {(row.code, row.reason) for row in refused} == {("RESOURCE_EXHAUSTED", "QUEUE_FULL")}
    assert all(row.finish is not None for row in refused)


async def test_requests_over_the_clients_cap_are_failures_of_the_measurement() -> None:
    slow = Behaviour(mode="queue", mean=0.5, servers=100)
    part = await play(slow, [0.01 * index for index in range(10)], 0.3, cap=4)
    outcomes = [row.outcome for row in part.rows]
    assert outcomes.count(Outcome.CLIENT_CAP) == 6
    verdict = grade([part], LIMITS)
    assert verdict.level_class is LevelClass.VOID
    assert "6 requests were not sent" in verdict.evidence


@pytest.mark.parametrize("transport", list(Transport))
async def test_clients_that_cancel(transport: Transport) -> None:
    def cancelling(entry: Entry) -> Entry:
        return msgspec.structs.replace(entry, manner=Manner(cancel_after=3)) if entry.index % 2 else entry

    pace = Behaviour(mode="pace", period=0.01)
    part = await play(pace, poisson(20.0, 1.0), 1.0, tokens=(20, 20), transport=transport, change=cancelling)
    for row in part.rows:
        assert row.outcome is (Outcome.CANCELLED if row.index % 2 else Outcome.COMPLETED)
        assert row.tokens == (3 if row.index % 2 else 20)


@pytest.mark.parametrize("transport", list(Transport))
async def test_deadlines_are_failures(transport: Transport) -> None:
    part = await play(
        Behaviour(mode="queue", mean=2.0),
        [0.0],
        0.5,
        transport=transport,
        change=lambda entry: msgspec.structs.replace(entry, manner=Manner(timeout=0.2)),
    )
    (row,) = part.rows
    assert (row.outcome, row.code) == (Outcome.FAILED, "DEADLINE_EXCEEDED")


async def test_clients_that_do_not_read_are_cut_off_at_the_end() -> None:
    part = await play(
        Behaviour(mode="pace", period=0.01),
        [0.0],
        0.3,
        drain=0.7,
        tokens=(10, 10),
        change=lambda entry: msgspec.structs.replace(entry, manner=Manner(deaf=True)),
    )
    (row,) = part.rows
    assert row.outcome is Outcome.CENSORED
    assert row.accepted is not None
    assert row.tokens <= 1


async def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    """Four users over service times of 50 ms: a request each nearly all the time, and never more than four at once."""
    part = await play(Behaviour(mode="queue", mean=0.05, servers=4), [0.0] * 400, 1.0, concurrency=4, clients=2)
    done = [row for row in part.rows if row.outcome is Outcome.COMPLETED]
    assert 20 <= len(done) <= 84
    assert part.in_flight > 3.5
    edges = sorted([(row.intended, 1) for row in part.rows] + [(row.finish or 0.0, -1) for row in part.rows])
    depth = most = 0
    for _, step in edges:
        depth += step
        most = max(most, depth)
    assert most == 4
