"""The runtime's ops on torch tensors: the only importer of `engine._runtime`'s ops.

Shapes use T tokens of this step, S sequences, H hidden, Hq/Hkv query/KV heads, D head_dim, B blocks a row. Integer tensors
are int32 unless said; all are on the data's device. Nothing is converted or copied silently: a wrong dtype, device or
stride raises `_runtime.OpError`. On CUDA every op runs on torch's current stream.
"""

from __future__ import annotations

import torch

from engine import _runtime

Tensor = torch.Tensor


def _stream(tensor: Tensor) -> int:
    return int(torch.cuda.current_stream(tensor.device).cuda_stream) if tensor.is_cuda else 0


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
) -> None:
    """Causal attention over the paged pool.

    out, query [T, Hq, D]; kv_pool [num_blocks, layers, 2, Hkv, block_size, D]; block_tables [S, B]; query_start [S + 1];
    context_lens [S]. workspace: uint8, CUDA only, from `paged_attention_workspace_bytes`.
    """
    _runtime.paged_attention(
        out, query, kv_pool, layer, block_tables, query_start, context_lens, max_query_len, scale, workspace, _stream(query)
    )


def paged_attention_workspace_bytes(max_seqs: int, q_heads: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of zeroed device workspace that serve any batch of up to `max_seqs` sequences."""
    return _runtime.paged_attention_workspace_bytes(max_seqs, q_heads, kv_heads, head_dim)


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
) -> None:
    """Bias, QK-norm, RoPE; K and V into the pool, rotated queries into `query_out`.

    query_out [T, Hq, D]; qkv [T, (Hq + 2 Hkv) * D], rows may be strided; positions [T]; slots [T] int64, -1 skips;
    cos_sin [max_positions, rotary_dim] fp32; bias [(Hq + 2 Hkv) * D]; q_norm, k_norm [D].
    """
    _runtime.write_kv(
        query_out, qkv, kv_pool, layer, positions, slots, cos_sin, bias, q_norm, k_norm, norm_eps, _stream(qkv)
    )


def copy_blocks(kv_pool: Tensor, pairs: Tensor) -> None:
    """Copies whole blocks inside the pool. pairs [n, 2] int64: source, destination."""
    _runtime.copy_blocks(kv_pool, pairs, _stream(kv_pool))


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> None:
    """out = RMSNorm(x) * weight; with a residual, first residual += x in place and the norm is of the sum. All [T, H]."""
    _runtime.rms_norm(out, x, residual, weight, eps, _stream(x))


def silu_mul(out: Tensor, gate_up: Tensor) -> None:
    """out [T, I] = silu(gate_up[:, :I]) * gate_up[:, I:]."""
    _runtime.silu_mul(out, gate_up, _stream(out))
