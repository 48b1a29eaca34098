"""The rules of the fault matrix, by what scripted services do."""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from loadtest import matrix
from loadtest.drive import Stage
from loadtest.faults import BEHIND, BURST_HEIGHT, FAULTS, GIANT_OUTPUT, Fault, Scene
from loadtest.fleet import entries_of
from loadtest.judgements import FaultCell
from loadtest.matrix import ALONE, DRAIN_LIMIT, ITSELF, REST_SECONDS, WARM_UP, Matrix
from loadtest.measure import LevelRows
from loadtest.mix import SHORT, RequestBuilder, deal
from loadtest.orders import Order
from loadtest.plan import LevelPlan
from loadtest.progress import RunProgress
from loadtest.records import Arrival, Limits, RunKind
from loadtest.session import Record, SessionOptions
from loadtest.target import time_alone
from octavo.v1.generation_pb2 import StartGeneration
from tests.loadtest.known_server import Behaviour
from tests.loadtest.playing import IDS, known_service, level_of
from tests.loadtest.synthetic import run_record

CONTEXT = 8192


def fault(name: str) -> Fault:
    (found,) = [each for each in FAULTS if each.name == name]
    return found


def order_at(begin: float, seconds: float = 10.0) -> Order:
    entries = entries_of(deal([0.5 * index for index in range(round(2 * seconds))], {"short": SHORT}, 1), begin)
    return Order(
        level=0, entries=entries, begin=begin, window_begin=begin, stop=begin + seconds, cut=begin + 99, cap=99
    )


class Script:
    """What becomes of a matrix in which what faults add takes `alone` seconds and probes are served after `recovery`.
    `timed`: prompts' lengths."""

    def __init__(self, alone: float | None, recovery: float | None, folder: Path) -> None:
        self.alone, self.recovery = alone, recovery
        self.plans: list[LevelPlan] = []
        self.timed: list[int] = []
        self.said = io.StringIO()
        options = SessionOptions(out=folder, limits=Limits(ttft=2.0, tpot=0.1), mix="short")
        progress = RunProgress(Console(file=self.said))
        record = Record(options, RunKind.FAULTS)
        self.matrix = Matrix(options, record, run_record().fingerprint, 10.0, progress, 1.0)

    @asynccontextmanager
    async def session(self, *_: object) -> AsyncIterator[Any]:
        service = SimpleNamespace(process=SimpleNamespace(returncode=None))
        target = SimpleNamespace(max_context_tokens=CONTEXT)
        driver = SimpleNamespace(address="x:1", vocabulary=IDS, floor=0.1, next_level=1, run=self.run)
        yield SimpleNamespace(driver=driver, service=service, target=target)

    async def run(self, plan: LevelPlan, stage: Stage) -> LevelRows:
        self.plans.append(plan)
        order = order_at(time.monotonic() - 20.0)
        stage.change(order.entries)
        await stage.beside(order)
        return LevelRows(level_of(0.0, 12.0, 1.0), [])

    async def time_alone(self, address: str, starts: list[StartGeneration], limit: float) -> float | None:
        self.timed += [len(start.token_ids.ids) for start in starts]
        return self.alone

    async def until_served(self, address: str, ids: list[int], ttft: float, since: float, limit: float) -> float | None:
        return self.recovery if self.recovery is None or since + self.recovery < limit else None

    async def nothing_wrong(self, *_: object) -> str:
        return ""

    async def shared(self, name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        """What has to hold for the service as a whole."""
        found: dict[str, str] = {}

        def cells_of(fault: Fault, part: LevelRows, shared: dict[str, str], *_: object) -> list[FaultCell]:
            found.update(shared)
            return []

        for known in ("session", "time_alone", "until_served"):
            monkeypatch.setattr(matrix, known, getattr(self, known))
        for known in ("held", "slower"):
            monkeypatch.setattr(matrix, known, self.nothing_wrong)
        monkeypatch.setattr(matrix, "cells_of", cells_of)
        async with self.matrix.progress:
            await self.matrix.run([fault(name)])
        return found


@pytest.mark.parametrize("name", ["giant-prompt", "burst"])
@pytest.mark.parametrize(
    ("recovery", "problem"), [(80.0, ""), (83.1, "it took 83.1 s"), (170.0, "no probe was"), (None, "no probe was")]
)
async def test_with_what_a_fault_adds_a_service_has_the_time_that_its_machine_needs(
    name: str, recovery: float | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 39 s alone, so twice that beside others, and a probe 5 s more."""
    script = Script(39.0, recovery, tmp_path)
    found = await script.shared(name, monkeypatch)
    assert found["a probe is served within 83 s (5 + 2 x 39.0, what is added, alone)"] == problem
    assert [text for text, wrong in found.items() if wrong] == ([] if not problem else [list(found)[2]])
    (plan,) = script.plans
    assert plan.drain_limit == DRAIN_LIMIT + 78.0
    assert plan.parameters == {"alone_seconds": 39.0}


async def test_a_prompt_that_fills_the_context_is_timed_and_so_is_a_whole_burst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    giant, burst = Script(1.0, 1.0, tmp_path), Script(1.0, 1.0, tmp_path)
    await giant.shared("giant-prompt", monkeypatch)
    await burst.shared("burst", monkeypatch)
    assert giant.timed == [CONTEXT - GIANT_OUTPUT - 1]
    assert len(burst.timed) in ((BURST_HEIGHT - 1) * count for count in (1, 2, 3))  # of a request/s for two seconds


async def test_a_burst_of_nothing_takes_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(None, 1.0, tmp_path)
    script.matrix.rate = 0.01  # no arrival in ten seconds
    found = await script.shared("burst", monkeypatch)
    assert script.timed == []
    assert found["a probe is served within 5 s (5 + 2 x 0.0, what is added, alone)"] == ""


async def test_a_service_that_does_not_serve_what_is_added_alone_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await Script(None, 4.0, tmp_path).shared("giant-prompt", monkeypatch)
    assert found[ALONE] == "it did not within 600 s"
    assert found["a probe is served within 5 s"] == ""


async def test_other_faults_have_their_own_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(39.0, 4.0, tmp_path)
    found = await script.shared("prefix-flip", monkeypatch)
    assert (script.timed, script.plans[0].drain_limit) == ([], DRAIN_LIMIT)
    assert set(found) == {
        "the service lives",
        "a probe is served within 5 s",
        "nothing is held when all is over",
        ITSELF,
    }


@pytest.mark.parametrize("name", ["burst", "giant-prompt", "prefix-flip"])
async def test_probes_come_behind_what_is_asked(name: str) -> None:
    """Arrivals that come late in the window put the fault late, too."""
    scene = Scene(cast(Any, None), CONTEXT)
    order = order_at(time.monotonic() - 1.0, 2.0)
    stage = fault(name).stage(scene)
    first = next(entry for entry in stage.change(order.entries[2:]) if entry.manner is not None)
    await stage.beside(order)
    assert scene.happened.is_set()
    assert scene.at is not None
    assert scene.at >= first.at + BEHIND


def test_how_long_a_matrix_takes_is_learnt_from_the_faults_that_are_over(tmp_path: Path) -> None:
    found = Script(None, None, tmp_path).matrix
    assert found.each(8.0) == 8.0 + WARM_UP + 10.0 + REST_SECONDS
    found.took = [60.0, 40.0, 130.0]
    assert found.each(8.0) == 60.0


async def test_a_matrix_says_how_long_it_will_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(None, 1.0, tmp_path)
    await script.shared("burst", monkeypatch)
    assert "faults: 1, about 0.5 min" in script.said.getvalue()


async def test_requests_are_timed_until_the_last_has_ended() -> None:
    builder = RequestBuilder(IDS, 1024)
    starts = [builder.build(Arrival(at=0.0, kind="short", seed=1, prompt_tokens=8, output_tokens=n)) for n in (2, 8)]
    async with known_service(Behaviour(mode="step", base=0.05)) as service:
        took = await time_alone(service.address, starts, 30.0)
        assert took is not None
        assert 0.05 * 7 <= took < 30.0
        assert all(start.cache.bypass for start in starts)
        assert await time_alone(service.address, starts, 0.01) is None
