"""Streamed text against one decode by the `tokenizers` library, for every kind of tokenizer."""

from __future__ import annotations

import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from engine.errors import ConfigurationError
from engine.text.decoding import decoder_rules
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer
from tests.model.tiny import byte_level_tokenizer, sentencepiece_tokenizer, unigram_tokenizer
from tests.text.corpus import CORPUS, SCRIPTS
from tests.text.tokenizers_under_test import KINDS, byte_ids, fallback_ids, random_ids, token_ids, tokenizer

FAMILY = "👨‍👩‍👧‍👦"


def pieces(tok: Tokenizer, ids: list[int], *, skip: bool = True, continues: bool = False) -> list[str]:
    stream = IncrementalDetokenizer(tok, skip_special_tokens=skip, continues=continues)
    return [*(stream.push([token_id]) for token_id in ids), stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_random_sequences(kind: str) -> None:
    tok, rng = tokenizer(kind), random.Random(20)
    broken = 0
    for _ in range(10_000):
        ids, skip = random_ids(tok, rng), rng.random() < 0.5
        expected = tok.decode(ids, skip_special_tokens=skip)
        broken += "\ufffd" in expected
        assert "".join(pieces(tok, ids, skip=skip)) == expected
    if kind != "metaspace":
        assert broken > 1000  # the sequences must reach invalid bytes


ADDED = ["<tool>", "é", "   ", "▁x▁", " lead", "Ġq", "<0x41>zz", "漢", "ů ", "<0xZZ>"]


@pytest.mark.parametrize(
    "backend",
    [
        byte_level_tokenizer(),
        sentencepiece_tokenizer(),
        unigram_tokenizer(SCRIPTS[::2]),
        sentencepiece_tokenizer(metaspace=True),
    ],
    ids=["byte-level", "byte-fallback", "unigram", "metaspace"],
)
def test_tokens_that_were_added_to_a_vocabulary(backend: tokenizers.Tokenizer) -> None:
    """Their text is theirs, whatever marks of a space or a byte are in it, as the library's decoder has it."""
    backend.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    backend.add_special_tokens([AddedToken("<|end é|>", special=True, normalized=False)])
    tok, rng = Tokenizer(backend), random.Random(3)
    ranges = [(0, tok.size), (tok.size - len(ADDED) - 1, tok.size), (3, 262)]
    for _ in range(3000):
        ids = [rng.randrange(*rng.choice(ranges)) for _ in range(rng.randrange(12))]
        skip = rng.random() < 0.5
        assert "".join(pieces(tok, ids, skip=skip)) == tok.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(st.lists(st.integers(0, 520), max_size=40), st.sampled_from(KINDS), st.data())
def test_any_cut_into_pushes(ids: list[int], kind: str, data: st.DataObject) -> None:
    stream = IncrementalDetokenizer(tokenizer(kind), skip_special_tokens=False)
    text, at = "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, 5))
        text += stream.push(ids[at : at + size])
        at += size
    assert text + stream.flush() == tokenizer(kind).decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", CORPUS)
def test_valid_text_never_shows_a_replacement_character(kind: str, text: str) -> None:
    tok = tokenizer(kind)
    ids = tok.encode(text, add_special_tokens=False)
    parts = pieces(tok, ids)
    assert "".join(parts) == tok.decode(ids)
    if "\ufffd" not in tok.decode(ids):  # the tiny Metaspace vocabulary lacks some characters
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("char", ["ř", "模", "😀", FAMILY])
def test_a_character_arrives_whole_with_its_last_byte(char: str) -> None:
    tok = tokenizer("byte-level")
    ids = byte_ids(char.encode())
    parts = pieces(tok, ids)
    arrived = "".join(part for part in parts[:-1])
    assert arrived == char
    assert parts[-1] == ""
    assert all(len(part) <= 1 for part in parts)
    ends = [len(char[: index + 1].encode()) - 1 for index in range(len(char))]
    assert [index for index, part in enumerate(parts) if part] == ends


def test_the_end_inside_a_character_gives_one_replacement() -> None:
    tok = tokenizer("byte-level")
    ids = byte_ids("模".encode()[:2])
    assert pieces(tok, ids) == ["", "", "\ufffd"]


def test_a_byte_run_is_held_until_it_ends() -> None:
    tok = tokenizer("byte-fallback")
    run = fallback_ids("模型".encode())
    the = tok.encode("the", add_special_tokens=False)
    parts = pieces(tok, [*run, *the])
    assert parts[:6] == [""] * 6
    assert parts[6].startswith("模型")
    invalid = [*run, *fallback_ids(b"\xff")]
    assert "".join(pieces(tok, invalid)) == "\ufffd" * 7 == tok.decode(invalid)


class TestLeadingSpace:
    @pytest.mark.parametrize("kind", ["byte-fallback", "metaspace"])
    def test_only_a_text_s_start_loses_it(self, kind: str) -> None:
        tok = tokenizer(kind)
        prompt, output = (
            tok.encode("the cat", add_special_tokens=False),
            tok.encode("the dog", add_special_tokens=False),
        )
        assert "".join(pieces(tok, output)) == "the dog" == tok.decode(output)
        continued = "".join(pieces(tok, output, continues=True))
        assert continued == " the dog"
        assert tok.decode(prompt) + continued == tok.decode(prompt + output)

    @pytest.mark.parametrize("kind", ["byte-fallback", "unigram", "metaspace"])
    def test_what_follows_a_prompt_is_what_it_adds_to_its_text(self, kind: str) -> None:
        """Of tokens that begin with a space, or are nothing else, in any order."""
        tok, rng = tokenizer(kind), random.Random(4)
        prompt = tok.encode("the cat", add_special_tokens=False)
        spaced = [item for item in range(tok.size) if (tok.token(item) or "").startswith("▁")]
        assert len(spaced) > 1
        [mark] = token_ids(tok, ["▁"])
        for _ in range(300):
            output = [mark if rng.random() < 0.3 else rng.choice(spaced) for _ in range(rng.randint(1, 5))]
            added = "".join(pieces(tok, output, continues=True))
            assert added.startswith(" ")
            assert tok.decode(prompt) + added == tok.decode(prompt + output)

    def test_one_space_is_stripped_and_no_more(self) -> None:
        tok = tokenizer("byte-fallback")
        mark = token_ids(tok, ["▁"])
        for count in range(4):
            ids = mark * count + tok.encode("the", add_special_tokens=False)
            assert "".join(pieces(tok, ids)) == tok.decode(ids) == " " * count + "the"

    def test_byte_level_keeps_it(self) -> None:
        tok = tokenizer("byte-level")
        ids = tok.encode(" the dog", add_special_tokens=False)
        assert "".join(pieces(tok, ids)) == " the dog"


def test_special_tokens_are_shown_or_skipped() -> None:
    tok = tokenizer("byte-level")
    ids = [1, *tok.encode("hi", add_special_tokens=False), 2]
    assert "".join(pieces(tok, ids)) == "hi"
    assert "".join(pieces(tok, ids, skip=False)) == "<|im_start|>hi<|im_end|>"


def test_token_bytes_join_to_the_text() -> None:
    for kind in ("demo", "byte-level"):
        tok = tokenizer(kind)
        for text in CORPUS:
            ids = tok.encode(text, add_special_tokens=False)
            assert b"".join(map(tok.token_bytes, ids)).decode() == tok.decode(ids)
    assert tokenizer("byte-fallback").token_bytes(3 + 0xFF) == b"\xff"
    assert tokenizer("byte-level").token_bytes(10**6) == b""


@pytest.mark.parametrize(
    "decoder",
    [
        "null",
        '{"type": "WordPiece", "prefix": "##", "cleanup": true}',
        '{"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "BPEDecoder", "suffix": "</w>"}]}',
    ],
)
def test_an_unknown_decoder_is_refused(decoder: str) -> None:
    with pytest.raises(ConfigurationError, match="is not supported"):
        decoder_rules(f'{{"decoder": {decoder}}}')
