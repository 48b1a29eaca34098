"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`stop` was completed by the character before index `end` of the piece that was fed."""

    stop: str
    end: int


@dataclass(slots=True)
class _State:
    """One node of the automaton: `depth` characters of some stop string have been seen."""

    depth: int
    match: str | None  # the longest stop string that ends here
    next: dict[str, int]
    fallback: int = 0


class StopMatcher:
    """An Aho-Corasick automaton: the match that ends first wins, and of those that end together the longest. How the
    text was cut into pieces makes no difference. `held`: how many characters at the end may yet become a match."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._states = _build(stops)
        self._starts = frozenset(self._states[0].next)
        self._at = 0

    @property
    def held(self) -> int:
        return self._states[self._at].depth

    def passes(self, text: str) -> bool:
        """Whether no stop string is under way and none begins in `text`, which then need not be fed."""
        return not self._at and self._starts.isdisjoint(text)

    def feed(self, text: str) -> StopMatch | None:
        """Reads up to the first match; what follows it must be fed again if the match is not to count."""
        if len(self._states) == 1:
            return None
        for index, char in enumerate(text):
            self._at = _follow(self._states, self._at, char)
            match = self._states[self._at].match
            if match is not None:
                return StopMatch(match, index + 1)
        return None


def _follow(states: list[_State], at: int, char: str) -> int:
    while at and char not in states[at].next:
        at = states[at].fallback
    return states[at].next.get(char, 0)


def _build(stops: Sequence[str]) -> list[_State]:
    states = [_State(0, None, {})]
    for stop in stops:
        at = 0
        for char in stop:
            if char not in states[at].next:
                states[at].next[char] = len(states)
                states.append(_State(states[at].depth + 1, None, {}))
            at = states[at].next[char]
        states[at].match = stop
    queue = deque(states[0].next.values())
    while queue:
        at = queue.popleft()
        for char, child in states[at].next.items():
            states[child].fallback = _follow(states, states[at].fallback, char)
            queue.append(child)
        if states[at].match is None:
            states[at].match = states[states[at].fallback].match
    return states
