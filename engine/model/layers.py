"""The one place where a weight matrix meets activations."""

from __future__ import annotations

import torch

from engine import ops

# Block formats that the CPU multiplies as they are stored.
PACKED_TYPES = frozenset({"Q4_0", "Q4_1", "Q8_0"})


class Linear:
    """out = x W^T (+ bias). The weight is [out_features, in_features] in the activations' dtype, or on the CPU also
    uint8 [out_features, bytes of a row] in the GGUF block format `block_type`.

    On the CPU a row of the result depends on its row of x alone, to the bit, whatever it is batched with.
    """

    __slots__ = ("_on_cpu", "_transposed", "bias", "block_type", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, block_type: str = "") -> None:
        self.weight = weight
        self.bias = bias
        self.block_type = block_type
        self._transposed = weight.t()
        self._on_cpu = weight.device.type == "cpu"

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] into `out` [T, out_features]; allocates nothing that outlives the call."""
        if self._on_cpu:
            ops.linear(out, x, self.weight, self.bias, block_type=self.block_type)
            return out
        if self.bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self.bias, x, self._transposed, out=out)
