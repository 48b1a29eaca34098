"""What a run is doing, how it went so far, and how long is left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.judgements import Distribution, LevelClass, Verdict
from loadtest.plan import LevelPlan

REFRESH = 0.5
COLOURS = {
    LevelClass.KEEPS_UP: "green",
    LevelClass.RECOVERED: "green",
    LevelClass.SATURATED_STABLE: "yellow",
    LevelClass.SATURATED_GROWING: "dark_orange",
}


class RunProgress:
    """`async with RunProgress(console) as progress`: a bar for the whole run, and a line for each level that ended."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
        )
        self._started = time.monotonic()
        self._level_ends = self._started
        self._rest = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    async def __aenter__(self) -> RunProgress:
        self._progress.start()
        self._task = self._progress.add_task("starting", total=None, left="")
        self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._ticker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticker
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)

    def doing(self, what: str, seconds: float, rest: Sequence[float] | None = None) -> None:
        """seconds: of this; rest: of what comes after it, as far as that is known; None: as was said before."""
        self._level_ends = time.monotonic() + seconds
        if rest is not None:
            self._rest = sum(rest)
        self._progress.update(self._task, description=what)
        self._show()

    def on_plan(self, plan: LevelPlan, rest: Sequence[float]) -> None:
        self.doing(str(plan), plan.seconds, rest)

    def on_verdict(self, verdict: Verdict) -> None:
        self.say(verdict_line(verdict))

    def _show(self) -> None:
        left = max(0.0, self._level_ends - time.monotonic()) + self._rest
        elapsed = self.elapsed
        self._progress.update(
            self._task, completed=elapsed, total=elapsed + left, left=f"about {left / 60:.1f} min left"
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(REFRESH)
            self._show()


def verdict_line(verdict: Verdict) -> str:
    measures = verdict.measures
    load = f"{verdict.concurrency} at once" if verdict.rate is None else f"{verdict.rate:.4g}/s"
    colour = COLOURS.get(verdict.level_class, "red")
    repeats = f" x{len(verdict.levels)}" if len(verdict.levels) > 1 else ""
    return (
        f"{verdict.phase:>9} {load:>11}{repeats:<3} [{colour}]{verdict.level_class}[/{colour}]: "
        f"{measures.completion_rate:.4g}/s done, {measures.token_rate:.0f} tokens/s, TTFT p99 {shown(measures.ttft)}, "
        f"TPOT p99 {shown(measures.tpot)}; {verdict.evidence}"
    )


def shown(distribution: Distribution | None) -> str:
    """Its p99 in milliseconds."""
    if distribution is None:
        return "-"
    bound = ">= " if distribution.p99.censored else ""
    return f"{bound}{distribution.p99.value * 1e3:.0f} ms"
