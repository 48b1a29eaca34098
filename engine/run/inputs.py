"""A plan's tokens, positions, slots and tables as tensors, built in buffers that live as long as the runner."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kv.block_table import BlockTables
from engine.model.batch import ForwardBatch
from engine.schedule.plan import StepPlan


class StepInputs:
    """Host buffers sized for the largest step; `fill` writes a plan into them and gives views of the used part."""

    def __init__(self, tables: BlockTables, max_tokens: int, max_seqs: int, device: torch.device) -> None:
        self._tables = tables
        self._device = device
        self._token_ids = np.zeros(max_tokens, dtype=np.int32)
        self._positions = np.zeros(max_tokens, dtype=np.int32)
        self._slots = np.zeros(max_tokens, dtype=np.int64)
        self._query_start = np.zeros(max_seqs + 1, dtype=np.int32)
        self._context_lens = np.zeros(max_seqs, dtype=np.int32)
        self._logits_rows = np.zeros(max_seqs, dtype=np.int64)

    def fill(self, plan: StepPlan, kv_pool: torch.Tensor) -> ForwardBatch:
        """The batch of a plan. Every scheduled token's value must be known to the host."""
        block_size = self._tables.block_size
        row, longest, sampled = 0, 0, 0
        for index, entry in enumerate(plan.scheduled):
            end = row + entry.count
            stop = entry.start + entry.count
            self._token_ids[row:end] = entry.sequence.token_ids[entry.start : stop]
            positions = np.arange(entry.start, stop, dtype=np.int32)
            self._positions[row:end] = positions
            blocks = self._tables.rows[entry.slot, positions // block_size].astype(np.int64)
            self._slots[row:end] = blocks * block_size + positions % block_size
            self._query_start[index + 1] = end
            self._context_lens[index] = stop
            if entry.samples:
                self._logits_rows[sampled] = end - 1
                sampled += 1
            longest = max(longest, stop)
            row = end
        count = len(plan.scheduled)
        slots = [entry.slot for entry in plan.scheduled]
        width = max(1, self._tables.blocks_for(longest))
        return ForwardBatch(
            token_ids=self._tensor(self._token_ids[:row]),
            positions=self._tensor(self._positions[:row]),
            slots=self._tensor(self._slots[:row]),
            block_tables=self._tensor(np.ascontiguousarray(self._tables.rows[slots, :width])),
            query_start=self._tensor(self._query_start[: count + 1]),
            context_lens=self._tensor(self._context_lens[:count]),
            max_query_len=max(entry.count for entry in plan.scheduled),
            logits_rows=self._tensor(self._logits_rows[:sampled]),
            kv_pool=kv_pool,
        )

    def _tensor(self, array: NDArray[np.integer[Any]]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)
