"""Weights of a Hugging Face directory: safetensors, one file or sharded, memory-mapped. Pickles are never opened."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from engine.errors import ConfigurationError
from engine.model.mapped_file import MappedFile
from engine.model.weight_plan import HUGGING_FACE, Naming

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.bin")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_SIZES |= {"U64": 8, "U32": 4, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor inside a file: bytes [start, end) of `data`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One memory-mapped .safetensors file whose header has been checked against the file's size."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        self._data = self._file.data
        self.tensors = self._parse(len(self._data))

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the mapped file."""
        stored = self.tensors[name]
        dtype = _DTYPES.get(stored.dtype)
        if dtype is None:
            raise self._error(f"tensor {name} has dtype {stored.dtype}, which is not supported")
        raw = torch.from_numpy(self._data[stored.start : stored.end])
        if stored.start % _SIZES[stored.dtype]:
            raw = raw.clone()
        return raw.view(dtype).reshape(stored.shape)

    def copy(self, name: str, out: torch.Tensor) -> None:
        """Copies a tensor into `out` and gives back the memory it was read through."""
        out.copy_(self.tensor(name))
        self._file.release(self._data[self.tensors[name].start : self.tensors[name].end])

    def _error(self, cause: str) -> ConfigurationError:
        return ConfigurationError(f"{self.path}: {cause}")

    def _parse(self, size: int) -> dict[str, StoredTensor]:
        start = bytes(self._data[:24])
        if start.startswith(b"version https://git-lfs"):
            raise self._error("is a Git LFS pointer, not the weights: run `git lfs pull` to fetch the real file")
        if size < 8:
            raise self._error(f"truncated: {size} bytes, shorter than a safetensors header")
        length = int.from_bytes(start[:8], "little")
        if length > min(size - 8, _MAX_HEADER):
            raise self._error(f"damaged or truncated: the header claims {length} bytes, the file has {size}")
        try:
            header = json.loads(bytes(self._data[8 : 8 + length]))
        except ValueError:
            raise self._error("damaged: the header is not valid JSON") from None
        if not isinstance(header, dict):
            raise self._error("damaged: the header is not a JSON object")
        entries = {name: value for name, value in header.items() if name != "__metadata__"}
        tensors = {name: self._entry(name, value, 8 + length, size) for name, value in entries.items()}
        self._check_layout(tensors, 8 + length, size)
        return tensors

    def _entry(self, name: str, value: Any, base: int, size: int) -> StoredTensor:
        try:
            dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
            sound = all(isinstance(item, int) and item >= 0 for item in (*shape, start, end))
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            raise self._error(f"damaged: the header entry of {name} is malformed")
        if dtype not in _SIZES:
            raise self._error(f"tensor {name} has unknown dtype {dtype!r}")
        if base + end > size:
            raise self._error(f"truncated: tensor {name} ends at byte {base + end}, the file at {size}")
        if end - start != math.prod(shape) * _SIZES[dtype]:
            raise self._error(f"damaged: tensor {name} of shape {list(shape)} {dtype} has {end - start} bytes")
        return StoredTensor(dtype, shape, base + start, base + end)

    def _check_layout(self, tensors: dict[str, StoredTensor], base: int, size: int) -> None:
        at = base
        for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
            if stored.start != at:
                fault = "overlaps the one before" if stored.start < at else "leaves a gap before it"
                raise self._error(f"damaged: tensor {name} {fault}")
            at = stored.end
        if at != size:
            raise self._error(f"damaged: {size - at} bytes after the last tensor")


class SafetensorsSource:
    """A `TensorSource` over all the shards of a directory."""

    def __init__(self, directory: Path, naming: Naming = HUGGING_FACE) -> None:
        self._directory = directory
        self._naming = naming
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in self._open(directory):
            for name in file.tensors:
                if name in self._file_of:
                    raise ConfigurationError(f"{file.path}: tensor {name} is also in {self._file_of[name].path.name}")
                self._file_of[name] = file

    @property
    def naming(self) -> Naming:
        return self._naming

    @property
    def label(self) -> str:
        return str(self._directory)

    def names(self) -> Iterable[str]:
        return self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file_of[name].tensors[name].shape

    def ignorable(self, name: str) -> bool:
        # Old checkpoints saved the rotary frequencies, which the config determines.
        return name.endswith(".rotary_emb.inv_freq")

    def packed(self, name: str) -> None:
        return None

    def load(self, name: str, out: torch.Tensor) -> None:
        self._file_of[name].copy(name, out)

    def _open(self, directory: Path) -> list[SafetensorsFile]:
        if (directory / SINGLE).exists():
            return [SafetensorsFile(directory / SINGLE)]
        if (directory / INDEX).exists():
            return _open_shards(directory)
        hint = _pickle_hint(directory) or "; load_format dummy needs no weights"
        raise ConfigurationError(f"model {directory}: no {SINGLE} and no {INDEX}{hint}", "model", "load_format")


def _pickle_hint(directory: Path) -> str:
    pickles = sorted({file.name for pattern in _PICKLES for file in directory.glob(pattern)})
    if not pickles:
        return ""
    return f"; {', '.join(pickles)}: pickled weights can run code and are refused, convert them to safetensors"


def _open_shards(directory: Path) -> list[SafetensorsFile]:
    index = directory / INDEX
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = {str(name): str(file) for name, file in weight_map.items()}
    except OSError as error:
        raise ConfigurationError(f"{index}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{index}: damaged: {type(error).__name__}: {error}") from None
    files: dict[str, SafetensorsFile] = {}
    for name in dict.fromkeys(shards.values()):
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or "\\" in name or parts.suffix != ".safetensors":
            raise ConfigurationError(f"{index}: weight_map entry {name!r} is not a .safetensors file of this directory")
        if not (directory / name).exists():
            raise ConfigurationError(f"{index}: shard {name} is missing")
        files[name] = SafetensorsFile(directory / name)
    for tensor, name in shards.items():
        if tensor not in files[name].tensors:
            raise ConfigurationError(f"{index}: tensor {tensor} is not in {name}")
    return list(files.values())
