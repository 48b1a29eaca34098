"""The rows of a result: what they say, and that they come back as they were written."""

from __future__ import annotations

import lzma
from pathlib import Path

import msgspec
import pytest

from loadtest.columns import arrival_columns, arrivals_of, request_columns, request_rows
from loadtest.judgements import Regime
from loadtest.mapping import frontend_parts, judge, special_measures
from loadtest.measure import LevelRows
from loadtest.notes import front_end_notes
from loadtest.overhead import messages_between, tokens_per_step
from loadtest.records import (
    SCHEMA,
    Arrival,
    ArrivalProcess,
    Fingerprint,
    Level,
    Limits,
    Outcome,
    Phase,
    RequestRow,
    Run,
    RunKind,
    Target,
    TelemetryRow,
    group_of,
)
from loadtest.result import Result, ResultError
from tests.loadtest import synthetic_kinds


def run_record(schema: int = SCHEMA) -> Run:
    fingerprint = Fingerprint(
        cpu="x",
        cores=2,
        memory=1,
        memory_bandwidth=1e9,
        kernel="k",
        python="3",
        versions={},
        commit="c",
        load_average=0,
    )
    return Run(
        schema=schema,
        kind=RunKind.MAP,
        created="2026-11-29T00:00:00Z",
        started=5.0,
        command=["map"],
        seed=1,
        mix="chat",
        limits=Limits(ttft=2.0, tpot=0.1),
        target=Target(address="127.0.0.1:1"),
        fingerprint=fingerprint,
    )


def level(index: int) -> Level:
    return Level(
        index=index,
        phase=Phase.LADDER,
        group=group_of(Phase.LADDER, 2.0, None),
        process=ArrivalProcess.POISSON,
        start=0.0,
        window_start=1.0,
        window_end=2.0,
        end=3.0,
        rate=2.0,
    )


def request(level_index: int = 0, index: int = 0) -> RequestRow:
    return RequestRow(
        level=level_index,
        index=index,
        kind="chat",
        outcome=Outcome.COMPLETED,
        intended=1.0,
        sent=1.25,
        first=1.5,
        finish=2.5,
        chunk_us=[250_000, 450_000, 1_250_000],
        chunk_tokens=[1, 3, 1],
    )


def test_times_count_from_the_intended_send() -> None:
    row = request()
    assert (row.ttft, row.service_ttft, row.e2e, row.lateness) == (0.5, 0.25, 1.5, 0.25)


def test_a_message_of_several_tokens_is_one_gap_and_zeros() -> None:
    row = request()
    assert row.tokens == 5
    assert row.gaps() == [0.2, 0.0, 0.0, 0.8]
    assert row.tpot == pytest.approx(sum(row.gaps()) / 4)


def test_levels_of_the_same_rate_are_one_group_whatever_asked_for_them() -> None:
    assert group_of(Phase.LADDER, 3.00001, None) == group_of(Phase.BISECT, 3.00002, None)
    assert group_of(Phase.LADDER, 3.0, None) != group_of(Phase.LADDER, 3.01, None)
    assert group_of(Phase.CALIBRATE, None, 8) == "closed:8"
    assert group_of(Phase.RECOVERY, 3.0, None) != group_of(Phase.LADDER, 3.0, None)


def test_a_result_comes_back_as_it_was_written(tmp_path: Path) -> None:
    result = Result.create(tmp_path, run_record())
    telemetry = TelemetryRow(at=1.0, level=0, metrics={"requests_running": 3.0})
    result.append_level(level(0), [request(0, 0), request(0, 1)], [telemetry])
    result.append_level(level(1), [request(1, 0)])
    again = Result.open(tmp_path)
    assert again.run == run_record()
    assert again.levels == [level(0), level(1)]
    assert again.requests == [request(0, 0), request(0, 1), request(1, 0)]
    assert again.telemetry == [telemetry]


def test_a_schedule_is_kept(tmp_path: Path) -> None:
    result = Result.create(tmp_path, run_record())
    arrivals = [Arrival(at=0.5, kind="chat", seed=7), Arrival(at=0.75, kind="json", seed=8, prompt_tokens=3)]
    name = result.write_schedule(4, arrivals)
    found = Level(**{**{f: getattr(level(4), f) for f in Level.__struct_fields__}, "schedule": name})
    assert result.schedule(found) == arrivals


def test_rows_of_a_level_that_was_cut_off_are_left_out(tmp_path: Path) -> None:
    result = Result.create(tmp_path, run_record())
    result.append_level(level(0), [request(0)])
    result._append("requests.jsonl.xz", [request_columns(1, [request(1)])])
    assert result.requests == [request(0)]


def test_a_cut_file_gives_what_is_whole(tmp_path: Path) -> None:
    result = Result.create(tmp_path, run_record())
    result.append_level(level(0), [request(0)])
    whole = len((tmp_path / "requests.jsonl.xz").read_bytes())
    result.append_level(level(1), [request(1, index) for index in range(500)])
    path = tmp_path / "requests.jsonl.xz"
    path.write_bytes(path.read_bytes()[: whole + 60])
    assert result.requests == [request(0)]


def test_no_result_is_overwritten(tmp_path: Path) -> None:
    Result.create(tmp_path, run_record())
    with pytest.raises(ResultError, match="already"):
        Result.create(tmp_path, run_record())


def test_columns_give_back_every_row() -> None:
    """Whatever ends a request can have, in one level; and none at all."""
    rows = [
        request(3, 0),
        RequestRow(level=3, index=7, kind="json", outcome=Outcome.CLIENT_CAP, intended=2.000001, client=1),
        RequestRow(
            level=3,
            index=2,
            kind="chat",
            outcome=Outcome.REFUSED,
            intended=1.5,
            sent=1.600003,
            finish=1.600004,
            prompt_tokens=12,
            code="RESOURCE_EXHAUSTED",
            reason="QUEUE_FULL",
            cause="the queue is full",
            queued=0.25,
        ),
        RequestRow(level=3, index=3, kind="chat", outcome=Outcome.CENSORED, intended=1.7, sent=1.7, finish=9.0),
    ]
    assert request_rows(request_columns(3, rows)) == rows
    assert request_rows(request_columns(3, rows[:1])) == rows[:1]
    assert request_rows(request_columns(3, [])) == []
    arrivals = [Arrival(at=0.5, kind="chat", seed=7), Arrival(at=0.75, kind="json", seed=2, prompt_tokens=3)]
    assert arrivals_of(arrival_columns(arrivals)) == arrivals
    assert arrivals_of(arrival_columns([])) == []


@pytest.mark.parametrize("line", [b"[]", b"{}", b'{"level": 0, "rows": 2, "intended": [1]}', b"no json", b"7"])
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, line: bytes) -> None:
    result = Result.create(tmp_path, run_record())
    result.append_level(level(0), [])
    (tmp_path / "requests.jsonl.xz").write_bytes(lzma.compress(line + b"\n"))
    if line == b"{}":  # of no level that is known
        assert result.requests == []
    else:
        with pytest.raises(ResultError, match=r"requests\.jsonl\.xz"):
            print(result.requests)
    (tmp_path / "requests.jsonl.xz").write_bytes(b"this is no xz file")
    with pytest.raises(ResultError, match=r"requests\.jsonl\.xz"):
        print(result.requests)


@pytest.mark.parametrize("schema", [1, SCHEMA + 1])
def test_another_schema_is_refused(tmp_path: Path, schema: int) -> None:
    Result.create(tmp_path, run_record(schema))
    with pytest.raises(ResultError, match="schema"):
        Result.open(tmp_path)


def test_a_folder_without_a_run_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"run\.json"):
        Result.open(tmp_path)


def test_what_hypotheses_of_faults_and_overhead_speak_of_is_of_their_rows(tmp_path: Path) -> None:
    assert special_measures(synthetic_kinds.faults(tmp_path / "faults")) == {"cells_broken": 3, "cells_hung": 3}
    assert special_measures(synthetic_kinds.overhead(tmp_path / "overhead")) == {
        "counts_differ": 0,
        "kept_up_share": pytest.approx(10 / 14),
        "lag_drift": 0.01,
        "frontend_us": 40.0,
    }


def test_counts_are_judged_where_nothing_was_kept_up_with(tmp_path: Path) -> None:
    """As on a machine that is too busy for any of the loads."""
    result = synthetic_kinds.overhead(tmp_path / "overhead")
    result.write_overhead([msgspec.structs.replace(row, regime=Regime.SATURATED) for row in result.overhead])
    assert special_measures(result) == {"counts_differ": 0, "frontend_us": 40.0}


def test_what_came_in_one_message_counts_as_one() -> None:
    """Two requests with tokens of the same two messages, stamped from sends of their own, and one with its own."""
    stamps = [(1.0, [200_000, 300_000]), (1.1, [100_001, 199_999]), (1.15, [70_000])]
    rows = [
        msgspec.structs.replace(request(0, index), sent=sent, chunk_us=chunk_us, chunk_tokens=[])
        for index, (sent, chunk_us) in enumerate(stamps)
    ]
    part = LevelRows(level(0), rows)
    assert messages_between(part, 1.0, 2.0) == 3
    assert messages_between(part, 1.21, 1.25) == 1
    assert messages_between(part, 1.5, 2.0) == 0


def test_tokens_of_a_step_are_by_the_services_counters() -> None:
    def counted(tokens: float, steps: float) -> dict[str, float]:
        return {"generated_tokens_total": tokens, "steps_total": steps}

    assert tokens_per_step([{}, counted(10, 5), counted(50, 9), counted(90, 15), {}]) == 8.0
    assert tokens_per_step([counted(10, 5), {}]) is None
    assert tokens_per_step([counted(10, 5), counted(10, 5)]) is None


def test_a_tokens_and_a_messages_share_of_the_front_end_are_told_apart(tmp_path: Path) -> None:
    """Of costs of 10 us a token and 150 us a message."""
    result = synthetic_kinds.overhead(tmp_path / "overhead")
    rows = [
        msgspec.structs.replace(row, tokens_per_message=many, frontend_us_per_token=10.0 + 150.0 / many)
        for row, many in zip(result.overhead, (2.0, 4.0, 20.0, 1.0), strict=True)
    ]
    parts = frontend_parts(rows)
    assert parts == {"frontend_us_a_token": pytest.approx(10.0), "frontend_us_a_message": pytest.approx(150.0)}
    assert frontend_parts(rows[:2]) == {}
    result.write_overhead(rows)
    summary = judge(result)
    assert "10 us a token and 150 us a message" in front_end_notes(summary)[0]
