"""The mean knee is inside its interval as often as that says, and the interval as wide as the machine is unsteady."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from loadtest.__main__ import app
from loadtest.classify import KEEPS_UP
from loadtest.headline import headline
from loadtest.judgements import MeanKnee, Window
from loadtest.mean_knee import mean_knee
from loadtest.quantity import interval
from loadtest.reading import Reading
from tests.loadtest.simulated import Drift, SteppingServer
from tests.loadtest.synthetic import synthetic_map

MEAN = 20_000.0  # requests/s: so many that a window's edges add no luck
STUDENT_5 = 2.571  # two-sided 95 %, of six values


def window(offered: float, could: float, seconds: float = 60.0) -> Window:
    """Both times MEAN. could: serve just then."""
    arrivals, completed = (round(MEAN * share * seconds) for share in (offered, min(offered, could)))
    return Window(rate=MEAN * offered, seconds=seconds, arrivals=arrivals, completed=completed, in_flight=0.0)


def found(windows: list[Window]) -> MeanKnee:
    mean = mean_knee(windows)
    assert mean is not None
    return mean


def test_windows_that_all_fall_behind_give_students_interval() -> None:
    """But for one that keeps up so far below that it tells next to nothing."""
    could = [0.96, 1.045, 1.005, 0.98, 1.02, 0.995]
    mean = found([window(1.15, served) for served in could] + [window(0.86, 1.0)])
    logs = [math.log(served) for served in could]
    middle, half = statistics.fmean(logs), STUDENT_5 * statistics.stdev(logs) / math.sqrt(len(logs))
    assert mean.served == pytest.approx(MEAN * math.exp(middle), rel=1e-3)
    assert mean.low == pytest.approx(MEAN * math.exp(middle - half), rel=2e-3)
    assert mean.high == pytest.approx(MEAN * math.exp(middle + half) / KEEPS_UP, rel=2e-3)
    assert mean.scatter == pytest.approx(statistics.stdev(logs), rel=0.35)


@pytest.mark.parametrize("scatter", [0.01, 0.04])
def test_the_mean_is_inside_as_often_as_the_interval_says(scatter: float) -> None:
    """Half of the windows keep up: what they tell is one-sided."""
    inside, random_ = 0, random.Random(3)
    for _ in range(200):
        drawn = [(rate, math.exp(random_.gauss(0.0, scatter))) for rate in (0.98, 1.0, 1.02, 1.04) * 2]
        windows = [window(0.86, 1.0), window(1.2, 1.0), *(window(rate, could) for rate, could in drawn)]
        mean = found(windows)
        inside += mean.low <= MEAN <= mean.high * KEEPS_UP
    assert 180 <= inside <= 200


def test_a_window_that_keeps_up_raises_the_mean_and_one_far_away_does_not() -> None:
    windows = [window(0.9, 1.0), window(1.02, 0.98), window(1.04, 0.99), window(1.03, 0.97), window(1.05, 1.01)]
    assert found([*windows, window(1.04, 1.1)]).served > 1.002 * found(windows).served
    far = [window(0.3, 1.0), window(3.0, 0.5)]  # that overload costs half is not the knee's affair
    assert found([*windows, *far]) == found(windows)


def test_short_windows_count_for_less() -> None:
    long = [window(0.9, 1.0), *(window(1.15, could) for could in (0.97, 1.0, 1.01, 0.99))]
    low, same = found([*long, window(1.15, 0.9, 5.0)]), found([*long, window(1.15, 0.9)])
    assert same.served < low.served < found(long).served


def test_a_window_in_which_nothing_completes_or_arrives_tells_nothing() -> None:
    """The service hung or was gone; that is a finding of its own."""
    windows = [window(0.9, 1.0), window(1.02, 0.98), window(1.04, 0.99), window(1.03, 0.97)]
    hung = window(1.01, 0.0)
    idle = msgspec.structs.replace(window(1.01, 1.0), arrivals=0)
    assert found([*windows, hung, idle]) == found(windows)
    assert mean_knee([hung]) is None


def test_there_is_none_unless_some_keep_up_and_some_do_not() -> None:
    keeping, behind = [window(rate, 1.0) for rate in (0.8, 0.9)], [window(rate, 1.0) for rate in (1.1, 1.2)]
    assert mean_knee([]) is None
    assert mean_knee(keeping) is None
    assert mean_knee(behind) is None
    assert mean_knee([window(0.5, 1.0), *behind]) is None  # far below
    assert mean_knee([*keeping, *behind]) is not None


@pytest.mark.slow
async def test_a_map_on_a_machine_that_drifts_has_its_mean_knee_inside(tmp_path: Path) -> None:
    """A queue so long that bursts cost nothing near the knee: it is what the service can serve, or 2 % more."""
    for seed in range(4):
        server = SteppingServer(base=0.03, each=0.006, seats=8, tokens=(2, 6), queue=40, machine=Drift(seed, 0.1))
        reading = Reading(await synthetic_map(tmp_path / str(seed), server, seed))
        mean, machine = reading.summary.mean_knee, server.machine
        assert mean is not None
        assert machine is not None
        speed = statistics.fmean(machine.speed(float(at)) for at in range(int(server.now)))
        assert mean.low <= server.capacity * speed <= mean.high, seed
        assert mean.scatter > 0.01
        assert interval(mean, "") in headline(reading).tiles[0].note


def test_grade_says_it(tmp_path: Path) -> None:
    result = asyncio.run(
        synthetic_map(tmp_path / "map", SteppingServer(base=0.03, each=0.003, tokens=(2, 4), queue=40))
    )
    mean = result.summary.mean_knee
    assert mean is not None
    output = " ".join(CliRunner().invoke(app, ["grade", str(tmp_path / "map")]).output.split())
    assert f"on average: {mean.low:.4g} to {mean.high:.4g} requests/s (95 %; windows of a minute" in output
