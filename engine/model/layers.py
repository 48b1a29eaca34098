"""The one place where a weight matrix meets activations."""

from __future__ import annotations

import torch

from engine import ops

# Block formats that the CPU multiplies as they are stored.
PACKED_TYPES = frozenset({"Q4_0", "Q4_1", "Q8_0"})


class Linear:
    """out = x W^T (+ bias). The weight is [out_features, in_features] in the activations' dtype, or on the CPU also
    uint8 [out_features, bytes of a row] in the GGUF block format `block_type`.

    On the CPU the weight is packed, and what was given is not kept; a row of the result depends on its row of x alone,
    to the bit, whatever it is batched with.
    """

    __slots__ = ("_packed", "_weight", "bias")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, block_type: str = "") -> None:
        on_cpu = weight.device.type == "cpu"
        self.bias = bias
        self._packed = ops.pack_linear(weight, block_type) if on_cpu else None
        self._weight = None if on_cpu else weight

    @property
    def format(self) -> str:
        """How the weight is stored: "float32", "bfloat16", "float16" or a block format."""
        return self._packed.format if self._packed is not None else str(self.weight.dtype).removeprefix("torch.")

    @property
    def weight(self) -> torch.Tensor:
        """The matrix as given. Raises ValueError on the CPU, where only its packed form is kept."""
        if self._weight is None:
            raise ValueError("a weight on the CPU is kept packed")
        return self._weight

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] into `out` [T, out_features]; allocates nothing that outlives the call."""
        if self._packed is not None:
            ops.linear(out, x, self._packed, self.bias)
            return out
        transposed = self.weight.t()
        if self.bias is None:
            return torch.mm(x, transposed, out=out)
        return torch.addmm(self.bias, x, transposed, out=out)
