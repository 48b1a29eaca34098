"""The matmuls of a decode step on an NVIDIA GPU, 1 to 64 rows, with the norms, SiLU and residual adds around them.

Shapes use B rows (sequences, or the bucket of a captured graph), H hidden. Everything runs on torch's current stream,
allocates nothing and can be captured. A row's result depends on its own data alone, bit by bit: not on the other rows,
nor on B. `pdl` starts a kernel while the one before it still runs (see `Launch` in cuda/include/octavo/tensor.h): what
an op reads early are weights, so every kernel of the step may use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine import _runtime
from engine.ops import current_stream

Tensor = torch.Tensor
MAX_BATCH = 64

Kind = Literal["norm_linear", "norm_gate_up", "linear_add"]
_KINDS: dict[Kind, int] = {"norm_linear": 0, "norm_gate_up": 1, "linear_add": 2}
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def supported(kind: Kind, out_features: int, in_features: int, batch: int, dtype: torch.dtype) -> bool:
    """Whether this op serves the shape on the current GPU; if not, the caller uses plain kernels.

    norm_gate_up: out_features is half the weight's rows. linear_add: out_features is H.
    """
    if dtype not in _DTYPES or not torch.cuda.is_available():
        return False
    return _runtime.decode_linear_supported(_KINDS[kind], out_features, in_features, batch, _DTYPES[dtype])


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The residual of one step, in fp32, and what the next RMSNorm needs of it; see `DecodeStream` in decode_linear.h.

    `start` and `linear_add` write it for the norm that comes next, the two ops with a norm read it.
    """

    residual: Tensor  # [max_batch, H] fp32
    scaled: Tensor  # [max_batch, H] in the model's dtype
    square_sums: Tensor  # [max_batch, parts] fp32

    @classmethod
    def allocate(cls, max_batch: int, hidden: int, dtype: torch.dtype, device: torch.device) -> ResidualStream:
        """Zeroed buffers at fixed addresses, for steps of up to `max_batch` rows."""
        parts = _runtime.decode_square_sum_parts(hidden)
        return cls(
            torch.zeros(max_batch, hidden, dtype=torch.float32, device=device),
            torch.zeros(max_batch, hidden, dtype=dtype, device=device),
            torch.zeros(max_batch, parts, dtype=torch.float32, device=device),
        )


def start(stream: ResidualStream, x: Tensor, norm_weight: Tensor, *, pdl: bool = False) -> None:
    """residual = x [B, H], the embeddings. norm_weight [H]: of the first RMSNorm."""
    _runtime.decode_start(stream.residual, stream.scaled, stream.square_sums, x, norm_weight, current_stream(x), pdl)


def begin(
    stream: ResidualStream,
    table: Tensor,
    token_ids: Tensor,
    norm_weight: Tensor,
    context_lens: Tensor,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    workspace: Tensor,
    *,
    sources: Tensor | None = None,
    newest: Tensor | None = None,
    fixed: bool = False,
    pdl: bool = False,
) -> None:
    """`ops.embed`, `start` and `ops.plan_attention` of a decode step in one kernel: its first. With `pdl` the next one
    is `norm_linear` with `opens_step`."""
    _runtime.decode_begin(
        stream.residual,
        stream.scaled,
        stream.square_sums,
        table,
        token_ids,
        sources,
        newest,
        norm_weight,
        context_lens,
        q_heads,
        kv_heads,
        head_dim,
        workspace,
        fixed,
        current_stream(table),
        pdl,
    )


def head_finds_best(out_features: int, in_features: int, dtype: torch.dtype) -> bool:
    """Whether `head` serves the shape on the current GPU."""
    return dtype in _DTYPES and _runtime.decode_head_finds_best(out_features, in_features, MAX_BATCH, _DTYPES[dtype])


def head(
    logits: Tensor,
    stream: ResidualStream,
    weight: Tensor,
    eps: float,
    *,
    best: Tensor,
    wanted: Tensor,
    vocab_size: int,
    pdl: bool = False,
) -> None:
    """`norm_linear` for logits [B, N] fp32, which are stored only for rows with `wanted` [B] int32. best [B] int64,
    zero before, is what `ops.sample` needs to know of the first vocab_size logits of greedy rows."""
    _runtime.decode_head(
        logits, stream.scaled, stream.square_sums, weight, eps, best, wanted, vocab_size, current_stream(logits), pdl
    )


def norm_linear(
    out: Tensor,
    stream: ResidualStream,
    weight: Tensor,
    eps: float,
    *,
    portable: bool = False,
    opens_step: bool = False,
    pdl: bool = False,
) -> None:
    """out [B, N] = RMSNorm(residual) W^T: QKV without its bias, or logits. weight [N, H]; out in its dtype or fp32.

    The norm's weight was given to the op that last wrote the stream. portable: the kernel of older GPUs, for tests.
    opens_step: of the op right behind `begin`, whose plan must be there before anything else starts.
    """
    _runtime.decode_norm_linear(
        out, stream.scaled, stream.square_sums, weight, eps, current_stream(out), portable, opens_step, pdl
    )


def norm_gate_up(
    out: Tensor,
    stream: ResidualStream,
    weight: Tensor,
    eps: float,
    *,
    portable: bool = False,
    pdl: bool = False,
) -> None:
    """out [B, I] = silu(gate) * up with [gate, up] = RMSNorm(residual) W^T. weight [2 I, H], gate rows first."""
    _runtime.decode_norm_gate_up(
        out, stream.scaled, stream.square_sums, weight, eps, current_stream(out), portable, pdl
    )


def linear_add(
    stream: ResidualStream,
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    *,
    portable: bool = False,
    ahead: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """residual += x W^T. x [B, K]; weight [H, K]; norm_weight [H]: of the RMSNorm that comes next.

    ahead: of the matmul after this one, the weight [N, K], some of which is brought into the L2.
    """
    _runtime.decode_linear_add(
        stream.residual,
        stream.scaled,
        stream.square_sums,
        x,
        weight,
        norm_weight,
        current_stream(x),
        portable,
        ahead,
        pdl,
    )
