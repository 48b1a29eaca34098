"""A deliberately tiny model of random, fixed weights: a forward pass that costs next to nothing, so that what is left
is the cost of everything around it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path) -> Path:
    """A model directory for `--load-format dummy`, with a byte-level tokenizer in which every id is a piece of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"\u0120w{number}" for number in range(512 - len(alphabet)))
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate([*alphabet, *words])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
