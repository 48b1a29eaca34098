"""Compiles grammars on trial, in a process of its own with bounded memory and processor time: some JSON schemas of a
few lines grow exponentially, before any limit of the library holds. Run as a script by `engine.grammar.compiler`.

After a first empty line, which says that it is ready: a line of JSON in, [kind, text]; a line of JSON out,
{"grammar": what llguidance takes} or {"error": what it says, "place": JSON pointer to what it is wrong with, if known}.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

MEMORY_BYTES = 640 << 20
CPU_SECONDS = 3

# One line, with a space behind a comma and a colon: a model cannot lose itself in white space.
_JSON_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ERROR_LENGTH = 4000
# What the library knows; any other is an annotation, as in JSON Schema itself.
_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_VALUES = frozenset(("const", "enum", "default", "examples"))
_LINE_LENGTH = 1000
_PLACE_SECONDS = 0.5  # of a trial, within which where in a schema an error is, is looked for
_VIA = "\n  while processing "  # before what an error was reached through
_DEFINITIONS = ("$defs", "definitions")
# Of the parser. A mask makes items, in rows of one byte each; a schema of 300 optional fields needs 1500, of which 1200
# in a row. How long that takes grows with the square of a row, so a row may have more only where the grammar is longer.
_ITEMS_A_MASK = 3000
_ITEMS_A_ROW, _BYTES_AN_ITEM, _MOST_ITEMS_A_ROW = 500, 2, 2000


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say("")
    for line in sys.stdin.buffer:
        _grant_time()
        kind, text = json.loads(line)
        _say(json.dumps(_answer(kind, text)))


def parser_limits(source: str) -> LLParserLimits:
    """What a grammar may cost the library, at a time: counted in work, which depends on nothing but the grammar and the
    output. source: what `grammar_from_...` made of it."""
    row = min(_MOST_ITEMS_A_ROW, _ITEMS_A_ROW + len(source) // _BYTES_AN_ITEM)
    return LLParserLimits(verbose_errors=False, step_max_items=_ITEMS_A_MASK, max_items_in_row=row)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _grant_time() -> None:
    """Also ends this process should its parent die in the middle of a trial."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(usage.ru_utime + usage.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU_SECONDS, resource.RLIM_INFINITY))


def _answer(kind: str, text: str) -> dict[str, str]:
    began = time.process_time()
    try:
        grammar = _to_llguidance(kind, text)
        error = LLMatcher.validate_grammar(grammar, limits=parser_limits(grammar))
    except RecursionError:
        error = "nested too deeply"
    except Exception as raised:
        error = str(raised)
    if error and not error.startswith("WARNING"):
        place = _place(text, error, began) if kind == "json_schema" else ""
        return {"error": _shortened(error), "place": place}
    return {"grammar": grammar}


def _shortened(error: str) -> str:
    """What is wrong comes behind a long text that is quoted."""
    lines = [line if len(line) <= _LINE_LENGTH else _middle_out(line, _LINE_LENGTH) for line in error.splitlines()]
    return _middle_out("\n".join(lines), 2 * _ERROR_LENGTH)


def _middle_out(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length // 2]}...{text[-length // 2 :]}"


def _place(text: str, error: str, began: float) -> str:
    """The innermost part of a schema of which the library says the same, as a JSON pointer; "" is the whole, also where
    the trial takes long. began: the trial, by `time.process_time()`."""
    try:
        root = _without_annotations(json.loads(text))
        until = began + _PLACE_SECONDS
        shared = {name: root[name] for name in _DEFINITIONS if name in root} if isinstance(root, dict) else {}
        schema, place = root, ""
        while time.process_time() < until:
            inner = _first_wrong(schema, shared, error, until)
            if inner is None:
                break
            schema, place = inner[1], place + inner[0]
    except (RecursionError, ValueError):
        return ""
    return place


def _first_wrong(schema: Any, shared: dict[str, Any], error: str, until: float) -> tuple[str, Any] | None:
    for place, part in _parts(schema):
        if time.process_time() >= until:
            return None
        alone = {**shared, **(part if isinstance(part, dict) else {"allOf": [part]})}
        grammar = _of_schema(alone)
        said = LLMatcher.validate_grammar(grammar, limits=parser_limits(grammar))
        if said.partition(_VIA)[0] == error.partition(_VIA)[0]:
            return place, part
    return None


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas right inside of one, definitions first: they are wrong wherever they are referred to."""
    if not isinstance(schema, dict):
        return
    for keyword in (*_DEFINITIONS, "properties", "patternProperties"):
        if isinstance(schema.get(keyword), dict):
            for name, part in schema[keyword].items():
                yield f"/{keyword}/{name.replace('~', '~0').replace('/', '~1')}", part
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(keyword), list):
            for index, part in enumerate(schema[keyword]):
                yield f"/{keyword}/{index}", part
    for keyword in ("items", "additionalItems", "additionalProperties"):
        if keyword in schema:
            yield f"/{keyword}", schema[keyword]


def _of_schema(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON_LAYOUT)


def _to_llguidance(kind: str, text: str) -> str:
    match kind:
        case "json_schema":
            schema = json.loads(text)
            if isinstance(schema, dict):
                schema.pop("x-guidance", None)  # the library's own options, no part of JSON Schema
            return _of_schema(_without_annotations(schema))
        case "json_object":
            return _of_schema({"type": "object"})
        case "regex":
            if (len(text) - len(text.rstrip("\\"))) % 2:
                raise ValueError("ends in a backslash that escapes nothing")
            return LLMatcher.grammar_from_regex(text)
        case "ebnf":
            if text.lstrip().startswith("{"):  # the library's own notation
                raise ValueError("no rule begins with a brace")
            return LLMatcher.grammar_from_lark(any_to_lark(text) if "::=" in text else text)
        case "choices":
            choices = json.loads(text)
            if not choices:
                raise ValueError("there is nothing to choose from")
            # One regex: as so many rules they would be followed one beside the other.
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, choices)))
    raise ValueError(f"no kind of grammar is called {kind!r}")


def _without_annotations(schema: Any) -> Any:
    """The schema without formats that the library does not know."""
    if isinstance(schema, list):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _VALUES:
            kept[key] = value
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            kept[key] = {name: _without_annotations(item) for name, item in value.items()}
        elif key != "format" or not isinstance(value, str) or value in _FORMATS:
            kept[key] = _without_annotations(value)
    return kept


if __name__ == "__main__":
    main()
