"""Activations of a step, claimed once, and the views of them that its layers share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.spec import ModelSpec

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The first T rows of every buffer: made once a step, as each costs the host as much as a third of a launch.

    normed, projected: [T, hidden]. qkv: [T, qkv_size]. kv: [T, qkv_size - q_size], over the memory of `qkv`. query,
    attended_heads: [T, q_heads, head_dim]; attended: the latter as [T, q_size]. gate_up: [T, 2 I]. activated: [T, I].
    """

    normed: Tensor
    projected: Tensor
    qkv: Tensor
    kv: Tensor
    query: Tensor
    attended: Tensor
    attended_heads: Tensor
    gate_up: Tensor
    activated: Tensor


def buffer_bytes(spec: ModelSpec, max_tokens: int, max_logits: int, dtype: torch.dtype) -> int:
    """What `Buffers` of these sizes hold."""
    width = 3 * spec.hidden_size + spec.qkv_size + 2 * spec.q_size + 3 * spec.intermediate_size
    row = width * dtype.itemsize + torch.int64.itemsize
    logits = spec.vocab_size * (torch.float32.itemsize + (0 if dtype == torch.float32 else dtype.itemsize))
    return max_tokens * row + max_logits * (spec.hidden_size * dtype.itemsize + logits)


class Buffers:
    """For `max_tokens` rows, of which `max_logits` are scored."""

    def __init__(self, spec: ModelSpec, max_tokens: int, max_logits: int, device: torch.device, dtype: torch.dtype):
        def rows(width: int) -> Tensor:
            return torch.zeros(max_tokens, width, device=device, dtype=dtype)

        self._heads = spec.q_heads, spec.head_dim
        self._kv_size = spec.qkv_size - spec.q_size
        self.residual = rows(spec.hidden_size)
        self.normed = rows(spec.hidden_size)
        self.projected = rows(spec.hidden_size)
        self.qkv = rows(spec.qkv_size)
        self.query = rows(spec.q_size)
        self.attended = rows(spec.q_size)
        self.gate_up = rows(2 * spec.intermediate_size)
        self.activated = rows(spec.intermediate_size)
        self.scored = torch.zeros(max_logits, spec.hidden_size, device=device, dtype=dtype)
        self.nowhere = torch.full((max_tokens,), -1, device=device, dtype=torch.int64)  # as slots: K and V stay
        self.logits = torch.zeros(max_logits, spec.vocab_size, device=device, dtype=torch.float32)
        same = dtype == torch.float32
        self.head_out = self.logits if same else torch.zeros_like(self.logits, dtype=dtype)

    def rows(self, count: int) -> Rows:
        attended = self.attended[:count]
        return Rows(
            normed=self.normed[:count],
            projected=self.projected[:count],
            qkv=self.qkv[:count],
            kv=self.qkv.view(-1)[: count * self._kv_size].view(count, self._kv_size),
            query=self.query[:count].view(count, *self._heads),
            attended=attended,
            attended_heads=attended.view(count, *self._heads),
            gate_up=self.gate_up[:count],
            activated=self.activated[:count],
        )
