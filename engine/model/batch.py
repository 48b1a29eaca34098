"""The tensors of one step, as the runner hands them to the decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GreedyRows:
    """Lets the LM head find greedy tokens itself (CUDA, where `Decoder.finds_best`).

    best: int64 [n], zero; gets what `ops.sample` needs instead of logits. wanted: int32 [n], 0 for rows whose logits
    nobody reads, so that they need not be stored. vocab_size: columns of the logits that are tokens.
    """

    best: torch.Tensor
    wanted: torch.Tensor
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The n scored rows of a step with prompts as a decode step would have them, each the last of its sequence.

    positions, context_lens: int32 [n]. block_tables: int32 [n, B]. query_start: int32 [n + 1], 0 to n.
    """

    positions: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of S sequences; all tensors are on the model's device, and stay at one address for a captured graph.

    token_ids, positions: int32 [T]. slots: int64 [T], where each token's K and V go in the pool, -1 nowhere.
    block_tables: int32 [S, B]. query_start: int32 [S + 1]. context_lens: int32 [S], this step's tokens included.
    max_query_len: the longest query; 1 means a pure decode step. logits_rows: int32 or int64 [n], rows of [T] to
    score; None scores all. scored: the same rows, if each is its sequence's last: the last layer then computes of the
    others nothing but K and V. keeps_hidden: `Decoder.hidden` is called afterwards for rows that are not scored.
    kv_pool: [num_blocks, layers, 2, kv_heads, block_size, head_dim]. workspace: uint8, CUDA only.
    num_decodes: how many of the first sequences have one query token; prefill_start: int32 [S - num_decodes + 1],
    prefix sums of the others' query lengths. On CUDA the two kinds of a mixed step go to their own attention kernels.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    logits_rows: torch.Tensor | None
    kv_pool: torch.Tensor
    workspace: torch.Tensor | None = None
    num_decodes: int = 0
    prefill_start: torch.Tensor | None = None
    sources: torch.Tensor | None = None
    newest: torch.Tensor | None = None
    greedy: GreedyRows | None = None
    pdl: bool = False
    scored: ScoredRows | None = None
    keeps_hidden: bool = False
