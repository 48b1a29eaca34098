"""Writes small random models in the Hugging Face layout: real safetensors, a tokenizer, a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCABULARY = 512
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps for a while in the warm afternoon sun.",
    "A printed sheet folded into sixteen pages is an octavo; a book of such sheets is light enough to carry.",
    "def add(left, right):\n    return left + right\n\nfor index in range(10):\n    print(index, add(index, 1))\n",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Whenever a request arrives while others are running, it joins the next step; nobody waits for a batch to end.",
    "the cat and the dog and the bird and the fish were there when the rain came down and the wind blew hard",
]
_CONFIGS: dict[str, type[transformers.PretrainedConfig]] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mistral": transformers.MistralConfig,
    "phi3": transformers.Phi3Config,
    "smollm3": transformers.SmolLM3Config,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "phi3": {"pad_token_id": None},
    "smollm3": {"tie_word_embeddings": False, "pad_token_id": None, "no_rope_layers": [1, 0]},
}


def tiny_config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """hidden 64, 2 layers, 4 query and 2 KV heads, vocabulary 512, unless overridden."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    return _CONFIGS[family](**{**values, **_DEFAULTS[family], **overrides})


def random_model(config: transformers.PretrainedConfig, seed: int = 0) -> Any:
    """A model with every parameter random, biases and norms too, and logits spread enough for a clear argmax."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model.eval()


def write_tiny_model(
    path: Path, family: str = "llama", *, seed: int = 0, shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Writes a model directory and returns its path. `overrides` are config.json fields."""
    random_model(tiny_config(family, **overrides), seed).save_pretrained(path, max_shard_size=shard_size)
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path, chat_template: str = CHAT_TEMPLATE, add_bos: bool = False) -> Path:
    """A byte-level BPE tokenizer of 512 tokens, 0 to 2 being <|endoftext|>, <|im_start|> and <|im_end|>."""
    backend = byte_level_tokenizer()
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=["<|endoftext|>", "$A"], special_tokens=[("<|endoftext|>", 0)]
        )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIALS[0], eos_token=SPECIALS[2], chat_template=chat_template
    )
    path.mkdir(parents=True, exist_ok=True)
    wrapped.save_pretrained(path)
    return path


def write_byte_level_model(path: Path, family: str = "llama", **overrides: Any) -> Path:
    """The same with a tokenizer whose tokens spell any bytes, as grammars need."""
    write_tiny_model(path, family, **overrides)
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    return path


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def sentencepiece_tokenizer(metaspace: bool = False) -> tokenizers.Tokenizer:
    """A Llama-2 style tokenizer: byte fallback, "▁" for spaces, a leading space that decoding strips."""
    specials = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[*specials, *fallback], show_progress=False)
    learner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator([line for line in _CORPUS if line.isascii()], trainer)
    vocabulary = learner.get_vocab()
    merges = [tuple(merge) for merge in _json_model(learner)["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens(specials)
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
        return backend
    return _as_sentencepiece(backend)


def unigram_tokenizer(texts: Sequence[str]) -> tokenizers.Tokenizer:
    """A SentencePiece unigram model of `texts`, with byte fallback for every character that they lack."""
    learner = tokenizers.Tokenizer(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    learner.train_from_iterator(texts, trainer)
    specials = ["<unk>", "<s>", "</s>"]
    given = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [(token, score) for token, score in _json_model(learner)["vocab"] if token not in specials]
    backend = tokenizers.Tokenizer(models.Unigram([*((token, 0.0) for token in given), *pieces], 0, True))
    backend.add_special_tokens(specials)
    return _as_sentencepiece(backend)


def _as_sentencepiece(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _json_model(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    return dict(json.loads(backend.to_str())["model"])
