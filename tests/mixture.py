"""Random requests of every kind that a batch can mix: greedy and drawn in every way, penalised, masked, bound to a
grammar, with log probabilities and candidates. Every one is reproducible. Figures are exact in fp32, as messages have
them."""

from __future__ import annotations

import json
import random
from typing import Any

from engine.types import GenerationRequest, Grammar, GrammarKind, SamplingParameters, StopCriteria

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 1.25},
    {"temperature": 0.75, "top_k": 8},
    {"top_p": 0.75},
    {"temperature": 1.5, "min_p": 0.125},
    {"temperature": 1.25, "top_k": 60, "top_p": 0.875, "min_p": 0.0625},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.25, "frequency_penalty": 1.5, "top_k": 20},
    {"temperature": 0.0, "logit_bias": {60: 4.0, 61: -8.0}},
    {"temperature": 1.0, "allowed_token_ids": list(range(100, 140))},
]
GRAMMARS = [
    Grammar(GrammarKind.REGEX, "[a-c]{3,9}-[0-9]{2}"),
    Grammar(GrammarKind.CHOICES, json.dumps(["yes", "no", "perhaps"])),
]


def random_request(source: random.Random, name: str, vocab_size: int = 512) -> GenerationRequest:
    """Prompts of 1 to 40 tokens, of which many begin alike, and 1 to 24 tokens of output."""
    way = {"seed": source.randrange(2**32), **source.choice(WAYS)}
    grammar = source.choice(GRAMMARS) if "allowed_token_ids" not in way and source.random() < 0.15 else None
    if way.get("temperature") != 0.0:
        way["n"] = source.choice([1, 1, 1, 2, 3])
    stop: dict[str, Any] = {"max_tokens": source.randint(1, 24)}
    if grammar is None:
        stop |= source.choice([{"ignore_eos": True}, {"min_tokens": source.randint(0, 6)}])
        stop["token_ids"] = source.choice([[], [], list(range(200, 220))])
    common, own = source.choice([0, 4, 17]), source.randint(1, 23)
    return GenerationRequest(
        name,
        [*range(50, 50 + common), *(source.randrange(3, vocab_size) for _ in range(own))],
        SamplingParameters(**way),
        StopCriteria(**stop),
        top_logprobs=source.choice([None, None, 0, 3]),
        prompt_top_logprobs=source.choice([None, None, None, None, 2]),
        grammar=grammar,
        priority=source.choice([0, 0, 0, 1]),
        cache_salt=source.choice(["", "", "tenant"]),
        cache_bypass=source.random() < 0.1,
    )
