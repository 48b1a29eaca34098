"""All charts of a result that its rows can give."""

from __future__ import annotations

from loadtest.plots import latency, machine, matrix, spread, throughput, timeline
from loadtest.plots.figure import Figure
from loadtest.reading import Reading

MAKERS = (
    latency.first_token,
    latency.per_token,
    throughput.offered_and_completed,
    throughput.concurrency,
    latency.hockey_stick,
    spread.distributions,
    latency.prompts,
    timeline.recovery,
    matrix.faults,
    spread.prefix_cache,
    latency.pareto,
    throughput.little,
    machine.speed,
)


def figures(reading: Reading) -> list[Figure]:
    """By their ids, which are numbered. (12 compares two results, and is made by `compare`.)"""
    made = [figure for maker in MAKERS if (figure := maker(reading)) is not None]
    return sorted([*made, *timeline.levels(reading), *matrix.overhead(reading)], key=lambda figure: figure.id)
