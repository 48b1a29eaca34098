"""Compiles grammars on trial, in a process of its own with bounded memory and processor time: some JSON schemas of a
few lines grow exponentially, before any limit of the library holds. Run as a script by `engine.grammar.compiler`.

After a first empty line, which says that it is ready: a line of JSON in, [kind, text]; a line of JSON out,
{"grammar": what llguidance takes} or {"error": what it says}.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

MEMORY_BYTES = 640 << 20
CPU_SECONDS = 3

# One line, with a space behind a comma and a colon: a model cannot lose itself in white space.
_JSON_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ERROR_LENGTH = 4000
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
        return {"error": error[:_ERROR_LENGTH]}
    return {"grammar": grammar}


def _to_llguidance(kind: str, text: str) -> str:
    match kind:
        case "json_schema":
            schema = json.loads(text)
            if isinstance(schema, dict):
                schema.pop("x-guidance", None)  # the library's own options, no part of JSON Schema
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON_LAYOUT)
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
            spelled = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(text)]
            if not spelled:
                raise ValueError("there is nothing to choose from")
            return LLMatcher.grammar_from_lark("start: " + " | ".join(spelled))
    raise ValueError(f"no kind of grammar is called {kind!r}")


if __name__ == "__main__":
    main()
