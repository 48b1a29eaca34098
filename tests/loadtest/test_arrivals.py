"""Schedules: from a seed alone, with exactly the load that was asked for."""

from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path

import pytest

from loadtest.arrivals import ScheduleError, flat, ramp, replay, spike, steps, stretched, times
from loadtest.columns import arrival_columns
from loadtest.drive import schedule_of
from loadtest.mix import KINDS, MIXES, RequestBuilder, deal, mix_of
from loadtest.plan import LevelPlan
from loadtest.records import Arrival, ArrivalProcess, Phase
from loadtest.result import write_rows

SECONDS, RATE = 100.0, 20.0


def drawn(process: ArrivalProcess, seed: int = 1, **more: float) -> list[float]:
    return times(flat(RATE, SECONDS), process, random.Random(seed), **more)  # type: ignore[arg-type]


def gaps(arrivals: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(arrivals)]


def variation(values: list[float]) -> float:
    return statistics.pstdev(values) / statistics.mean(values)


@pytest.mark.parametrize(
    "process", [ArrivalProcess.POISSON, ArrivalProcess.GAMMA, ArrivalProcess.CONSTANT, ArrivalProcess.BURST]
)
def test_a_schedule_has_exactly_the_arrivals_of_its_rate_and_depends_on_the_seed_alone(process: ArrivalProcess) -> None:
    arrivals = drawn(process)
    assert len(arrivals) == 2000
    assert arrivals == sorted(arrivals)
    assert arrivals[0] >= 0
    assert arrivals[-1] < SECONDS
    assert arrivals == drawn(process)
    assert process is ArrivalProcess.CONSTANT or arrivals != drawn(process, seed=2)


def test_gaps_are_as_bursty_as_asked() -> None:
    assert variation(gaps(drawn(ArrivalProcess.POISSON))) == pytest.approx(1.0, abs=0.08)
    assert variation(gaps(drawn(ArrivalProcess.GAMMA, cv=3.0))) == pytest.approx(3.0, rel=0.15)
    assert variation(gaps(drawn(ArrivalProcess.CONSTANT))) == pytest.approx(0.0, abs=1e-9)


def test_bursts_come_at_once() -> None:
    arrivals = drawn(ArrivalProcess.BURST, size=10)
    assert len(set(arrivals)) == 200
    assert all(arrivals.count(at) == 10 for at in set(arrivals))


def test_shapes_have_their_arrivals_where_they_belong() -> None:
    generator = random.Random(1)
    rising = times(ramp(0.0, 40.0, 100.0), ArrivalProcess.CONSTANT, generator)
    assert len(rising) == 2000
    assert sum(at < 50 for at in rising) == pytest.approx(500, abs=2)
    stairs = times(steps([10, 20, 30], 90.0), ArrivalProcess.CONSTANT, generator)
    assert [sum(low <= at < low + 30 for at in stairs) for low in (0, 30, 60)] == pytest.approx([300, 600, 900], abs=2)
    spiked = times(spike(10.0, 10.0, 60.0, 2.0), ArrivalProcess.POISSON, generator)
    assert sum(29 <= at < 31 for at in spiked) == pytest.approx(200, rel=0.2)
    assert len(spiked) == 780
    with pytest.raises(ScheduleError, match="spike"):
        spike(10.0, 10.0, 1.0, 2.0)


def test_a_schedule_can_be_played_again(tmp_path: Path) -> None:
    arrivals = deal(drawn(ArrivalProcess.POISSON)[:50], mix_of("mixed"), 3)
    write_rows(tmp_path / "3.jsonl.xz", [arrival_columns(arrivals)])
    assert replay(tmp_path / "3.jsonl.xz") == arrivals


def test_a_trace_can_be_played(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 5500, "input_length": 7, "output_length": 2}\n'
        '{"timestamp": 5000, "input_length": 9, "output_length": 3, "hash_ids": [1]}\n'
    )
    assert replay(trace) == [
        Arrival(at=0.0, kind="replay", seed=0, prompt_tokens=9, output_tokens=3),
        Arrival(at=0.5, kind="replay", seed=1, prompt_tokens=7, output_tokens=2),
    ]
    trace.write_text("not a trace\n")
    with pytest.raises(ScheduleError, match=r"trace\.jsonl"):
        replay(trace)


def test_a_trace_is_stretched_to_a_rate_and_goes_around_its_end() -> None:
    trace = [Arrival(at=at, kind="chat", seed=index) for index, at in enumerate((10.0, 11.0, 13.0, 13.0))]
    found = stretched(trace, 6, 60.0, begin=2)
    assert [arrival.seed for arrival in found] == [2, 3, 0, 1, 2, 3]
    # Gaps 0, 1 (from the end to the beginning: the mean one), 1, 2, 0, 1: five units in sixty seconds.
    assert [arrival.at for arrival in found] == pytest.approx([0.0, 0.0, 12.0, 24.0, 48.0, 48.0])
    assert stretched(trace, 0, 60.0) == []
    with pytest.raises(ScheduleError, match="two arrivals"):
        stretched(trace[2:], 4, 60.0)


@pytest.mark.parametrize("process", [ArrivalProcess.POISSON, ArrivalProcess.GAMMA, ArrivalProcess.REPLAY])
def test_levels_of_one_seed_have_the_same_arrivals_stretched_in_time_and_no_words_in_common(
    process: ArrivalProcess,
) -> None:
    mix = mix_of("mixed")
    trace = deal(drawn(ArrivalProcess.POISSON)[:150], mix, 9)

    def window(rate: float, words: int) -> list[Arrival]:
        """Of a hundred arrivals."""
        plan = LevelPlan(
            phase=Phase.LADDER,
            rate=rate,
            warm_up=4.0,
            window=100 / rate,
            drain_limit=1.0,
            seed=7,
            words=words,
            process=process,
            trace=trace,
        )
        return [arrival for arrival in schedule_of(plan, mix) if arrival.at >= 4.0]

    slow, fast = window(5.0, 1), window(10.0, 2)
    assert len(slow) == len(fast) == 100
    assert [2 * (arrival.at - 4.0) for arrival in fast] == pytest.approx(
        [arrival.at - 4.0 for arrival in slow], abs=1e-5
    )

    def work(level: list[Arrival]) -> list[tuple[str, int, int]]:
        return [(arrival.kind, arrival.prompt_tokens, arrival.output_tokens) for arrival in level]

    assert work(slow) == work(fast)
    assert not {arrival.seed for arrival in slow} & {arrival.seed for arrival in fast}


def test_any_stretch_of_a_schedule_has_the_mixs_shares_and_mean_lengths() -> None:
    arrivals = deal([float(index) for index in range(1000)], mix_of("mixed"), 5)
    for begin in (0, 300, 700):
        part = arrivals[begin : begin + 100]
        assert sum(arrival.kind == "chat" for arrival in part) == pytest.approx(70, abs=2)
        chats = [arrival.output_tokens for arrival in part if arrival.kind == "chat"]
        assert statistics.mean(chats) == pytest.approx(28, abs=1.5)
        assert 8 <= min(chats) <= max(chats) <= 48


@pytest.mark.parametrize("name", MIXES)
def test_messages_depend_on_their_arrival_alone_and_keep_to_the_context(name: str) -> None:
    arrivals = deal([0.0] * 40, mix_of(name), 5)
    one, two = (RequestBuilder(list(range(100, 200)), 1024) for _ in range(2))
    for arrival in arrivals:
        start = one.build(arrival, "r")
        assert start == two.build(arrival, "r")
        prompt = len(start.token_ids.ids)
        assert prompt + start.stop.max_tokens <= 1024
        assert start.WhichOneof("prompt") == ("token_ids" if prompt else "chat")
        assert bool(start.structured_output.json_schema) == (arrival.kind == "json")
        assert start.stop.ignore_eos == (arrival.kind != "json")


def test_shared_prefixes_are_shared() -> None:
    builder = RequestBuilder(list(range(100, 200)), 4096)
    starts = [builder.build(arrival).token_ids.ids for arrival in deal([0.0] * 200, mix_of("shared-prefix"), 1)]
    prefixes = {tuple(ids[:512]) for ids in starts}
    assert 8 <= len(prefixes) <= 16
    assert len({tuple(ids) for ids in starts}) == 200


def test_every_class_of_every_mix_has_a_form() -> None:
    assert set(KINDS) >= {name for mix in MIXES.values() for name in mix}
