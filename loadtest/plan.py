"""What a level is to be, before it is run, and who runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from loadtest.measure import LevelRows
from loadtest.records import Arrival, ArrivalProcess, Phase, group_of


@dataclass(frozen=True, kw_only=True)
class LevelPlan:
    """`rate` (open loop, requests/s) or `concurrency` (closed loop). `warm_up` and `window` in seconds; after them
    arrivals stop and `drain_limit` seconds are left until what still runs is cut off and becomes censored.
    `probes`: after the window single probes go out until one is served as by an idle service.

    `seed` gives gaps, classes and lengths: levels that share it have the same arrivals, stretched in time. `words`
    gives what the prompts say, which no two levels may share, or the second one's would be found in the cache.
    `cv`, `size`: as of `arrivals.times`. `trace`: what a REPLAY plays.
    """

    phase: Phase
    warm_up: float
    window: float
    drain_limit: float
    seed: int
    rate: float | None = None
    concurrency: int | None = None
    words: int = 0
    process: ArrivalProcess = ArrivalProcess.POISSON
    cv: float = 2.0
    size: int = 8
    trace: Sequence[Arrival] = ()
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
