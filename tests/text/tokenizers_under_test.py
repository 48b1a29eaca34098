"""One tokenizer of each kind: byte-level (tiny and the demo model's), byte fallback (BPE and unigram), Metaspace."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache

from engine.text.decoding import BYTE_ALPHABET
from engine.text.tokenizer import Tokenizer
from tests.model.tiny import byte_level_tokenizer, sentencepiece_tokenizer, unigram_tokenizer
from tests.text.corpus import CORPUS, SCRIPTS

KINDS = ["demo", "byte-level", "byte-fallback", "unigram", "metaspace"]


@cache
def tokenizer(kind: str) -> Tokenizer:
    match kind:
        case "demo":
            return Tokenizer.load("demo")
        case "byte-level":
            return Tokenizer(byte_level_tokenizer())
        case "byte-fallback":
            return Tokenizer(sentencepiece_tokenizer())
        case "unigram":  # knows every other script
            return Tokenizer(unigram_tokenizer(SCRIPTS[::2]))
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


def random_ids(tok: Tokenizer, rng: random.Random) -> list[int]:
    """Stretches of real text, single bytes, specials, and ids of no token."""
    found: list[int] = []
    for _ in range(rng.randrange(1, 6)):
        kind = rng.random()
        if kind < 0.4:
            ids = tok.encode(rng.choice(CORPUS), add_special_tokens=False)
            start = rng.randrange(len(ids) + 1)
            found += ids[start : start + rng.randrange(12)]
        elif kind < 0.6:
            found += (rng.randrange(3, 262) for _ in range(rng.randrange(6)))
        else:
            found += (rng.randrange(tok.size + 2) for _ in range(rng.randrange(6)))
    return found
