"""What is wrong with a grammar, as its client is told: one line, without the library's excerpts and inner names."""

from __future__ import annotations

import re

_LENGTH = 300
_PLACE_LENGTH = 200
_QUOTED_LENGTH = 40
NO_TEXT = "the grammar allows no text at all"

# Lines of an excerpt, with a caret under them: they mean nothing once joined.
_EXCERPT = re.compile(r"^(\s|\d+ \|)")
_LONG_QUOTE = re.compile(rf'"((?:\\.|[^"\\]){{{_QUOTED_LENGTH}}})(?:\\.|[^"\\])+"')
_POSITION = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_PLAINER: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"^NoExtensionBias\b.*", NO_TEXT),
        (r"^Expecting object schema to apply options$", "the schema must be a JSON object"),
        (r"Unimplemented keys: \[(.*)\]", r"keywords that are not supported: \1"),
        (
            r"^oneOf constraints are not supported.*",
            "oneOf is supported only where no two of its schemas can match the same value: use anyOf",
        ),
        (r"Resource '(.*)' is not present in a registry.*", r"\1 is another document, which is not fetched"),
        (r"lookarounds not supported yet; \w+ in regex.*", "look-around is not supported, word boundaries included"),
        (r"regex parse error: (?:error: )?", "invalid regex: "),
        (r" \(in regex\): (?:invalid regex: )?", ": "),
        (r"; following (?:special tokens )?are available.*", ""),
        (r' \(at "(?:\\.|[^"\\])*" \(.*\)\)$', ""),
        (
            r"(?:Parser Error: )?Current row has \d+ items; max is \d+.*",
            "the grammar is too ambiguous to follow; try to make it less so",
        ),
        (r".*too many (?:expressions constructed|states).*", "the grammar needs too many lexer states to follow"),
        (r".*Too many items \(limit.*", "the grammar is too large, too ambiguous, or repeats without an end"),
        (r"<non-verbose/>", ""),
    )
)


def problem(kind: str, text: str, said: str, place: str = "") -> str:
    """kind, text: the grammar's. said: by the library. place: a JSON pointer into a schema, if it is known."""
    told = [line for line in said.splitlines() if not _EXCERPT.match(line)] or said.splitlines()
    line = " ".join(" ".join(told).split())
    position = _POSITION.match(line)
    if position is not None:
        line = line[position.end() :]
        # A regex, and rules with ::=, stand in a text made around them: where in that one helps nobody.
        if kind == "ebnf" and "::=" not in text:
            line = f"line {position[1]}, column {position[2]}: {line}"
    for pattern, plain in _PLAINER:
        line = pattern.sub(plain, line)
    if kind == "regex":
        line = re.sub(r'^invalid regex(?: ".*")?: ', "", line)
    line = _LONG_QUOTE.sub(r'"\1..."', line).strip()[:_LENGTH]
    if len(place) > _PLACE_LENGTH:
        place = "..." + place[3 - _PLACE_LENGTH :]
    return f"at {place}: {line}" if place else line
