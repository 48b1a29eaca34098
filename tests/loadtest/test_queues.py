"""What the instrument measures of queues whose answers are in textbooks, in simulated time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from loadtest.arrivals import flat, times
from loadtest.judgements import Measures
from loadtest.measure import LevelRows, measure
from loadtest.records import ArrivalProcess, Limits, Outcome, RequestRow
from tests.loadtest.playing import level_of
from tests.loadtest.simulated import queue_waits

REQUESTS = 150_000
LIMITS = Limits(ttft=1e9, tpot=1e9)


def measured(rate: float, servers: int, service: Callable[[], float]) -> Measures:
    seconds = REQUESTS / rate
    arrivals = times(flat(rate, seconds), ArrivalProcess.POISSON, random.Random(11))
    rows = [
        RequestRow(
            level=0,
            index=index,
            kind="short",
            outcome=Outcome.COMPLETED,
            intended=at,
            sent=at,
            accepted=at,
            first=begin,  # so that TTFT is the wait
            finish=end,
            chunk_us=[round((end - at) * 1e6)],
        )
        for index, (at, (begin, end)) in enumerate(zip(arrivals, queue_waits(arrivals, servers, service), strict=True))
    ]
    return measure([LevelRows(level_of(0.0, seconds, rate), rows)], LIMITS)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_server_with_constant_service_times(load: float) -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) service times."""
    measures = measured(load, 1, lambda: 1.0)
    assert measures.ttft is not None
    assert measures.ttft.mean.value == pytest.approx(load / (2 * (1 - load)), rel=0.1)
    assert measures.little_gap is not None
    assert measures.little_gap < 0.01


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (4, 0.7), (8, 0.7)])
def test_many_servers_with_exponential_service_times(servers: int, load: float) -> None:
    """M/M/c: Erlang's C for the chance of a wait, over the spare rate."""
    draw = random.Random(5)
    measures = measured(load * servers, servers, lambda: draw.expovariate(1.0))
    offered = load * servers
    full = offered**servers / math.factorial(servers) / (1 - load)
    waiting = full / (sum(offered**k / math.factorial(k) for k in range(servers)) + full)
    assert measures.ttft is not None
    assert measures.ttft.mean.value == pytest.approx(waiting / (servers - offered), rel=0.1)
    assert measures.in_flight == pytest.approx(offered + waiting * load / (1 - load), rel=0.1)
