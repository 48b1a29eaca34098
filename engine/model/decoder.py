"""The transformer: one decoder for every family, driven by its `ModelSpec`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine import ops, ops_prefill
from engine.model.attention_calls import AttentionCall, attention_calls
from engine.model.batch import ForwardBatch
from engine.model.buffers import Buffers, Rows
from engine.model.decode_chain import DecodeChain
from engine.model.layers import Linear
from engine.model.rope import cos_sin_table, identity_table
from engine.model.spec import ModelSpec

Tensor = torch.Tensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Queries, keys and values are one matrix, gate and up another; the QKV bias is added after it."""

    input_norm: Tensor
    qkv: Linear
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model on its device. Where they are tied, `head` is made of `embedding`, and `last_kv` of the last
    layer's `qkv`: its rows of keys and values (on CUDA, the same memory)."""

    embedding: Tensor
    layers: list[LayerWeights]
    last_kv: Linear
    final_norm: Tensor
    head: Linear


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch with what every layer needs for it. own: as in Linear."""

    batch: ForwardBatch
    rows: Rows
    calls: list[AttentionCall]
    own: bool


class Decoder:
    """Runs steps of up to `max_tokens` tokens, of which up to `max_logits` are scored.

    Results are views of buffers that the next call overwrites. On CUDA nothing here synchronises, branches on device
    data or allocates, so a call can be captured in a graph.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_tokens: int,
        max_logits: int,
        max_positions: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """batch_invariant: in a step of one token a sequence, what a row gives depends on its own sequence alone, to
        the bit, among steps of as many rows and those of `same_bits`. On the CPU it always does."""
        self.spec = spec
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self.max_tokens = max_tokens
        self.max_logits = max_logits
        self.max_positions = max_positions or spec.max_positions
        self.pulse: Callable[[], None] = _no_pulse  # called after each large piece of `forward`
        self._scale = spec.head_dim**-0.5
        self._cos_sin = self._tables()
        self._buffers = Buffers(spec, max_tokens, max_logits, device, dtype)
        self._fuses_attention = device.type == "cuda" and spec.rope.rotary_dim == spec.head_dim
        self._batch_invariant = batch_invariant
        self._has_hidden = True
        self._known_step: _Step | None = None
        self._chain = DecodeChain.build(spec, weights, device, dtype, fixed=batch_invariant)
        if device.type == "cuda":
            _log_prefill_kernels(spec, dtype, max_tokens)

    def _tables(self) -> list[Tensor]:
        rope, positions = self.spec.rope, self.max_positions
        rotating = cos_sin_table(rope, positions, self.device)
        still = identity_table(rope, positions, self.device) if self.spec.nope_layers else rotating
        return [still if layer in self.spec.nope_layers else rotating for layer in range(self.spec.num_layers)]

    @torch.inference_mode()
    def scores(self, batch: ForwardBatch) -> Tensor:
        """Runs a step; fp32 logits [n, vocab_size] of `batch.logits_rows`. See also `finds_best`."""
        chain, rows = self._chain_for(batch), batch.token_ids.shape[0]
        if chain is None:
            return self.logits(self.forward(batch), own=self._needs_own(batch))
        step, logits = self._step(batch), self._buffers.logits[:rows]
        attention = partial(self._attention, step=step)
        chain.run(batch, attention, step.rows.qkv, step.rows.activated, logits)
        return logits

    def finds_best(self, batch: ForwardBatch) -> bool:
        """Whether `scores` fills `batch.greedy.best`, and stores logits only of the rows wanted there."""
        chain = self._chain_for(batch)
        return batch.greedy is not None and chain is not None and chain.finds_best

    @property
    def decodes_fused(self) -> bool:
        """Whether decode steps run on the fused matmuls, up to their number of rows."""
        return self._chain is not None

    def same_bits(self, rows: int, others: int) -> bool:
        """Whether decode steps of so many rows and of so many others surely give a row the same bits, if this decoder
        is batch-invariant: the fused matmuls do for any number that they take, other kernels are chosen by it."""
        chain = self._chain
        return rows == others or (chain is not None and max(rows, others) <= chain.max_batch)

    def _chain_for(self, batch: ForwardBatch) -> DecodeChain | None:
        chain, rows = self._chain, batch.token_ids.shape[0]
        if chain is None or batch.max_query_len > 1 or batch.logits_rows is not None or rows > chain.max_batch:
            return None
        return chain

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Writes this step's K and V and returns the final hidden states of `batch.logits_rows`, [n, hidden]."""
        tokens = batch.token_ids.shape[0]
        wanted = tokens if batch.logits_rows is None else batch.logits_rows.shape[0]
        if tokens > self.max_tokens or wanted > self.max_logits:
            raise ValueError(f"{tokens} tokens and {wanted} scored rows exceed {self.max_tokens} and {self.max_logits}")
        buffers, weights = self._buffers, self.weights
        residual = self._embed(batch)
        step = self._step(batch)
        normed = step.rows.normed
        ops.rms_norm(normed, residual, self._first_norm, self.spec.norm_eps, pdl=batch.pdl)
        rows = self._rows_to_finish(batch)
        self._has_hidden = rows is None
        for index, layer in enumerate(weights.layers):
            if batch.max_query_len > 1 and layer is weights.layers[-1]:
                self._write_last_kv(normed, step)
                if rows is not None and wanted == 0:
                    return buffers.scored[:0]
                if rows is not None:
                    normed, residual = self._picked(rows, normed, residual)
                step = self._last_step(step)
                attended = self._last_attended(normed, step)
            else:
                attended = self._attended(index, normed, step)
            normed = self._add(layer.o, attended, residual, layer.post_norm, step)
            self.pulse()
            activated = self._activated(layer, normed, step)
            self._add(layer.down, activated, residual, self._norm_after(index), step)
        if rows is not None or batch.logits_rows is None:
            return normed
        return torch.index_select(normed, 0, batch.logits_rows, out=buffers.scored[:wanted])

    def _step(self, batch: ForwardBatch) -> _Step:
        """Made once for a batch that comes again."""
        if self._known_step is None or self._known_step.batch is not batch:
            rows = self._buffers.rows(batch.token_ids.shape[0])
            self._known_step = _Step(batch, rows, attention_calls(batch), self._needs_own(batch))
        return self._known_step

    def _rows_to_finish(self, batch: ForwardBatch) -> Tensor | None:
        """The scored rows, if of the others nobody reads more than the last layer's K and V; else None. Decode steps,
        whose rows may not depend on how many they are, finish all."""
        if batch.scored is None or batch.keeps_hidden or batch.max_query_len == 1 or not self.weights.layers:
            return None
        return batch.logits_rows

    def _write_last_kv(self, normed: Tensor, step: _Step) -> None:
        """K and V of the last layer to the pool, from its normed rows [T, hidden]. By the same kernels whatever else is
        computed there: a prompt that is computed again, with nothing scored any more, leaves the same bits."""
        linear, layer, spec, batch = self.weights.last_kv, self.weights.layers[-1], self.spec, step.batch
        tokens, index = normed.shape[0], spec.num_layers - 1
        no_query = normed[:, :0].view(tokens, 0, spec.head_dim)
        bias = None if layer.qkv_bias is None else layer.qkv_bias[spec.q_size :]
        write: Callable[..., None]
        if self._makes_query_and_kv(linear, tokens):
            write = partial(ops_prefill.query_and_kv, no_query, normed, linear.weight)
        else:
            write = partial(ops.write_kv, no_query, linear(normed, step.rows.kv, pdl=batch.pdl))
        write(
            *(batch.kv_pool, index, batch.positions, batch.slots, self._cos_sin[index]),
            bias=bias,
            k_norm=layer.k_norm,
            norm_eps=spec.norm_eps,
            pdl=batch.pdl,
        )
        self.pulse()

    def _picked(self, rows: Tensor, normed: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        buffers, count = self._buffers, rows.shape[0]
        return (
            torch.index_select(normed, 0, rows, out=buffers.projected[:count]),
            torch.index_select(residual, 0, rows, out=buffers.scored[:count]),
        )

    def _last_step(self, step: _Step) -> _Step:
        """The last layer's, behind its K and V: as it is but for those, or the scored rows' alone, which attend as in a
        decode step. That without `pdl`: its attention may read keys before the kernel before it has ended."""
        batch, nowhere = step.batch, self._buffers.nowhere
        if self._rows_to_finish(batch) is None or batch.scored is None:
            return replace(step, batch=replace(batch, slots=nowhere[: batch.slots.shape[0]]))
        scored, count = batch.scored, batch.scored.positions.shape[0]
        decode = replace(
            batch,
            positions=scored.positions,
            slots=nowhere[:count],
            block_tables=scored.block_tables,
            query_start=scored.query_start,
            context_lens=scored.context_lens,
            max_query_len=1,
            pdl=False,
        )
        if scored.positions.is_cuda:
            self._plan_attention(decode)
        return _Step(decode, self._buffers.rows(count), attention_calls(decode), own=False)

    def _last_attended(self, normed: Tensor, step: _Step) -> Tensor:
        """Attended rows [n, q_size] of the last layer's normed rows [n, hidden], whose K and V are in the pool."""
        index = self.spec.num_layers - 1
        qkv = self.weights.layers[index].qkv(normed, step.rows.qkv, pdl=step.batch.pdl)
        return self._attend(index, self._turned(index, qkv, step), step)

    def _needs_own(self, batch: ForwardBatch) -> bool:
        """Prompts need not: each of their chunks is a step of its own, whose shape is always the same."""
        return self._batch_invariant and batch.max_query_len == 1

    def hidden(self, begin: int, end: int) -> Tensor:
        """Final hidden states [end - begin, hidden] of tokens of the last `forward`, scored or not. Raises ValueError
        if that step neither scored all of them nor was told that they are read (`ForwardBatch.keeps_hidden`)."""
        if not self._has_hidden:
            raise ValueError("the last step kept the hidden states of its scored rows only")
        return self._buffers.normed[begin:end]

    @torch.inference_mode()
    def logits(self, hidden: Tensor, *, own: bool = False) -> Tensor:
        """fp32 [n, vocab_size] of hidden states [n, hidden]. own: as in Linear."""
        count = hidden.shape[0]
        out = self._buffers.logits[:count]
        raw = self.weights.head(hidden, self._buffers.head_out[:count], own=own)
        return out if raw.dtype == torch.float32 else out.copy_(raw)

    @property
    def _first_norm(self) -> Tensor:
        layers = self.weights.layers
        return layers[0].input_norm if layers else self.weights.final_norm

    def _norm_after(self, index: int) -> Tensor:
        layers = self.weights.layers
        return layers[index + 1].input_norm if index + 1 < len(layers) else self.weights.final_norm

    def _embed(self, batch: ForwardBatch) -> Tensor:
        """The step's first kernels: the attention plan, and the embeddings."""
        tokens = batch.token_ids.shape[0]
        if self.device.type == "cuda":
            self._plan_attention(batch)
        embedded = self._buffers.residual[:tokens]
        ops.embed(embedded, self.weights.embedding, batch.token_ids, batch.sources, batch.newest, pdl=batch.pdl)
        return embedded

    def _attended(self, index: int, normed: Tensor, step: _Step) -> Tensor:
        """Attended rows [T, q_size] of normed rows [T, hidden]; K and V go to the pool."""
        batch, layer = step.batch, self.weights.layers[index]
        if batch.max_query_len > 1 and self._makes_query_and_kv(layer.qkv, normed.shape[0]):
            query = step.rows.query
            ops_prefill.query_and_kv(
                *(query, normed, layer.qkv.weight, batch.kv_pool, index),
                *(batch.positions, batch.slots, self._cos_sin[index]),
                bias=layer.qkv_bias,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                norm_eps=self.spec.norm_eps,
                pdl=batch.pdl,
            )
            self.pulse()
            return self._attend(index, query, step)
        qkv = layer.qkv(normed, step.rows.qkv, own=step.own, pdl=batch.pdl)
        self.pulse()
        return self._attention(index, qkv, step=step)

    def _makes_query_and_kv(self, linear: Linear, tokens: int) -> bool:
        rotates_all = self.spec.rope.rotary_dim == self.spec.head_dim
        return rotates_all and linear.makes_query_and_kv(tokens, self.spec.head_dim)

    def _attention(self, index: int, qkv: Tensor, ahead: Tensor | None = None, *, step: _Step) -> Tensor:
        """Attended rows [T, q_size] of QKV rows [T, qkv_size]; K and V go to the pool. ahead: as in
        `ops.decode_attention`."""
        batch, layer = step.batch, self.weights.layers[index]
        if self._fuses_attention and batch.max_query_len == 1 and batch.workspace is not None:
            ops.decode_attention(
                step.rows.attended_heads,
                qkv,
                batch.kv_pool,
                index,
                batch.block_tables,
                batch.context_lens,
                self._cos_sin[index],
                scale=self._scale,
                workspace=batch.workspace,
                bias=layer.qkv_bias,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                norm_eps=self.spec.norm_eps,
                planned=True,
                fixed=self._batch_invariant,
                ahead=ahead,
                pdl=batch.pdl,
            )
            return step.rows.attended
        return self._attend(index, self._turned(index, qkv, step), step)

    def _turned(self, index: int, qkv: Tensor, step: _Step) -> Tensor:
        """Queries [T, q_heads, head_dim] of QKV rows, ready for attention; K and V go to the pool."""
        batch, layer, query = step.batch, self.weights.layers[index], step.rows.query
        ops.write_kv(
            query,
            qkv,
            batch.kv_pool,
            index,
            batch.positions,
            batch.slots,
            self._cos_sin[index],
            bias=layer.qkv_bias,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=self.spec.norm_eps,
            pdl=batch.pdl,
        )
        return query

    def _plan_attention(self, batch: ForwardBatch) -> None:
        """Once a step: every layer's attention is shared out over the GPU in the same way."""
        if batch.workspace is None:
            raise ValueError("attention on CUDA needs a workspace")
        spec = self.spec
        shape = (spec.q_heads, spec.kv_heads, spec.head_dim, batch.workspace)
        for call in attention_calls(batch):
            if call.max_query_len == 1:
                ops.plan_attention(call.context_lens, *shape, fixed=self._batch_invariant)
            else:
                ops.plan_prefill(call.query_start, call.context_lens, *shape)

    def _attend(self, index: int, query: Tensor, step: _Step) -> Tensor:
        """Attended rows [T, q_size] of queries [T, q_heads, head_dim]."""
        batch, out = step.batch, step.rows.attended_heads
        for call in step.calls:
            ops.paged_attention(
                out if call.rows is None else out[call.rows],
                query if call.rows is None else query[call.rows],
                batch.kv_pool,
                index,
                call.block_tables,
                call.query_start,
                call.context_lens,
                max_query_len=call.max_query_len,
                scale=self._scale,
                workspace=batch.workspace,
                planned=out.is_cuda,
                fixed=self._batch_invariant,
                pdl=batch.pdl,
            )
        return step.rows.attended

    def _add(self, linear: Linear, x: Tensor, residual: Tensor, norm: Tensor, step: _Step) -> Tensor:
        """The residual stream grows by x W^T; returns what the next layer reads of it, normed rows."""
        rows, eps, own, pdl = step.rows, self.spec.norm_eps, step.own, step.batch.pdl
        if linear.add(x, residual, own=own, pdl=pdl):
            ops.rms_norm(rows.normed, residual, norm, eps, pdl=pdl)
            return rows.normed
        projected = linear(x, rows.projected, own=own, pdl=pdl)
        ops.rms_norm(rows.normed, projected, norm, eps, residual=residual, pdl=pdl)
        return rows.normed

    def _activated(self, layer: LayerWeights, normed: Tensor, step: _Step) -> Tensor:
        activated, own, pdl = step.rows.activated, step.own, step.batch.pdl
        if not layer.gate_up.gate_up(normed, activated, own=own, pdl=pdl):
            gate_up = layer.gate_up(normed, step.rows.gate_up, own=own, pdl=pdl)
            self.pulse()
            ops.silu_mul(activated, gate_up, pdl=pdl)
        return activated


def _log_prefill_kernels(spec: ModelSpec, dtype: torch.dtype, max_tokens: int) -> None:
    """One line where the kernels for many rows serve none of the MLP, as on any GPU but those of capability 9.0."""
    served = ops_prefill.efficiency("gate_up", max_tokens, spec.intermediate_size, spec.hidden_size, dtype)
    if served == 0 or spec.mlp_bias:
        _log.info("steps of many rows use cuBLAS and plain kernels on this device, for this shape or dtype")


def _no_pulse() -> None:
    pass
