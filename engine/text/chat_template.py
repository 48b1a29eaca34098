"""Renders a chat through the model's own template, and keeps control tokens out of what users wrote.

A special token written in a message must stay text. Strings from outside get an unguessable mark inside every such
occurrence before the template runs; what the template itself wrote has none. Where a mark survives rendering, the
prompt is tokenized with the template's control tokens under unguessable names, so that the forged ones are plain text
and everything else is tokenized as usual, in one piece.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ConfigurationError, InvalidRequestError

# Noncharacters: legal in a string, used by no script.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
RESERVED = frozenset({"messages", "add_generation_prompt"})


class _Generation(jinja2.ext.Extension):
    """Accepts {% generation %} blocks, which mark what the assistant said for training, and renders their body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


class ChatTemplate:
    """A compiled template. `constants` are the names of special tokens that templates use (bos_token, ...)."""

    def __init__(self, source: str, constants: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigurationError(f"the chat template does not compile: {error}") from None
        self.source = source
        self._constants = dict(constants)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, arguments: Mapping[str, Any]
    ) -> str:
        """Raises InvalidRequestError if the template refuses the chat or cannot render it."""
        values = {"tools": None, "documents": None, **self._constants, **arguments}
        try:
            return self._template.render(**values, messages=messages, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template may fail in any way on what it did not expect
            cause = str(error) or type(error).__name__
            raise InvalidRequestError("chat.messages", f"the model's chat template refuses it: {cause}") from None


class ControlTokens:
    """Tells a template's special tokens from the same characters in a user's text. A token of one character is no
    control token: it may be the very token that spells that character in plain text."""

    def __init__(self, specials: Sequence[str]) -> None:
        self._specials = sorted({token for token in specials if len(token) > 1}, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, self._specials)) or r"(?!)"
        self._starts = re.compile(f"(?={alternatives})(.)", re.DOTALL)
        self._real = re.compile(alternatives)
        self._prefixes = frozenset(token[:size] for token in self._specials for size in range(1, len(token)))
        self._longest = max(map(len, self._specials), default=0)
        nonce = secrets.token_hex(12)
        # Nobody outside this process can write these names.
        self.aliases = {token: f"\ue000{nonce}{index}\ue001" for index, token in enumerate(self._specials)}

    def choose_mark(self, value: Any) -> str:
        """A character that occurs nowhere in `value`, not even escaped."""
        for mark in _MARKS:
            if not _contains(value, mark) and not _contains(value, json.dumps(mark)[1:-1]):
                return mark
        raise InvalidRequestError("chat.messages", "the text uses every Unicode noncharacter")

    def mark(self, value: Any, mark: str) -> Any:
        """`value` with a mark inside each special token of each of its strings, and after a string's end that another
        string could complete to one."""
        if isinstance(value, str):
            return self._mark_text(value, mark)
        if isinstance(value, Mapping):
            return {self.mark(key, mark): self.mark(item, mark) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item, mark) for item in value]
        return value

    def alias(self, marked: str, mark: str) -> str:
        """Rendered text with unmarked special tokens under their aliases, and without marks."""
        return strip_mark(self._real.sub(lambda match: self.aliases[match[0]], marked), mark)

    def _mark_text(self, text: str, mark: str) -> str:
        marked = self._starts.sub(lambda match: match[1] + mark, text)
        tail = min(len(text), self._longest - 1)
        if any(text[-size:] in self._prefixes for size in range(1, tail + 1)):
            marked += mark
        return marked


def strip_mark(text: str, mark: str) -> str:
    """Without marks, also those that a template escaped to ASCII."""
    return text.replace(mark, "").replace(json.dumps(mark)[1:-1], "")


def _contains(value: Any, text: str) -> bool:
    if isinstance(value, str):
        return text in value
    if isinstance(value, Mapping):
        return any(_contains(key, text) or _contains(item, text) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return any(_contains(item, text) for item in value)
    return False


def aliased_tokenizer_json(tokenizer_json: str, aliases: Mapping[str, str]) -> str:
    """A serialised tokenizer in which each special token has only its alias: its own characters are plain text."""
    data = json.loads(tokenizer_json)
    for token in data["added_tokens"]:
        token["content"] = aliases.get(token["content"], token["content"])
    model = data["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {aliases.get(token, token): index for token, index in vocabulary.items()}
    else:
        model["vocab"] = [[aliases.get(token, token), score] for token, score in vocabulary]
    if "merges" in model:
        # A merge that spells a special token would name a token that is gone.
        model["merges"] = [merge for merge in model["merges"] if not set(_spelled(merge)) & aliases.keys()]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    data["post_processor"] = None
    return json.dumps(data)


def _spelled(merge: str | list[str]) -> tuple[str, ...]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right
