"""How long outputs are expected to be."""

from __future__ import annotations

import random

import pytest

from engine.schedule.forecast import Demand, OutputForecast, own_tokens, peak_tokens
from engine.schedule.sequence import RequestGroup, Sequence
from tests.schedule.fake_model import request


def sequence(generated: int, max_tokens: int = 1000) -> Sequence:
    return Sequence(RequestGroup(request("a", [1] * 4), 0, 0.0), 0, 0, [1] * (4 + generated), 4 + max_tokens)


@pytest.mark.parametrize(
    ("generated", "most", "remaining"),
    [
        (0, 1000, 40),
        (15, 1000, 25),
        (39, 1000, 10),  # a quarter of what is usual, however long it has become
        (500, 1000, 10),
        (500, 503, 3),  # but never beyond its own limit
        (0, 12, 12),
    ],
)
def test_what_is_still_to_come_by_those_before(generated: int, most: int, remaining: int) -> None:
    forecast = OutputForecast()
    for output in (30, 50):
        forecast.observe(output)
    assert forecast.remaining(sequence(generated, most)) == remaining


@pytest.mark.parametrize(("most", "remaining"), [(1000, 512), (100, 100)])
def test_before_any_has_ended_it_is_a_guess(most: int, remaining: int) -> None:
    assert OutputForecast().remaining(sequence(0, most)) == remaining


def test_the_last_outputs_count_most() -> None:
    forecast = OutputForecast()
    for output in [10] * 100 + [100] * 100:
        forecast.observe(output)
    assert 95 < forecast.mean < 100


def test_one_more_fits_as_long_as_the_peak_of_all_does() -> None:
    """Pools around the peak, where most of what is held and to come is more than the pool."""
    draw = random.Random(5)
    outcomes = set()
    for _ in range(300):
        running = [sequence(draw.randrange(40), draw.randrange(41, 90)) for _ in range(draw.randrange(1, 6))]
        forecast, new = OutputForecast(), sequence(0, draw.randrange(1, 90))
        every = [*running, new]
        held = [own_tokens(one, 4) for one in every]
        peak = peak_tokens(held, [forecast.remaining(one) for one in every])
        others = draw.randrange(50)  # tokens of blocks that are shared
        demand = Demand(forecast, others + peak + draw.randrange(-30, 30), 4, sum(held[:-1]) + others)
        for one in running:
            demand.add(one)
        assert demand.fits(new) == (others + peak <= demand.pool)
        outcomes.add(demand.fits(new))
    assert outcomes == {False, True}
