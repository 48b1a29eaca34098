"""Structured output on whole engines: answers follow their grammars, whatever else runs; bad grammars hurt nobody."""

from __future__ import annotations

import json
import random
import re
import time
from concurrent.futures import wait
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from engine.config import EngineConfig
from engine.engine import MAX_COMPILING, Engine
from engine.generation_result import GeneratedCandidate, GenerationResult
from engine.text.tokenizer import Tokenizer
from engine.types import (
    Event,
    FailureKind,
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    RequestFailed,
    RequestFinished,
    SamplingParameters,
    StopCriteria,
    TokensGenerated,
)
from engine.worker import create_engine
from tests.grammar.test_compiler import AMBIGUOUS, nested_all_of
from tests.model.tiny import write_byte_level_model
from tests.test_engine import engine, request
from tests.test_engine_sampling import answering_late

PROMPT = [7, 300, 12, 45]
REGEX = Grammar(GrammarKind.REGEX, "[a-c]{3,9}-[0-9]{2}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Engine:
    return engine(tiny)


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.load(str(tiny))


def constrained(
    name: str, grammar: Grammar, seed: int = 1, max_tokens: int = 60, prompt: list[int] | None = None, n: int = 1
) -> GenerationRequest:
    sampling = SamplingParameters(temperature=1.0, seed=seed, n=n)
    stop = StopCriteria(max_tokens=max_tokens)
    return GenerationRequest(name, prompt or PROMPT, sampling, stop, grammar=grammar)


def test_every_answer_follows_its_own_grammar_in_one_batch(shared: Engine, tokenizer: Tokenizer) -> None:
    grammars = {
        "regex": REGEX,
        "choices": Grammar(GrammarKind.CHOICES, json.dumps(["yes", "no", "per\\haps"])),
        "ebnf": Grammar(GrammarKind.EBNF, 'start: "(" ("x" | "y")~0..5 ")"'),
    }
    items = [constrained(name, grammar, seed) for seed, (name, grammar) in enumerate(grammars.items())]
    items += [request(f"free{i}", [*PROMPT, i], 30) for i in range(3)]
    free = [shared.generate([item])[0].token_ids for item in items[3:]]
    results = shared.generate(items)
    texts = [tokenizer.decode(result.token_ids) for result in results[:3]]
    assert re.fullmatch(REGEX.text, texts[0])
    assert texts[1] in ("yes", "no", "per\\haps")
    assert re.fullmatch(r"\([xy]{0,5}\)", texts[2])
    for result in results[:3]:
        assert result.candidates[0].finish is not None
        assert result.candidates[0].finish.reason is FinishReason.END_OF_SEQUENCE
    assert [result.token_ids for result in results[3:]] == free
    shared.scheduler.check_idle()


def test_a_served_engines_first_grammar_waits_for_no_process_and_no_tokenizer(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = create_engine(EngineConfig(model=str(tiny), kv_cache_tokens=1024, num_threads=1), lambda _: None)
    assert isinstance(served, Engine)

    def none(*_: object) -> None:
        raise AssertionError("it was to be there already")

    monkeypatch.setattr("engine.grammar.compiler.Trial._start", none)
    monkeypatch.setattr("engine.grammar.compiler.LLTokenizer", none)
    try:
        served.submit(constrained("a", REGEX))
        events: list[Event] = []
        run(served, time.monotonic() + 60, events)
        assert isinstance(events[-1], RequestFinished)
    finally:
        served.close()


def test_candidates_and_preemption_keep_the_grammar(tiny: Path, shared: Engine, tokenizer: Tokenizer) -> None:
    items = [constrained(str(i), REGEX, seed=i, prompt=[*PROMPT * 3, i + 3], n=1 + i % 3) for i in range(6)]
    alone = [[c.token_ids for c in shared.generate([item])[0].candidates] for item in items]
    small = engine(tiny, kv_cache_tokens=80, admission_forecast=False)
    compile_grammar = small._grammars.submit
    # All come at once, however busy the thread that compiles is: one after the other they would fit.
    small._grammars.submit = lambda grammar: wait([compile_grammar(grammar)]).done.pop()  # type: ignore[method-assign]
    together = [[c.token_ids for c in result.candidates] for result in small.generate(items)]
    assert together == alone
    assert small.stats.preemptions > 0
    assert all(re.fullmatch(REGEX.text, tokenizer.decode(ids)) for candidates in together for ids in candidates)


def test_a_device_that_answers_a_step_later_draws_the_same(tiny: Path, shared: Engine) -> None:
    items = [constrained(str(i), REGEX, seed=i, prompt=[*PROMPT, i + 3], n=1 + i % 3) for i in range(4)]
    alone = [[c.token_ids for c in shared.generate([item])[0].candidates] for item in items]
    late = answering_late(engine(tiny))
    assert [[c.token_ids for c in result.candidates] for result in late.generate(items)] == alone


def run(engine_: Engine, until: float, events: list[Event]) -> None:
    while engine_.has_work and time.monotonic() < until:
        events += engine_.step().events


def test_a_hostile_grammar_fails_alone_while_other_streams_go_on(tiny: Path) -> None:
    local = engine(tiny, max_model_len=400)
    expected = local.generate([request("a", PROMPT, 200)])[0].token_ids
    local.submit(constrained("hostile", Grammar(GrammarKind.JSON_SCHEMA, nested_all_of(30))))
    local.submit(request("a", PROMPT, 200))
    events: list[Event] = []
    run(local, time.monotonic() + 60, events)
    tokens = [event for event in events if isinstance(event, TokensGenerated)]
    [failure] = [event for event in events if isinstance(event, RequestFailed)]
    assert (failure.request_id, failure.kind, failure.field) == ("hostile", FailureKind.GRAMMAR_INVALID, "grammar")
    assert [token for event in tokens for token in event.token_ids] == expected
    assert events.index(tokens[0]) < events.index(failure)
    local.scheduler.check_idle()


def test_a_grammar_that_is_hostile_to_follow_fails_alone_while_other_streams_go_on(tiny: Path) -> None:
    """It compiles, then every mask costs the step loop more: it is ended by its own account."""
    local = engine(tiny, max_model_len=400)
    others = [request("a", PROMPT, 120), constrained("b", REGEX)]
    expected = [result.token_ids for result in local.generate(others)]
    going_on = SamplingParameters(seed=1, logit_bias=dict.fromkeys(local.info.eos_token_ids, -100.0))
    grammar = Grammar(GrammarKind.EBNF, AMBIGUOUS)
    ambiguous = GenerationRequest("hostile", PROMPT, going_on, StopCriteria(max_tokens=380), grammar=grammar)
    results = local.generate([*others, ambiguous])
    assert [result.token_ids for result in results[:2]] == expected
    failure = results[2].failure
    assert failure is not None
    assert (failure.kind, failure.field) == (FailureKind.GRAMMAR_INVALID, "grammar")
    assert "too ambiguous" in failure.message
    assert failure.usage.completion_tokens > 0
    local.scheduler.check_idle()


def test_a_request_is_cancelled_while_its_grammar_compiles(tiny: Path) -> None:
    local = engine(tiny)
    local.submit(constrained("a", Grammar(GrammarKind.JSON_SCHEMA, nested_all_of(30))))
    local.submit(constrained("b", REGEX))
    assert local.cancel("b")
    assert not local.cancel("b")
    events: list[Event] = []
    run(local, time.monotonic() + 60, events)
    ends = {e.request_id: e for e in events if isinstance(e, RequestFailed | RequestFinished)}
    assert isinstance(ends["b"], RequestFinished)
    assert ends["b"].cancelled
    assert isinstance(ends["a"], RequestFailed)
    assert len(events) == 2


def test_grammars_that_wait_are_bounded(tiny: Path) -> None:
    local = engine(tiny)
    for index in range(MAX_COMPILING + 2):
        local.submit(constrained(str(index), REGEX, max_tokens=1))
    events: list[Event] = []
    run(local, time.monotonic() + 60, events)
    refused = [e.request_id for e in events if isinstance(e, RequestFailed) and e.kind is FailureKind.QUEUE_FULL]
    assert refused == [str(MAX_COMPILING), str(MAX_COMPILING + 1)]
    assert sum(isinstance(e, RequestFinished) for e in events) == MAX_COMPILING


@pytest.mark.parametrize(
    ("stop", "field"),
    [(StopCriteria(ignore_eos=True), "stop.ignore_eos"), (StopCriteria(min_tokens=3), "stop.min_tokens")],
)
def test_what_does_not_go_with_a_grammar_is_named(shared: Engine, stop: StopCriteria, field: str) -> None:
    failure = shared.generate([GenerationRequest("a", PROMPT, stop=stop, grammar=REGEX)])[0].failure
    assert failure is not None
    assert (failure.kind, failure.field) == (FailureKind.INVALID, field)


def test_a_grammar_and_allowed_tokens_that_exclude_each_other_fail_alone(shared: Engine, tokenizer: Tokenizer) -> None:
    [z] = tokenizer.encode("z", add_special_tokens=False)
    sampling = SamplingParameters(allowed_token_ids=[z])
    results = shared.generate([GenerationRequest("a", PROMPT, sampling, grammar=REGEX), request("b", PROMPT, 5)])
    assert results[0].failure is not None
    assert results[0].failure.kind is FailureKind.INVALID
    assert len(results[1].token_ids) == 5


WORDS = ["red", "green", 3, None, True, 'q"u', "ž", "a\\b", 2.5, "🙂"]
PATTERNS = ["^[A-Z]{3}-[0-9]{2}$", "^(ab|cd){1,3}$", "^x?y$", "^[^a-z]{2}$", '^\\\\d+"$', "^[α-ω]{1,3}$"]


def random_schema(generator: random.Random, depth: int = 0) -> dict[str, Any]:
    """Bounded, so that a small model's answer ends."""
    kinds = [
        "integer",
        "multiple",
        "number",
        "boolean",
        "null",
        "const",
        "enum",
        "string",
        "pattern",
        "format",
        "types",
    ]
    kinds += ["object", "object", "array", "tuple", "any", "all", "ref"] * (depth < 2)
    match generator.choice(kinds) if depth else "object":
        case "integer":
            least = generator.randint(-50, 50)
            return {"type": "integer", "minimum": least, "maximum": least + generator.randint(0, 500)}
        case "multiple":
            return {"type": "integer", "multipleOf": generator.choice([2, 5, 7, 12]), "minimum": 0, "maximum": 900}
        case "number":
            return {"type": "number", "minimum": -generator.randint(0, 5), "exclusiveMaximum": generator.randint(1, 90)}
        case "const":
            return {"const": generator.choice(WORDS)}
        case "enum":
            return {"enum": generator.sample(WORDS, generator.randint(1, 4))}
        case "string":
            most = generator.randint(1, 12)
            return {"type": "string", "minLength": generator.randint(0, most), "maxLength": most}
        case "pattern":
            return {"type": "string", "pattern": generator.choice(PATTERNS)}
        case "format":
            return {"type": "string", "format": generator.choice(["date", "ipv4", "uuid"])}
        case "types":
            return {"type": generator.sample(["null", "boolean", "integer"], 2), "maximum": 99, "minimum": -9}
        case "array":
            most = generator.randint(1, 3)
            items = random_schema(generator, depth + 1)
            return {"type": "array", "items": items, "minItems": generator.randint(0, most), "maxItems": most}
        case "tuple":
            first = [random_schema(generator, depth + 1) for _ in range(generator.randint(1, 3))]
            return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
        case "any":
            return {"anyOf": [random_schema(generator, depth + 1) for _ in range(generator.randint(1, 3))]}
        case "all":
            return {"allOf": [{"type": "integer"}, {"minimum": 10}, {"maximum": generator.randint(10, 99)}]}
        case "ref":
            return REFERENCE
        case "object":
            names = generator.sample(["id", "name", "tags", "a b", "é", 'q"', "$x"], generator.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(generator, depth + 1) for name in names},
                "required": generator.sample(names, generator.randint(0, len(names))),
                "additionalProperties": False,
            }
        case kind:
            return {"type": kind}


REFERENCE = {"$ref": "#/$defs/point"}
DEFINITIONS = {
    "point": {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"$ref": "#/$defs/point"}},
        "required": ["x"],
        "additionalProperties": False,
    }
}


def check_schemas(engine_: Engine, tokenizer: Tokenizer, count: int, prompt: list[int], max_tokens: int = 110) -> int:
    """How many answers ended by themselves; each of those has been found valid."""
    generator = random.Random(11)
    schemas = [random_schema(generator) | {"$defs": DEFINITIONS} for _ in range(count)]
    items = [
        constrained(str(i), Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), i, max_tokens, prompt)
        for i, schema in enumerate(schemas)
    ]
    finished = 0
    for schema, result in zip(schemas, generate_some_at_a_time(engine_, items), strict=True):
        assert result.failure is None, (schema, result.failure)
        finish = result.candidates[0].finish
        assert finish is not None
        if finish.reason is FinishReason.END_OF_SEQUENCE:
            finished += 1
            answer = tokenizer.decode(result.token_ids)
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(answer))
    return finished


def generate_some_at_a_time(engine_: Engine, items: list[GenerationRequest]) -> list[GenerationResult]:
    """As many as may be compiled at once: where one ends the next one comes, so that steps stay full."""
    results = {item.request_id: GenerationResult(item.request_id, [GeneratedCandidate()]) for item in items}
    coming, live = iter(items), 0
    while True:
        for item in islice(coming, MAX_COMPILING - live):
            engine_.submit(item)
            live += 1
        if not live:
            return list(results.values())
        for event in engine_.step().events:
            results[event.request_id].add(event)
            live -= isinstance(event, RequestFinished | RequestFailed)
        if not engine_.loop.has_work:
            time.sleep(0.001)


FORMATS = jsonschema.FormatChecker()


def test_random_schemas_are_followed(shared: Engine, tokenizer: Tokenizer) -> None:
    assert check_schemas(shared, tokenizer, 40, PROMPT) >= 20


@pytest.mark.parametrize(("count", "least"), [(60, 48), pytest.param(500, 400, marks=pytest.mark.slow)])
def test_random_schemas_are_followed_by_the_demo_model(count: int, least: int) -> None:
    tok = Tokenizer.load("demo")
    prompt = tok.encode("Here is an example of a JSON object:\n")
    demo = engine("demo", max_num_seqs=64, max_model_len=128, num_threads=1)  # type: ignore[arg-type]
    assert check_schemas(demo, tok, count, prompt, 64) >= least
