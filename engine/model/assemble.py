"""Fills a decoder's weights from a checkpoint, after checking that the two agree tensor by tensor."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from engine.errors import ConfigurationError
from engine.model.decoder import DecoderWeights, LayerWeights
from engine.model.layers import Linear
from engine.model.spec import ModelSpec
from engine.model.weight_plan import Naming, Parameter, Piece, head_piece, plan_weights

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
_LISTED = 64


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

    Raises ConfigurationError that names each tensor which is missing, of another shape, or used by nothing.
    """
    plan = plan_weights(spec, source.naming)
    head = head_piece(spec, source.naming)
    _check(spec, source, plan, head)
    tensors = {(item.layer, item.name): torch.empty(item.shape, device=device, dtype=dtype) for item in plan}
    jobs = [(piece, tensors[item.layer, item.name]) for item in plan for piece in item.pieces]
    own_head = head.name in set(source.names())
    if own_head:
        tensors[None, "head"] = torch.empty(head.shape, device=device, dtype=dtype)
        jobs.append((head, tensors[None, "head"]))
    _load_all(source, jobs, progress)
    if own_head and spec.tied_embeddings:
        _resolve_tied_head(source, tensors)
    return _weights(spec, tensors)


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


def _load_all(source: TensorSource, jobs: list[tuple[Piece, torch.Tensor]], progress: Progress | None) -> None:
    total = sum(math.prod(piece.shape) for piece, _ in jobs)
    done = 0

    def run(job: tuple[Piece, torch.Tensor]) -> int:
        piece, target = job
        source.load(piece.name, target.narrow(0, piece.start, piece.shape[0]))
        return math.prod(piece.shape)

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


def _weights(spec: ModelSpec, tensors: dict[tuple[int | None, str], torch.Tensor]) -> DecoderWeights:
    embedding = tensors[None, "embedding"]
    return DecoderWeights(
        embedding=embedding,
        layers=[_layer(layer, tensors) for layer in range(spec.num_layers)],
        final_norm=tensors[None, "final_norm"],
        head=Linear(tensors.get((None, "head"), embedding)),
    )


def _layer(layer: int, tensors: dict[tuple[int | None, str], torch.Tensor]) -> LayerWeights:
    def get(name: str) -> torch.Tensor | None:
        return tensors.get((layer, name))

    return LayerWeights(
        input_norm=tensors[layer, "input_norm"],
        qkv=Linear(tensors[layer, "qkv"]),
        qkv_bias=get("qkv_bias"),
        q_norm=get("q_norm"),
        k_norm=get("k_norm"),
        o=Linear(tensors[layer, "o"], get("o_bias")),
        post_norm=tensors[layer, "post_norm"],
        gate_up=Linear(tensors[layer, "gate_up"], get("gate_up_bias")),
        down=Linear(tensors[layer, "down"], get("down_bias")),
    )
