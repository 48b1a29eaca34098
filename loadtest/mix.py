"""Workloads: classes of requests with weights, dealt out to arrival times, and the messages that they become."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loadtest.records import Arrival
from octavo.v1 import generation_pb2

STEPS = (0.6180339887498949, 0.4142135623730950, 0.7320508075688772)  # irrational, and independent of each other
APART = 1000  # seeds of the prompts of one schedule, which so compress well
PREFIXES = 16  # different shared prefixes
WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money"),
    *("story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side"),
    *("kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law"),
    *("car", "city", "name", "team", "minute", "idea", "body", "back", "parent", "face", "others", "level", "office"),
)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)


class Form(StrEnum):
    CHAT = "chat"
    TOKENS = "tokens"
    SHARED_PREFIX = "shared prefix"
    JSON = "json"


@dataclass(frozen=True)
class RequestClass:
    """`prompt`, `output`: least and most tokens, equally likely. A chat's prompt is in words, of about a token each.
    `prefix`: tokens of the prompt that many requests share. JSON ends where it is complete; all others run to their
    length."""

    form: Form
    prompt: tuple[int, int]
    output: tuple[int, int]
    weight: float = 1.0
    prefix: int = 0


CHAT = RequestClass(Form.CHAT, (16, 128), (8, 48))
LONG_PROMPT = RequestClass(Form.TOKENS, (512, 1024), (8, 32))
SHARED_PREFIX = RequestClass(Form.SHARED_PREFIX, (528, 576), (8, 48), prefix=512)
JSON = RequestClass(Form.JSON, (16, 64), (48, 64))
LONG = RequestClass(Form.TOKENS, (2048, 2048), (256, 256))
SHORT = RequestClass(Form.TOKENS, (4, 12), (8, 24))
BRIEF = RequestClass(Form.TOKENS, (4, 12), (2, 6))


def weighted(kind: RequestClass, weight: float) -> RequestClass:
    return RequestClass(kind.form, kind.prompt, kind.output, weight, kind.prefix)


MIXES: dict[str, dict[str, RequestClass]] = {
    "chat": {"chat": CHAT},
    "long-prompt": {"long-prompt": LONG_PROMPT},
    "shared-prefix": {"shared-prefix": SHARED_PREFIX},
    "json": {"json": JSON},
    "2048-256": {"2048-256": LONG},
    "short": {"short": SHORT},
    "brief": {"brief": BRIEF},
    "mixed": {
        "chat": weighted(CHAT, 0.7),
        "long-prompt": weighted(LONG_PROMPT, 0.1),
        "shared-prefix": weighted(SHARED_PREFIX, 0.1),
        "json": weighted(JSON, 0.1),
    },
}
KINDS = {name: kind for mix in MIXES.values() for name, kind in mix.items()} | {"replay": LONG}


class MixError(Exception):
    """No such mix; the message lists them."""


def mix_of(name: str) -> dict[str, RequestClass]:
    if name not in MIXES:
        raise MixError(f"--mix: no mix {name!r}; there are {', '.join(MIXES)}")
    return MIXES[name]


def deal(times: Sequence[float], mix: dict[str, RequestClass], seed: int, words: int = 0) -> list[Arrival]:
    """Gives each arrival a class, lengths and a seed of its prompt; the last from `words` as well. Classes and lengths
    follow sequences of low discrepancy: any stretch of arrivals has nearly the mix's own shares and mean lengths:
    levels differ in rate and not in work."""
    generator, first = random.Random(seed), random.Random(f"{seed}/{words}").getrandbits(48)
    kinds, prompts, outputs = (_spread(generator, step) for step in STEPS)
    total = sum(kind.weight for kind in mix.values())
    bounds = list(itertools.accumulate(kind.weight / total for kind in mix.values()))
    names = list(mix)
    arrivals = []
    for index, at in enumerate(times):
        mark = next(kinds)
        name = names[min(len(names) - 1, sum(bound <= mark for bound in bounds))]
        prompt, output = _length(mix[name].prompt, next(prompts)), _length(mix[name].output, next(outputs))
        arrivals.append(
            Arrival(at=round(at, 6), kind=name, seed=first + index * APART, prompt_tokens=prompt, output_tokens=output)
        )
    return arrivals


def _spread(generator: random.Random, step: float) -> Iterator[float]:
    """Steps around [0, 1) from a random start."""
    start = generator.random()
    return ((start + index * step) % 1.0 for index in itertools.count())


def _length(bounds: tuple[int, int], mark: float) -> int:
    return bounds[0] + int(mark * (bounds[1] - bounds[0] + 1))


class RequestBuilder:
    """Builds messages that depend on the arrival alone. vocabulary: ids of the served model's tokenizer that prompts of
    ids are drawn from. context: its limit in tokens; longer requests are cut to it."""

    def __init__(self, vocabulary: Sequence[int], context: int) -> None:
        self._vocabulary = list(vocabulary)
        self._context = context
        self._prefixes: dict[tuple[int, int], list[int]] = {}

    def build(self, arrival: Arrival, request_id: str = "") -> generation_pb2.StartGeneration:
        kind = KINDS[arrival.kind]
        generator = random.Random(arrival.seed)
        output = max(1, min(arrival.output_tokens, self._context - 1))
        prompt = max(1, min(arrival.prompt_tokens, self._context - output))
        start = generation_pb2.StartGeneration(
            request_id=request_id,
            sampling=generation_pb2.SamplingParameters(temperature=1.0, seed=arrival.seed),
            stop=generation_pb2.StopCriteria(max_tokens=output, ignore_eos=kind.form is not Form.JSON),
        )
        if kind.form in (Form.CHAT, Form.JSON):
            text = " ".join(generator.choices(WORDS, k=prompt))
            start.chat.messages.add(role="user", content=text)
        else:
            start.token_ids.ids.extend(self._ids(generator, kind, prompt))
        if kind.form is Form.JSON:
            start.structured_output.json_schema = SCHEMA
        return start

    def _ids(self, generator: random.Random, kind: RequestClass, prompt: int) -> list[int]:
        if kind.form is not Form.SHARED_PREFIX:
            return generator.choices(self._vocabulary, k=prompt)
        which, length = generator.randrange(PREFIXES), min(kind.prefix, prompt)
        if (which, length) not in self._prefixes:
            self._prefixes[which, length] = random.Random(which).choices(self._vocabulary, k=length)
        return self._prefixes[which, length] + generator.choices(self._vocabulary, k=prompt - length)
