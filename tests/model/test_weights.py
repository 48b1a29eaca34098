"""Damaged, unsafe and incomplete checkpoints: one line that names the file and the cause, and nothing is run."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, LoadFormat
from engine.errors import ConfigurationError
from engine.model import assemble
from engine.model.layers import Linear
from engine.model.loader import LoadedModel, load_model
from engine.model.weights import INDEX, SINGLE, SafetensorsFile
from engine.text.tokenizer import Tokenizer
from tests.model.paged_loop import prompt_logits
from tests.model.test_parity import assert_equal_to_hugging_face, hf_logits, hf_model
from tests.model.tiny import write_tiny_model

PROMPT = [5, 400, 17, 33]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load(path: Path, **config: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), **config), torch.device("cpu"))


def refusal(path: Path, **config: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(path, **config)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / SINGLE)
    edit(tensors)
    save_file(tensors, path / SINGLE)


def values(linear: Linear, shape: torch.Size) -> torch.Tensor:
    """A layer's weight: rows of the unit matrix pick its columns out, exactly."""
    return linear(torch.eye(shape[1]), torch.empty(shape[1], shape[0])).T


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "m", "llama")


def shares_its_storage(path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the output layer was made of the embedding itself. (A CPU layer packs a copy, a GPU's keeps it.)"""
    given: list[int] = []

    def make(weight: torch.Tensor, *arguments: Any) -> Linear:
        given.append(weight.data_ptr())
        return Linear(weight, *arguments)

    monkeypatch.setattr(assemble, "Linear", make)
    return load(path).decoder.weights.embedding.data_ptr() in given


class TestTiedEmbeddings:
    def test_tied_without_head(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_tiny_model(tmp_path / "m", "qwen2", tie_word_embeddings=True)
        assert HEAD not in load_file(path / SINGLE)
        weights = load(path).decoder.weights
        assert torch.equal(values(weights.head, weights.embedding.shape), weights.embedding)
        assert shares_its_storage(path, monkeypatch)

    def test_tied_with_an_equal_head(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_tiny_model(tmp_path / "m", "qwen2", tie_word_embeddings=True)
        edit_tensors(path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
        weights = load(path).decoder.weights
        assert torch.equal(values(weights.head, weights.embedding.shape), weights.embedding)
        assert_equal_to_hugging_face(path)
        assert shares_its_storage(path, monkeypatch)

    def test_tied_with_a_trained_head_uses_it_and_warns(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = write_tiny_model(tmp_path / "m", "qwen2", tie_word_embeddings=True)
        edit_tensors(path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].flip(0).contiguous()}))
        decoder = load(path).decoder
        assert "lm_head.weight differs" in caplog.text
        embedding = decoder.weights.embedding
        assert torch.equal(values(decoder.weights.head, embedding.shape), embedding.flip(0))
        expected = hf_logits(hf_model(path), PROMPT)
        torch.testing.assert_close(prompt_logits(decoder, PROMPT), expected, atol=1e-4, rtol=0)

    def test_untied_without_head(self, model: Path) -> None:
        edit_tensors(model, lambda tensors: tensors.pop(HEAD))
        assert "missing tensors: lm_head.weight" in refusal(model)


class TestMissingAndUnused:
    def test_one_layer_too_many_lists_every_tensor(self, model: Path) -> None:
        edit_config(model, num_hidden_layers=3)
        message = refusal(model)
        layer = [name for name in load_file(model / SINGLE) if ".layers.1." in name]
        assert len(layer) == 9
        assert all(name.replace(".1.", ".2.") in message for name in layer)

    @pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.up_proj", "post_attention_layernorm"])
    def test_one_part_of_a_fused_matrix(self, model: Path, name: str) -> None:
        gone = f"model.layers.0.{name}.weight"
        edit_tensors(model, lambda tensors: tensors.pop(gone))
        assert refusal(model).endswith(f"missing tensors: {gone}")

    @pytest.mark.parametrize("name", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
    def test_a_matrix_that_the_checkpoint_keeps_fused(self, tmp_path: Path, name: str) -> None:
        path, gone = write_tiny_model(tmp_path / "m", "phi3"), f"model.layers.1.{name}.weight"
        edit_tensors(path, lambda tensors: tensors.pop(gone))
        assert refusal(path).endswith(f"missing tensors: {gone}")

    def test_missing_bias(self, tmp_path: Path) -> None:
        path = write_tiny_model(tmp_path / "m", "qwen2")
        edit_tensors(path, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
        assert "model.layers.1.self_attn.k_proj.bias" in refusal(path)

    def test_unused_tensors_are_refused(self, tmp_path: Path) -> None:
        path = write_tiny_model(tmp_path / "m", "llama", attention_bias=True)
        edit_config(path, attention_bias=False)
        message = refusal(path)
        assert "does not use" in message
        assert "model.layers.0.self_attn.o_proj.bias" in message

    def test_saved_rotary_frequencies_are_no_fault(self, model: Path) -> None:
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        edit_tensors(model, lambda tensors: tensors.update({name: torch.ones(8)}))
        load(model)

    def test_wrong_shape(self, model: Path) -> None:
        edit_config(model, intermediate_size=80)
        assert "gate_proj.weight has shape [96, 64], not [80, 64]" in refusal(model)

    def test_integer_weights(self, model: Path) -> None:
        edit_tensors(model, lambda tensors: tensors.update({HEAD: tensors[HEAD].to(torch.int8)}))
        assert "dtype I8" in refusal(model)


def valid_file(path: Path) -> bytes:
    save_file({"a": torch.arange(4.0), "b": torch.ones(2, 3)}, path)
    return path.read_bytes()


def with_header(header: object, payload: bytes = b"\0" * 40) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 12345\n"
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: 0 bytes"),
    "five bytes": (b"12345", "truncated: 5 bytes"),
    "lfs pointer": (LFS, "git lfs pull"),
    "header length of 2^64-1": (b"\xff" * 8 + b"{}", "the header claims 18446744073709551615 bytes"),
    "header cut": (with_header({"a": entry("F32", [10], 0, 40)})[:20], "the header claims"),
    "header no json": (with_header(b"{'a': 1}"), "not valid JSON"),
    "header no utf-8": (with_header(b'{"\xff": 1}'), "not valid JSON"),
    "header a list": (with_header([1, 2]), "not a JSON object"),
    "entry malformed": (with_header({"a": {"dtype": "F32"}}), "entry of a is malformed"),
    "negative offset": (with_header({"a": entry("F32", [10], -40, 0)}), "entry of a is malformed"),
    "payload cut": (with_header({"a": entry("F32", [10], 0, 40)})[:-1], "truncated: tensor a ends at byte"),
    "offsets beyond": (with_header({"a": entry("F32", [100], 0, 400)}), "truncated: tensor a ends at byte"),
    "overlap": (with_header({"a": entry("F32", [5], 0, 20), "b": entry("F32", [6], 16, 40)}), "overlaps"),
    "gap": (with_header({"a": entry("F32", [4], 0, 16), "b": entry("F32", [5], 20, 40)}), "gap"),
    "unknown dtype": (with_header({"a": entry("F31", [10], 0, 40)}), "unknown dtype 'F31'"),
    "size and shape differ": (with_header({"a": entry("F32", [9], 0, 40)}), "of shape [9] F32 has 40 bytes"),
    "trailing bytes": (with_header({"a": entry("F32", [9], 0, 36)}), "4 bytes after the last tensor"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_file(name: str, tmp_path: Path) -> None:
    content, cause = DAMAGED[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ConfigurationError) as caught:
        SafetensorsFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert cause in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert peak < 1_000_000


def test_every_cut_of_a_file_is_noticed(tmp_path: Path) -> None:
    whole = valid_file(tmp_path / "whole.safetensors")
    path = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigurationError):
            SafetensorsFile(path)


def test_unaligned_payload_is_read(tmp_path: Path) -> None:
    payload = b"\x01" + torch.arange(3.0).numpy().tobytes()
    path = tmp_path / "x.safetensors"
    path.write_bytes(with_header({"a": entry("U8", [1], 0, 1), "b": entry("F32", [3], 1, 13)}, payload))
    assert SafetensorsFile(path).tensor("b").tolist() == [0.0, 1.0, 2.0]


class TestIndex:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        return write_tiny_model(tmp_path / "m", "llama", shard_size="100KB")

    def test_two_objects_glued(self, sharded: Path) -> None:
        (sharded / INDEX).write_text((sharded / INDEX).read_text() * 2)
        assert "Extra data" in refusal(sharded)

    def test_no_weight_map(self, sharded: Path) -> None:
        (sharded / INDEX).write_text("{}")
        assert "weight_map" in refusal(sharded)

    @pytest.mark.parametrize("entry", ["../m/x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "x.bin"])
    def test_entries_that_leave_the_directory(self, sharded: Path, entry: str) -> None:
        index = json.loads((sharded / INDEX).read_text())
        index["weight_map"][HEAD] = entry
        (sharded / INDEX).write_text(json.dumps(index))
        assert repr(entry) in refusal(sharded)

    def test_shard_missing(self, sharded: Path) -> None:
        shard = sorted(sharded.glob("*.safetensors"))[1]
        shard.unlink()
        assert f"shard {shard.name} is missing" in refusal(sharded)

    def test_tensor_not_in_its_shard(self, sharded: Path) -> None:
        index = json.loads((sharded / INDEX).read_text())
        index["weight_map"]["model.extra"] = index["weight_map"][HEAD]
        (sharded / INDEX).write_text(json.dumps(index))
        assert "tensor model.extra is not in" in refusal(sharded)


class _Canary:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_pickles_are_refused_unopened(model: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(_Canary(canary)))
    (model / SINGLE).unlink()
    message = refusal(model)
    assert "pytorch_model.bin" in message
    assert "refused" in message
    assert not canary.exists()


def test_custom_code_is_never_run(model: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (model / "modeling_evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\n")
    edit_config(model, auto_map={"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"})
    load(model)
    edit_config(model, architectures=["EvilForCausalLM"])
    assert "unknown architecture EvilForCausalLM" in refusal(model)
    assert not canary.exists()


@pytest.mark.parametrize("name", ["with space", 'it\'s "quoted"', "žluťoučký 模型", "$(touch x); `id`"])
def test_odd_directory_names_and_symlinked_shards(name: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / name / "snapshots" / "1", "llama", shard_size="100KB")
    blobs = tmp_path / name / "blobs"
    blobs.mkdir()
    for index, shard in enumerate(sorted(path.glob("*.safetensors"))):
        shard.rename(blobs / str(index))
        shard.symlink_to(Path("../../blobs") / str(index))
    path.chmod(0o500)
    try:
        load(path)
        assert Tokenizer.load(str(path)).size == 512
    finally:
        path.chmod(0o700)


class TestDummy:
    @pytest.mark.parametrize("family", ["llama", "phi3"])
    def test_needs_nothing_but_a_config(self, family: str, tmp_path: Path) -> None:
        model = write_tiny_model(tmp_path / "m", family)
        for file in model.iterdir():
            if file.name != "config.json":
                file.unlink()
        loaded = load(model, load_format=LoadFormat.DUMMY)
        logits = prompt_logits(loaded.decoder, PROMPT)
        assert logits.isfinite().all()
        assert logits.std() > 0.01
        assert loaded.sampled_vocab_size == 512

    def test_same_seed_same_weights(self, model: Path) -> None:
        first, again, other = (load(model, load_format=LoadFormat.DUMMY, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(prompt_logits(first.decoder, PROMPT), prompt_logits(again.decoder, PROMPT))
        assert not torch.equal(prompt_logits(first.decoder, PROMPT), prompt_logits(other.decoder, PROMPT))


def test_ids_without_a_token_are_not_sampled(tmp_path: Path) -> None:
    """The embedding may be padded beyond the tokenizer."""
    loaded = load(write_tiny_model(tmp_path / "m", "qwen2", vocab_size=640))
    assert loaded.spec.vocab_size == 640
    assert loaded.sampled_vocab_size == 512


def test_end_tokens_come_from_config_generation_config_and_tokenizer(model: Path) -> None:
    edit_config(model, eos_token_id=7)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9], "repetition_penalty": 1.5}))
    assert load(model).eos_token_ids == {2, 7, 8, 9}


def test_progress_reaches_its_end(model: Path) -> None:
    lines: list[str] = []
    load_model(EngineConfig(model=str(model)), torch.device("cpu"), lines.append)
    assert lines[0] == "loading m"
    assert lines[-1] == "loading weights: 100 %"
