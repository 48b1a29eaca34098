"""GGUF files: weights of every supported architecture and packing, and damaged files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import ConfigurationError
from engine.model.assemble import assemble
from engine.model.decoder import Decoder
from engine.model.families import spec_from_gguf
from engine.model.gguf_file import BLOCK_TYPES, read_gguf
from engine.model.gguf_weights import GgufSource
from tests.model.gguf_writer import quantised_copy, write_gguf
from tests.model.paged_loop import prompt_logits
from tests.model.test_parity import LLAMA3, PROMPT, hf_logits
from tests.model.tiny import random_model, tiny_config

CPU = torch.device("cpu")


def decoder_of(path: Path) -> Decoder:
    file = read_gguf(path)
    spec = spec_from_gguf(file)
    weights = assemble(spec, GgufSource(file, spec), CPU, torch.float32)
    return Decoder(spec, weights, CPU, torch.float32, max_tokens=64, max_logits=64)


def assert_same(path: Path, model: Any) -> None:
    expected = hf_logits(model, PROMPT)
    torch.testing.assert_close(prompt_logits(decoder_of(path), PROMPT), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_equals_the_model_it_was_made_from(family: str, tied: bool, tmp_path: Path) -> None:
    model = random_model(tiny_config(family, tie_word_embeddings=tied))
    assert_same(write_gguf(tmp_path / "m.gguf", model), model)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_packed_matrices(kind: str, tmp_path: Path) -> None:
    quantisation = GGMLQuantizationType[kind]
    model = random_model(tiny_config("llama", hidden_size=128))
    path = write_gguf(tmp_path / "m.gguf", model, quantisation=quantisation)
    assert_same(path, quantised_copy(model, quantisation))


def test_matrices_stay_in_blocks_where_the_cpu_multiplies_them(tmp_path: Path) -> None:
    model = random_model(tiny_config("llama", hidden_size=128, tie_word_embeddings=True))
    packed = decoder_of(write_gguf(tmp_path / "a.gguf", model, quantisation=GGMLQuantizationType.Q4_1)).weights
    matrices = [packed.head, *(getattr(packed.layers[0], name) for name in ("qkv", "o", "gate_up", "down"))]
    assert [matrix.format for matrix in matrices] == ["Q4_1"] * 5
    assert packed.embedding.dtype == torch.float32
    other = decoder_of(write_gguf(tmp_path / "b.gguf", model, quantisation=GGMLQuantizationType.Q5_1)).weights
    assert [other.layers[0].qkv.format, other.head.format] == ["float32"] * 2


def test_block_sizes_are_the_format_s() -> None:
    for kind, block in BLOCK_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType(kind)] == (block.elements, block.size)
        assert GGMLQuantizationType(kind).name == block.name


def test_raw_blocks_come_in_hugging_face_s_row_order(tmp_path: Path) -> None:
    model = random_model(tiny_config("llama", hidden_size=128))
    path = write_gguf(tmp_path / "m.gguf", model, quantisation=GGMLQuantizationType.Q8_0)
    file = read_gguf(path)
    source = GgufSource(file, spec_from_gguf(file))
    layer = quantised_copy(model, GGMLQuantizationType.Q8_0).model.layers[1]
    for name, linear in (("q", layer.self_attn.q_proj), ("k", layer.self_attn.k_proj), ("v", layer.self_attn.v_proj)):
        block_type, blocks = source.blocks(f"blk.1.attn_{name}.weight")
        assert block_type.name == "Q8_0"
        values = gguf.dequantize(np.ascontiguousarray(blocks), GGMLQuantizationType.Q8_0)
        assert np.array_equal(values, linear.weight.detach().numpy())


def test_rope_factors_of_llama_3(tmp_path: Path) -> None:
    """llama.cpp's converter stores Llama 3's scaling as divisors of the plain frequencies."""
    model = random_model(tiny_config("llama", rope_parameters=LLAMA3))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, CPU)
    plain = 1.0 / (10_000.0 ** (torch.arange(0, 16, 2).float() / 16))
    assert not torch.equal(plain, scaled)
    path = write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": (plain / scaled).numpy()})
    assert_same(path, model)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_in_metadata(kind: str, tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = 16

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(16)

    model = random_model(tiny_config("qwen2", rope_parameters=parameters))
    assert_same(write_gguf(tmp_path / "m.gguf", model, edit=edit), model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    config = tiny_config("qwen2", hidden_size=32, vocab_size=40, num_hidden_layers=1)
    return write_gguf(path, random_model(config)).read_bytes()


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        spec_from_gguf(read_gguf(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestDamaged:
    def test_every_cut_is_noticed(self, whole: bytes, tmp_path: Path) -> None:
        header = whole.index(b"output_norm")
        for size in [*range(0, header, 7), *range(header, len(whole), 997), len(whole) - 1]:
            refusal(tmp_path / "cut.gguf", whole[:size])

    @pytest.mark.parametrize(
        ("content", "cause"),
        [
            (b"", "not a GGUF file"),
            (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
            (b"PK\x03\x04" + b"\0" * 60, "not a GGUF file"),
            (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported"),
            (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "truncated"),
            (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**64 - 1), "truncated"),
            (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**62), "truncated"),
            (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "unknown metadata type 99"),
            (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "unknown GGUF architecture None; supported: llama, qwen2, qwen3"),
        ],
    )
    def test_headers(self, content: bytes, cause: str, tmp_path: Path) -> None:
        assert cause in refusal(tmp_path / "x.gguf", content)

    def test_unknown_architecture(self, whole: bytes, tmp_path: Path) -> None:
        assert "unknown GGUF architecture 'qwenX'" in refusal(tmp_path / "x.gguf", whole.replace(b"qwen2", b"qwenX"))

    def test_unknown_tensor_type(self, whole: bytes, tmp_path: Path) -> None:
        at = whole.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
        content = whole[:at] + struct.pack("<I", 77) + whole[at + 4 :]
        assert "tensor output_norm.weight has type 77" in refusal(tmp_path / "x.gguf", content)


def test_missing_tensor_is_listed(tmp_path: Path) -> None:
    model = random_model(tiny_config("llama"))
    path = write_gguf(tmp_path / "m.gguf", model, edit=lambda writer: writer.add_block_count(3))
    with pytest.raises(ConfigurationError, match=r"missing tensors: .*blk\.2\.attn_q\.weight.*blk\.2\.ffn_down"):
        decoder_of(path)


def test_tensor_that_nothing_uses_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", random_model(tiny_config("llama")), tensors=extra)
    with pytest.raises(ConfigurationError, match=r"does not use: blk\.0\.attn_sinks\.weight"):
        decoder_of(path)
