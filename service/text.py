"""What the service needs of a tokenizer and of incremental text. The engine's own classes satisfy these protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from engine.types import TokenLogprob


class Tokenizer(Protocol):
    """The served model's tokenizer. Safe to call from several threads."""

    @property
    def size(self) -> int: ...

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Also each token's (start, end) in characters of the text."""
        ...

    def encode_chat(
        self,
        messages: list[dict[str, str]],
        add_generation_prompt: bool = True,
        template_arguments: dict[str, Any] | None = None,
    ) -> tuple[list[int], str]:
        """Token ids and the rendered prompt. Raises InvalidRequestError for what the template cannot render."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def to_json(self) -> str:
        """In the tokenizer.json format of Hugging Face."""
        ...


class Delta(Protocol):
    """Tokens that became final together with exactly their text. `stopped`: the stop sequence that matched."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def text(self) -> str: ...

    @property
    def logprobs(self) -> Sequence[TokenLogprob]: ...

    @property
    def stopped(self) -> str | None: ...


class OutputText(Protocol):
    """Turns one candidate's tokens into text, holding back what may still change or belong to a stop sequence."""

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Delta: ...

    def finish(self) -> Delta: ...


class OutputTextFactory(Protocol):
    def __call__(
        self,
        tokenizer: Any,
        stop_strings: Sequence[str],
        include_stop: bool,
        skip_special_tokens: bool,
    ) -> OutputText: ...
