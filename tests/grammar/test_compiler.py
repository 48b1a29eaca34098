"""Grammars compiled beside the step loop, and what they let through, token by token."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from llguidance import LLParserLimits

from engine.grammar.compiler import (
    MAX_TEXT_BYTES,
    TRIAL_SECONDS,
    GrammarCompiler,
    GrammarError,
    GrammarLimitError,
    Trial,
)
from engine.grammar.constraint import GrammarConstraint
from engine.grammar.problem import problem
from engine.text.tokenizer import Tokenizer
from engine.types import Grammar, GrammarKind
from tests.text.tokenizers_under_test import tokenizer

TOKENIZER = tokenizer("byte-level")
EOS = TOKENIZER.token_id("<|im_end|>") or 0


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(lambda: TOKENIZER, [EOS])
    yield made
    made.close()


def compiled(compiler: GrammarCompiler, kind: GrammarKind, text: str = "") -> GrammarConstraint:
    return compiler.submit(Grammar(kind, text)).result(timeout=30)


def allowed(constraint: GrammarConstraint, output: list[int]) -> set[int]:
    bits = np.unpackbits(constraint.mask(output).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def accepts(constraint: GrammarConstraint, text: str, tok: Tokenizer = TOKENIZER, eos: int = EOS) -> bool:
    """Whether the text's own tokens may come one after another and then the end."""
    own, output = constraint.copy(), list[int]()
    for token in tok.encode(text, add_special_tokens=False):
        if token not in allowed(own, output):
            return False
        output.append(token)
    return eos in allowed(own, output)


CASES = [
    (GrammarKind.REGEX, r"[a-c]{2,3}\d", ["ab1", "abc9"], ["a1", "abcd1", "ab", "ab1 "]),
    (GrammarKind.CHOICES, json.dumps(["yes", 'a"b\\c\n', "žluť 🙂"]), ["yes", 'a"b\\c\n', "žluť 🙂"], ["no", "yes!"]),
    (GrammarKind.EBNF, 'start: "a" start "b" | "ab"', ["ab", "aabb"], ["aab", "ba"]),
    (GrammarKind.EBNF, 'root ::= "x" [0-9]+ | "y"', ["x12", "y"], ["x", "z"]),
    (GrammarKind.JSON_OBJECT, "", ["{}", '{"a": [1, null]}'], ["[]", "1", '{"a" : 1}', '{"a"']),
    (
        GrammarKind.JSON_SCHEMA,
        json.dumps(
            {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 12}, "s": {"enum": ["a", "b"]}},
                "required": ["n", "s"],
                "additionalProperties": False,
            }
        ),
        ['{"n": 3, "s": "a"}', '{"n": 12, "s": "b"}'],
        ['{"n": 13, "s": "a"}', '{"n": 3}', '{"n": 3, "s": "c"}', '{"n": 3, "s": "a", "t": 1}'],
    ),
]


@pytest.mark.parametrize(("kind", "text", "good", "bad"), CASES)
def test_exactly_the_grammars_texts_may_come(
    compiler: GrammarCompiler, kind: GrammarKind, text: str, good: list[str], bad: list[str]
) -> None:
    constraint = compiled(compiler, kind, text)
    assert [item for item in good if not accepts(constraint, item)] == []
    assert [item for item in bad if accepts(constraint, item)] == []


@pytest.mark.parametrize(
    ("kind", "sample"),
    [
        ("demo", "a bcd ěü 🙂"),
        ("byte-level", "a bcd ěü 🙂"),
        ("byte-fallback", "a bcd ěü 🙂"),
        ("metaspace", "a bcd e"),  # its decoder has no byte fallback: those tokens are their names
    ],
)
def test_every_kind_of_tokenizer_spells_the_same_texts(kind: str, sample: str) -> None:
    tok = tokenizer(kind)
    compiler = GrammarCompiler(lambda: tok, [eos := min(tok.special_ids)])
    try:
        constraint = compiled(compiler, GrammarKind.REGEX, "[ a-zěü🙂]+")
        tokens = tok.encode(sample, add_special_tokens=False)
        own, output = constraint.copy(), list[int]()
        for token in tokens:
            assert token in allowed(own, output), tok.token(token)
            output.append(token)
        assert eos in allowed(own, output)
        special = tok.special_ids - {eos}
        assert not allowed(constraint.copy(), []) & special
    finally:
        compiler.close()


@pytest.mark.parametrize(
    ("kind", "text", "spelled"),
    [
        (GrammarKind.REGEX, r"a<\|im_end\|>b", "a<|im_end|>b"),
        (GrammarKind.JSON_SCHEMA, '{"const": "<|im_end|>"}', '"<|im_end|>"'),
        (GrammarKind.CHOICES, '["<|im_start|>"]', "<|im_start|>"),
        (GrammarKind.EBNF, 'root ::= "<|im_start|>" "<|im_end|>"', "<|im_start|><|im_end|>"),
        (GrammarKind.EBNF, 'start: "<|im_start|>user"', "<|im_start|>user"),
    ],
)
def test_text_that_spells_a_special_token_is_made_of_ordinary_tokens(
    compiler: GrammarCompiler, kind: GrammarKind, text: str, spelled: str
) -> None:
    constraint, output = compiled(compiler, kind, text), list[int]()
    while (choice := allowed(constraint, output)) != {EOS}:
        assert choice
        assert not choice & TOKENIZER.special_ids
        output.append(min(choice))
    assert TOKENIZER.decode(output) == spelled


def test_candidates_are_apart_and_follow_what_has_been_added(compiler: GrammarCompiler) -> None:
    first = compiled(compiler, GrammarKind.REGEX, "(ab|cd)*")
    second = first.copy()
    a, b, c = (TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    assert {a, c, EOS} <= allowed(first, [])
    assert b not in allowed(first, [])
    assert b in allowed(first, [a])
    assert a in allowed(second, [])
    assert EOS in allowed(first, [a, b])
    assert EOS not in allowed(first.copy(), [a, b, a])


def test_tokens_against_the_grammar_leave_nothing_to_come(compiler: GrammarCompiler) -> None:
    constraint = compiled(compiler, GrammarKind.REGEX, "ab")
    [wrong] = TOKENIZER.encode("z", add_special_tokens=False)
    assert allowed(constraint, [wrong]) == set()
    assert allowed(constraint, [wrong, wrong]) == set()


def nested_all_of(depth: int) -> str:
    """Two lines that a compiler expands to 2 ** depth."""
    defs: dict[str, object] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(depth)
    }
    defs[f"d{depth}"] = {"type": "string", "pattern": "a*"}
    return json.dumps({"$defs": defs, "$ref": "#/$defs/d0"})


OPEN_OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}
NOT_DISJOINT = "oneOf is supported only where no two of its schemas can match the same value: use anyOf"
UNCLOSED = "invalid regex: unclosed group"
INVALID_RANGE = 'invalid regex "[z-a]": invalid character class range, the start must be <= the end'

HOSTILE = [
    (GrammarKind.JSON_SCHEMA, nested_all_of(18)),
    (GrammarKind.JSON_SCHEMA, nested_all_of(30)),
    (GrammarKind.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000),
    (GrammarKind.JSON_SCHEMA, json.dumps({"enum": ["x" * 100] * 5000})),
    (GrammarKind.REGEX, "(" * 10_000 + "a" + ")" * 10_000),
    (GrammarKind.EBNF, "start: " + "(" * 100_000 + '"a"' + ")" * 100_000),
]


@pytest.mark.parametrize(("kind", "text"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_grammars_are_refused_in_bounded_time_and_the_next_is_served(
    compiler: GrammarCompiler, kind: GrammarKind, text: str
) -> None:
    began = time.monotonic()
    compiled(compiler, GrammarKind.REGEX, "starts the process, whose start is not counted")
    with pytest.raises(GrammarError) as caught:
        compiled(compiler, kind, text)
    assert time.monotonic() - began < 3 * TRIAL_SECONDS
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert accepts(compiled(compiler, GrammarKind.REGEX, "ab*"), "abb")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.REGEX, "(", "unclosed group"),
        (GrammarKind.REGEX, r"a\b", "look-around is not supported, word boundaries included"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "("}', "invalid regex: unclosed group"),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "(" * 20_000}), UNCLOSED),
        (GrammarKind.JSON_SCHEMA, json.dumps({"oneOf": [OPEN_OBJECT, OPEN_OBJECT]}), NOT_DISJOINT),
        (GrammarKind.JSON_SCHEMA, "[]", "the schema must be a JSON object"),
        (GrammarKind.JSON_SCHEMA, '{"not": {"type": "null"}}', 'keywords that are not supported: "not"'),
        (GrammarKind.JSON_SCHEMA, '{"anyOf": []}', "Unsatisfiable schema: anyOf is empty"),
        (
            GrammarKind.JSON_SCHEMA,
            '{"$ref": "http://localhost/x"}',
            "http://localhost/x is another document, which is not fetched",
        ),
        (GrammarKind.EBNF, 'start: "b" | (\n  | "a"', "line 2, column 8: Expected token ')', found '\\n'"),
        (GrammarKind.REGEX, "a\\", "ends in a backslash that escapes nothing"),
        (GrammarKind.EBNF, "start: start", "the grammar allows no text at all"),
        (GrammarKind.EBNF, "start: /(/", 'line 1, column 8: invalid regex "(": unclosed group'),
        (GrammarKind.EBNF, "root ::= [z-a]", INVALID_RANGE),
        (GrammarKind.EBNF, "start: <nope>", 'unknown special token: "<nope>"'),
        (GrammarKind.EBNF, 'value: "a"', "no start rule found"),
        (GrammarKind.EBNF, '{"grammars": []}', "no rule begins with a brace"),
    ],
)
def test_messages_are_one_plain_line(compiler: GrammarCompiler, kind: GrammarKind, text: str, message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled(compiler, kind, text)
    assert str(caught.value) == message


SCHEMA_WITH_DEFINITION = {
    "$defs": {"code": {"type": "string", "pattern": "("}},
    "properties": {"a": {"$ref": "#/$defs/code"}, "b": {"type": "integer"}},
}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"properties": {"a": {}, "b/c": {"items": {"type": "strin"}}}},
            "at /properties/b~1c/items: Invalid type: strin",
        ),
        (
            {"anyOf": [{"type": "null"}, {"prefixItems": [{"not": {}}]}]},
            'at /anyOf/1/prefixItems/0: keywords that are not supported: "not"',
        ),
        ({"properties": {"a": {"items": 7}}}, "at /properties/a/items: schema must be an object or boolean"),
        (SCHEMA_WITH_DEFINITION, "at /$defs/code: invalid regex: unclosed group"),
        (
            {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {}},
            "at /properties/a: Pointer '/$defs/b' does not exist",
        ),
        (
            {"properties": {"x" * 500: {"properties": {"a": {"not": {}}}}}},
            f'at ...{"x" * 184}/properties/a: keywords that are not supported: "not"',
        ),
    ],
)
def test_a_schemas_message_says_where(compiler: GrammarCompiler, schema: dict[str, object], message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled(compiler, GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert str(caught.value) == message


def test_where_is_looked_for_in_bounded_time(compiler: GrammarCompiler) -> None:
    """A thousand fields are right: the wrong one behind them is found, or else the message stands alone."""
    fields: dict[str, object] = {f"field{index}": {"type": "string", "maxLength": 9} for index in range(1000)}
    schema = {"properties": {**fields, "wrong": {"type": "strin"}}}
    with pytest.raises(GrammarError, match=r"^(at /properties/wrong: )?Invalid type: strin$"):
        compiled(compiler, GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize("length", [10, 500, 100_000])
@pytest.mark.parametrize(
    ("end", "cause"),
    [("(", "unclosed group"), ("[z-a]", "invalid character class range, the start must be <= the end")],
)
def test_a_long_regex_does_not_hide_what_is_wrong_with_it(
    compiler: GrammarCompiler, length: int, end: str, cause: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled(compiler, GrammarKind.REGEX, "a" * length + end)
    assert str(caught.value) == cause
    with pytest.raises(GrammarError) as caught:
        compiled(compiler, GrammarKind.EBNF, f"start: /{'a' * length}{end}/")
    shown = f'"{"a" * length}{end}"' if length == 10 else f'"{"a" * 40}..."'
    assert str(caught.value) == f"line 1, column 8: invalid regex {shown}: {cause}"
    with pytest.raises(GrammarError) as caught:
        compiled(compiler, GrammarKind.JSON_SCHEMA, json.dumps({"items": {"pattern": "a" * length + end}}))
    assert str(caught.value) == f"at /items: invalid regex: {cause}"


def test_a_limit_of_the_parser_is_told_plainly() -> None:
    said = "parser error: Too many items (limit 10000; ff_tokens); try avoiding single-byte/short lexemes"
    assert problem("ebnf", "", said) == "the grammar is too large, too ambiguous, or repeats without an end"


def test_thousands_of_choices_are_taken(compiler: GrammarCompiler) -> None:
    choices = [f"choice {i} of (these|those)*" for i in range(3000)]
    constraint = compiled(compiler, GrammarKind.CHOICES, json.dumps(choices))
    assert accepts(constraint, choices[1234])
    assert not accepts(constraint, "choice 3000 of (these|those)*")
    assert not accepts(constraint, "choice 1234 of these")


def test_a_choice_may_be_the_beginning_of_another_or_empty(compiler: GrammarCompiler) -> None:
    constraint = compiled(compiler, GrammarKind.CHOICES, json.dumps(["ab", "a", "", "a\n#-~&\0\t"]))
    assert all(accepts(constraint, choice) for choice in ("ab", "a", "", "a\n#-~&\0\t"))
    assert not accepts(constraint, "b")


def test_a_format_that_is_not_known_changes_nothing(compiler: GrammarCompiler) -> None:
    """JSON Schema takes it for an annotation; pydantic writes several."""
    fields = {
        "format": {"type": "string", "format": "path"},
        "const": {"type": "array", "items": {"format": "binary", "type": "string"}},
        "d": {"type": "string", "format": "date"},
        "e": {"enum": [{"format": "password"}]},
    }
    schema = {"type": "object", "properties": fields, "required": sorted(fields), "additionalProperties": False}
    constraint = compiled(compiler, GrammarKind.JSON_SCHEMA, json.dumps(schema))
    text = '{"format": "/x", "const": ["y"], "d": "2026-11-30", "e": {"format": "password"}}'
    assert accepts(constraint, text)
    assert not accepts(constraint, text.replace("2026-11-30", "today"))
    assert not accepts(constraint, text.replace('{"format": "password"}', "{}"))


def test_a_schemas_options_for_the_library_are_not_taken(compiler: GrammarCompiler) -> None:
    """They are no part of JSON Schema, whose unknown keywords change nothing."""
    schema = {"type": "object", "x-guidance": {"item_separator": "!", "nonsense": 1}}
    constraint = compiled(compiler, GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert accepts(constraint, '{"a": 1, "b": 2}')


def followed_to_its_end(constraint: GrammarConstraint, most: int) -> int:
    """How many tokens a random walk through the grammar takes until nothing may come, at most `most`."""
    generator, output = np.random.default_rng(1), list[int]()
    while len(output) < most and (choice := sorted(allowed(constraint, output) - {EOS})):
        output.append(int(generator.choice(choice)))
    return len(output)


AMBIGUOUS = 'start: s\ns: s s s | s s | "a" | "" | "b" s "b"'


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.EBNF, AMBIGUOUS),
        (GrammarKind.REGEX, r"(\w{1,50}\s?){1,200}"),
        (GrammarKind.EBNF, "start: a+\na: a a | /x/"),
    ],
)
def test_a_grammar_that_costs_too_much_to_follow_ends_and_says_so(
    compiler: GrammarCompiler, kind: GrammarKind, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles at once, but each mask takes more work than the last. The end is told by work: it comes at the same
    token however long that takes."""
    ends = list[int]()
    for seconds_a_look in (0.0, 0.03):
        monkeypatch.setattr("engine.grammar.constraint.time", clock_that_advances(seconds_a_look))
        constraint = compiled(compiler, kind, text).copy()
        ends.append(followed_to_its_end(constraint, 1000))
        assert constraint.error
        assert "<" not in constraint.error
        assert "time" not in constraint.error
        assert allowed(constraint, []) == set()
    assert ends[0] == ends[1] < 1000


def clock_that_advances(seconds: float) -> SimpleNamespace:
    """A `time` by whose processor time each piece of work takes so long."""
    looks = itertools.count()
    return SimpleNamespace(thread_time=lambda: seconds * next(looks))


def test_a_grammar_that_hangs_is_ended(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = compiled(compiler, GrammarKind.REGEX, "a*")
    monkeypatch.setattr("engine.grammar.constraint.time", clock_that_advances(0.8))
    assert followed_to_its_end(constraint, 1000) < 10
    assert "too much time" in constraint.error


def test_requests_of_one_grammar_take_nothing_from_each_others_limits(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(verbose_errors=False, max_lexer_states=3000)
    monkeypatch.setattr("engine.grammar.checker.parser_limits", lambda _: limits)
    first, second = (compiled(compiler, GrammarKind.REGEX, ".*(a|b).{150}") for _ in range(2))
    steps = followed_to_its_end(first, 5000)
    assert "too many lexer states" in first.error
    assert followed_to_its_end(second, 5000) == steps


def test_a_grammar_is_tried_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[str] = []
    run = compiler._trial.run

    def counting(kind: str, text: str) -> str:
        trials.append(text)
        return run(kind, text)

    monkeypatch.setattr(compiler._trial, "run", counting)
    for _ in range(3):
        assert accepts(compiled(compiler, GrammarKind.REGEX, "(tried|once)*"), "once")
    assert trials == ["(tried|once)*"]


def test_a_common_grammar_never_runs_out_of_time(compiler: GrammarCompiler) -> None:
    constraint = compiled(compiler, GrammarKind.JSON_OBJECT)
    assert followed_to_its_end(constraint, 2000) == 2000 or not constraint.error


def test_a_trial_that_takes_too_long_is_ended_and_forgotten(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = json.dumps({"enum": [f"value {i}" for i in range(8000)]})
    with monkeypatch.context() as patch:
        patch.setattr("engine.grammar.compiler.TRIAL_SECONDS", 0.0)
        with pytest.raises(GrammarLimitError, match="MiB"):
            compiled(compiler, GrammarKind.JSON_SCHEMA, schema)
    assert accepts(compiled(compiler, GrammarKind.JSON_SCHEMA, schema), '"value 17"')


def test_a_process_that_died_while_it_was_idle_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.warm().result(timeout=60)
    process = compiler._trial._process
    assert process is not None
    process.kill()
    process.wait()
    assert accepts(compiled(compiler, GrammarKind.REGEX, "(after|a|death)*"), "death")


def test_processes_that_die_before_they_read_are_a_limit_and_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(trial: Trial, question: bytes) -> bytes | None:
        asked.append(question)
        raise BrokenPipeError

    asked: list[bytes] = []
    monkeypatch.setattr(Trial, "_ask", broken)
    with pytest.raises(GrammarLimitError):
        Trial().run("regex", "a")
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        (GrammarKind.REGEX, "a(", "unclosed group"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.JSON_SCHEMA, "{", "line 1"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "not": {"const": "a"}}', "not"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:9/x.json"}', "not fetch"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "minLength": 3, "maxLength": 2}', "Unsatisfiable"),
        (GrammarKind.EBNF, "start: nope", "nope"),
        (GrammarKind.CHOICES, "[]", "nothing to choose"),
        (GrammarKind.REGEX, "x" * (MAX_TEXT_BYTES + 1), "longer than"),
    ],
)
def test_a_grammar_that_does_not_compile_says_why(
    compiler: GrammarCompiler, kind: GrammarKind, text: str, named: str
) -> None:
    for _ in range(2):  # the second time from what is known
        with pytest.raises(GrammarError, match=re.escape(named)):
            compiled(compiler, kind, text)


def test_a_model_without_a_tokenizer_refuses_every_grammar() -> None:
    def none() -> Tokenizer:
        raise GrammarError("no tokenizer.json")

    compiler = GrammarCompiler(none, [EOS])
    try:
        with pytest.raises(GrammarError, match="no tokenizer"):
            compiled(compiler, GrammarKind.REGEX, "a")
    finally:
        compiler.close()


def test_closing_waits_until_thread_and_process_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends with the thread at work is aborted."""
    compiler = GrammarCompiler(lambda: TOKENIZER, [EOS])
    compiler.warm().result(timeout=60)
    close, process = compiler._trial.close, compiler._trial._process

    def late() -> None:
        time.sleep(0.2)
        close()

    monkeypatch.setattr(compiler._trial, "close", late)
    compiler.close()
    assert process is not None
    assert process.poll() is not None
    assert compiler._thread is not None
    assert not compiler._thread.is_alive()
