"""Fills a decoder's weights from a checkpoint, after checking that the two agree tensor by tensor."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from engine.errors import ConfigurationError
from engine.model.decoder import DecoderWeights, LayerWeights
from engine.model.layers import PACKED_TYPES, Linear
from engine.model.spec import ModelSpec
from engine.model.weight_plan import Naming, Parameter, Piece, head_piece, plan_weights

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
_LISTED = 64
_MATRICES = frozenset({"qkv", "o", "gate_up", "down", "head"})


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in blocks. `load` copies them into a uint8 tensor [rows, row_bytes]."""

    block_type: str
    row_bytes: int
    load: Callable[[torch.Tensor], None]


class TensorSource(Protocol):
    """A checkpoint. `load` may be called from several threads."""

    @property
    def naming(self) -> Naming: ...

    @property
    def label(self) -> str:
        """What errors call it: its path."""
        ...

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def ignorable(self, name: str) -> bool:
        """Whether a tensor may go unused: it holds nothing that the spec does not already say."""
        ...

    def packed(self, name: str) -> PackedMatrix | None:
        """The matrix in the blocks it is stored in; None if it is stored otherwise."""
        ...

    def load(self, name: str, out: torch.Tensor) -> None:
        """Copies the tensor into `out`, which has its shape, converting to the dtype and device of `out`."""
        ...


def assemble(
    spec: ModelSpec,
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> DecoderWeights:
    """Loads every parameter straight into its place, in parallel. `progress(done, total)` counts numbers, not bytes.
    On the CPU, matrices in blocks that it can multiply stay in blocks.

    Raises ConfigurationError that names each tensor which is missing, of another shape, or used by nothing.
    """
    plan = plan_weights(spec, source.naming)
    head = head_piece(spec, source.naming)
    _check(spec, source, plan, head)
    loaded = _Loaded(source, device, dtype)
    own_head = head.name in set(source.names())
    tied_head = Parameter(None, "head", head.shape, (Piece(source.naming.embedding, head.shape),))
    if own_head:
        plan.append(Parameter(None, "head", head.shape, (head,)))
    elif loaded.packed(tied_head):
        # Looked up in full precision, multiplied in blocks: the one matrix that is held twice.
        plan.append(tied_head)
    _load_all([job for item in plan for job in loaded.claim(item)], progress)
    if own_head and spec.tied_embeddings:
        _resolve_tied_head(source, loaded.tensors)
    return _weights(spec, loaded)


@dataclass(frozen=True, slots=True)
class _Job:
    """A source tensor and the rows that it fills."""

    piece: Piece
    target: torch.Tensor
    load: Callable[[torch.Tensor], None]


class _Loaded:
    """The decoder's tensors by layer and name, claimed before they are filled."""

    def __init__(self, source: TensorSource, device: torch.device, dtype: torch.dtype) -> None:
        self.tensors: dict[tuple[int | None, str], torch.Tensor] = {}
        self._block_types: dict[tuple[int | None, str], str] = {}
        self._source = source
        self._device = device
        self._dtype = dtype

    def claim(self, item: Parameter) -> list[_Job]:
        packed = self.packed(item)
        if packed:
            tensor = torch.empty((item.shape[0], packed[0].row_bytes), device=self._device, dtype=torch.uint8)
            loads = [matrix.load for matrix in packed]
        else:
            tensor = torch.empty(item.shape, device=self._device, dtype=self._dtype)
            loads = [partial(self._source.load, piece.name) for piece in item.pieces]
        key = (item.layer, item.name)
        self.tensors[key], self._block_types[key] = tensor, packed[0].block_type if packed else ""
        return [
            _Job(piece, tensor.narrow(0, piece.start, piece.shape[0]), load)
            for piece, load in zip(item.pieces, loads, strict=True)
        ]

    def linear(self, layer: int | None, name: str, bias: str = "") -> Linear:
        key = (layer, name)
        # Out of the dictionary: what a CPU layer packs is freed before the next one is packed.
        return Linear(self.tensors.pop(key), self.tensors.get((layer, bias)), self._block_types[key])

    def rows(self, layer: int, name: str, begin: int) -> Linear:
        """Of a matrix that has not been taken yet, the rows from `begin` on."""
        return Linear(self.tensors[layer, name][begin:], None, self._block_types[layer, name])

    def packed(self, item: Parameter) -> list[PackedMatrix]:
        """The pieces in blocks, if they share a format that the device multiplies."""
        if self._device.type != "cpu" or item.name not in _MATRICES:
            return []
        packed = [matrix for piece in item.pieces if (matrix := self._source.packed(piece.name)) is not None]
        types = {matrix.block_type for matrix in packed}
        usable = len(packed) == len(item.pieces) and len(types) == 1 and types <= PACKED_TYPES
        return packed if usable else []


def _check(spec: ModelSpec, source: TensorSource, plan: list[Parameter], head: Piece) -> None:
    present = set(source.names())
    pieces = [piece for item in plan for piece in item.pieces]
    if head.name in present or not spec.tied_embeddings:
        pieces.append(head)
    missing = [piece.name for piece in pieces if piece.name not in present]
    if missing:
        raise ConfigurationError(f"{source.label}: missing tensors: {_listed(missing)}")
    for piece in pieces:
        if tuple(source.shape(piece.name)) != piece.shape:
            found, wanted = list(source.shape(piece.name)), list(piece.shape)
            raise ConfigurationError(f"{source.label}: tensor {piece.name} has shape {found}, not {wanted}")
    unused = present - {piece.name for piece in pieces}
    unused = {name for name in unused if not source.ignorable(name)}
    if unused:
        raise ConfigurationError(f"{source.label}: tensors that the model does not use: {_listed(sorted(unused))}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _load_all(jobs: list[_Job], progress: Progress | None) -> None:
    total = sum(math.prod(job.piece.shape) for job in jobs)
    done = 0

    def run(job: _Job) -> int:
        job.load(job.target)
        return math.prod(job.piece.shape)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="load") as pool:
        for size in pool.map(run, jobs):
            done += size
            if progress is not None:
                progress(done, total)


def _resolve_tied_head(source: TensorSource, tensors: dict[tuple[int | None, str], torch.Tensor]) -> None:
    # Transformers ties only equal matrices: a trained head in a file whose config says "tied" must not be lost.
    if torch.equal(tensors[None, "head"], tensors[None, "embedding"]):
        del tensors[None, "head"]
        return
    log.warning(
        "%s: the config ties the embeddings but %s differs from them; using the file's",
        source.label,
        source.naming.head,
    )


def _weights(spec: ModelSpec, loaded: _Loaded) -> DecoderWeights:
    embedding = loaded.tensors[None, "embedding"]
    last_kv = loaded.rows(spec.num_layers - 1, "qkv", spec.q_size)
    return DecoderWeights(
        embedding=embedding,
        last_kv=last_kv,
        layers=[_layer(layer, loaded) for layer in range(spec.num_layers)],
        final_norm=loaded.tensors[None, "final_norm"],
        head=loaded.linear(None, "head") if (None, "head") in loaded.tensors else Linear(embedding),
    )


def _layer(layer: int, loaded: _Loaded) -> LayerWeights:
    def get(name: str) -> torch.Tensor | None:
        return loaded.tensors.get((layer, name))

    return LayerWeights(
        input_norm=loaded.tensors[layer, "input_norm"],
        qkv=loaded.linear(layer, "qkv"),
        qkv_bias=get("qkv_bias"),
        q_norm=get("q_norm"),
        k_norm=get("k_norm"),
        o=loaded.linear(layer, "o", "o_bias"),
        post_norm=loaded.tensors[layer, "post_norm"],
        gate_up=loaded.linear(layer, "gate_up", "gate_up_bias"),
        down=loaded.linear(layer, "down", "down_bias"),
    )
