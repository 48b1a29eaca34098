"""Finds the knee of a service: calibrate, ladder, bisect, confirm, go beyond it, come back.

What differs between two levels is to be their rate alone: the first levels of all rates have the same arrivals,
stretched in time (`LevelPlan.seed`), and repeats of a rate alternate with those of the other end of the bracket, so
that a machine that slows down slows both.

The axis refines itself: the ladder begins far below the bound that the calibration found and goes on in whatever
direction the verdicts ask for, and nothing but verdicts moves the bracket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from loadtest.classify import grade
from loadtest.judge import (
    Bracket,
    bracket,
    contradictions,
    in_order,
    keeps_up,
    knee_of,
    mean_knee_of,
    meets_limits,
)
from loadtest.judgements import LevelClass, Verdict
from loadtest.machine import Machine
from loadtest.measure import LevelRows
from loadtest.plan import Driver, LevelPlan
from loadtest.records import Arrival, ArrivalProcess, Limits, Phase

GAIN = 1.05  # of the rate, for the closed loop to go on doubling
LOW = 0.8  # of the bound that calibration found: rungs below it are short
MOST_RUNGS = 16  # extensions of the ladder in one direction
MOST_BISECTIONS = 24
NARROWINGS = 3
GRID = 1.1  # the ladder's rates are multiples of its powers: maps of one service have levels in common
SLOWEST = 5.0  # p95 of end-to-end times in a window
SETTLING = 3.0  # in a warm-up
BETWEEN = 4.0  # seconds that a level takes besides warm-up and window


class SearchError(Exception):
    """The search cannot go on; the message says why. What was measured stays."""


@dataclass(frozen=True)
class Settings:
    """Times in seconds. `warm_up`, `window`: the least; a window also has `completions` requests and five times the p95
    of end-to-end times that was last seen at a lower rate, a warm-up three times that, neither more than `most_window`.
    `rung`: the least window of rungs of the ladder that are far below the bound. `full`: requests of a window near the
    knee, as far as `full_window` goes. `knee_width`: that the knee's interval is to have at most. `width`: of the
    bracket (its highest over its lowest rate, less 1); the interval is wider by the 2 % that keeping up allows, and by
    luck. `aim`: share of its arrivals that is completed at the rate that is looked at first. `repeats`: levels at each
    end of the bracket, the least. `bends`: levels where the curve of p99 TTFT bends most. `process`, `cv`, `size`,
    `trace`: of arrivals in open loops, as of `LevelPlan`."""

    calibrate: float = 8.0
    warm_up: float = 8.0
    window: float = 30.0
    beyond: float = 20.0
    drain_limit: float = 30.0
    ladder: tuple[float, ...] = (0.3, 0.6, 0.85, 1.0, 1.15, 1.3)
    knee_width: float = 0.05
    width: float = 0.02
    aim: float = 0.98
    repeats: int = 3
    multiples: tuple[float, ...] = (1.2, 1.5, 2.0, 3.0)
    most_concurrency: int = 1024
    slo_levels: int = 3
    bends: int = 2
    completions: int = 200
    full: int = 1320
    full_window: float = 60.0
    rung: float = 20.0
    most_window: float = 90.0
    process: ArrivalProcess = ArrivalProcess.POISSON
    cv: float = 2.0
    size: int = 8
    trace: Sequence[Arrival] = ()
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
        await self.bends()
        await self.knee()  # of which shorter windows have said something since
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
        """From far below the bound to above it; further down or up if all of it fails or keeps up. One rung far below
        that is not kept up with does not end it: the machine may have been busy elsewhere for a short window, which
        would send the whole search to rates that say nothing."""
        bound = GRID ** round(math.log(bound, GRID))
        behind = 0
        for share in self.settings.ladder:
            window = self.settings.rung if share < LOW else None
            verdict = await self.run(self._open(Phase.LADDER, bound * share, window))
            behind = 0 if keeps_up(verdict) else behind + 1
            if behind > 1 or (behind and share >= LOW):
                break
        await self.extend(bound)

    async def extend(self, bound: float) -> None:
        """Goes on downwards or upwards from all that was tried, until there is a bracket."""
        for _ in range(MOST_RUNGS):
            found = self._bracket()
            if found.low is not None and found.high is not None:
                return
            tried = [verdict.rate or 0.0 for verdict in self._open_verdicts()] or [bound]
            rate = min(tried) / 2 if found.low is None and found.high is not None else max(tried) * 1.15
            await self.run(self._open(Phase.LADDER, rate))
        raise SearchError("no rate keeps up" if self._bracket().low is None else "no rate is too high")

    async def knee(self) -> None:
        """Bisects and repeats until the knee's interval is narrow enough: three times at most, each with one repeat
        more at the ends, since of a bracket this narrow it is luck that makes the interval wide."""
        for more in range(NARROWINGS):
            await self.bisect(keeps_up, Phase.BISECT, MOST_BISECTIONS, self.settings.width)
            await self.confirm(self.settings.width, self.settings.repeats + more)
            knee = knee_of(self._open_verdicts())
            if knee is None or knee.width < self.settings.knee_width:
                return

    async def bisect(self, good: Callable[[Verdict], bool], phase: Phase, most: int, width: float) -> None:
        """Halves (geometrically) the bracket of a property that is lost with rising rate, until its ends differ by so
        little. Where verdicts contradict each other the one that fewest levels speak for is looked at again."""
        for _ in range(most):
            found = bracket(self._open_verdicts(), good)
            if found.low is None or found.high is None or found.high / found.low <= 1 + width:
                return
            against = contradictions(self._open_verdicts(), good)
            if against:
                rate = min(against, key=lambda verdict: verdict.measures.seconds).rate or 0.0
            elif phase is Phase.BISECT:
                rate = self._between(found.low, found.high, width)
            else:
                rate = math.sqrt(found.low * found.high)
            if not await self._afforded(self._open(phase, rate), f"{phase} stopped"):
                return

    def _between(self, low: float, high: float, width: float) -> float:
        """Where to look next: just below and just above the rate that the service seems to lose its step at, by what
        all windows near it completed; that end of the bracket again which contradicts it, if it was not yet repeated;
        else the middle."""
        verdicts = self._open_verdicts()
        mean = mean_knee_of(verdicts)
        full = next(verdict for verdict in verdicts if verdict.rate == high)
        served = full.measures.completion_rate if mean is None else mean.served
        guess = served / self.settings.aim
        half = math.sqrt(1 + 0.95 * width)
        inside = [rate for rate in (guess / half, guess * half) if low * half < rate < high / half]
        again = [low] if guess / half <= low * half and self._count(low) < 2 else []
        return next(iter([*inside, *again]), math.sqrt(low * high))

    async def confirm(self, width: float, repeats: int) -> None:
        """Repeats both ends of the bracket. A pooled verdict that turns moves the bracket, and the search goes on."""
        for _ in range(MOST_BISECTIONS):
            found = self._bracket()
            ends = [rate for rate in (found.low, found.high) if rate is not None]
            missing = [rate for rate in ends if self._count(rate) < repeats]
            if not missing:
                return
            for rate in missing:
                if not await self._afforded(self._open(Phase.BISECT, rate), "repeats stopped"):
                    return
                if self._bracket() != found:
                    break
            await self.extend(ends[-1])
            await self.bisect(keeps_up, Phase.BISECT, MOST_BISECTIONS, width)

    async def bends(self) -> None:
        """Levels where p99 TTFT over the rate bends most, up to the knee: between that rate and the next ones."""
        for _ in range(self.settings.bends):
            rate = bend([verdict for verdict in self._open_verdicts() if keeps_up(verdict)])
            if rate is None or not await self._afforded(self._open(Phase.REFINE, rate), "the bend was not refined"):
                return

    async def beyond(self) -> None:
        """Multiples of the knee, then the way back from the last one."""
        found = self._bracket()
        if found.low is None:
            return
        for multiple in self.settings.multiples:
            plan = self._open(Phase.BEYOND, found.low * multiple)
            await self.run(replace(plan, multiple=multiple, window=self.settings.beyond))
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
            part = await self.driver.run(replace(plan, words=self._words(), repeat=plan.repeat + 1))
            verdict = self._keep(part)
        return verdict

    def _keep(self, part: LevelRows) -> Verdict:
        group = part.level.group
        self.parts.setdefault(group, []).append(part)
        lower = [known for known in self._open_verdicts() if (known.rate or 0.0) < (part.level.rate or 0.0)]
        levels = [part.level for parts in self.parts.values() for part in parts]
        verdict = grade(self.parts[group], self.limits, lower, Machine(levels))
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
            seed=self.seed * 10_000,
            words=self._words(),
        )

    def _open(self, phase: Phase, rate: float, window: float | None = None) -> LevelPlan:
        """The nth level of every rate has the same arrivals, stretched in time: what differs between rates is then the
        rate and not the luck of the draw."""
        settings, slow = self.settings, self._slow(rate)
        least = settings.window if window is None else window
        if phase is Phase.BISECT:
            least = max(least, min(settings.full / rate, settings.full_window))
        return LevelPlan(
            phase=phase,
            rate=float(f"{rate:.4g}"),
            warm_up=min(max(settings.warm_up, SETTLING * slow), settings.most_window),
            window=min(max(least, settings.completions / rate, SLOWEST * slow), settings.most_window),
            drain_limit=settings.drain_limit,
            seed=self.seed * 10_000 + self._count(rate) * 10,
            words=self._words(),
            process=settings.process,
            cv=settings.cv,
            size=settings.size,
            trace=settings.trace,
            repeat=len(self.parts.get(f"rate:{rate:.4g}", ())),
        )

    def _slow(self, rate: float) -> float:
        """p95 of end-to-end times at the next lower rate that keeps up or may; 0 where none is known."""
        kept = (LevelClass.KEEPS_UP, LevelClass.CANNOT_TELL)
        lower = [v for v in self._open_verdicts() if v.level_class in kept and (v.rate or 0.0) <= rate]
        return lower[-1].measures.e2e.p95.value if lower and lower[-1].measures.e2e is not None else 0.0

    def _words(self) -> int:
        self._runs += 1
        return self._runs

    def _count(self, rate: float) -> int:
        """Levels of this rate that count."""
        group = f"rate:{rate:.4g}"
        void = self.verdicts[group].void if group in self.verdicts else {}
        return sum(str(part.level.index) not in void for part in self.parts.get(group, ()))

    def _open_verdicts(self) -> list[Verdict]:
        return in_order(self.verdicts.values())

    def _bracket(self) -> Bracket:
        return bracket(self._open_verdicts(), keeps_up)

    async def _afforded(self, plan: LevelPlan, what: str) -> bool:
        """Runs a level if the budget has room for it and for everything beyond the knee; one that refines, only if the
        knee could be looked at once more after it."""
        settings = self.settings
        rest = (len(settings.multiples) + 1) * (settings.warm_up + settings.beyond + BETWEEN)
        if plan.phase is Phase.REFINE:
            rest += settings.warm_up + settings.full_window + BETWEEN
        if self.clock() + plan.seconds + BETWEEN + rest <= settings.budget:
            await self.run(plan)
            return True
        note = f"{what}: the budget of {settings.budget:.0f} s was spent"
        if note not in self.notes:
            self.notes.append(note)
        return False

    def _expected(self, phase: Phase) -> list[float]:
        """Seconds of the levels that are still to come after a level of this phase, as far as can be said."""
        settings = self.settings
        level = settings.warm_up + settings.window + BETWEEN
        rest: list[float] = []
        if phase is Phase.CALIBRATE:
            rest += [level] * len(settings.ladder)
        if phase in (Phase.CALIBRATE, Phase.LADDER):
            rest += [level] * 4
        if phase in (Phase.CALIBRATE, Phase.LADDER, Phase.BISECT):
            rest += [level] * max(0, 2 * settings.repeats - 2 - self._repeated())
        if phase not in (Phase.BEYOND, Phase.RECOVERY):
            rest += [settings.warm_up + settings.beyond + BETWEEN] * (len(settings.multiples) + 1)
        return rest

    def _repeated(self) -> int:
        return sum(len(parts) - 1 for group, parts in self.parts.items() if group.startswith("rate:"))


def bend(verdicts: Sequence[Verdict]) -> float | None:
    """The rate at which a level shows most of how p99 TTFT bends: the middle of the wider gap beside the point with the
    largest second difference. verdicts: by rate. None below three of them."""
    points = [(v.rate, v.measures.ttft.p99.value) for v in verdicts if v.rate and v.measures.ttft is not None]
    found: tuple[float, float] | None = None
    for (x0, y0), (x1, y1), (x2, y2) in zip(points, points[1:], points[2:], strict=False):
        bent = (y2 - y1) / (x2 - x1) - (y1 - y0) / (x1 - x0)
        middle = (x0 + x1) / 2 if x1 - x0 > x2 - x1 else (x1 + x2) / 2
        found = max(found or (bent, middle), (bent, middle))
    return found[1] if found else None
