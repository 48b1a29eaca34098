"""One generation as the service sees it: validated, free of protobuf, not yet tokenized."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine import Grammar, SamplingParameters, StopCriteria


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`messages` have the keys role and content; `template_arguments` are extra variables of the chat template, which
    came as so many bytes of JSON."""

    messages: list[dict[str, str]]
    add_generation_prompt: bool = True
    template_arguments: dict[str, Any] | None = None
    argument_bytes: int = 0

    @property
    def text_bytes(self) -> int:
        written = sum(len(m["role"].encode()) + len(m["content"].encode()) for m in self.messages)
        return written + self.argument_bytes


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What a client wants back. `coalesce` is in seconds; `window` in unacknowledged tokens, 0 for none; `in_one`: all
    in one message."""

    text: bool = True
    token_ids: bool = False
    top_logprobs: int | None = None
    prompt_top_logprobs: int | None = None
    echo_prompt_token_ids: bool = False
    skip_special_tokens: bool = True
    coalesce: float = 0.0
    usage_in_deltas: bool = False
    in_one: bool = False
    window: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A validated request. `timeout` and `queue_timeout` are seconds from `arrival`, a `time.monotonic()` time."""

    request_id: str
    prompt: Prompt
    arrival: float
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stop: StopCriteria = field(default_factory=StopCriteria)
    stop_sequences: list[str] = field(default_factory=list)
    include_stop: bool = False
    output: OutputOptions = OutputOptions()
    grammar: Grammar | None = None
    priority: int = 0
    timeout: float | None = None
    queue_timeout: float | None = None
    cache_salt: str = ""
    cache_bypass: bool = False
