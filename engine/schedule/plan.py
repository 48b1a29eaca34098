"""What one step runs, and what came of it: all that passes between scheduler and runner."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.schedule.sequence import Sequence
from engine.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Runs tokens [start, start + count) of a sequence. `samples`: the last of them is the sequence's newest token, so
    its logits give the next one. `slot` is the row of the block tables, fixed at planning."""

    sequence: Sequence
    slot: int
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`scheduled` lists decodes (count 1) before prefill chunks, so a decode-only step is a plain batch."""

    step: int
    scheduled: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(entry.count for entry in self.scheduled)

    @property
    def sampling(self) -> list[ScheduledSequence]:
        return [entry for entry in self.scheduled if entry.samples]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One entry for each of the plan's `sampling`, in order. `failures` maps an index to why its logits are
    unusable."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    failures: dict[int, str] = field(default_factory=dict)
