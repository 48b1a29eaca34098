"""The decoder against Hugging Face transformers on the same files: fp32, logits within 1e-4 and equal greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.model.decoder import Decoder
from engine.model.families import spec_from_config
from engine.model.loader import load_model
from tests.model.paged_loop import greedy, prompt_logits
from tests.model.tiny import VOCABULARY, write_tiny_model

PROMPT = torch.randint(0, VOCABULARY, (41,), generator=torch.Generator().manual_seed(7)).tolist()
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
# original_max_position_embeddings lies beside the scaling; the prompt and what follows are within it, or all beyond.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [1.5 + 2.0 * pair for pair in range(8)],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-attention-factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.0}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-off": ("qwen2", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}),
    "qwen2-window-on-no-layer": ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-head-dim": ("qwen3", {"hidden_size": 48, "head_dim": 32}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "mistral": ("mistral", {}),
    "mistral-head-dim": ("mistral", {"head_dim": 24}),
    "phi3": ("phi3", {}),
    "phi3-tied": ("phi3", {"tie_word_embeddings": True}),
    "phi3-multi-head": ("phi3", {"num_key_value_heads": 4}),
    "phi3-longrope-short": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
    "phi3-partial-rotary": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "smollm3": ("smollm3", {}),
    "smollm3-tied": ("smollm3", {"tie_word_embeddings": True, "attention_bias": True}),
}


def hf_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval()


def hf_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0].float()
    return logits


def assert_equal_to(model: Any, decoder: Decoder, prompt: list[int], tokens: list[int], atol: float = 1e-4) -> None:
    """tokens: the decoder's, greedy. The model would have chosen the same: each is its likeliest after those before."""
    logits = hf_logits(model, prompt + tokens)
    expected, choices = logits[: len(prompt)], logits[len(prompt) - 1 : -1].argmax(1)
    # The reference must tell tokens apart, or equality would say nothing.
    assert expected.std() > 0.1
    torch.testing.assert_close(prompt_logits(decoder, prompt), expected, atol=atol, rtol=0)
    assert tokens == choices.tolist()
    assert len(set(tokens)) > 10


def load(path: Path, **config: Any) -> Decoder:
    return load_model(EngineConfig(model=str(path), **config), torch.device("cpu")).decoder


def assert_equal_to_hugging_face(path: Path, prompt: list[int] = PROMPT) -> None:
    decoder = load(path)
    tokens = greedy(decoder, prompt, 30)
    assert_equal_to(hf_model(path), decoder, prompt, tokens)
    assert greedy(decoder, prompt, 30, chunk=7) == tokens


@pytest.mark.parametrize("case", CASES)
def test_equals_hugging_face(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    assert_equal_to_hugging_face(write_tiny_model(tmp_path / "m", family, **overrides))


def test_large_qwen2_biases_are_loaded(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", "qwen2")
    model = hf_model(path)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.bias.normal_(0, 1)
    model.save_pretrained(path)
    assert_equal_to_hugging_face(path)


@pytest.mark.parametrize("old_key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_old_config_layout(kind: str, old_key: str, tmp_path: Path) -> None:
    """rope_scaling and a top-level rope_theta, as config.json had them before rope_parameters."""
    path = write_tiny_model(tmp_path / "m", "llama")
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    scaling = {"llama3": LLAMA3, "yarn": YARN}.get(kind, {"factor": 2.0})
    scaling = {key: value for key, value in scaling.items() if key not in ("rope_type", "rope_theta")}
    config |= {"rope_theta": 5000.0, "rope_scaling": {old_key: kind, **scaling}, "torch_dtype": config.pop("dtype")}
    (path / "config.json").write_text(json.dumps(config))
    assert_equal_to_hugging_face(path)


@pytest.mark.parametrize("asked", [None, 512])
def test_longrope_by_the_context_served(asked: int | None, tmp_path: Path) -> None:
    """Within the original length by default; where more is asked for, the long factors hold for every position, as
    transformers has it for texts beyond the original length."""
    scaling = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    path = write_tiny_model(tmp_path / "m", "phi3", **scaling)
    model, loaded = hf_model(path), load_model(EngineConfig(model=str(path), max_model_len=asked), torch.device("cpu"))
    assert loaded.max_model_len == (asked or 64)
    prompt = (PROMPT * 3)[: 100 if asked else 60]
    torch.testing.assert_close(prompt_logits(loaded.decoder, prompt, 50), hf_logits(model, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi3_files_as_they_were_first_published(kind: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", "phi3", original_max_position_embeddings=128, rope_parameters=LONGROPE)
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    scaling = {key: value for key, value in LONGROPE.items() if key.endswith("_factor")}
    config |= {"rope_theta": 10_000.0, "rope_scaling": {"type": kind, **scaling}, "sliding_window": 262144}
    config |= {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "torch_dtype": config.pop("dtype")}
    (path / "config.json").write_text(json.dumps(config))
    if kind == "su":  # transformers 5.17 fails on the name that it means to translate
        expected = config | {"rope_scaling": {"type": "longrope", **scaling}}
        assert spec_from_config(config) == spec_from_config(expected)
    else:
        assert_equal_to_hugging_face(path)


def test_sharded_files(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", "qwen3", shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    assert_equal_to_hugging_face(path)


def test_head_dim_null_is_hidden_over_heads(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "head_dim": None}))
    assert_equal_to_hugging_face(path)


def test_a_window_in_some_layers_is_refused_beyond_its_length(tmp_path: Path) -> None:
    window = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    path = write_tiny_model(tmp_path / "m", "qwen2", **window)
    with pytest.raises(ConfigurationError, match=r"sliding-window attention \(8 tokens\) is not supported"):
        load(path)
    within = prompt_logits(load(path, max_model_len=8), PROMPT[:8])
    torch.testing.assert_close(within, hf_logits(hf_model(path), PROMPT[:8]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_row_is_batched_with_changes_no_bit(dtype: str, tmp_path: Path) -> None:
    decoder = load(write_tiny_model(tmp_path / "m", "qwen3"), dtype=dtype)
    whole = prompt_logits(decoder, PROMPT)
    for chunk in (1, 2, 3, 5, 8, 13, 16, 21, 40):
        assert torch.equal(prompt_logits(decoder, PROMPT, chunk), whole), chunk


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_is_as_near_the_truth_as_hugging_face(family: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", family)
    truth = hf_logits(hf_model(path), PROMPT)
    theirs = (hf_logits(hf_model(path, torch.bfloat16), PROMPT) - truth).abs().mean()
    ours = (prompt_logits(load(path, dtype="bfloat16"), PROMPT) - truth).abs().mean()
    assert 0 < ours < 1.5 * theirs
