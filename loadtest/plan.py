"""What a level is to be, before it is run, and who runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from loadtest.measure import LevelRows
from loadtest.records import ArrivalProcess, Phase, group_of


@dataclass(frozen=True, kw_only=True)
class LevelPlan:
    """`rate` (open loop, requests/s) or `concurrency` (closed loop). `warm_up` and `window` in seconds; after them
    arrivals stop and `drain_limit` seconds are left until what still runs is cut off and becomes censored.
    `probes`: after the window single probes go out until one is served as by an idle service.
    """

    phase: Phase
    warm_up: float
    window: float
    drain_limit: float
    seed: int
    rate: float | None = None
    concurrency: int | None = None
    process: ArrivalProcess = ArrivalProcess.POISSON
    repeat: int = 0
    multiple: float | None = None
    label: str = ""
    probes: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return group_of(self.phase, self.rate, self.concurrency, self.label)

    @property
    def seconds(self) -> float:
        """Without the drain."""
        return self.warm_up + self.window

    def __str__(self) -> str:
        load = f"{self.concurrency} in flight" if self.rate is None else f"{self.rate:.3g} requests/s"
        return f"{self.phase}: {load}" + (f", {self.multiple:g} x the knee" if self.multiple else "")


class Driver(Protocol):
    """Runs levels, numbered from 0 in order."""

    async def run(self, plan: LevelPlan) -> LevelRows: ...
