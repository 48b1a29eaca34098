"""The matmuls of a step with many rows on an NVIDIA GPU of compute capability 9.0, with what follows them.

Shapes use T rows, N out_features, K in_features. Everything runs on torch's current stream, allocates nothing and can
be captured. Sums are fp32 and run along K from first to last whatever T is, so a row of the result depends on its own
row of x alone, bit by bit. `pdl` starts a kernel while the one before it still runs (see `Launch` in
cuda/include/octavo/tensor.h): what is read early are weights.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch

from engine import _runtime
from engine.ops import current_stream

Tensor = torch.Tensor

Kind = Literal["plain", "add", "gate_up"]
_KINDS: dict[Kind, int] = {"plain": 0, "add": 1, "gate_up": 2}
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@lru_cache(maxsize=1024)
def efficiency(kind: Kind, rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> float:
    """What part of the tensor cores' peak the kernel should reach at this shape; 0 if it does not serve it.

    gate_up: out_features is half the weight's rows.
    """
    if dtype not in _DTYPES or not torch.cuda.is_available():
        return 0.0
    return _runtime.prefill_linear_efficiency(_KINDS[kind], rows, out_features, in_features, _DTYPES[dtype])


@lru_cache(maxsize=1024)
def query_and_kv_efficiency(rows: int, qkv_features: int, head_dim: int, in_features: int, dtype: torch.dtype) -> float:
    """The same of `query_and_kv`, which serves heads of 64, 96 and 128."""
    if dtype not in _DTYPES or not torch.cuda.is_available():
        return 0.0
    return _runtime.prefill_qkv_efficiency(rows, qkv_features, head_dim, in_features, _DTYPES[dtype])


def _run(kind: Kind, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tile_columns: int, pdl: bool) -> None:
    _runtime.prefill_linear(_KINDS[kind], out, x, weight, bias, tile_columns, current_stream(x), pdl)


def linear(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile_columns: int = 0, pdl: bool = False
) -> None:
    """out [T, N] = x [T, K] W^T (+ bias [N]). weight [N, K]. tile_columns: 128, 192 or 256 instead of the best, for
    tests and measurements."""
    _run("plain", out, x, weight, bias, tile_columns, pdl)


def add(out: Tensor, x: Tensor, weight: Tensor, *, tile_columns: int = 0, pdl: bool = False) -> None:
    """out [T, N] += x [T, K] W^T, added in fp32 and rounded once. weight [N, K]."""
    _run("add", out, x, weight, None, tile_columns, pdl)


def gate_up(out: Tensor, x: Tensor, weight: Tensor, *, tile_columns: int = 0, pdl: bool = False) -> None:
    """out [T, N] = silu(gate) * up with [gate, up] = x W^T, neither of them ever stored. weight [2 N, K], gate rows
    first. tile_columns: 128 or 256."""
    _run("gate_up", out, x, weight, None, tile_columns, pdl)


def query_and_kv(
    query_out: Tensor,
    x: Tensor,
    weight: Tensor,
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
    tile_columns: int = 0,
    pdl: bool = False,
) -> None:
    """`ops.write_kv` of qkv = x [T, K] W^T in one kernel: qkv is never stored, nor rounded. weight [(Hq + 2 Hkv) D, K].
    The whole head rotates: cos_sin [positions, D]. Hq may be 0: keys and values alone."""
    _runtime.prefill_qkv(
        query_out,
        x,
        weight,
        kv_pool,
        layer,
        positions,
        slots,
        cos_sin,
        bias,
        q_norm,
        k_norm,
        norm_eps,
        tile_columns,
        current_stream(x),
        pdl,
    )
