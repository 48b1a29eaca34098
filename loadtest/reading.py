"""A result read whole, with its judgements: what plots, reports and comparisons start from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

from loadtest.judge import in_order, judge_levels, keeps_up, summarize, told
from loadtest.judgements import Verdict
from loadtest.measure import LevelRows, by_level
from loadtest.records import Phase, TelemetryRow
from loadtest.result import Result


class Reading:
    """Judgements are the stored ones; where a run ended before it wrote them they are made from its rows."""

    def __init__(self, result: Result) -> None:
        self.run = result.run
        self.folder = result.folder
        self.levels = result.levels
        requests = by_level(result.requests)
        telemetry: defaultdict[int, list[TelemetryRow]] = defaultdict(list)
        for row in result.telemetry:
            telemetry[row.level].append(row)
        self.parts = {
            level.index: LevelRows(level, requests.get(level.index, []), telemetry[level.index])
            for level in self.levels
        }
        judged = (result.folder / "summary.json").exists()
        self.verdicts = result.verdicts if judged else judge_levels(list(self.parts.values()), self.run.limits)
        self.summary = result.summary if judged else summarize(self.run, self.verdicts, complete=False)
        self.faults = result.faults
        self.overhead = result.overhead

    @cached_property
    def sweep(self) -> list[Verdict]:
        """Open-loop groups that count, by rate."""
        return in_order(self.verdicts)

    @cached_property
    def closed(self) -> list[Verdict]:
        """Closed-loop groups, by concurrency."""
        found = [verdict for verdict in self.verdicts if verdict.concurrency is not None]
        return sorted(found, key=lambda verdict: verdict.concurrency or 0)

    @property
    def recovery(self) -> Verdict | None:
        found = [verdict for verdict in self.verdicts if verdict.phase is Phase.RECOVERY]
        return found[-1] if found else None

    def parts_of(self, verdict: Verdict) -> list[LevelRows]:
        """Its levels that count; all of them if none does."""
        parts = [self.parts[index] for index in verdict.levels]
        return [part for part in parts if str(part.level.index) not in verdict.void] or parts

    @cached_property
    def around_knee(self) -> list[Verdict]:
        """Up to four groups that tell the story: the lowest rate, the highest that keeps up, the lowest above it that
        does not, the highest rate."""
        keeping = [verdict for verdict in self.sweep if keeps_up(verdict)]
        last = keeping[-1].rate if keeping else None
        lost = [v for v in told(self.sweep) if not keeps_up(v) and (last is None or (v.rate or 0.0) > last)]
        picked: Sequence[Verdict] = [*self.sweep[:1], *keeping[-1:], *lost[:1], *self.sweep[-1:]]
        return [verdict for index, verdict in enumerate(picked) if verdict not in picked[:index]]
