"""Weights of a GGUF file: raw quantised blocks, or dequantised into the decoder's tensors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from engine.errors import ConfigurationError
from engine.model.assemble import PackedMatrix
from engine.model.gguf_file import BlockType, GgufFile
from engine.model.spec import ModelSpec
from engine.model.weight_plan import GGUF, Naming

# Rows dequantised at once: bounds the temporary fp32 copy of a large embedding.
_CHUNK_NUMBERS = 1 << 22
# Its content is in the spec's rope divisors.
_IGNORABLE = frozenset({"rope_freqs.weight"})


class GgufSource:
    """A `TensorSource` over a GGUF file. Architecture llama stores the rows of Q and K interleaved for the other rotary
    convention; they come out in Hugging Face's order here, raw blocks too."""

    def __init__(self, file: GgufFile, spec: ModelSpec) -> None:
        self._file = file
        self._interleaved = file.metadata.get("general.architecture") == "llama"
        self._heads = {".attn_q.": spec.q_heads, ".attn_k.": spec.kv_heads}

    @property
    def naming(self) -> Naming:
        return GGUF

    @property
    def label(self) -> str:
        return str(self._file.path)

    def names(self) -> Iterable[str]:
        return self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[name].shape

    def ignorable(self, name: str) -> bool:
        return name in _IGNORABLE

    def blocks(self, name: str) -> tuple[BlockType, npt.NDArray[np.uint8]]:
        """The packed rows of a matrix, uint8 [rows, bytes of a row], in Hugging Face's row order."""
        tensor = self._file.tensors[name]
        order = self._row_order(name)
        return tensor.block_type, tensor.blocks if order is None else tensor.blocks[order]

    def packed(self, name: str) -> PackedMatrix | None:
        tensor = self._file.tensors[name]
        if len(tensor.shape) != 2 or tensor.block_type.elements == 1:
            return None
        return PackedMatrix(tensor.block_type.name, tensor.blocks.shape[1], partial(self._load_packed, name))

    def load(self, name: str, out: torch.Tensor) -> None:
        tensor = self._file.tensors[name]
        if len(tensor.shape) == 1:
            self._load_vector(name, out)
            return
        order = self._row_order(name)
        step = max(1, _CHUNK_NUMBERS // tensor.shape[-1])
        for start in range(0, tensor.blocks.shape[0], step):
            stop = min(start + step, tensor.blocks.shape[0])
            blocks = tensor.blocks[start:stop] if order is None else tensor.blocks[order[start:stop]]
            out[start:stop].copy_(torch.from_numpy(self._dequantise(name, blocks)))
        self._file.mapped.release(tensor.blocks)

    def _load_packed(self, name: str, out: torch.Tensor) -> None:
        out.copy_(torch.from_numpy(np.ascontiguousarray(self.blocks(name)[1])))
        self._file.mapped.release(self._file.tensors[name].blocks)

    def _load_vector(self, name: str, out: torch.Tensor) -> None:
        values = self._dequantise(name, self._file.tensors[name].blocks).reshape(-1)
        order = self._row_order(name)
        out.copy_(torch.from_numpy(values if order is None else values[order]))

    def _dequantise(self, name: str, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        kind = GGMLQuantizationType(self._file.tensors[name].type_id)
        try:
            return np.require(dequantize(np.ascontiguousarray(blocks), kind), np.float32, ["C", "W"])
        except NotImplementedError:
            raise ConfigurationError(
                f"{self.label}: tensor {name} has type {kind.name}: cannot be dequantised"
            ) from None

    def _row_order(self, name: str) -> npt.NDArray[np.intp] | None:
        """Source row of each row wanted: of a head's D rows, even ones first, then odd ones."""
        if not self._interleaved:
            return None
        for part, heads in self._heads.items():
            if part in name:
                rows = self._file.tensors[name].shape[0]
                return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return None
