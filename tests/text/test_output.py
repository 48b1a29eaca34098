"""Text, token ids and log probabilities are held back together, and stop strings never show."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.output import Delta, OutputText
from engine.text.tokenizer import Tokenizer
from engine.types import TokenLogprob
from tests.text.corpus import CORPUS
from tests.text.tokenizers_under_test import KINDS, byte_ids, fallback_ids, random_ids, tokenizer

BYTE_LEVEL = "byte-level"


def logprobs_of(ids: list[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, -float(index), 1) for index, token_id in enumerate(ids)]


def run(tok: Tokenizer, ids: list[int], size: int = 1, **options: Any) -> list[Delta]:
    """All deltas of a candidate whose tokens come `size` at a time; checks what must hold after every one."""
    output = OutputText(tok, **options)
    logprobs = logprobs_of(ids)
    deltas: list[Delta] = []
    for at in range(0, len(ids), size):
        deltas.append(output.push(ids[at : at + size], logprobs[at : at + size]))
        if output.stopped is None:
            sent = [token_id for delta in deltas for token_id in delta.token_ids]
            skip = options.get("skip_special_tokens", True)
            assert "".join(delta.text for delta in deltas) == tok.decode(sent, skip_special_tokens=skip)
    deltas.append(output.finish())
    assert output.token_count == len(ids)
    kept = [entry for delta in deltas for entry in delta.logprobs]
    sent = [token_id for delta in deltas for token_id in delta.token_ids]
    assert sent == ids[: len(sent)]
    assert kept == logprobs[: len(sent)]
    return deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


@settings(deadline=None)
@given(st.lists(st.integers(0, 520), max_size=40), st.integers(1, 6), st.sampled_from(KINDS), st.booleans())
def test_without_stops_everything_arrives(ids: list[int], size: int, kind: str, skip: bool) -> None:
    tok = tokenizer(kind)
    deltas = run(tok, ids, size, skip_special_tokens=skip)
    assert ids_of(deltas) == ids
    assert text_of(deltas) == tok.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", CORPUS)
def test_real_text_whole_code_points(kind: str, text: str) -> None:
    tok = tokenizer(kind)
    ids = tok.encode(text, add_special_tokens=False)
    deltas = run(tok, ids)
    assert text_of(deltas) == tok.decode(ids)  # in which half a character would be another one


@settings(deadline=None)
@given(
    st.text("abcd ef", max_size=30),
    st.lists(st.text("abcd ", min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(1, 4),
    st.booleans(),
)
def test_stop_strings_by_oracle(text: str, stops: list[str], size: int, include: bool) -> None:
    tok = tokenizer(BYTE_LEVEL)
    ids = tok.encode(text, add_special_tokens=False)
    deltas = run(tok, ids, size, stop_strings=stops, include_stop=include)
    ends = [(end, stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    if not ends:
        assert text_of(deltas) == text
        assert ids_of(deltas) == ids
        assert all(delta.stopped is None for delta in deltas)
        return
    end = ends[0][0]
    stop = max((stop for at, stop in ends if at == end), key=len)
    assert text_of(deltas) == text[: end if include else end - len(stop)]
    assert [delta.stopped for delta in deltas if delta.stopped is not None] == [stop]
    # Tokens stop with the text: none that holds any of the stop string, unless it is kept.
    decoded = tok.decode(ids_of(deltas))
    assert decoded.startswith(text_of(deltas)) if include else text_of(deltas).startswith(decoded)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the match that ends first ends, and the longest that ends there."""
    ends = [(at + len(stop), -len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    return (min(ends)[0], min(ends)[2]) if ends else None


def random_stops(text: str, rng: random.Random) -> list[str]:
    """Mostly pieces of the text, so that they are met, at any place in its tokens; some that only begin like it."""
    stops = []
    for _ in range(rng.randrange(3) if text else 0):
        start = rng.randrange(len(text))
        stops.append(text[start : start + rng.randrange(1, 9)] + rng.choice(["", "", "\x00"]))
    return stops


@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_random_candidates_by_oracle(kind: str) -> None:
    """Any tokens, cut anywhere, with stop strings kept or not: what arrives is the one decode of all of them, up to the
    stop string."""
    tok, rng, stopped = tokenizer(kind), random.Random(8), 0
    for _ in range(10_000):
        ids, skip, include = random_ids(tok, rng), rng.random() < 0.5, rng.random() < 0.5
        whole = tok.decode(ids, skip_special_tokens=skip)
        stops = random_stops(whole, rng)
        output = OutputText(tok, stop_strings=stops, include_stop=include, skip_special_tokens=skip)
        deltas, at = list[Delta](), 0
        while at < len(ids):
            size = rng.randrange(1, 7)
            deltas.append(output.push(ids[at : at + size]))
            at += size
        deltas.append(output.finish())
        match = first_stop(whole, stops)
        if match is None:
            assert (text_of(deltas), ids_of(deltas), output.stopped) == (whole, ids, None)
        else:
            end, stop = match
            stopped += 1
            assert text_of(deltas) == whole[: end if include else end - len(stop)]
            assert output.stopped == stop
        assert output.token_count == len(ids)
        assert output.used_tokens <= len(ids)
    assert 3000 < stopped < 9000


class TestStopAcrossTokens:
    def deltas(self, words: list[str], **options: Any) -> list[Delta]:
        """Each word is pushed as the bytes' tokens of one step."""
        output = OutputText(tokenizer(BYTE_LEVEL), **options)
        deltas = [output.push(byte_ids(word.encode())) for word in words]
        return [*deltas, output.finish()]

    def test_nothing_of_it_is_ever_sent(self) -> None:
        deltas = self.deltas(["ABC", "DEF", "G", "HI", "J", "tail"], stop_strings=["DEFGHIJ"])
        assert [delta.text for delta in deltas] == ["ABC", "", "", "", "", "", ""]
        assert deltas[4].stopped == "DEFGHIJ"
        assert len(ids_of(deltas)) == 3

    def test_a_false_start_is_released(self) -> None:
        deltas = self.deltas(["ABC", "DEF", "G", "xx"], stop_strings=["DEFGHIJ"])
        assert [delta.text for delta in deltas] == ["ABC", "", "", "DEFGxx", ""]

    def test_held_text_comes_out_at_the_end(self) -> None:
        deltas = self.deltas(["ABC", "DEF"], stop_strings=["DEFGHIJ"])
        assert [delta.text for delta in deltas] == ["ABC", "", "DEF"]
        assert len(ids_of(deltas)) == 6

    def test_it_starts_and_ends_inside_tokens(self) -> None:
        tok = tokenizer(BYTE_LEVEL)
        ids = tok.encode("the quick brown fox", add_special_tokens=False)
        for include, text in ((False, "the qui"), (True, "the quick bro")):
            deltas = run(tok, ids, stop_strings=["ck bro"], include_stop=include)
            assert text_of(deltas) == text
            assert len(ids_of(deltas)) < len(ids)

    def test_it_ends_the_candidate_even_in_one_big_step(self) -> None:
        output = OutputText(tokenizer(BYTE_LEVEL), stop_strings=["b"])
        delta = output.push(byte_ids(b"aXbYc"))
        assert (delta.text, delta.stopped) == ("aX", "b")
        assert output.token_count == 5
        assert output.push(byte_ids(b"more")) == Delta()
        assert output.push_whole(byte_ids(b"z")) is None
        assert output.push(byte_ids(b"z")) == Delta()
        assert output.finish() == Delta()
        assert (output.token_count, output.used_tokens) == (10, 3)

    def test_a_stop_inside_the_last_flush(self) -> None:
        tok = tokenizer("byte-fallback")
        ids = fallback_ids("a模b".encode())
        output = OutputText(tok, stop_strings=["模"])
        assert output.push(ids) == Delta([], "", [])
        delta = output.finish()
        assert (delta.text, delta.stopped) == ("a", "模")

    def test_multi_byte_stop(self) -> None:
        output = OutputText(tokenizer(BYTE_LEVEL), stop_strings=["模型"])
        deltas = [output.push([token_id]) for token_id in byte_ids("大模型".encode())]
        assert "".join(delta.text for delta in deltas) == "大"
        assert deltas[-1].stopped == "模型"
        assert len(ids_of(deltas)) == 3

    def test_prefix_stop_strings(self) -> None:
        deltas = self.deltas(["xa", "b", "c"], stop_strings=["abc", "b"])
        assert text_of(deltas) == "xa"
        assert deltas[1].stopped == "b"


class TestMinTokens:
    def test_an_early_match_does_not_count(self) -> None:
        ids = byte_ids(b"a.b.c.d")
        for least, text in ((0, "a"), (2, "a"), (3, "a.b"), (4, "a.b"), (5, "a.b.c"), (7, "a.b.c.d")):
            assert text_of(run(tokenizer(BYTE_LEVEL), ids, stop_strings=["."], min_tokens=least)) == text


class TestHeldTogether:
    def test_ids_wait_for_their_character(self) -> None:
        ids = byte_ids("a模b".encode())
        deltas = run(tokenizer(BYTE_LEVEL), ids)
        assert [len(delta.token_ids) for delta in deltas] == [1, 0, 0, 3, 1, 0]
        assert [delta.text for delta in deltas] == ["a", "", "", "模", "b", ""]

    def test_an_unfinished_character_at_the_end(self) -> None:
        ids = byte_ids("a模".encode())[:3]
        deltas = run(tokenizer(BYTE_LEVEL), ids)
        assert text_of(deltas) == "a\ufffd"
        assert ids_of(deltas) == ids

    def test_tokens_without_text_are_counted_and_sent(self) -> None:
        tok = tokenizer(BYTE_LEVEL)
        ids = [1, *byte_ids(b"a"), 2]
        deltas = run(tok, ids)
        assert [delta.token_ids for delta in deltas] == [[1], ids[1:2], [2], []]
        assert text_of(deltas) == "a"

    def test_lengths_must_agree(self) -> None:
        with pytest.raises(ValueError, match="1 log probabilities for 2 tokens"):
            OutputText(tokenizer(BYTE_LEVEL)).push([5, 6], logprobs_of([5]))


def test_a_continuation_keeps_its_leading_space() -> None:
    tok = tokenizer("byte-fallback")
    ids = tok.encode("the dog", add_special_tokens=False)
    for prompt, text in (([], "the dog"), ([1], "the dog"), (tok.encode("a"), " the dog")):
        output = OutputText(tok, prompt_token_ids=prompt)
        assert output.push(ids).text + output.finish().text == text


@pytest.mark.parametrize("kind", KINDS)
def test_whole_texts_are_what_the_token_adds_to_any_text(kind: str) -> None:
    tok = tokenizer(kind)
    start = tok.encode("ab", add_special_tokens=False)
    whole = [(token_id, text) for token_id in range(tok.size) if (text := tok.whole_texts[token_id]) is not None]
    assert len(whole) > 50
    for token_id, text in whole:
        assert tok.decode([*start, token_id, *start]) == tok.decode(start) + text + tok.decode([*start, *start])[2:]
        assert token_id not in tok.special_ids
    assert tok.whole_texts[tok.size] is None
