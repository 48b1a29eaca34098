"""`python -m loadtest` as a person runs it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.__main__ import app, checked_address, main
from loadtest.faults import FAULTS
from loadtest.judgements import LevelClass, Regime
from loadtest.launch import LaunchError, Service
from loadtest.matrix import ITSELF, cells_of, has_all
from loadtest.measure import LevelRows
from loadtest.records import Limits, Outcome, Phase, RequestRow
from loadtest.result import Result
from loadtest.tiny_model import write_tiny_model
from service.__main__ import check_address
from tests.loadtest.known_server import Behaviour
from tests.loadtest.playing import known_service, level_of
from tests.loadtest.synthetic import run_record
from tests.service.process import ROOT, run_command

ATTACHED = ("map", "--address", "127.0.0.1:9")
STEP = Behaviour(mode="step", base=0.02, seats=4, queue=8)


async def loadtest(*arguments: str | Path, seconds: float = 100.0) -> tuple[int, str, str]:
    return await run_command(sys.executable, "-m", "loadtest", *arguments, seconds=seconds, env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("map", "--address", "127.0.0.1:9", "--out", "{out}"), "127.0.0.1:9"),
        ((*ATTACHED, "--metrics-url", "http://127.0.0.1:9/metrics", "--out", "{out}"), "--metrics-url"),
        (("map", "--mix", "nothing", "--out", "{out}"), "--mix: no mix 'nothing'"),
        (("faults", "nothing", "--out", "{out}"), "no fault 'nothing'"),
        (("grade", "{out}"), "no run.json"),
        (("map", "--model", "/no/such/model", "--out", "{out}"), "exit code 2"),
    ],
)
async def test_what_a_person_can_put_right_is_one_line(
    tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    code, _, err = await loadtest(*(word.format(out=tmp_path / "r") for word in arguments))
    assert code == 2, err
    assert problem in err
    assert len(err.strip().splitlines()) == 1


def test_without_a_command_it_tells_what_there_are() -> None:
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 0
    assert {"map", "faults", "overhead", "ui", "grade", "report", "compare"} <= set(done.output.split())


WEEK, SEED = "604800", str(2**32 - 1)


def error_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """All that a wrong command line says."""
    monkeypatch.setattr(sys, "argv", ["loadtest", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("loadtest: ")
    return str(line)


@pytest.mark.parametrize(
    ("command", "flag", "most"),
    [
        ("map", "--ttft", WEEK),
        ("map", "--tpot", WEEK),
        ("map", "--window", WEEK),
        ("map", "--warm-up", WEEK),
        ("map", "--minutes", "10080"),
        ("map", "--seed", SEED),
        ("faults", "--ttft", WEEK),
        ("faults", "--seconds", WEEK),
        ("overhead", "--seconds", WEEK),
        ("overhead", "--warm-up", WEEK),
        ("compare", "--seed", SEED),
    ],
)
def test_a_flag_beyond_its_bound_is_one_line(
    command: str, flag: str, most: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in [str(2**64)] if flag == "--seed" else ["1e300", "inf", "nan"]:
        line = error_line(monkeypatch, capsys, command, flag, value)
        assert flag in line
        assert most in line


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        *(
            ((*ATTACHED, "--metrics-url", url), "--metrics-url")
            for url in ("foo", "http://", "http://h:x/", "file:///x")
        ),
        *((("map", "--pid", pid, *ATTACHED[1:]), "--pid") for pid in ("0", "99999999", "9" * 30)),
        *(
            (("map", "--address", address), "--address")
            for address in ("garbage", ":1", "h:0", "h:65536", "http://h:1", "::1:50051", "unix:")
        ),
        *(((command, "--pid", "1"), "--pid") for command in ("map", "overhead")),
        *(((command, "--metrics-url", "http://h:1/"), "--metrics-url") for command in ("map", "overhead")),
        *(((command, *ATTACHED[1:], "--model", "demo"), "--model") for command in ("map", "ui")),
        *(((command, *ATTACHED[1:], "--serve", ""), "--serve") for command in ("map", "overhead", "ui")),
        *(((command, "--serve", "'unbalanced"), "--serve") for command in ("map", "faults", "overhead", "ui")),
        (("ui", "--locust", "'unbalanced"), "--locust"),
        *((("faults", "--rate", rate), "--rate") for rate in ("nan", "inf", "-1", "0", "1e300")),
        *((("map", "--cv", cv), "--cv") for cv in ("nan", "inf", "1e300")),
        *(((command, "--clients", "100000"), "--clients") for command in ("map", "faults", "overhead")),
        (("map", "--channels", "100000"), "--channels"),
        (("map", "--burst-size", "9" * 30), "--burst-size"),
        (("overhead", "--streams", "100000"), "--streams"),
        *((("map", "--out", folder), "--out") for folder in ("/dev/null", "/dev/null/x", "/proc/x")),
        (("faults", "--out", "/dev/null"), "--out"),
        (("overhead", "--out", "/dev/null"), "--out"),
        (("compare", "a", "b", "--out", "/dev/null"), "--out"),
    ],
)
def test_a_flag_that_cannot_be_is_one_line(
    arguments: tuple[str, ...], flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts."""
    monkeypatch.setattr(asyncio, "run", lambda work: pytest.fail("something started"))
    assert flag in error_line(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize("command", ["map", "faults", "overhead"])
def test_no_result_is_overwritten(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told before anything starts."""
    Result.create(tmp_path, run_record())
    monkeypatch.setattr(asyncio, "run", lambda work: pytest.fail("something started"))
    assert "already holds a result" in error_line(monkeypatch, capsys, command, "--out", str(tmp_path))


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "localhost:65535", "a-b.c_d:50051", "[::1]:50051", "[fe80::1%eth0]:1", "unix:/a b"]
)
def test_addresses_are_those_that_the_service_commands_take(address: str) -> None:
    assert checked_address(address) == check_address(address) == address


@pytest.mark.parametrize("arguments", [["--process", "replay"], ["--trace", "trace.jsonl"]])
def test_a_replay_and_its_trace_go_together(tmp_path: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["map", *arguments, "--out", str(tmp_path / "r")])
    assert done.exit_code == 2
    assert "--process replay and --trace go together" in done.output


@pytest.mark.slow
async def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    async with known_service(STEP) as service:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loadtest", "map", "--address", service.address, "--pid", str(service.pid)),
            *("--mix", "short", "--window", "6", "--warm-up", "1", "--out", str(tmp_path)),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "COLUMNS": "200"},
        )
        async with asyncio.timeout(40.0):
            while not (tmp_path / "levels.jsonl").exists() or len(Result.open(tmp_path).levels) < 1:
                await asyncio.sleep(0.1)
        await asyncio.sleep(1.7)  # the middle of the next one's window, which is two seconds long
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), 30.0)
    assert process.returncode == 0, err
    result = Result.open(tmp_path)
    assert not result.summary.complete
    assert result.summary.notes == ["interrupted"]
    assert "note: interrupted" in out.decode()
    assert "not measured: The map takes less than 15 minutes" in out.decode()
    levels = result.levels
    assert [level.interrupted for level in levels] == [False] * (len(levels) - 1) + [True]
    cut = [row for row in result.requests if row.level == levels[-1].index]
    assert any(row.outcome is Outcome.CENSORED for row in cut)
    assert result.verdicts[-1].level_class is LevelClass.VOID
    code, again, _ = await loadtest("grade", tmp_path)
    assert code == 0
    assert "note: interrupted" in again
    assert "not measured: The map takes less than 15 minutes" in again


async def test_a_service_that_does_not_come_up_says_why() -> None:
    with pytest.raises(LaunchError, match="exit code 2"):
        async with Service(["--model", "/no/such/model"]):
            pass


def tiny(tmp_path: Path) -> tuple[str, ...]:
    model = write_tiny_model(tmp_path / "tiny")
    return ("--model", str(model), "--serve", "--load-format dummy --max-num-seqs 8 --max-queued-requests 16")


@pytest.mark.parametrize(
    ("received", "counted", "whole"),
    [(8, 8, True), (5, 6, True), (5, 5, True), (5, 7, False), (8, 9, False), (7, 6, False)],
)
def test_an_end_of_sequence_token_is_counted_and_not_sent(received: int, counted: int, whole: bool) -> None:
    """Of a request for eight tokens."""
    row = RequestRow(
        level=0,
        index=0,
        kind="json",
        outcome=Outcome.COMPLETED,
        intended=0.0,
        chunk_us=list(range(received)),
        asked_tokens=8,
        completion_tokens=counted,
    )
    assert has_all(row) is whole


def test_a_client_that_does_not_read_makes_no_hang() -> None:
    """To the end of its level it has heard nothing for eight seconds; all others were served at once."""
    at = [0.0, 0.2, 0.4, 9.5]
    rows = [
        RequestRow(
            level=0,
            index=index,
            kind="chat" if index != 1 else "deaf",
            outcome=Outcome.COMPLETED if index != 1 else Outcome.CENSORED,
            intended=begin,
            sent=begin,
            accepted=begin,
            first=begin + 0.1 if index != 1 else None,
            finish=begin + 0.1 if index != 1 else 10.0,
            chunk_us=[100_000] if index != 1 else [],
            asked_tokens=1,
            completion_tokens=1 if index != 1 else None,
        )
        for index, begin in enumerate(at)
    ]
    part = LevelRows(level_of(0.0, 10.0, 0.4), rows)
    (readers,) = [fault for fault in FAULTS if fault.name == "slow-readers"]
    found = cells_of(readers, part, {}, None, Limits(ttft=1.0, tpot=1.0))
    assert {cell.level_class for cell in found} == {LevelClass.KEEPS_UP}
    others = [fault for fault in FAULTS if fault.name == "burst"]
    assert {cell.level_class for cell in cells_of(others[0], part, {}, None, Limits(ttft=1.0, tpot=1.0))} == {
        LevelClass.HUNG
    }


@pytest.mark.slow
async def test_faults_of_a_real_service(tmp_path: Path) -> None:
    """Each against a fresh service of a tiny model: nothing that must hold is broken."""
    out = tmp_path / "result"
    names = ("engine-killed", "sigterm", "giant-prompt", "cancel-storm")
    code, text, err = await loadtest(
        "faults", *names, *tiny(tmp_path), "--mix", "short", "--rate", "20", "--seconds", "4", "--out", out, seconds=200
    )
    cells = Result.open(out).faults
    assert {cell.fault for cell in cells} == set(names), err
    broken = [wrong for cell in cells for wrong in cell.broken]
    assert not [wrong for wrong in broken if not wrong.startswith(ITSELF)], text  # how fast it is: the machine's affair
    assert code == bool(broken)
    assert Result.open(out).summary.measures["cells_broken"] == sum(bool(cell.broken) for cell in cells)
    assert [score.hypothesis for score in Result.open(out).summary.scores] == ["holds", "no-hang"]
    by_name = {(cell.fault, cell.kind): cell for cell in cells}
    killed = by_name["engine-killed", "short"]
    assert killed.outcomes.get("ENGINE_STARTING", 0) + killed.outcomes.get("ENGINE_DIED", 0) > 0
    assert killed.recovery is not None
    assert killed.level_class is LevelClass.CRASHED
    assert by_name["sigterm", "short"].outcomes.keys() & {"DRAINING", "UNAVAILABLE"}
    assert by_name["cancel-storm", "cancelling"].outcomes["cancelled"] > 0
    assert by_name["giant-prompt", "giant"].outcomes == {"completed": 1}
    (alone,) = [level.parameters["alone_seconds"] for level in Result.open(out).levels if level.fault == "giant-prompt"]
    assert any(f"5 + 2 x {alone:.1f}" in text for text in by_name["giant-prompt", "short"].expected)


@pytest.mark.slow
async def test_the_overhead_around_a_tiny_model(tmp_path: Path) -> None:
    out = tmp_path / "result"
    code, _, err = await loadtest(
        "overhead", "--seconds", "1", "--warm-up", "0.2", "--serve", "--max-num-seqs 64", "--out", out, seconds=200
    )
    assert code == 0, err
    result = Result.open(out)
    rows = result.overhead
    assert len({row.level for row in rows}) == 7
    assert all(row.counts_match for row in rows)
    assert {level.phase for level in result.levels} == {Phase.OVERHEAD}
    assert {score.hypothesis: score.holds for score in result.summary.scores}["counts"] is True
    first = rows[0]
    assert first.regime is Regime.SATURATED
    # A level of a second has one reading of the service in its window, or none where the machine is busy.
    for figure in ("frontend_us_per_token", "engine_us_per_token", "client_us_per_token", "per_gb"):
        assert max(getattr(row, figure) for row in rows) > 0.0
    assert max(row.pss for row in rows) > 50_000_000
    assert json.loads((out / "summary.json").read_text())["complete"] is True
