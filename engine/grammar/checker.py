"""Compiles grammars on trial, in a process of its own with bounded memory and processor time: some JSON schemas of a
few lines grow exponentially, before any limit of the library holds. Run as a script by `engine.grammar.compiler`.

After a first empty line, which says that it is ready: a line of JSON in, [kind, text]; a line of JSON out,
{"grammar": what llguidance takes} or {"error": what it says}.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

MEMORY_BYTES = 640 << 20
CPU_SECONDS = 3

# One line, with a space behind a comma and a colon: a model cannot lose itself in white space.
_JSON_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ERROR_LENGTH = 4000  # its beginning and its end, between which an excerpt of the grammar may be as long as that
# What the library knows; any other is an annotation, as in JSON Schema itself.
_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_VALUES = frozenset(("const", "enum", "default", "examples"))
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
    try:
        grammar = _to_llguidance(kind, text)
        error = LLMatcher.validate_grammar(grammar, limits=parser_limits(grammar))
    except RecursionError:
        error = "nested too deeply"
    except Exception as raised:
        error = str(raised)
    if error and not error.startswith("WARNING"):
        if len(error) > _ERROR_LENGTH:
            error = error[: _ERROR_LENGTH // 2] + error[-_ERROR_LENGTH // 2 :]
        return {"error": error}
    return {"grammar": grammar}


def _to_llguidance(kind: str, text: str) -> str:
    match kind:
        case "json_schema":
            schema = json.loads(text)
            if isinstance(schema, dict):
                schema.pop("x-guidance", None)  # the library's own options, no part of JSON Schema
            known = _without_annotations(schema)
            return LLMatcher.grammar_from_json_schema(json.dumps(known), defaults=_JSON_LAYOUT)
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON_LAYOUT)
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
