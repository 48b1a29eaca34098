"""The one place where a weight matrix meets activations."""

from __future__ import annotations

import torch

from engine import ops, ops_prefill

# From these efficiencies on our own kernels for many rows beat cuBLAS with the kernels that they spare, or come within
# 4 %. Below, tiles are few, and cuBLAS splits sums. Measured on an H200: the table in cuda/bench/LOG.md.
LEAST_EFFICIENCY: dict[ops_prefill.Kind, float] = {"plain": 0.75, "add": 0.70, "gate_up": 0.64}
LEAST_QKV_EFFICIENCY = 0.62  # of the kernel that spares `write_kv`, too, and takes longer for it

# Block formats that the CPU multiplies as they are stored.
PACKED_TYPES = frozenset({"Q4_0", "Q4_1", "Q8_0"})


class Linear:
    """out = x W^T (+ bias). The weight is [out_features, in_features] in the activations' dtype, or on the CPU also
    uint8 [out_features, bytes of a row] in the GGUF block format `block_type`.

    On the CPU the weight is packed, and what was given is not kept; a row of the result depends on its row of x alone,
    to the bit, whatever it is batched with.
    """

    __slots__ = ("_packed", "_transposed", "_weight", "bias")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, block_type: str = "") -> None:
        on_cpu = weight.device.type == "cpu"
        self.bias = bias
        self._packed = ops.pack_linear(weight, block_type) if on_cpu else None
        self._weight = None if on_cpu else weight
        self._transposed = None if on_cpu else weight.t()

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

    def __call__(self, x: torch.Tensor, out: torch.Tensor, *, own: bool = False, pdl: bool = False) -> torch.Tensor:
        """x [T, in_features] into `out` [T, out_features]; allocates nothing that outlives the call.

        own: by our own kernels where there are any, since with them a row of the result depends on its row of x alone.
        """
        if self._packed is not None:
            ops.linear(out, x, self._packed, self.bias)
            return out
        if self._is_ours("plain", x.shape[0], own):
            ops_prefill.linear(out, x, self.weight, self.bias, pdl=pdl)
            return out
        assert self._transposed is not None
        if self.bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self.bias, x, self._transposed, out=out)

    def add(self, x: torch.Tensor, total: torch.Tensor, *, own: bool = False, pdl: bool = False) -> bool:
        """total [T, out_features] += x W^T in one kernel. False: nothing was done, as no kernel does that here."""
        if self._packed is not None or self.bias is not None or not self._is_ours("add", x.shape[0], own):
            return False
        ops_prefill.add(total, x, self.weight, pdl=pdl)
        return True

    def gate_up(self, x: torch.Tensor, out: torch.Tensor, *, own: bool = False, pdl: bool = False) -> bool:
        """out [T, out_features / 2] = silu(gate) * up in one kernel, gate being the first half. False: as in `add`."""
        if self._packed is not None or self.bias is not None or not self._is_ours("gate_up", x.shape[0], own):
            return False
        ops_prefill.gate_up(out, x, self.weight, pdl=pdl)
        return True

    def makes_query_and_kv(self, rows: int, head_dim: int) -> bool:
        """Whether `ops_prefill.query_and_kv` of this weight and so many rows beats a product and `ops.write_kv`."""
        if self._packed is not None or self.bias is not None:
            return False
        out_features, in_features = self.weight.shape
        reached = ops_prefill.query_and_kv_efficiency(rows, out_features, head_dim, in_features, self.weight.dtype)
        return reached >= LEAST_QKV_EFFICIENCY

    def _is_ours(self, kind: ops_prefill.Kind, rows: int, own: bool) -> bool:
        out_features, in_features = self.weight.shape
        halves = 2 if kind == "gate_up" else 1
        reached = ops_prefill.efficiency(kind, rows, out_features // halves, in_features, self.weight.dtype)
        return reached > 0 if own else reached >= LEAST_EFFICIENCY[kind]
