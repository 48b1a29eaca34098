"""Ragged batches over a paged pool in which every slot that is not written holds NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK_SIZE = 16
LAYERS = 2


@dataclass(frozen=True)
class RaggedBatch:
    """Sequences whose K and V are in the pool; the last `query_lens[s]` tokens of each are this step's queries."""

    query: torch.Tensor
    kv_pool: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int


def tensor(values: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values)).to(dtype).to(device)


def float64(x: torch.Tensor) -> NDArray[np.float64]:
    return x.double().cpu().numpy()


def ragged_batch(
    contexts: list[int],
    query_lens: list[int],
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    layer: int = 1,
    seed: int = 0,
    block_size: int = BLOCK_SIZE,
) -> RaggedBatch:
    """Blocks are dealt out in random order; only the written slots of `layer` are numbers."""
    random = np.random.default_rng(seed)
    blocks = [-(-context // block_size) for context in contexts]
    ids = random.permutation(np.arange(1, sum(blocks) + 3))
    tables = np.zeros((len(contexts), max(blocks) + 2), np.int32)
    pool = np.full((len(ids) + 1, LAYERS, 2, kv_heads, block_size, head_dim), np.nan, np.float32)
    for seq, (context, count) in enumerate(zip(contexts, blocks, strict=True)):
        tables[seq, :count], ids = ids[:count], ids[count:]
        positions = np.arange(context)
        rows = tables[seq, positions // block_size]
        pool[rows, layer, :, :, positions % block_size] = random.normal(size=(context, 2, kv_heads, head_dim))
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    query = random.normal(size=(int(starts[-1]), q_heads, head_dim))
    return RaggedBatch(
        query=tensor(query, dtype, device),
        kv_pool=tensor(pool, dtype, device),
        block_tables=tensor(tables, torch.int32, device),
        query_start=tensor(starts, torch.int32, device),
        context_lens=tensor(contexts, torch.int32, device),
        max_query_len=max(query_lens),
    )
