"""What requests do to their logits before the draw: bias, penalties, tokens that must not come.

As Hugging Face's processors do it, and in their order: bias, repetition penalty (over prompt and output), presence and
frequency penalty (over the output, as OpenAI defines them), then the masks. All before the temperature. A row depends
on its own request alone. Log probabilities are the model's own, so what is edited here is a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.run.masks import Mask, grammar_masks
from engine.run.sampler import NO_TOKEN, SamplingTensors, sample_into, sampling_arrays
from engine.schedule.plan import ScheduledSequence, StepPlan
from engine.schedule.token_counts import TokenCounts

Tensor = torch.Tensor
Ids = NDArray[np.int64]

_ROWS_AT_ONCE = 32  # copies of so many rows' logits are held at a time


def redraw(
    tokens: Tensor, logits: Tensor, plan: StepPlan, *, newest: Tensor | None = None, workspace: Tensor | None = None
) -> None:
    """Draws the plan's edited rows again, from edited copies of their logits.

    tokens [n] int32 as `sample_into` left them, of logits [n, vocabulary] fp32. NOT_FINITE stays; NO_TOKEN where every
    token is ruled out. newest: as for `sample_into`, by slot.
    """
    # Before anything waits for the device, which is at the forward pass meanwhile.
    masks = grammar_masks([plan.sampling[row] for row in plan.edited])
    for begin in range(0, len(plan.edited), _ROWS_AT_ONCE):
        rows = plan.edited[begin : begin + _ROWS_AT_ONCE]
        entries = [plan.sampling[row] for row in rows]
        index = torch.tensor(rows, device=logits.device)
        edited = logits[index]
        edit_logits(edited, entries, masks[begin : begin + _ROWS_AT_ONCE])
        drawn = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
        arrays = sampling_arrays(entries, len(entries)).all()
        sampling = SamplingTensors(*(torch.from_numpy(array).to(logits.device) for array in arrays))
        sample_into(drawn, edited, sampling, workspace=workspace)
        before = tokens[index]
        drawn = torch.where(before < 0, before, drawn.masked_fill(drawn < 0, NO_TOKEN))
        tokens[index] = drawn
        if newest is not None:
            newest[torch.tensor([entry.slot for entry in entries], device=logits.device)] = drawn.clamp_min(0)


def edit_logits(
    logits: Tensor, entries: Sequence[ScheduledSequence], masks: Sequence[Mask | None] | None = None
) -> None:
    """logits [n, vocabulary] fp32 of n entries, in place. masks: of their grammars."""
    _add_bias(logits, entries)
    _penalise_repetition(logits, entries)
    _penalise_output(logits, entries)
    _keep_allowed(logits, entries)
    _keep_grammatical(logits, masks or ())
    _bar_endings(logits, entries)


@dataclass(slots=True)
class _Cells:
    """Single logits, each at most once, with a figure for each."""

    rows: list[int] = field(default_factory=list)
    ids: list[Ids] = field(default_factory=list)
    figures: list[NDArray[np.float32]] = field(default_factory=list)

    def add(self, row: int, ids: Ids, figures: NDArray[np.float32] | float) -> None:
        self.rows.append(row)
        self.ids.append(ids)
        self.figures.append(np.broadcast_to(np.asarray(figures, dtype=np.float32), ids.shape))

    def upload(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and ids int64, figures fp32; all [cells]."""
        counts = [len(ids) for ids in self.ids]
        rows = np.repeat(np.asarray(self.rows, dtype=np.int64), counts)
        arrays = rows, np.concatenate(self.ids), np.concatenate(self.figures)
        return tuple(torch.from_numpy(array).to(device) for array in arrays)  # type: ignore[return-value]


def _add_bias(logits: Tensor, entries: Sequence[ScheduledSequence]) -> None:
    cells = _Cells()
    for row, entry in enumerate(entries):
        bias = entry.sequence.group.request.sampling.logit_bias
        if bias:
            cells.add(row, _ids(bias), np.fromiter(bias.values(), dtype=np.float32, count=len(bias)))
    if cells.rows:
        rows, ids, figures = cells.upload(logits.device)
        logits[rows, ids] += figures


def _penalise_repetition(logits: Tensor, entries: Sequence[ScheduledSequence]) -> None:
    cells = _Cells()
    for row, entry in enumerate(entries):
        penalty = entry.sequence.group.request.sampling.repetition_penalty
        if penalty != 1.0:
            cells.add(row, _counts(entry).seen, penalty)
    if cells.rows:
        rows, ids, figures = cells.upload(logits.device)
        values = logits[rows, ids]
        logits[rows, ids] = torch.where(values < 0, values * figures, values / figures)


def _penalise_output(logits: Tensor, entries: Sequence[ScheduledSequence]) -> None:
    cells = _Cells()
    for row, entry in enumerate(entries):
        sampling = entry.sequence.group.request.sampling
        if sampling.presence_penalty or sampling.frequency_penalty:
            seen, counts = _counts(entry).output
            cells.add(
                row, seen, counts * np.float32(sampling.frequency_penalty) + np.float32(sampling.presence_penalty)
            )
    if cells.rows:
        rows, ids, figures = cells.upload(logits.device)
        logits[rows, ids] -= figures


def _keep_allowed(logits: Tensor, entries: Sequence[ScheduledSequence]) -> None:
    for row, entry in enumerate(entries):
        allowed = entry.sequence.group.request.sampling.allowed_token_ids
        if allowed:
            ids = torch.tensor(allowed, device=logits.device)
            kept = logits[row, ids]
            logits[row] = -math.inf
            logits[row, ids] = kept


def _keep_grammatical(logits: Tensor, masks: Sequence[Mask | None]) -> None:
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if rows:
        words = torch.from_numpy(np.stack([mask for mask in masks if mask is not None])).to(logits.device)
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
        barred = bits.flatten(1)[:, : logits.shape[1]] == 0
        index = torch.tensor(rows, device=logits.device)
        logits[index] = logits[index].masked_fill(barred, -math.inf)


def _bar_endings(logits: Tensor, entries: Sequence[ScheduledSequence]) -> None:
    """No end before `min_tokens`."""
    cells = _Cells()
    for row, entry in enumerate(entries):
        group = entry.sequence.group
        if _num_output(entry) < group.request.stop.min_tokens and group.ending_ids:
            endings = _ids(group.ending_ids)
            cells.add(row, endings[endings < logits.shape[1]], -math.inf)
    if cells.rows:
        rows, ids, figures = cells.upload(logits.device)
        logits[rows, ids] = figures


def _ids(tokens: Iterable[int]) -> Ids:
    return np.asarray(list(tokens), dtype=np.int64)


def _num_output(entry: ScheduledSequence) -> int:
    """Tokens of the output before the one to draw."""
    return entry.start + entry.count - entry.sequence.num_prompt


def _counts(entry: ScheduledSequence) -> TokenCounts:
    sequence = entry.sequence
    if sequence.counts is None:
        sequence.counts = TokenCounts(sequence.num_prompt)
    sequence.counts.follow(entry.known_tokens())
    return sequence.counts
