"""Paged attention cases on the GPU and their truth in float64, both on the device: long contexts stay quick.

`tests/cuda` compares the same ops with numpy at small sizes; here are the sizes at which grids, splits and clusters
differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine import ops

Tensor = torch.Tensor

BLOCK = 16
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class PagedCase:
    """query [T, Hq, D]; the last query_lens[s] of contexts[s] tokens are queries. Unwritten pool slots are NaN."""

    query: Tensor
    pool: Tensor
    layer: int
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    contexts: list[int]
    query_lens: list[int]

    @property
    def scale(self) -> float:
        return float(self.query.shape[2] ** -0.5)

    def workspace(self, max_seqs: int | None = None, *, fixed: bool = False) -> Tensor:
        _, q_heads, head_dim = self.query.shape
        rows = max_seqs or len(self.contexts)
        size = ops.paged_attention_workspace_bytes(rows, q_heads, self.pool.shape[3], head_dim, fixed)
        return torch.zeros(size, dtype=torch.uint8, device=DEVICE)

    def attend(
        self,
        workspace: Tensor,
        *,
        least_tokens: int | None = None,
        planned: bool = False,
        fixed: bool = False,
        pdl: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """The op's output, in `out` or a poisoned buffer. least_tokens: plan with it first; planned: that was done
        before."""
        _, q_heads, head_dim = self.query.shape
        if out is None:
            out = torch.full_like(self.query, float("nan"))
        if least_tokens is not None:
            ops.plan_attention(
                self.context_lens, q_heads, self.pool.shape[3], head_dim, workspace, least_tokens=least_tokens, pdl=pdl
            )
        ops.paged_attention(
            out,
            self.query,
            self.pool,
            self.layer,
            self.block_tables,
            self.query_start,
            self.context_lens,
            max_query_len=max(self.query_lens),
            scale=self.scale,
            workspace=workspace,
            planned=planned or least_tokens is not None,
            fixed=fixed,
            pdl=pdl,
        )
        return out

    def truth(self) -> Tensor:
        """float64 [T, Hq, D]."""
        out = torch.zeros_like(self.query, dtype=torch.float64)
        kv_heads = self.pool.shape[3]
        group = self.query.shape[1] // kv_heads
        first = 0
        for seq, (context, count) in enumerate(zip(self.contexts, self.query_lens, strict=True)):
            rows = slice(first, first + count)
            first += count
            if context == 0:
                continue
            blocks = self.block_tables[seq, : -(-context // BLOCK)].long()
            kv = self.pool[blocks, self.layer].double()  # [blocks, 2, Hkv, 16, D]
            kv = kv.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
            query = self.query[rows].double().view(count, kv_heads, group, -1).permute(1, 2, 0, 3)  # [Hkv, G, q, D]
            scores = query @ kv[0][:, None].transpose(-1, -2) * self.scale
            visible = (
                torch.arange(context, device=DEVICE) <= torch.arange(context - count, context, device=DEVICE)[:, None]
            )
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out[rows] = (weights @ kv[1][:, None]).permute(2, 0, 1, 3).flatten(1, 2)
        return out


def paged_case(
    contexts: list[int],
    query_lens: list[int] | None = None,
    *,
    heads: tuple[int, int, int] = (12, 2, 128),
    dtype: torch.dtype = torch.bfloat16,
    layers: int = 2,
    seed: int = 0,
) -> PagedCase:
    """heads: query heads, KV heads, head_dim. Blocks are dealt out in random order."""
    q_heads, kv_heads, head_dim = heads
    query_lens = query_lens or [1] * len(contexts)
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    counts = [-(-context // BLOCK) for context in contexts]
    ids = 1 + torch.randperm(sum(counts) + 2, generator=generator, device=DEVICE)
    pool = torch.full((len(ids) + 1, layers, 2, kv_heads, BLOCK, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    tables = ids[-1].int().repeat(len(contexts), max(counts) + 2)  # unused entries: a block of NaN
    layer, first = layers - 1, 0
    for seq, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        own = ids[first : first + count]
        first += count
        tables[seq, :count] = own.int()
        shape = (count, 2, kv_heads, BLOCK, head_dim)
        values = torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)
        if context % BLOCK:
            values[-1, :, :, context % BLOCK :] = torch.nan
        pool[own, layer] = values
    starts = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    query = torch.randn(sum(query_lens), q_heads, head_dim, generator=generator, device=DEVICE).to(dtype)
    lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    return PagedCase(query, pool, layer, tables, starts, lens, contexts, query_lens)


def relative_error(out: Tensor, truth: Tensor) -> float:
    """|out - truth| / |truth|; NaN anywhere gives NaN, which no bound accepts."""
    return float((out.double() - truth).norm() / truth.norm())
