"""Rotary tables against transformers.modeling_rope_utils, at positions that short prompts never reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.errors import ConfigurationError
from engine.model.families import spec_from_config
from engine.model.rope import cos_sin_table, identity_table

POSITIONS = torch.tensor([0, 1, 1000, 8191, 8192, 20000, 60000])
BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 65536,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN: dict[str, Any] = {"factor": 8.0, "original_max_position_embeddings": 8192}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"kind": "default"},
    "linear": {"kind": "linear", "factor": 4.0},
    "dynamic": {"kind": "dynamic", "factor": 4.0},
    "llama3": {"kind": "llama3", **LLAMA3},
    "yarn": {"kind": "yarn", **YARN},
    "yarn-attention-factor": {"kind": "yarn", **YARN, "attention_factor": 1.0},
    "yarn-mscale": {"kind": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-betas": {"kind": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
}


def config_of(scaling: dict[str, Any] | None, key: str = "rope_type", **changes: Any) -> dict[str, Any]:
    if scaling is None:
        return {**BASE, **changes}
    fields = {name: value for name, value in scaling.items() if name != "kind"}
    return {**BASE, "rope_scaling": {key: scaling["kind"], **fields}, **changes}


def reference(config: dict[str, Any], seq_len: int | None = None) -> torch.Tensor:
    """[positions, 64]: cosines, then sines."""
    hf = transformers.LlamaConfig(**{key: value for key, value in config.items() if key != "architectures"})
    kind = hf.rope_parameters["rope_type"]
    if kind == "default":
        frequencies, scale = LlamaRotaryEmbedding.compute_default_rope_parameters(hf)
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), seq_len=seq_len)
    angles = torch.outer(POSITIONS.float(), frequencies)
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers(name: str, key: str) -> None:
    config = config_of(SCALINGS[name], key)
    spec = spec_from_config(config)
    table = cos_sin_table(spec.rope, spec.max_positions)
    assert table.shape == (65536, 64)
    torch.testing.assert_close(table[POSITIONS], reference(config), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", SCALINGS)
def test_new_layout_gives_the_same_spec(name: str) -> None:
    scaling = SCALINGS[name]
    old = config_of(scaling)
    parameters = {"rope_theta": old["rope_theta"], **old.get("rope_scaling", {"rope_type": "default"})}
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    assert spec_from_config({**new, "rope_parameters": parameters}) == spec_from_config(old)


def test_scaling_is_visible_far_out() -> None:
    """Guards the tests above: had the scaling been ignored, position 60000 would show it."""
    plain = reference(config_of(None))[-1]
    for name in ("linear", "llama3", "yarn"):
        assert torch.cosine_similarity(reference(config_of(SCALINGS[name]))[-1], plain, dim=0) < 0.9


def test_dynamic_beyond_the_original_length_is_that_of_the_longest_sequence() -> None:
    config = config_of({"kind": "dynamic", "factor": 4.0}, max_position_embeddings=8192)
    table = cos_sin_table(spec_from_config(config).rope, 65536)
    torch.testing.assert_close(table[POSITIONS], reference(config, seq_len=65536), atol=1e-6, rtol=0)


@pytest.mark.parametrize("attention", [{}, {"factor": 4.0}, {"attention_factor": 1.19}])
@pytest.mark.parametrize("context", [8192, 8193, 65536])
def test_longrope_takes_its_factors_by_the_context(context: int, attention: dict[str, float]) -> None:
    """The short ones as far as the original length, the long ones for every position of a longer context."""
    short, long = ([1.0 + slope * pair for pair in range(32)] for slope in (0.05, 1.7))
    scaling = {"kind": "longrope", "short_factor": short, "long_factor": long, **attention}
    config = config_of({**scaling, "original_max_position_embeddings": 8192})
    spec = spec_from_config(config)
    assert (spec.default_context, spec.max_positions, spec.position_limit) == (8192, 65536, 65536)
    within = context > POSITIONS
    table = cos_sin_table(spec.rope, context)
    expected = reference(config, seq_len=context)[within]
    torch.testing.assert_close(table[POSITIONS[within]], expected, atol=1e-6, rtol=0)


def test_original_length_beside_the_scaling_wins() -> None:
    config = config_of({"kind": "yarn", "factor": 8.0}, original_max_position_embeddings=8192)
    table = cos_sin_table(spec_from_config(config).rope, 65536)
    torch.testing.assert_close(table[POSITIONS], reference(config_of(SCALINGS["yarn"])), atol=1e-6, rtol=0)


def test_yarn_default_length_is_the_config_s() -> None:
    scaled = spec_from_config(config_of(SCALINGS["yarn"]))
    assert (scaled.max_positions, scaled.position_limit) == (65536, 65536)
    unscaled = spec_from_config(config_of(SCALINGS["yarn"], max_position_embeddings=8192))
    assert (unscaled.max_positions, unscaled.position_limit) == (8192, 65536)


def test_identity_rotates_nothing() -> None:
    table = identity_table(spec_from_config(BASE).rope, 5)
    assert torch.equal(table, torch.cat((torch.ones(5, 32), torch.zeros(5, 32)), dim=1))


@pytest.mark.parametrize("kind", ["su", "mrope", "Llama3"])
def test_unknown_kind_is_refused(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"unknown rope type '{kind}'"):
        spec_from_config(config_of({"kind": kind, "factor": 2.0}))


def test_missing_factor_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="rope type linear needs factor"):
        spec_from_config(config_of({"kind": "linear"}))
