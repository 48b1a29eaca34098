"""Runs plans on the CPU: inputs -> forward -> sampler, one step to its end in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kv.block_table import BlockTables
from engine.model.batch import ForwardBatch
from engine.model.decoder import Decoder
from engine.run.inputs import StepArrays, prefill_arrays
from engine.run.sampler import sample
from engine.run.staging import DeviceStaging, HostStaging
from engine.schedule.plan import StepOutcome, StepPlan


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that ran to its end inside `launch`."""

    outcome: StepOutcome

    def wait(self) -> StepOutcome:
        return self.outcome


class EagerRunner:
    """The CPU's runner."""

    lookahead = False

    def __init__(self, decoder: Decoder, kv_pool: torch.Tensor, tables: BlockTables, vocab_size: int) -> None:
        self._decoder = decoder
        self._kv_pool = kv_pool
        self._tables = tables
        self._vocab_size = vocab_size
        self._staging = HostStaging()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> FinishedStep:
        batch, _ = forward_batch(prefill_arrays(plan, self._tables), self._staging, self._kv_pool, None)
        hidden = self._decoder.forward(batch)
        sampling = plan.sampling
        if not sampling:
            return FinishedStep(StepOutcome([], []))
        return FinishedStep(sample(self._decoder.logits(hidden), sampling, self._vocab_size))


def forward_batch(
    arrays: StepArrays,
    staging: HostStaging | DeviceStaging,
    kv_pool: torch.Tensor,
    workspace: torch.Tensor | None,
) -> tuple[ForwardBatch, torch.Tensor]:
    """The batch on its device, and `sources`: token_ids are still to be filled in where it is not HOST_TOKEN."""
    token_ids, sources, positions, slots, block_tables, query_start, context_lens, logits_rows, prefill_start = (
        staging.upload(
            [
                arrays.token_ids,
                arrays.sources,
                arrays.positions,
                arrays.slots,
                arrays.block_tables,
                arrays.query_start,
                arrays.context_lens,
                arrays.logits_rows,
                arrays.prefill_start,
            ]
        )
    )
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        block_tables=block_tables,
        query_start=query_start,
        context_lens=context_lens,
        max_query_len=arrays.max_query_len,
        logits_rows=logits_rows,
        kv_pool=kv_pool,
        workspace=workspace,
        num_decodes=arrays.num_decodes,
        prefill_start=prefill_start,
    )
    return batch, sources
