"""Finds the knee of a service: calibrate, ladder, bisect, confirm, go beyond it, come back.

The axis refines itself: the ladder begins far below the bound that the calibration found and goes on in whatever
direction the verdicts ask for, and nothing but verdicts moves the bracket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from loadtest.classify import grade
from loadtest.judge import Bracket, bracket, in_order, knee_of, meets_limits
from loadtest.measure import LevelRows
from loadtest.plan import Driver, LevelPlan
from loadtest.records import Level, LevelClass, Limits, Phase, Verdict

GAIN = 1.05  # of the rate, for the closed loop to go on doubling
GOOD = frozenset({LevelClass.KEEPS_UP})
MOST_RUNGS = 16  # extensions of the ladder in one direction
MOST_BISECTIONS = 24
NARROWINGS = 3


class SearchError(Exception):
    """The search cannot go on; the message says why. What was measured stays."""


@dataclass(frozen=True)
class Settings:
    """Times in seconds. `knee_width`: that the knee's interval is to have at most. `width`: of the bracket (its highest
    over its lowest rate, less 1) at first; the interval is wider by the 2 % that keeping up allows, and by luck.
    `repeats`: levels at each end of the bracket."""

    calibrate: float = 8.0
    warm_up: float = 8.0
    window: float = 30.0
    beyond: float = 20.0
    drain_limit: float = 30.0
    ladder: tuple[float, ...] = (0.2, 0.35, 0.6, 0.85, 1.05, 1.3)
    knee_width: float = 0.05
    width: float = 0.029
    repeats: int = 3
    multiples: tuple[float, ...] = (1.2, 1.5, 2.0, 3.0)
    most_concurrency: int = 1024
    slo_levels: int = 3
    budget: float = math.inf


@dataclass
class Search:
    """`on_level`: called after each level with its rows and the verdict of its group, to keep and to show them.
    `on_plan`: before each, with the levels that are expected after it. `clock`: seconds spent so far."""

    driver: Driver
    limits: Limits
    settings: Settings
    seed: int
    on_level: Callable[[LevelRows, Verdict], None]
    on_plan: Callable[[LevelPlan, Sequence[float]], None] = lambda plan, rest: None
    clock: Callable[[], float] = lambda: 0.0
    parts: dict[str, list[LevelRows]] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _runs: int = 0

    async def map(self) -> None:
        """Everything. Raises SearchError if no bracket can be found."""
        bound = await self.calibrate()
        await self.ladder(bound)
        await self.knee()
        await self.bisect(meets_limits, Phase.REFINE, self.settings.slo_levels, self.settings.width)
        await self.beyond()

    # --- phases -----------------------------------------------------------------------------------------------------

    async def calibrate(self) -> float:
        """A closed loop at doubling concurrency until it twice gains less than 5 %. Returns the highest rate seen."""
        best, concurrency, idle = 0.0, 1, 0
        while concurrency <= self.settings.most_concurrency and idle < 2:
            verdict = await self.run(self._closed(concurrency))
            if not verdict.measures.completed:
                raise SearchError(f"nothing completed with {concurrency} in flight: {verdict.evidence}")
            rate = verdict.measures.completion_rate
            idle = idle + 1 if rate < best * GAIN else 0
            best, concurrency = max(best, rate), concurrency * 2
        return best

    async def ladder(self, bound: float) -> None:
        """From far below the bound to above it; further down or up if all of it fails or keeps up."""
        for share in self.settings.ladder:
            verdict = await self.run(self._open(Phase.LADDER, bound * share))
            if verdict.level_class not in GOOD and share != self.settings.ladder[0]:
                break
        await self.extend(bound)

    async def extend(self, bound: float) -> None:
        """Goes on downwards or upwards until there is a bracket."""
        for _ in range(MOST_RUNGS):
            found = self._bracket()
            if found.low is not None and found.high is not None:
                return
            rate = found.high / 2 if found.low is None and found.high is not None else (found.low or bound) * 1.15
            await self.run(self._open(Phase.LADDER, rate))
        raise SearchError("no rate keeps up" if self._bracket().low is None else "no rate is too high")

    async def knee(self) -> None:
        """Bisects and repeats until the knee's interval is narrow enough: three times at most, to half the width."""
        width = self.settings.width
        for _ in range(NARROWINGS):
            await self.bisect(keeping, Phase.BISECT, MOST_BISECTIONS, width)
            await self.confirm(width)
            knee = knee_of(self._open_verdicts())
            if knee is None or knee.width < self.settings.knee_width:
                return
            width /= 2

    async def bisect(self, good: Callable[[Verdict], bool], phase: Phase, most: int, width: float) -> None:
        """Halves (geometrically) the bracket of a property that is lost with rising rate, until its ends differ by so
        little."""
        for _ in range(most):
            found = bracket(self._open_verdicts(), good)
            if found.low is None or found.high is None or found.high / found.low <= 1 + width:
                return
            if not self._affordable(self.settings.window + self.settings.warm_up, f"{phase} stopped"):
                return
            await self.run(self._open(phase, math.sqrt(found.low * found.high)))

    async def confirm(self, width: float) -> None:
        """Repeats both ends of the bracket. A pooled verdict that turns moves the bracket, and the search goes on."""
        for _ in range(MOST_BISECTIONS):
            found = self._bracket()
            ends = [rate for rate in (found.low, found.high) if rate is not None]
            missing = [rate for rate in ends if self._count(rate) < self.settings.repeats]
            if not missing:
                return
            for rate in missing:
                if not self._affordable(self.settings.window + self.settings.warm_up, "repeats stopped"):
                    return
                await self.run(self._open(Phase.BISECT, rate))
            await self.extend(ends[-1])
            await self.bisect(keeping, Phase.BISECT, MOST_BISECTIONS, width)

    async def beyond(self) -> None:
        """Multiples of the knee, then the way back from the last one."""
        found = self._bracket()
        if found.low is None:
            return
        for multiple in self.settings.multiples:
            plan = replace(
                self._open(Phase.BEYOND, found.low * multiple), multiple=multiple, window=self.settings.beyond
            )
            await self.run(plan)
        multiple = self.settings.multiples[-1]
        plan = self._open(Phase.RECOVERY, found.low * multiple)
        await self.run(
            replace(plan, multiple=multiple, window=self.settings.beyond, label=f"{multiple:g}", probes=True)
        )

    # --- levels -----------------------------------------------------------------------------------------------------

    async def run(self, plan: LevelPlan) -> Verdict:
        """Runs a level and grades its group; a void level is run once more."""
        self.on_plan(plan, self._expected(plan.phase))
        part = await self.driver.run(plan)
        verdict = self._keep(part)
        if str(part.level.index) in verdict.void and not part.level.interrupted:
            part = await self.driver.run(replace(plan, seed=plan.seed + 1, repeat=plan.repeat + 1))
            verdict = self._keep(part)
        return verdict

    def _keep(self, part: LevelRows) -> Verdict:
        group = part.level.group
        self.parts.setdefault(group, []).append(part)
        lower = [known for known in self._open_verdicts() if (known.rate or 0.0) < (part.level.rate or 0.0)]
        verdict = grade(self.parts[group], self.limits, lower)
        self.verdicts[group] = verdict
        self.on_level(part, verdict)
        return verdict

    def _closed(self, concurrency: int) -> LevelPlan:
        settings = self.settings
        return LevelPlan(
            phase=Phase.CALIBRATE,
            concurrency=concurrency,
            warm_up=settings.calibrate / 4,
            window=settings.calibrate,
            drain_limit=settings.drain_limit,
            seed=self._seed(),
        )

    def _open(self, phase: Phase, rate: float) -> LevelPlan:
        settings = self.settings
        return LevelPlan(
            phase=phase,
            rate=float(f"{rate:.4g}"),
            warm_up=settings.warm_up,
            window=settings.window,
            drain_limit=settings.drain_limit,
            seed=self._seed(),
            repeat=self._count(rate),
        )

    def _seed(self) -> int:
        self._runs += 1
        return self.seed * 10_000 + self._runs * 10

    def _count(self, rate: float) -> int:
        return len(self.parts.get(f"rate:{rate:.4g}", ()))

    def _open_verdicts(self) -> list[Verdict]:
        return in_order(self.verdicts.values())

    def _bracket(self) -> Bracket:
        return bracket(self._open_verdicts(), keeping)

    def _affordable(self, seconds: float, what: str) -> bool:
        """Whether the budget has room for a level and everything beyond the knee."""
        settings = self.settings
        beyond = (len(settings.multiples) + 1) * (settings.warm_up + settings.beyond + settings.drain_limit / 2)
        if self.clock() + seconds + beyond <= settings.budget:
            return True
        note = f"{what}: the budget of {settings.budget:.0f} s was spent"
        if note not in self.notes:
            self.notes.append(note)
        return False

    def _expected(self, phase: Phase) -> list[float]:
        """Seconds of the levels that are still to come after a level of this phase, as far as can be said."""
        settings = self.settings
        level = settings.warm_up + settings.window + 3.0
        rest: list[float] = []
        if phase is Phase.CALIBRATE:
            rest += [level] * len(settings.ladder)
        if phase in (Phase.CALIBRATE, Phase.LADDER):
            rest += [level] * 4
        if phase in (Phase.CALIBRATE, Phase.LADDER, Phase.BISECT):
            rest += [level] * max(0, 2 * settings.repeats - 2 - self._repeated())
        if phase not in (Phase.BEYOND, Phase.RECOVERY):
            rest += [settings.warm_up + settings.beyond + 5.0] * (len(settings.multiples) + 1)
        return rest

    def _repeated(self) -> int:
        return sum(len(parts) - 1 for group, parts in self.parts.items() if group.startswith("rate:"))


def keeping(verdict: Verdict) -> bool:
    return verdict.level_class in GOOD


def levels_of(search: Search) -> list[Level]:
    return sorted((part.level for parts in search.parts.values() for part in parts), key=lambda level: level.index)
