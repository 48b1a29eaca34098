"""A decode step on an NVIDIA GPU by fused matmuls: five kernels a layer, each with the norms and adds around it.

Where a shape is not served (a bias on the output or MLP projections, a width the kernels do not know, more rows than
they take), the decoder runs its plain kernels instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine import ops_decode
from engine.model.batch import ForwardBatch
from engine.model.spec import ModelSpec

if TYPE_CHECKING:
    from engine.model.decoder import DecoderWeights

Tensor = torch.Tensor
Attention = Callable[[int, Tensor, Tensor | None], Tensor]  # layer, its QKV rows, weights to come -> attended rows

_log = logging.getLogger(__name__)

# Bytes of a gate-up weight from which a part of it, brought into the L2 while attention and the output projection run,
# spares more than it costs the others. The other matmuls gain nothing by it: cuda/bench/LOG.md.
_WORTH_FETCHING_AHEAD = 32 << 20


class DecodeChain:
    """Holds the residual stream of up to MAX_BATCH rows; weights and activations are the decoder's."""

    max_batch = ops_decode.MAX_BATCH

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype, fixed: bool
    ) -> None:
        self._spec = spec
        self._fixed = fixed
        self._eps = spec.norm_eps
        self.finds_best = ops_decode.head_finds_best(spec.vocab_size, spec.hidden_size, dtype)
        self._weights = weights
        self._fetches_ahead = weights.layers[0].gate_up.weight.nbytes >= _WORTH_FETCHING_AHEAD
        self._stream = ops_decode.ResidualStream.allocate(self.max_batch, spec.hidden_size, dtype, device)

    @classmethod
    def build(
        cls, spec: ModelSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype, *, fixed: bool = False
    ) -> DecodeChain | None:
        """None, and one log line, if any matmul of this model is not served on this device. fixed: of its attention's
        plan, as in `ops.plan_attention`."""
        if device.type != "cuda":
            return None
        unserved = _unserved(spec, weights, dtype)
        if unserved:
            _log.info("decode steps use plain kernels: %s", unserved)
            return None
        return cls(spec, weights, device, dtype, fixed)

    def run(self, batch: ForwardBatch, attention: Attention, qkv: Tensor, activated: Tensor, logits: Tensor) -> None:
        """logits [B, vocabulary] fp32 of a batch with one token a sequence; with `batch.greedy` of the rows wanted
        there. qkv [B, qkv size] and activated [B, I] are scratch."""
        stream, eps, layers, pdl = self._stream, self._eps, self._weights.layers, batch.pdl
        head, greedy = self._weights.head.weight, batch.greedy
        norms = [layer.input_norm for layer in layers[1:]] + [self._weights.final_norm]
        self._begin(batch)
        for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
            ops_decode.norm_linear(qkv, stream, layer.qkv.weight, eps, opens_step=index == 0, pdl=pdl)
            gate, up = layer.gate_up.weight.chunk(2) if self._fetches_ahead else (None, None)
            attended = attention(index, qkv, gate)
            ops_decode.linear_add(stream, attended, layer.o.weight, layer.post_norm, ahead=up, pdl=pdl)
            ops_decode.norm_gate_up(activated, stream, layer.gate_up.weight, eps, pdl=pdl)
            ops_decode.linear_add(stream, activated, layer.down.weight, next_norm, pdl=pdl)
        if greedy is None or not self.finds_best:
            ops_decode.norm_linear(logits, stream, head, eps, pdl=pdl)
            return
        ops_decode.head(
            *(logits, stream, head, eps),
            best=greedy.best,
            wanted=greedy.wanted,
            vocab_size=greedy.vocab_size,
            pdl=pdl,
        )

    def _begin(self, batch: ForwardBatch) -> None:
        if batch.workspace is None:
            raise ValueError("decode attention on CUDA needs a workspace")
        spec = self._spec
        ops_decode.begin(
            self._stream,
            self._weights.embedding,
            batch.token_ids,
            self._weights.layers[0].input_norm,
            batch.context_lens,
            *(spec.q_heads, spec.kv_heads, spec.head_dim),
            batch.workspace,
            sources=batch.sources,
            newest=batch.newest,
            fixed=self._fixed,
            pdl=batch.pdl,
        )


def _unserved(spec: ModelSpec, weights: DecoderWeights, dtype: torch.dtype) -> str:
    """What keeps this model from the fused kernels, or nothing."""
    if spec.o_bias or spec.mlp_bias:
        return "a bias on the output or MLP projections"
    if not weights.layers:
        return "no layers"
    hidden, inner, batch = spec.hidden_size, spec.intermediate_size, ops_decode.MAX_BATCH
    served = ops_decode.supported
    checks = {
        "QKV": served("norm_linear", spec.qkv_size, hidden, batch, dtype),
        "output": served("linear_add", hidden, spec.q_size, batch, dtype),
        "gate and up": served("norm_gate_up", inner, hidden, batch, dtype),
        "down": served("linear_add", hidden, inner, batch, dtype),
        "head": served("norm_linear", spec.vocab_size, hidden, batch, dtype),
    }
    missing = [name for name, good in checks.items() if not good]
    return f"the {', '.join(missing)} projections' shapes" if missing else ""
