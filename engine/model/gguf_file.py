"""Reads a GGUF file: metadata, and a memory-mapped view of every tensor's raw blocks. No torch, no `gguf` package."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigurationError
from engine.model.mapped_file import MappedFile

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class BlockType:
    """How a tensor's numbers are packed: `elements` of them in `size` bytes, in order along a row."""

    name: str
    elements: int
    size: int


# ggml's type ids; the sizes are part of the file format.
BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as stored. `shape` is in torch's order (rows first); `blocks` is uint8 [rows, bytes of a row]."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    block_type: BlockType
    blocks: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file. `tensors` are views of the mapping: nothing is read before it is used."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    mapped: MappedFile


def read_gguf(path: Path) -> GgufFile:
    """Maps and parses `path`. Raises ConfigurationError with one line if it is damaged or of an unknown layout."""
    return _Parser(path, MappedFile(path)).parse()


def gguf_end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id that ends a turn or a text, without repeats."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(item for item in ids if isinstance(item, int)))


class _Parser:
    """A cursor over the header. Every read is bounds-checked, so a damaged length never causes an allocation."""

    def __init__(self, path: Path, mapped: MappedFile) -> None:
        self._path = path
        self._mapped = mapped
        self._data = mapped.data
        self._view = memoryview(self._data.data)
        self._at = 0

    def parse(self) -> GgufFile:
        if bytes(self._view[:4]) != _MAGIC:
            hint = " (a Git LFS pointer: run `git lfs pull`)" if bytes(self._view[:7]) == b"version" else ""
            raise self._error(f"not a GGUF file{hint}")
        self._at = 4
        version = self._scalar(4)
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is not supported (2 and 3 are)")
        tensor_count, entry_count = self._scalar(10), self._scalar(10)
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            metadata[key] = self._value(self._scalar(4))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._error(f"bad alignment {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, start + at) for name, shape, kind, at in infos}
        return GgufFile(self._path, metadata, tensors, self._mapped)

    def _error(self, cause: str) -> ConfigurationError:
        return ConfigurationError(f"{self._path}: {cause}")

    def _take(self, size: int) -> int:
        at = self._at
        if at + size > len(self._data):
            raise self._error(f"truncated: {size} bytes wanted at offset {at} of {len(self._data)}")
        self._at = at + size
        return at

    def _scalar(self, kind: int) -> Any:
        layout = _SCALARS[kind]
        return layout.unpack_from(self._view, self._take(layout.size))[0]

    def _string(self) -> str:
        size = self._scalar(10)
        at = self._take(size)
        # A token need not be valid UTF-8; the replacement keeps its id in place.
        return str(self._view[at : at + size], "utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._error(f"unknown metadata type {kind}")
        return self._scalar(kind)

    def _array(self) -> list[Any]:
        kind, count = self._scalar(4), self._scalar(10)
        if kind in _SCALARS:
            layout = _SCALARS[kind]
            at = self._take(count * layout.size)
            return [item[0] for item in layout.iter_unpack(self._view[at : at + count * layout.size])]
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        raise self._error(f"unknown array type {kind}")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._scalar(4)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([self._scalar(10) for _ in range(dimensions)]))
        return name, shape, self._scalar(4), self._scalar(10)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        block_type = BLOCK_TYPES.get(kind)
        if block_type is None:
            raise self._error(f"tensor {name} has type {kind}, which is not supported")
        if shape[-1] % block_type.elements:
            raise self._error(f"tensor {name} has rows of {shape[-1]}, no multiple of {block_type.elements}")
        rows = math.prod(shape[:-1])
        row_bytes = shape[-1] // block_type.elements * block_type.size
        end = offset + rows * row_bytes
        if end > len(self._data):
            raise self._error(f"truncated: tensor {name} ends at byte {end}, the file at {len(self._data)}")
        blocks = self._data[offset:end].reshape(rows, row_bytes)
        return GgufTensor(name, shape, kind, block_type, blocks)
