"""Which calls of attention a step makes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.batch import ForwardBatch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of paged attention, the same in every layer. rows: of the step's, which it takes; None: all."""

    rows: slice | None
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    max_query_len: int


def attention_calls(batch: ForwardBatch) -> list[AttentionCall]:
    """One, or two for a mixed step on CUDA, whose decodes and chunks have kernels of their own."""
    count, tables, lens = batch.num_decodes, batch.block_tables, batch.context_lens
    if batch.max_query_len == 1 or not count or batch.prefill_start is None or not lens.is_cuda:
        return [AttentionCall(None, tables, batch.query_start, lens, batch.max_query_len)]
    return [
        AttentionCall(slice(0, count), tables[:count], batch.query_start[: count + 1], lens[:count], 1),
        AttentionCall(slice(count, None), tables[count:], batch.prefill_start, lens[count:], batch.max_query_len),
    ]
