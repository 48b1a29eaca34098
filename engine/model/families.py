"""From a model's own description (Hugging Face config.json or GGUF metadata) to a `ModelSpec`.

Anything that would change the model's output and is not implemented is refused here, by the name of the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigurationError
from engine.model.gguf_file import GgufFile, gguf_end_tokens
from engine.model.json_file import read_json
from engine.model.spec import ModelSpec, RopeSpec

Config = Mapping[str, Any]
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Family:
    """How one architecture differs from plain Llama. `defaults` hold for keys that config.json leaves out."""

    architecture: str
    qkv_bias: bool | None = None  # None: what `attention_bias` says
    o_bias: bool | None = None
    mlp_bias: bool | None = None  # None: what `mlp_bias` says
    qk_norm: bool = False
    fused: bool = False  # see ModelSpec.fused_checkpoint
    rope_names: Mapping[str, str] = field(default_factory=dict)  # other names of rope kinds
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 4096}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", defaults={"bos_token_id": 1, "eos_token_id": 2}),
    "mistral": Family(
        "MistralForCausalLM",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, o_bias=False, mlp_bias=False, defaults=_QWEN),
    "qwen3": Family("Qwen3ForCausalLM", mlp_bias=False, qk_norm=True, defaults={**_QWEN, "head_dim": 128}),
    "phi3": Family(
        "Phi3ForCausalLM",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        fused=True,
        rope_names={"su": "longrope", "yarn": "longrope"},
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
        },
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
    ),
}
_BASE_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu"}


def spec_from_directory(path: Path) -> ModelSpec:
    """The spec of a Hugging Face model directory: config.json, and generation_config.json for its end tokens."""
    config = read_json(path / "config.json")
    generation = path / "generation_config.json"
    extra = read_json(generation) if generation.is_file() else {}
    try:
        return spec_from_config(config, extra)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path / 'config.json'}: {error}") from None


def spec_from_config(config: Config, generation: Config | None = None) -> ModelSpec:
    """`config`: a parsed config.json of any transformers version. Code named by `auto_map` is never run."""
    family = _family_of(config)
    view = _View(config, {**_BASE_DEFAULTS, **family.defaults})
    _refuse_quantised(config)
    if view.text("hidden_act") != "silu":
        raise ConfigurationError(f"hidden_act {config['hidden_act']!r} is not supported (silu is)")
    hidden, q_heads = view.positive("hidden_size"), view.positive("num_attention_heads")
    if config.get("head_dim") is None and "head_dim" not in family.defaults and hidden % q_heads:
        raise ConfigurationError(f"hidden_size {hidden} is no multiple of num_attention_heads {q_heads}")
    head_dim = view.positive("head_dim", hidden // q_heads)
    kv_heads = view.positive("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise ConfigurationError(f"num_attention_heads {q_heads} is no multiple of num_key_value_heads {kv_heads}")
    layers, max_positions = view.positive("num_hidden_layers"), view.positive("max_position_embeddings")
    attention_bias, mlp_bias = view.flag("attention_bias"), view.flag("mlp_bias")
    return ModelSpec(
        architecture=family.architecture,
        vocab_size=view.positive("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=view.positive("intermediate_size"),
        norm_eps=view.number("rms_norm_eps"),
        rope=_rope_from_config(view, family, head_dim, max_positions),
        max_positions=max_positions,
        tied_embeddings=view.flag("tie_word_embeddings"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        attention_window=_window(view, family, layers, max_positions),
        nope_layers=_nope_layers(config, family, layers),
        bos_token_id=view.get("bos_token_id"),
        eos_token_ids=_end_tokens(view, generation or {}),
        dtype=_dtype_of(config),
        fused_checkpoint=family.fused,
    )


class _View:
    """Typed look-ups in a config; a key that is absent or null has the family's default."""

    def __init__(self, config: Config, defaults: Config) -> None:
        self._config = config
        self._defaults = defaults

    def get(self, key: str, default: Any = None) -> Any:
        value = self._config.get(key)
        if value is None:
            # An explicit null differs from absence only where the family has a default to be switched off.
            value = self._defaults.get(key) if key not in self._config else None
        return default if value is None else value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            value = self._defaults.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigurationError(f"{key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self.get(key, self._defaults.get(key))
        return _number(key, value)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise ConfigurationError(f"{key} must be true or false, not {value!r}")
        return value

    def text(self, key: str) -> str:
        return str(self.get(key, self._defaults.get(key)))


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigurationError(f"{key} must be a finite number, not {value!r}")
    return float(value)


def _positive(key: str, value: Any) -> float:
    if _number(key, value) <= 0:
        raise ConfigurationError(f"{key} must be above 0, not {value!r}")
    return float(value)


def _family_of(config: Config) -> Family:
    names = config.get("architectures") or []
    by_architecture = {family.architecture: family for family in FAMILIES.values()}
    for name in names:
        if name in by_architecture:
            return by_architecture[name]
    model_type = config.get("model_type")
    if not names and model_type in FAMILIES:
        return FAMILIES[model_type]
    asked = ", ".join(map(str, names)) or f"model_type {model_type!r}"
    raise ConfigurationError(f"unknown architecture {asked}; supported: {', '.join(sorted(by_architecture))}")


def _refuse_quantised(config: Config) -> None:
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise ConfigurationError(f"quantization_config ({method}) is not supported")


def _dtype_of(config: Config) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigurationError(f"dtype {name!r} is not supported ({', '.join(_DTYPES)} are)")
    return name


def _end_tokens(view: _View, generation: Config) -> tuple[int, ...]:
    ids: list[int] = []
    for value in (view.get("eos_token_id"), generation.get("eos_token_id")):
        values = value if isinstance(value, list) else [value]
        ids += [item for item in values if isinstance(item, int) and item not in ids]
    return tuple(ids)


def _window(view: _View, family: Family, layers: int, max_positions: int) -> int | None:
    """The sliding window if any layer has one that is shorter than the context."""
    window = view.get("sliding_window")
    if family.architecture in ("MistralForCausalLM", "Phi3ForCausalLM"):
        active = window is not None
    elif family.architecture == "LlamaForCausalLM":
        active = False
    else:
        active = view.flag("use_sliding_window") and window is not None
        kinds = view.get("layer_types")
        if kinds is not None:
            active = active and "sliding_attention" in kinds
        elif family.architecture == "SmolLM3ForCausalLM":
            active = active and bool(_nope_layers(view._config, family, layers))
        else:
            active = active and view.get("max_window_layers", layers) < layers
    if not active:
        return None
    if isinstance(window, bool) or not isinstance(window, int) or window <= 0:
        raise ConfigurationError(f"sliding_window must be a positive integer, not {window!r}")
    return window if window < max_positions else None


def _nope_layers(config: Config, family: Family, layers: int) -> frozenset[int]:
    if family.architecture != "SmolLM3ForCausalLM":
        return frozenset()
    flags = config.get("no_rope_layers")
    if flags is None:
        interval = config.get("no_rope_layer_interval") or 4
        flags = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(flags) < layers:
        raise ConfigurationError(f"no_rope_layers has {len(flags)} entries for {layers} layers")
    return frozenset(layer for layer in range(layers) if not flags[layer])


def _rope_from_config(view: _View, family: Family, head_dim: int, max_positions: int) -> RopeSpec:
    parameters = view.get("rope_scaling") or view.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise ConfigurationError(f"rope_scaling must be an object, not {parameters!r}")
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        if set(parameters) != {"full_attention"}:
            raise ConfigurationError(f"rope_parameters differ by layer type ({', '.join(parameters)}): not supported")
        parameters = parameters["full_attention"]
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = family.rope_names.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise ConfigurationError(f"unknown rope type {kind!r}; supported: {', '.join(ROPE_KINDS)}")
    partial = parameters.get("partial_rotary_factor", view.get("partial_rotary_factor", 1.0))
    theta = parameters.get("rope_theta")
    theta = _positive("rope_theta", view.number("rope_theta") if theta is None else theta)
    rotary_dim = int(head_dim * _number("partial_rotary_factor", partial))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigurationError(f"partial_rotary_factor {partial} of head_dim {head_dim} rotates {rotary_dim}")
    if kind == "default":
        return RopeSpec(theta, rotary_dim)
    return _scaled_rope(kind, theta, rotary_dim, parameters, view, max_positions)


def _scaled_rope(
    kind: str, theta: float, rotary_dim: int, parameters: Config, view: _View, max_positions: int
) -> RopeSpec:
    original = view.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    original = int(_positive("original_max_position_embeddings", original or max_positions))

    def number(key: str, default: float | None = None) -> float:
        value = parameters.get(key)
        if value is None and default is None:
            raise ConfigurationError(f"rope type {kind} needs {key}")
        return _number(key, default if value is None else value)

    factor = _positive("factor", number("factor", max_positions / original if kind in ("yarn", "longrope") else None))
    attention_factor = parameters.get("attention_factor")
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        kind=kind,
        factor=factor,
        original_max_positions=max_positions if kind == "dynamic" else original,
        low_freq_factor=number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=number("high_freq_factor", None if kind == "llama3" else 4.0),
        attention_factor=None if attention_factor is None else _number("attention_factor", attention_factor),
        beta_fast=number("beta_fast", 32.0) or 32.0,
        beta_slow=number("beta_slow", 1.0) or 1.0,
        mscale=number("mscale", 0.0),
        mscale_all_dim=number("mscale_all_dim", 0.0),
        truncate=bool(parameters.get("truncate", True)),
        short_factors=_factors("short_factor", parameters, rotary_dim) if kind == "longrope" else (),
        long_factors=_factors("long_factor", parameters, rotary_dim) if kind == "longrope" else (),
    )


def _factors(key: str, parameters: Config, rotary_dim: int) -> tuple[float, ...]:
    values = parameters.get(key)
    if not isinstance(values, list) or len(values) != rotary_dim // 2:
        raise ConfigurationError(f"rope type longrope needs {key}: a list of {rotary_dim // 2} numbers")
    return tuple(_positive(key, value) for value in values)


_GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def spec_from_gguf(file: GgufFile) -> ModelSpec:
    """The spec of a GGUF file of architecture llama (Llama, Mistral, SmolLM2), qwen2 or qwen3."""
    try:
        return _spec_from_gguf(file)
    except ConfigurationError as error:
        raise ConfigurationError(f"{file.path}: {error}") from None


def _spec_from_gguf(file: GgufFile) -> ModelSpec:
    architecture = file.metadata.get("general.architecture")
    if architecture not in _GGUF_FAMILIES:
        raise ConfigurationError(
            f"unknown GGUF architecture {architecture!r}; supported: {', '.join(sorted(_GGUF_FAMILIES))}"
        )
    family = FAMILIES[_GGUF_FAMILIES[architecture]]
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    view = _View(values, {"rope.freq_base": 10_000.0})
    if view.get("expert_count", 0):
        raise ConfigurationError("mixture-of-experts models are not supported (expert_count)")
    hidden, q_heads = view.positive("embedding_length"), view.positive("attention.head_count")
    head_dim = view.positive("attention.key_length", hidden // q_heads)
    if view.positive("attention.value_length", head_dim) != head_dim:
        raise ConfigurationError("attention.value_length differs from attention.key_length: not supported")
    max_positions = view.positive("context_length")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigurationError("missing tensor token_embd.weight")
    window = view.get("attention.sliding_window")
    return ModelSpec(
        architecture=family.architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        num_layers=view.positive("block_count"),
        q_heads=q_heads,
        kv_heads=view.positive("attention.head_count_kv", q_heads),
        head_dim=head_dim,
        intermediate_size=view.positive("feed_forward_length"),
        norm_eps=view.number("attention.layer_norm_rms_epsilon"),
        rope=_rope_from_gguf(view, file, head_dim, max_positions),
        max_positions=max_positions,
        tied_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        attention_window=window if isinstance(window, int) and 0 < window < max_positions else None,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=gguf_end_tokens(file.metadata),
        dtype="bfloat16",
    )


def _rope_from_gguf(view: _View, file: GgufFile, head_dim: int, max_positions: int) -> RopeSpec:
    kind = view.get("rope.scaling.type", "none")
    kind = "default" if kind == "none" else kind
    if kind not in ("default", "linear", "yarn"):
        raise ConfigurationError(f"unknown rope type {kind!r}; supported: none, linear, yarn")
    factors = file.tensors.get("rope_freqs.weight")
    divisors: tuple[float, ...] = ()
    if factors is not None:
        if factors.block_type.name != "F32":
            raise ConfigurationError(f"rope_freqs.weight has type {factors.block_type.name}, not F32")
        divisors = tuple(factors.blocks.reshape(-1).view("<f4").tolist())
    attention_factor = view.get("rope.scaling.attn_factor")
    return RopeSpec(
        theta=_positive("rope.freq_base", view.number("rope.freq_base")),
        rotary_dim=view.positive("rope.dimension_count", head_dim),
        kind=kind,
        factor=1.0 if kind == "default" else _positive("rope.scaling.factor", view.get("rope.scaling.factor")),
        original_max_positions=int(view.get("rope.scaling.original_context_length", max_positions)),
        attention_factor=None if attention_factor is None else _number("rope.scaling.attn_factor", attention_factor),
        divisors=divisors,
    )
