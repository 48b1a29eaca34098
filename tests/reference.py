"""What each op must compute, in numpy and float64: the first rung of the ladder numpy -> cpu op -> gpu op.

Shapes are those of engine/ops.py. Inputs may be of any float type; outputs are float64 and not rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Float64 = NDArray[np.float64]


def paged_attention(
    query: Array,
    kv_pool: Array,
    layer: int,
    block_tables: Array,
    query_start: Array,
    context_lens: Array,
    scale: float,
) -> Float64:
    """[T, Hq, D]. Rows past query_start[-1] and those of sequences with no context are zero."""
    tokens, q_heads, head_dim = query.shape
    kv_heads, block_size = kv_pool.shape[3], kv_pool.shape[4]
    out = np.zeros((tokens, q_heads, head_dim))
    for seq, context in enumerate(context_lens.tolist()):
        first, last = int(query_start[seq]), int(query_start[seq + 1])
        if context == 0:
            continue
        positions = np.arange(context)
        blocks = block_tables[seq, positions // block_size]
        rows = kv_pool[blocks, layer, :, :, positions % block_size].astype(np.float64)  # [context, 2, Hkv, D]
        for token in range(first, last):
            visible = context - (last - 1 - token)
            for head in range(q_heads):
                keys, values = (
                    rows[:visible, 0, head // (q_heads // kv_heads)],
                    rows[:visible, 1, head // (q_heads // kv_heads)],
                )
                scores = scale * (keys @ query[token, head].astype(np.float64))
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ values / weights.sum()
    return out


def write_kv(
    qkv: Array,
    kv_pool: Array,
    layer: int,
    positions: Array,
    slots: Array,
    cos_sin: Array,
    *,
    bias: Array | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    norm_eps: float = 0.0,
) -> tuple[Float64, Float64]:
    """The rotated queries [T, Hq, D], and the pool as it is afterwards."""
    pool = kv_pool.astype(np.float64)
    kv_heads, block_size, head_dim = pool.shape[3:]
    heads = qkv.astype(np.float64) + (0.0 if bias is None else bias.astype(np.float64))
    heads = heads.reshape(len(qkv), -1, head_dim)
    q_heads = heads.shape[1] - 2 * kv_heads
    queries, keys, values = np.split(heads, [q_heads, q_heads + kv_heads], axis=1)
    if q_norm is not None:
        queries = _normalise(queries, q_norm, norm_eps)
    if k_norm is not None:
        keys = _normalise(keys, k_norm, norm_eps)
    angles = cos_sin.astype(np.float64)[positions][:, None]
    queries, keys = _rotate(queries, angles), _rotate(keys, angles)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            pool[slot // block_size, layer, 0, :, slot % block_size] = keys[token]
            pool[slot // block_size, layer, 1, :, slot % block_size] = values[token]
    return queries, pool


def copy_blocks(kv_pool: Array, pairs: Array) -> Array:
    """The pool as it is afterwards."""
    pool = kv_pool.copy()
    pool[pairs[:, 1]] = kv_pool[pairs[:, 0]]
    return pool


def rms_norm(x: Array, weight: Array, eps: float) -> Float64:
    return _normalise(x.astype(np.float64), weight, eps)


def silu_mul(gate_up: Array) -> Float64:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    return gate * np.exp(-np.logaddexp(0.0, -gate)) * up


def linear(x: Array, weight: Array, bias: Array | None = None) -> Float64:
    """x [T, K] times weight [N, K] transposed, plus bias [N]."""
    product: Float64 = x.astype(np.float64) @ weight.astype(np.float64).T
    return product if bias is None else product + bias.astype(np.float64)


def rotary_table(max_positions: int, rotary_dim: int, base: float = 10_000.0) -> NDArray[np.float32]:
    """[max_positions, rotary_dim]: cosines, then sines."""
    frequencies = base ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.arange(max_positions)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _normalise(x: Float64, weight: Array, eps: float) -> Float64:
    result: Float64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)
    return result


def _rotate(x: Float64, angles: Float64) -> Float64:
    half = angles.shape[-1] // 2
    cos, sin = angles[..., :half], angles[..., half:]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
