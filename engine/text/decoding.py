"""What a tokenizer's decoder does to one token, so that text can be had token by token and still equal one decode.

Three kinds cover the supported families: byte-level (GPT-2, Llama 3, Qwen), byte fallback (SentencePiece models saved
with Replace, ByteFallback, Fuse, Strip) and Metaspace.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigurationError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class DecoderKind(enum.Enum):
    BYTE_LEVEL = enum.auto()
    BYTE_FALLBACK = enum.auto()
    METASPACE = enum.auto()


@dataclass(frozen=True)
class DecoderRules:
    """replacements: (from, to) on each token. late: (from, to) on text, after bytes became characters.
    strip: how many leading `strip_char` the whole text loses. drop_first: the first token loses every space mark."""

    kind: DecoderKind
    replacements: tuple[tuple[str, str], ...] = ()
    late: tuple[tuple[str, str], ...] = ()
    strip: int = 0
    strip_char: str = " "
    drop_first: str = ""


def decoder_rules(tokenizer_json: str) -> DecoderRules:
    """Reads the decoder of a serialised tokenizer. Raises ConfigurationError if it is of no known kind."""
    decoder = json.loads(tokenizer_json).get("decoder")
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderRules(DecoderKind.BYTE_LEVEL)
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0])
    if "ByteFallback" in kinds:
        return _byte_fallback(steps)
    raise ConfigurationError(f"tokenizer decoder {' + '.join(kinds) or 'null'} is not supported")


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


def _metaspace(step: Mapping[str, Any]) -> DecoderRules:
    mark = step["replacement"]
    drop = "" if step.get("prepend_scheme", "always") == "never" else mark
    return DecoderRules(DecoderKind.METASPACE, replacements=((mark, " "),), drop_first=drop)


def _byte_fallback(steps: list[Mapping[str, Any]]) -> DecoderRules:
    early: list[tuple[str, str]] = []
    late: list[tuple[str, str]] = []
    strip, strip_char, seen = 0, " ", set()
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and isinstance(step["pattern"], dict) and len(step["pattern"].get("String", "")) == 1:
            (late if "ByteFallback" in seen else early).append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and "Fuse" in seen and step["stop"] == 0 and not strip:
            strip, strip_char = step["start"], step["content"]
        elif kind not in ("ByteFallback", "Fuse") or kind in seen:
            raise ConfigurationError(f"tokenizer decoder step {dict(step)} is not supported")
        seen.add(kind)
    return DecoderRules(DecoderKind.BYTE_FALLBACK, tuple(early), tuple(late), strip, strip_char)


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_ALPHABET = _byte_level_alphabet()


def token_to_bytes(token: str, rules: DecoderRules) -> bytes:
    """The bytes that `token` stands for inside a text."""
    if rules.kind is DecoderKind.BYTE_LEVEL:
        try:
            return bytes([BYTE_ALPHABET[char] for char in token])
        except KeyError:
            return token.encode()
    if rules.kind is DecoderKind.BYTE_FALLBACK and (byte := fallback_byte(token)) is not None:
        return bytes([byte])
    for old, new in (*rules.replacements, *rules.late):
        token = token.replace(old, new)
    return token.encode()


def fallback_byte(token: str) -> int | None:
    """The byte of a token like <0x0A>, else None."""
    match = _BYTE_TOKEN.match(token)
    return int(match[1], 16) if match else None
