"""Random weights in a model's shape, made on the device: for measuring speed without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from engine.model.spec import ModelSpec
from engine.model.weight_plan import Naming, head_piece, naming_of, plan_weights

# Keeps activations of any depth finite, and logits far enough apart for a clear argmax.
_STANDARD_DEVIATION = 0.02


class DummySource:
    """A `TensorSource` whose tensors depend on (seed, name) alone: norms are ones, the rest is normal noise."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self._seed = seed
        self._naming = naming_of(spec)
        pieces = [piece for item in plan_weights(spec, self._naming) for piece in item.pieces]
        if not spec.tied_embeddings:
            pieces.append(head_piece(spec, self._naming))
        self._shapes = {piece.name: piece.shape for piece in pieces}

    @property
    def naming(self) -> Naming:
        return self._naming

    @property
    def label(self) -> str:
        return "dummy weights"

    def names(self) -> Iterable[str]:
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def ignorable(self, name: str) -> bool:
        return False

    def packed(self, name: str) -> None:
        return None

    def load(self, name: str, out: torch.Tensor) -> None:
        if "norm" in name:
            out.fill_(1.0)
            return
        # torch's CPU generator uses 32 bits of a seed.
        generator = torch.Generator(device=out.device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        out.normal_(0.0, _STANDARD_DEVIATION, generator=generator)
