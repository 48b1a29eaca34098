"""A real tokenizer of 256 bytes and two special tokens: id 97 is "a"."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine import Tokenizer

IM_START = 256
IM_END = 257

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The characters that stand for bytes 0 to 255 in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def byte_tokenizer() -> Tokenizer:
    vocabulary = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    )
    return Tokenizer(backend, named={"eos_token": "<|im_end|>"}, chat_template=CHAT_TEMPLATE)
