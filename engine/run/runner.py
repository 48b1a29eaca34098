"""Runs plans on the CPU: inputs -> forward -> sampler, one step to its end in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.kv.block_table import BlockTables
from engine.model.batch import ForwardBatch, GreedyRows, ScoredRows
from engine.model.decoder import Decoder
from engine.run.block_moves import BlockMover
from engine.run.inputs import StepArrays, prefill_arrays
from engine.run.logits import redraw
from engine.run.prompt_scores import score_prompts
from engine.run.sampler import SamplingTensors, logprobs_of, outcome_of, sample_into
from engine.run.staging import Array, HostStaging, Views
from engine.schedule.plan import StepOutcome, StepPlan
from engine.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that ran to its end inside `launch`."""

    outcome: StepOutcome

    def wait(self) -> StepOutcome:
        return self.outcome


class EagerRunner:
    """The CPU's runner."""

    lookahead = False
    moved = None

    def __init__(
        self,
        decoder: Decoder,
        kv_pool: torch.Tensor,
        tables: BlockTables,
        vocab_size: int,
        mover: BlockMover,
        pulse: Callable[[], None] | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """pulse: called several times a layer; a step of a large model may take seconds here."""
        self._decoder = decoder
        decoder.pulse = pulse or decoder.pulse
        self._kv_pool = kv_pool
        self._tables = tables
        self._vocab_size = vocab_size
        self._staging = HostStaging()
        self._mover = mover
        self._batch_invariant = batch_invariant

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> FinishedStep:
        self._mover.apply(plan, self._tables)
        if not plan.scheduled:
            return FinishedStep(StepOutcome([], []))
        arrays = prefill_arrays(plan, self._tables)
        tensors = self._staging.upload(packed(arrays))
        step = batch_of(tensors, arrays, self._kv_pool, keeps_hidden=bool(plan.scored))
        sampling = plan.sampling
        if not sampling:
            self._decoder.forward(step.batch)
            return FinishedStep(StepOutcome([], [], prompt_logprobs=self._scores(plan)))
        logits = self._decoder.scores(step.batch)[:, : self._vocab_size]
        tokens = torch.empty(len(sampling), dtype=torch.int32)
        sample_into(tokens, logits, step.sampling)
        redraw(tokens, logits, plan)
        logprobs = logprobs_of(logits, tokens, sampling, row_by_row=self._batch_invariant)
        return FinishedStep(outcome_of(tokens.tolist(), logprobs, self._scores(plan)))

    def _scores(self, plan: StepPlan) -> dict[int, list[TokenLogprob]]:
        return score_prompts(self._decoder, plan, self._vocab_size) if plan.scored else {}


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A step's tensors. `targets` [n]: the scored rows' slots; `sampling` [n]: their parameters."""

    batch: ForwardBatch
    targets: torch.Tensor
    sampling: SamplingTensors


def packed(arrays: StepArrays) -> list[Array]:
    """A step's arrays in the order in which `batch_of` takes their tensors."""
    listed: list[Array] = [arrays.token_ids, arrays.sources, arrays.positions, arrays.slots, arrays.block_tables]
    listed += [arrays.query_start, arrays.context_lens, arrays.prefill_start, arrays.targets, arrays.wanted]
    listed += arrays.sampling.all()
    if arrays.scored is not None:
        listed += arrays.scored.all()
    if arrays.logits_rows is not None:
        listed.append(arrays.logits_rows)
    return listed


def batch_of(
    tensors: Views,
    arrays: StepArrays,
    kv_pool: torch.Tensor,
    workspace: torch.Tensor | None = None,
    newest: torch.Tensor | None = None,
    best: torch.Tensor | None = None,
    vocab_size: int = 0,
    keeps_hidden: bool = False,
) -> DeviceBatch:
    """tensors: of `packed(arrays)`. newest: the last sampled token of each slot, where `sources` finds tokens that the
    host does not know yet. best: int64, zeros for as many rows as a step may score, and `vocab_size` as in GreedyRows.
    """
    token_ids, sources, positions, slots, block_tables, query_start, context_lens, prefill_start, targets = tensors[:9]
    wanted = tensors[9]
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        block_tables=block_tables,
        query_start=query_start,
        context_lens=context_lens,
        max_query_len=arrays.max_query_len,
        logits_rows=None if arrays.logits_rows is None else tensors[-1],
        kv_pool=kv_pool,
        workspace=workspace,
        num_decodes=arrays.num_decodes,
        prefill_start=prefill_start,
        sources=None if newest is None else sources,
        newest=newest,
        greedy=None if best is None else GreedyRows(best[: len(targets)], wanted, vocab_size),
        pdl=newest is not None,
        scored=None if arrays.scored is None else ScoredRows(*tensors[16:20]),
        keeps_hidden=keeps_hidden,
    )
    return DeviceBatch(batch, targets, SamplingTensors(*tensors[10:16]))
