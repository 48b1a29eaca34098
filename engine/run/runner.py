"""Runs plans on the model: inputs -> forward -> sampler."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kv.block_table import BlockTables
from engine.model.decoder import Decoder
from engine.run.inputs import StepInputs
from engine.run.sampler import sample
from engine.schedule.plan import StepOutcome, StepPlan


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that ran to its end inside `launch`."""

    outcome: StepOutcome

    def wait(self) -> StepOutcome:
        return self.outcome


class EagerRunner:
    """One launch runs one step to its end: the CPU's way, and the truth that graphs are held against."""

    lookahead = False

    def __init__(
        self,
        decoder: Decoder,
        kv_pool: torch.Tensor,
        tables: BlockTables,
        *,
        max_tokens: int,
        max_seqs: int,
        vocab_size: int,
    ) -> None:
        self._decoder = decoder
        self._kv_pool = kv_pool
        self._inputs = StepInputs(tables, max_tokens, max_seqs, kv_pool.device)
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> FinishedStep:
        batch = self._inputs.fill(plan, self._kv_pool)
        hidden = self._decoder.forward(batch)
        sampling = plan.sampling
        if not sampling:
            return FinishedStep(StepOutcome([], []))
        logits = self._decoder.logits(hidden)
        return FinishedStep(sample(logits, sampling, self._vocab_size))
