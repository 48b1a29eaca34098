"""One tokenizer of each kind: byte-level (tiny and the demo model's), byte fallback, Metaspace."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from engine.text.decoding import BYTE_ALPHABET
from engine.text.tokenizer import Tokenizer
from tests.model.tiny import byte_level_tokenizer, sentencepiece_tokenizer

KINDS = ["demo", "byte-level", "byte-fallback", "metaspace"]


@cache
def tokenizer(kind: str) -> Tokenizer:
    match kind:
        case "demo":
            return Tokenizer.load("demo")
        case "byte-level":
            return Tokenizer(byte_level_tokenizer())
        case "byte-fallback":
            return Tokenizer(sentencepiece_tokenizer())
        case "metaspace":
            return Tokenizer(sentencepiece_tokenizer(metaspace=True))
    raise KeyError(kind)


def token_ids(tok: Tokenizer, tokens: Iterable[str]) -> list[int]:
    """The ids of tokens as the vocabulary spells them; KeyError if one is not in it."""
    ids: list[int] = []
    for token in tokens:
        token_id = tok.token_id(token)
        if token_id is None:
            raise KeyError(token)
        ids.append(token_id)
    return ids


def byte_ids(data: bytes) -> list[int]:
    """One token a byte, of the "byte-level" tokenizer."""
    spelled = {byte: char for char, byte in BYTE_ALPHABET.items()}
    return token_ids(tokenizer("byte-level"), [spelled[byte] for byte in data])


def fallback_ids(data: bytes) -> list[int]:
    """One token a byte, of the "byte-fallback" tokenizer."""
    return token_ids(tokenizer("byte-fallback"), [f"<0x{byte:02X}>" for byte in data])
