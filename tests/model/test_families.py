"""What is refused, and what a config's fields come to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigurationError
from engine.model.families import spec_from_config, spec_from_directory
from engine.model.loader import check_device, context_length
from engine.model.source import DEMO_NAME, SourceKind, resolve
from engine.model.spec import ModelSpec
from tests.model.tiny import tiny_config

BASE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def spec(**changes: Any) -> ModelSpec:
    return spec_from_config({**BASE, **changes})


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3"])
def test_absent_keys_mean_what_transformers_makes_of_them(family: str) -> None:
    """A minimal config.json, and the one that transformers writes out in full, give one spec."""
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 32}
    minimal = {**shape, "num_hidden_layers": 2, "model_type": family}
    written = type(tiny_config(family))(**shape, num_hidden_layers=2).to_dict()
    assert spec_from_config(minimal) == spec_from_config(json.loads(json.dumps(written)))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "unknown architecture GPT2LMHeadModel; supported: LlamaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "unknown architecture"),
        ({"architectures": [], "model_type": "bert"}, "unknown architecture model_type 'bert'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config (gptq)"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, not 0"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, not None"),
        ({"hidden_size": 66}, "hidden_size 66 is no multiple"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a finite number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"rope_theta": 0}, "rope_theta must be above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be above 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 of head_dim 16 rotates 24"),
        ({"partial_rotary_factor": 0.2}, "rotates 3"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "differ by layer type"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 8}}, "longrope needs short_factor: a list of 8"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
            "longrope needs long_factor: a list of 8 numbers",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}},
            "short_factor must be above 0",
        ),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        spec(**changes)
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_file_is_named(tmp_path: Path) -> None:
    for content in ("{", "[]", json.dumps({**BASE, "hidden_act": "relu"})):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigurationError, match=r"config\.json: "):
            spec_from_directory(tmp_path)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 8, "use_sliding_window": False}, None),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4}, None),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, 8),
        ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}, None),
        ({"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"] * 4}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 16}, 16),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 16}, None),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 16}, 16),
        ({"architectures": ["Phi3ForCausalLM"]}, None),
    ],
)
def test_sliding_window(changes: dict[str, Any], window: int | None) -> None:
    assert spec(**changes).attention_window == window


def test_a_window_in_use_is_refused_beyond_its_length() -> None:
    mistral = spec(architectures=["MistralForCausalLM"], sliding_window=16)
    with pytest.raises(ConfigurationError, match=r"sliding-window attention \(16 tokens\) .* max_model_len 16"):
        context_length(mistral, None)
    assert context_length(mistral, 16) == 16


def test_context_length() -> None:
    assert context_length(spec(), None) == 128
    assert context_length(spec(), 100) == 100
    for asked in (0, 129):
        with pytest.raises(ConfigurationError, match=rf"max_model_len {asked} is not in 1\.\.128"):
            context_length(spec(), asked)


@pytest.mark.parametrize(
    ("device", "dtype", "block_size", "changes", "cause"),
    [
        ("cpu", torch.float16, 16, {}, "not supported on cpu: dtype float16"),
        ("cpu", torch.float32, 16, {"hidden_size": 48}, "not supported on cpu: head_dim 12"),
        ("cuda", torch.bfloat16, 16, {}, "not supported on cuda: head_dim 16"),
        ("cuda", torch.float32, 16, {"head_dim": 64}, "not supported on cuda: dtype float32"),
        ("cuda", torch.bfloat16, 8, {"head_dim": 64}, "not supported on cuda: block_size 8"),
        ("cuda", torch.bfloat16, 16, {"head_dim": 64, "num_attention_heads": 18}, "9 query heads a KV head"),
        ("cpu", torch.bfloat16, 4, {}, None),
        ("cuda", torch.float16, 16, {"head_dim": 128}, None),
    ],
)
def test_what_a_device_cannot_do_is_refused(
    device: str, dtype: torch.dtype, block_size: int, changes: dict[str, Any], cause: str | None
) -> None:
    # Qwen3 has a head_dim of its own.
    model = spec(**{"architectures": ["Qwen3ForCausalLM"], "head_dim": None, **changes})
    if cause is None:
        check_device(model, torch.device(device), dtype, block_size)
        return
    with pytest.raises(ConfigurationError, match=cause):
        check_device(model, torch.device(device), dtype, block_size)


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (2, {}, (2,)),
        ([2, 3], {"eos_token_id": 4}, (2, 3, 4)),
        (None, {"eos_token_id": [5, 2]}, (5, 2)),
        (2, {"eos_token_id": [2, 6], "temperature": 0.6}, (2, 6)),
        (None, {}, ()),
    ],
)
def test_end_tokens_are_a_set(eos: object, generation: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert spec_from_config({**BASE, "eos_token_id": eos}, generation).eos_token_ids == expected


class TestResolve:
    def test_demo(self) -> None:
        source = resolve("demo")
        assert (source.name, source.kind) == (DEMO_NAME, SourceKind.GGUF)
        assert source.path.is_file()

    def test_directory(self, tmp_path: Path) -> None:
        folder = tmp_path / "my model"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        assert resolve(str(folder)).name == "my model"
        assert resolve(str(folder)).kind is SourceKind.DIRECTORY

    def test_gguf_file_and_its_directory(self, tmp_path: Path) -> None:
        file = tmp_path / "x.Q8_0.gguf"
        file.write_bytes(b"GGUF")
        for given in (file, tmp_path):
            source = resolve(str(given))
            assert (source.name, source.path, source.kind) == ("x.Q8_0", file, SourceKind.GGUF)

    def test_refusals(self, tmp_path: Path) -> None:
        (tmp_path / "w.bin").write_bytes(b"x")
        cases = {
            "": "^model is empty: give demo, ",
            "no/such/model": "^model no/such/model: no such directory or file, and nothing is downloaded; give demo, ",
            str(tmp_path): "^model .*: no config.json and no .gguf file; give demo, ",
            str(tmp_path / "w.bin"): "^model .*/w.bin: not a .gguf file",
        }
        for given, cause in cases.items():
            with pytest.raises(ConfigurationError, match=cause):
                resolve(given)
