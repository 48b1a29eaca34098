"""The locustfile as a command: closed and open loop, several processes, shapes, and users that misbehave."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from loadtest.records import Outcome, RequestRow
from loadtest.shapes import SHAPES, shape_users
from tests.service.process import BIN, run_command, server_process

FAKE = {"FAKE_STEP_DELAY": "0.005"}
LOCUST = (
    "-f",
    "loadtest/locustfile.py",
    "--headless",
    "--mix",
    "short",
    "--only-summary",
    "--json",
    "--stop-timeout",
    "3",
)


async def locust(tmp_path: Path, *options: str) -> tuple[int, list[RequestRow], str, dict[str, int]]:
    """Exit code, rows, standard error, and Locust's own counts of `generate` events."""
    rows = tmp_path / "rows"
    async with server_process("-m", "tests.service.fake_server", env=FAKE) as server:
        command = (BIN / "locust", *LOCUST, "--host", server.address, "--rows", rows, *options)
        code, out, err = await run_command(*command, seconds=60.0)
    found = [
        msgspec.json.decode(line, type=RequestRow) for path in rows.iterdir() for line in path.read_bytes().splitlines()
    ]
    stats = [entry for entry in json.loads(out[("\n" + out).rindex("\n[\n") :]) if entry["method"] == "generate"]
    counts = {
        "requests": sum(entry["num_requests"] for entry in stats),
        "failures": sum(e["num_failures"] for e in stats),
    }
    return code, found, err, counts


@pytest.mark.slow
async def test_streaming_users_in_several_processes(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, rows, err, counts = await locust(
        tmp_path, "-u", "12", "-r", "12", "-t", "5", "--processes", "2", "--html", str(page)
    )
    assert code == 0, err
    done = [row for row in rows if row.outcome is Outcome.COMPLETED]
    assert done
    assert len(rows) > 12  # users have gone on after their first
    assert len({row.client for row in rows}) == 2
    assert all(row.tokens == row.asked_tokens for row in done)
    assert counts["failures"] == 0
    assert abs(counts["requests"] - len(rows)) <= 12  # what ended between the master's last report and the end
    assert page.stat().st_size > 10_000
    assert err.count("octavo client") == 2


@pytest.mark.slow
async def test_an_open_loop_sends_what_its_schedule_says(tmp_path: Path) -> None:
    code, rows, err, _ = await locust(
        tmp_path, "-u", "1", "-t", "5", "--rate", "30", "--arrivals", "constant", "--show-ttft"
    )
    assert code == 0, err
    intended = sorted(row.intended for row in rows)
    assert len(rows) > 10  # a busy machine begins late
    places = [(at - intended[0]) * 30 for at in intended]
    assert all(abs(place - round(place)) < 0.03 for place in places)
    # What has just been sent when the time is over may have no row.
    settled = [round(place) for place in places if place < places[-1] - 30]
    assert settled == list(range(len(settled)))
    assert {row.outcome for row in rows} <= {Outcome.COMPLETED, Outcome.CENSORED}


@pytest.mark.slow
async def test_users_that_misbehave_beside_others(tmp_path: Path) -> None:
    bad = "cancel=3,deaf=2,frozen=1,killed=1,deadline=3,garbage=2"
    code, rows, err, counts = await locust(
        tmp_path, "--shape", "steps", "--shape-seconds", "4", "--shape-users", "52", "--misbehave", bad
    )
    outcomes = {row.outcome for row in rows}
    assert {Outcome.COMPLETED, Outcome.CANCELLED, Outcome.FAILED} <= outcomes, err
    assert {row.code for row in rows if row.outcome is Outcome.FAILED} == {"DEADLINE_EXCEEDED"}
    assert code == 1  # Locust's, since there were failures
    assert counts["failures"] > 0


def test_shapes() -> None:
    course = {shape: [shape_users(shape, at, 100.0, 20) for at in (0.0, 30.0, 50.0, 99.0, 100.0)] for shape in SHAPES}
    assert course == {
        "ramp": [1, 6, 10, 20, None],
        "steps": [4, 8, 12, 20, None],
        "spike": [20, 20, 200, 20, None],
        "soak": [1, 20, 20, 20, None],
    }
