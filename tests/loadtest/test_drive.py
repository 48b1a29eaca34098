"""What is kept of a level that was cut off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loadtest import drive
from loadtest.drive import ServiceDriver
from loadtest.fleet import Interrupted
from loadtest.mapping import judge
from loadtest.mix import SHORT
from loadtest.orders import Order
from loadtest.plan import LevelPlan
from loadtest.records import Phase, ReferenceTime
from loadtest.result import Result
from tests.loadtest.synthetic import run_record


class InterruptedFleet:
    """Its levels end by Ctrl-C `seconds` after they began."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def play(self, order: Order) -> Any:
        await asyncio.sleep(max(0.0, order.begin + self._seconds - time.monotonic()))
        raise Interrupted([])


class EmptyFleet:
    """Its levels last as long as they are to, and nothing comes of them."""

    async def play(self, order: Order) -> list[Any]:
        await asyncio.sleep(max(0.0, order.stop - time.monotonic()))
        return []


class CountedReference:
    """The nth level has n times."""

    def __init__(self) -> None:
        self.levels = 0

    @asynccontextmanager
    async def watch(self, origin: float) -> AsyncIterator[list[ReferenceTime]]:
        self.levels += 1
        yield [ReferenceTime(at=float(self.levels), seconds=0.01)] * self.levels


@asynccontextmanager
async def no_telemetry(*_: object) -> AsyncIterator[SimpleNamespace]:
    yield SimpleNamespace(rows=[])


@pytest.mark.parametrize(("warm_up", "kept"), [(60.0, 0), (0.1, 1)])
async def test_a_level_interrupted_before_its_window_is_no_level(
    warm_up: float, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "Telemetry", no_telemetry)
    result = Result.create(tmp_path / "result", run_record())
    fleet: Any = InterruptedFleet(0.2)
    driver = ServiceDriver(fleet, result, {"short": SHORT}, "nowhere:1", [1], time.monotonic(), floor=0.1)
    plan = LevelPlan(phase=Phase.LADDER, warm_up=warm_up, window=1.0, drain_limit=0.1, seed=1, rate=5.0)
    with pytest.raises(asyncio.CancelledError):
        await driver.run(plan)
    assert len(result.levels) == kept
    summary = judge(result, complete=False, notes=["interrupted"], minutes=1.0)
    assert summary.notes == ["interrupted"]
    assert "minutes" not in summary.measures
    judge(result, complete=True, minutes=2.0)
    assert judge(result).measures["minutes"] == 2.0  # as `grade` does


async def test_the_machines_speed_is_measured_in_every_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "Telemetry", no_telemetry)
    fleet, reference = cast(Any, EmptyFleet()), cast(Any, CountedReference())
    result = Result.create(tmp_path / "result", run_record())
    origin = time.monotonic()
    driver = ServiceDriver(fleet, result, {"short": SHORT}, "x:1", [1], origin, floor=0.1, reference=reference)
    for _ in range(2):
        await driver.run(LevelPlan(phase=Phase.LADDER, warm_up=0.1, window=0.1, drain_limit=0.1, seed=1, rate=5.0))
    assert [[time.at for time in level.reference] for level in result.levels] == [[1.0], [2.0, 2.0]]
