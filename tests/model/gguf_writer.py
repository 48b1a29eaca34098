"""Writes small GGUF files from Hugging Face models, with the rows of Q and K as llama.cpp's converter orders them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType

Array = npt.NDArray[Any]
STEMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(
    path: Path,
    model: Any,
    *,
    quantisation: GGMLQuantizationType = GGMLQuantizationType.F32,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
    tensors: dict[str, Array] | None = None,
) -> Path:
    """`quantisation` is that of the matrices; vectors are F32. `edit` adds metadata, `tensors` further tensors."""
    config = model.config
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if edit is not None:
        edit(writer)
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target, values = gguf_name(name), tensor.detach().float().numpy()
        if architecture == "llama":
            values = next((interleave(values, count) for part, count in heads.items() if part in target), values)
        add_tensor(writer, target, values, quantisation)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, _, layer, rest = name.split(".", 3)
    stem, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{STEMS[stem]}.{suffix}"


def interleave(values: Array, heads: int) -> Array:
    """From halves (0..D/2, D/2..D) to pairs (0, D/2, 1, D/2 + 1, ...) in each head's rows."""
    rows: Array = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return np.ascontiguousarray(rows)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: Array, quantisation: GGMLQuantizationType) -> None:
    if values.ndim == 1 or quantisation is GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
        return
    writer.add_tensor(name, gguf.quantize(values, quantisation), raw_dtype=quantisation)


def quantised_copy(model: Any, quantisation: GGMLQuantizationType) -> Any:
    """The same model with every matrix rounded as the quantisation rounds it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                blocks = gguf.quantize(parameter.numpy(), quantisation)
                parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, quantisation).copy()))
    return model
