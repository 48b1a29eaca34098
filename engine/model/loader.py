"""From an engine's configuration to a model that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import EngineConfig, LoadFormat
from engine.errors import ConfigurationError
from engine.model.assemble import Progress, TensorSource, assemble
from engine.model.decoder import Decoder
from engine.model.dummy import DummySource
from engine.model.families import spec_from_directory, spec_from_gguf
from engine.model.gguf_file import read_gguf
from engine.model.source import ModelSource, SourceKind, resolve
from engine.model.spec import ModelSpec
from engine.model.weight_plan import naming_of
from engine.model.weights import SafetensorsSource
from engine.ops import MAX_FIXED_PAIRS
from engine.text.tokenizer import Tokenizer

Report = Callable[[str], None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device.

    max_model_len: the longest context it serves, prompt and output together. eos_token_ids: every id that ends a text.
    sampled_vocab_size: ids from here on pad the embedding and have no token; they must not be sampled.
    """

    spec: ModelSpec
    decoder: Decoder
    source: ModelSource
    max_model_len: int
    eos_token_ids: frozenset[int]
    sampled_vocab_size: int


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights are not read yet, and how it is going to be served."""

    source: ModelSource
    spec: ModelSpec
    tensors: TensorSource
    max_model_len: int
    dtype: torch.dtype


def open_model(config: EngineConfig, device: torch.device) -> OpenedModel:
    """All checks that need no weights. Raises ConfigurationError with one line."""
    source = resolve(config.model)
    spec, tensors = _open(source, config)
    max_model_len = context_length(spec, config.max_model_len)
    dtype = resolve_dtype(config.dtype, device)
    check_device(spec, device, dtype, config.block_size)
    if config.batch_invariant and device.type == "cuda":
        check_fixed_splits(spec, config.max_num_seqs)
    return OpenedModel(source, spec, tensors, max_model_len, dtype)


def load_model(config: EngineConfig, device: torch.device, report: Report | None = None) -> LoadedModel:
    """Opens a model and reads its weights. Raises ConfigurationError with one line."""
    return load_weights(open_model(config, device), config, device, report)


def load_weights(
    opened: OpenedModel, config: EngineConfig, device: torch.device, report: Report | None = None
) -> LoadedModel:
    """Places a model's weights on the device. Raises ConfigurationError with one line.

    `report` gets a line of text when a part of the work begins and at each tenth of the weights; the first one once the
    first weights are there, so that a model without them is one line.
    """
    source, spec, max_model_len = opened.source, opened.spec, opened.max_model_len
    report = report or (lambda _: None)
    weights = assemble(spec, opened.tensors, device, opened.dtype, _tenths(source.name, report))
    if spec.rope.kind == "longrope":
        report(f"longrope: {'long' if max_model_len > spec.default_context else 'short'} factors, for every request")
    decoder = Decoder(
        spec,
        weights,
        device,
        opened.dtype,
        max_tokens=max(config.step_tokens(device.type), config.max_num_seqs),
        max_logits=config.max_num_seqs,
        max_positions=max_model_len,
        batch_invariant=config.batch_invariant,
    )
    end_ids, sampled = _vocabulary(spec, source, report)
    return LoadedModel(spec, decoder, source, max_model_len, end_ids, sampled)


def _vocabulary(spec: ModelSpec, source: ModelSource, report: Report) -> tuple[frozenset[int], int]:
    """Ids that end a text, and how many ids may be sampled."""
    if source.kind is SourceKind.DIRECTORY and not (source.path / "tokenizer.json").is_file():
        report(f"{source.path} has no tokenizer.json: every id of the vocabulary may be sampled")
        return frozenset(spec.eos_token_ids), spec.vocab_size
    tokenizer = Tokenizer.from_source(source)
    return tokenizer.eos_token_ids | set(spec.eos_token_ids), min(tokenizer.size, spec.vocab_size)


def _tenths(name: str, report: Report) -> Progress:
    """Turns counts into one line a tenth, behind one with the model's name."""
    shown = -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        tenth = 10 * done // total
        if shown < 0:
            report(f"loading {name}")
        if tenth > shown:
            shown = tenth
            report(f"loading weights: {10 * tenth} %")

    return progress


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is fp32 on CPU and bf16 on CUDA."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise ConfigurationError(f"dtype {name!r} is unknown; auto, {', '.join(_DTYPES)} are known", "dtype")
    return _DTYPES[name]


def check_device(spec: ModelSpec, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
    """Refuses what the device's kernels were not made for."""
    if device.type == "cuda" and block_size != 16:
        raise ConfigurationError(f"not supported on cuda: block_size {block_size} (16 is)", "block_size")
    group = spec.q_heads // spec.kv_heads
    if device.type == "cuda":
        limits = {
            f"head_dim {spec.head_dim} (64, 80, 96 and 128 are)": spec.head_dim in (64, 80, 96, 128),
            f"{group} query heads a KV head (up to 8 are)": group <= 8,
            "dtype float32 (bfloat16 and float16 are)": dtype != torch.float32,
        }
    else:
        limits = {
            f"head_dim {spec.head_dim} (multiples of 8 are)": spec.head_dim % 8 == 0,
            "dtype float16 (float32 and bfloat16 are)": dtype != torch.float16,
        }
    for limit, kept in limits.items():
        if not kept:
            settings = ("dtype",) if limit.startswith("dtype") else ()
            raise ConfigurationError(f"not supported on {device.type}: {limit}", *settings)


def check_fixed_splits(spec: ModelSpec, max_num_seqs: int) -> None:
    """Refuses more sequences than attention has room for the parts of, when it cuts them by their own lengths."""
    most = MAX_FIXED_PAIRS // spec.kv_heads
    if max_num_seqs > most:
        raise ConfigurationError(
            f"batch_invariant on cuda serves at most {most} sequences of {spec.kv_heads} KV heads;"
            f" max_num_seqs is {max_num_seqs}",
            *("batch_invariant", "max_num_seqs"),
        )


def context_length(spec: ModelSpec, asked: int | None) -> int:
    """The context to serve: what was asked for, if the model allows it."""
    length = spec.default_context if asked is None else asked
    if length < 1 or length > spec.position_limit:
        problem = f"max_model_len {length} is not in 1..{spec.position_limit}, the model's limit"
        raise ConfigurationError(problem, "max_model_len")
    if spec.attention_window is not None and length > spec.attention_window:
        raise ConfigurationError(
            f"sliding-window attention ({spec.attention_window} tokens) is not supported:"
            f" serve it within the window with max_model_len {spec.attention_window}",
            "max_model_len",
        )
    return length


def _open(source: ModelSource, config: EngineConfig) -> tuple[ModelSpec, TensorSource]:
    if source.kind is SourceKind.GGUF:
        return _open_gguf(source, config)
    if config.load_format is LoadFormat.GGUF:
        raise _unreadable("gguf", f"a .gguf file, and {source.path} is a directory", "safetensors")
    spec = spec_from_directory(source.path)
    if config.load_format is LoadFormat.DUMMY:
        return spec, DummySource(spec, config.seed)
    return spec, SafetensorsSource(source.path, naming_of(spec))


def _open_gguf(source: ModelSource, config: EngineConfig) -> tuple[ModelSpec, TensorSource]:
    # The `gguf` package is needed for GGUF files only.
    from engine.model.gguf_weights import GgufSource

    if config.load_format is LoadFormat.SAFETENSORS:
        raise _unreadable("safetensors", f"a directory, and {source.path} is a .gguf file", "gguf")
    file = read_gguf(source.path)
    spec = spec_from_gguf(file)
    if config.load_format is LoadFormat.DUMMY:
        return spec, DummySource(spec, config.seed)
    return spec, GgufSource(file, spec)


def _unreadable(load_format: str, problem: str, right: str) -> ConfigurationError:
    return ConfigurationError(f"load_format {load_format} reads {problem}: give auto or {right}", "load_format")
