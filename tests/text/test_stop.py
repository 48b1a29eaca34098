"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stop import StopMatch, StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def naive(text: str, stops: list[str]) -> StopMatch | None:
    """The match that ends first; among those that end together, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return StopMatch(max(ending, key=len), end)
    return None


def naive_held(text: str, stops: list[str]) -> int:
    sizes = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(sizes, default=0)


@settings(deadline=None)
@given(st.text("abc", max_size=20), STOPS)
def test_equals_a_naive_search_however_the_text_is_cut(text: str, stops: list[str]) -> None:
    expected = naive(text, stops)
    assert StopMatcher(stops).feed(text) == expected
    matcher = StopMatcher(stops)
    for index, char in enumerate(text):
        match = matcher.feed(char)
        if match is not None:
            assert expected == StopMatch(match.stop, index + 1)
            return
        assert matcher.held == naive_held(text[: index + 1], stops)
    assert expected is None


def test_matching_goes_on_after_a_match() -> None:
    matcher = StopMatcher(["aba"])
    text, ends, at = "ababab", [], 0
    while (match := matcher.feed(text[at:])) is not None:
        at += match.end
        ends.append(at)
    assert ends == [3, 5]


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("anything") is None
    assert matcher.held == 0


def test_characters_beyond_ascii() -> None:
    matcher = StopMatcher(["模型", "\n\n"])
    assert matcher.feed("大模") is None
    assert matcher.held == 1
    assert matcher.feed("型!") == StopMatch("模型", 1)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])
