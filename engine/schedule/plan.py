"""What one step runs, and what came of it: all that passes between scheduler and runner."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.errors import EngineError
from engine.schedule.sequence import Sequence
from engine.types import TokenLogprob

Pairs = list[tuple[int, int]]


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """Runs tokens [start, start + count) of a sequence. `samples`: the last of them is the sequence's newest token, so
    its logits give the next one. `slot` is the row of the block tables, fixed at planning. (A msgspec struct, since
    one is made for every sequence and step, ten times as fast as a frozen dataclass.)"""

    sequence: Sequence
    slot: int
    start: int
    count: int
    samples: bool

    def known_tokens(self) -> list[int]:
        """Prompt and output up to the token to draw. Raises EngineError if some of them are still on the device."""
        tokens = self.sequence.token_ids
        if len(tokens) != self.start + self.count:
            raise EngineError("what may come next depends on tokens that are still on the device")
        return tokens


@dataclass(slots=True)
class BlockMoves:
    """Copies of whole blocks, as if made before the step computes and in this order: `out` (device block, host block),
    `back` (host block, device block), `copies` (device block, device block). A block that is a destination here may
    have been a source or another sequence's a moment ago, so the order is part of the plan. `freed`: blocks that nobody
    owns since the last plan, by a checking allocator: they are filled with NaN behind `out`, so that whoever still
    reads them shows."""

    out: Pairs = field(default_factory=list)
    back: Pairs = field(default_factory=list)
    copies: Pairs = field(default_factory=list)
    freed: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.out or self.back or self.copies)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`scheduled` lists decodes (count 1) before prefill chunks, so a decode-only step is a plain batch; `sampling` are
    those that sample. Both may be empty where a step only moves blocks. `edited`: indices in `sampling` of those whose
    requests change their logits before the draw. `scored`: indices in `scheduled` of those that want the log
    probabilities of prompt tokens behind theirs."""

    step: int
    scheduled: list[ScheduledSequence]
    sampling: list[ScheduledSequence]
    moves: BlockMoves = field(default_factory=BlockMoves)
    edited: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(entry.count for entry in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One token for each of the plan's `sampling`, in order; as many log probabilities, or none at all. `failures` maps
    an index to why it has no token; `refused` are those of them whose own requests are to blame.
    `prompt_logprobs`: by index in `scheduled`, of the prompt's tokens from the second of the entry's own on."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    refused: frozenset[int] = frozenset()
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
