"""One tokenizer of each kind: byte-level (tiny and the demo model's), byte fallback, Metaspace."""

from __future__ import annotations

from functools import cache

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
