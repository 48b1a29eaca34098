"""The runtime's ops on torch tensors: the only importer of `engine._runtime`'s ops.

Shapes use T tokens of this step, S sequences, H hidden, Hq/Hkv query/KV heads, D head_dim, B blocks a row. Integer
tensors are int32 unless said; all are on the data's device. Nothing is converted or copied silently: a wrong dtype,
device or stride raises `_runtime.OpError`. On CUDA every op runs on torch's current stream; `pdl` is for chains of
kernels, see `Launch` in cuda/include/octavo/tensor.h.
"""

from __future__ import annotations

import torch

from engine import _runtime

Tensor = torch.Tensor
LinearWeight = _runtime.LinearWeight

MAX_FIXED_PAIRS = 1024  # of sequences and KV heads, in attention on CUDA with `fixed`: kTickets / kFixedParts there


def current_stream(tensor: Tensor) -> int:
    """Of the tensor's device, as a CUDA handle; 0 on the CPU. (torch's public way makes an object, which takes the host
    as long as half a launch.)"""
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


def paged_attention(
    out: Tensor,
    query: Tensor,
    kv_pool: Tensor,
    layer: int,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    max_query_len: int,
    scale: float,
    workspace: Tensor | None = None,
    planned: bool = False,
    fixed: bool = False,
    pdl: bool = False,
) -> None:
    """Causal attention over the paged pool.

    out, query [T, Hq, D]; kv_pool [num_blocks, layers, 2, Hkv, block_size, D]; block_tables [S, B]; query_start
    [S + 1]; context_lens [S]. CUDA only: workspace uint8, from `paged_attention_workspace_bytes`; planned:
    `plan_attention` has run for these context_lens and as `fixed` says (decode, that is max_query_len 1), or
    `plan_prefill` for these and this query_start.
    """
    _runtime.paged_attention(
        out,
        query,
        kv_pool,
        layer,
        block_tables,
        query_start,
        context_lens,
        max_query_len,
        scale,
        workspace,
        current_stream(query),
        planned,
        fixed,
        pdl,
    )


def paged_attention_workspace_bytes(
    max_seqs: int, q_heads: int, kv_heads: int, head_dim: int, fixed: bool = False
) -> int:
    """Bytes of zeroed device workspace that serve any batch of up to `max_seqs` sequences."""
    return _runtime.paged_attention_workspace_bytes(max_seqs, q_heads, kv_heads, head_dim, fixed)


def write_kv(
    query_out: Tensor,
    qkv: Tensor,
    kv_pool: Tensor,
    layer: int,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    *,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    pdl: bool = False,
) -> None:
    """Bias, QK-norm, RoPE; K and V into the pool, rotated queries into `query_out`.

    query_out [T, Hq, D], Hq may be 0; qkv [T, (Hq + 2 Hkv) * D], rows may be strided; positions [T]; slots [T] int64,
    -1 skips; cos_sin [max_positions, rotary_dim] fp32; bias [(Hq + 2 Hkv) * D]; q_norm, k_norm [D].
    """
    _runtime.write_kv(
        query_out,
        qkv,
        kv_pool,
        layer,
        positions,
        slots,
        cos_sin,
        bias,
        q_norm,
        k_norm,
        norm_eps,
        current_stream(qkv),
        pdl,
    )


def copy_blocks(kv_pool: Tensor, pairs: Tensor) -> None:
    """Copies whole blocks inside the pool. pairs [n, 2] int64: source, destination."""
    _runtime.copy_blocks(kv_pool, pairs, current_stream(kv_pool))


def rms_norm(
    out: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, pdl: bool = False
) -> None:
    """out = RMSNorm(x) * weight, all [T, H]; with a residual, residual += x in place and the norm is of the sum."""
    _runtime.rms_norm(out, x, residual, weight, eps, current_stream(x), pdl)


def silu_mul(out: Tensor, gate_up: Tensor, *, pdl: bool = False) -> None:
    """out [T, I] = silu(gate_up[:, :I]) * gate_up[:, I:]."""
    _runtime.silu_mul(out, gate_up, current_stream(out), pdl)


def plan_attention(
    context_lens: Tensor,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    workspace: Tensor,
    *,
    least_tokens: int = 0,
    fixed: bool = False,
    pdl: bool = False,
) -> None:
    """Shares a decode batch's attention out over the GPU, for all layers of the step: run it when context_lens [S] is
    final, then call `paged_attention(..., planned=True)` with the same workspace. least_tokens: of a context that a
    thread block reads on its own; 0 lets the device choose. fixed: a sequence's bits depend on itself alone."""
    _runtime.plan_attention(
        context_lens, q_heads, kv_heads, head_dim, workspace, current_stream(context_lens), least_tokens, fixed, pdl
    )


def plan_prefill(
    query_start: Tensor,
    context_lens: Tensor,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    workspace: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Shares the attention of query chunks out over the GPU, for all layers of the step: as `plan_attention`, and in
    another part of the same workspace. query_start [S + 1], context_lens [S]."""
    _runtime.plan_prefill(
        query_start, context_lens, q_heads, kv_heads, head_dim, workspace, current_stream(context_lens), pdl
    )


def decode_attention(
    out: Tensor,
    qkv: Tensor,
    kv_pool: Tensor,
    layer: int,
    block_tables: Tensor,
    context_lens: Tensor,
    cos_sin: Tensor,
    *,
    scale: float,
    workspace: Tensor,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    planned: bool = False,
    fixed: bool = False,
    ahead: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """`write_kv` and `paged_attention` of a decode step in one kernel; CUDA only, the whole head rotates.

    out [S, Hq, D]; qkv [S, (Hq + 2 Hkv) * D]; context_lens [S] with this step's token, whose position is
    context_lens - 1 and whose slot is by block_tables. Context length 0: nothing is written, zeros come out. ahead: of
    a matmul to come, the weight [N, K], some of which is brought into the L2 where the contexts leave time.
    """
    _runtime.decode_attention(
        out,
        qkv,
        kv_pool,
        layer,
        block_tables,
        context_lens,
        cos_sin,
        scale,
        workspace,
        bias,
        q_norm,
        k_norm,
        norm_eps,
        current_stream(qkv),
        planned,
        fixed,
        ahead,
        pdl,
    )


def embed(
    out: Tensor,
    table: Tensor,
    token_ids: Tensor,
    sources: Tensor | None = None,
    newest: Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """out [T, H] = table [vocabulary, H] at token_ids [T], or at newest[sources[t]] where sources [T] is not -1."""
    _runtime.embed(out, table, token_ids, sources, newest, current_stream(table), pdl)


def advance(
    out: Tensor,
    table: Tensor,
    newest: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    block_size: int,
    *,
    pdl: bool = False,
) -> None:
    """Every sequence a token on, with no help from the host: row s continues slot rows[s] with newest[rows[s]].

    positions[s] = context_lens[s]; slots[s] (int64) is that position's place by block_tables [S, B]; context_lens[s]
    += 1; out [S, H] gets the embeddings. rows[s] < 0: a padded row: position 0, slot 0, context length 0.
    """
    _runtime.advance(
        out,
        table,
        newest,
        rows,
        context_lens,
        positions,
        slots,
        block_tables,
        block_size,
        current_stream(table),
        pdl,
    )


def sample(
    tokens: Tensor,
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    newest: Tensor | None = None,
    targets: Tensor | None = None,
    best: Tensor | None = None,
    workspace: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """tokens [n] of logits [n, vocabulary], each row by its own parameters; cuda/include/octavo/sample.h defines every
    draw to the bit, the same on the CPU and the GPU. -1: a row that is not finite.

    temperature, top_p, min_p [n] fp32; top_k, positions [n]; seeds, targets [n] int64. Without temperature all rows
    are greedy. newest[targets[r]] also gets the token. best [n] int64, CUDA only: what `ops_decode.head` found of the
    same logits, which greedy rows then do not read; zero again afterwards. workspace: uint8, CUDA only, from
    `sample_workspace_bytes`.
    """
    _runtime.sample(
        tokens,
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        newest,
        targets,
        best,
        workspace,
        current_stream(logits),
        pdl,
    )


def sample_workspace_bytes(max_rows: int) -> int:
    """Bytes of zeroed device workspace that serve any `sample` of up to `max_rows` rows."""
    return _runtime.sample_workspace_bytes(max_rows)


def pack_linear(weight: Tensor, block_type: str = "") -> LinearWeight:
    """A CPU weight in the order in which `linear` reads it; `weight` is not needed afterwards.

    weight: [N, K] float32 or bfloat16; or GGUF blocks as stored, uint8 [N, bytes of a row], with `block_type` "Q4_0",
    "Q4_1" or "Q8_0".
    """
    return _runtime.pack_linear(weight, block_type)


def linear(out: Tensor, x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> None:
    """out [T, N] = x [T, K] W^T + bias [N], on the CPU, fp32 or bf16 with fp32 sums.

    Blocks mean exactly what their format says. A row of `out` depends on its row of `x` alone, to the bit, for any T.
    """
    _runtime.linear(out, x, weight, bias)
