"""The one place where a weight matrix meets activations."""

from __future__ import annotations

import torch


class Linear:
    """out = x W^T (+ bias), for a weight [out_features, in_features] in the activations' dtype."""

    __slots__ = ("_transposed", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._transposed = weight.t()

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] into `out` [T, out_features]; allocates nothing that outlives the call."""
        if self.bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self.bias, x, self._transposed, out=out)
