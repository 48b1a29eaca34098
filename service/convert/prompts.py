"""Prompts: text, token ids or a chat, and how long they may be."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

from engine import EngineInfo
from octavo.v1 import generation_pb2
from service.convert.fields import check_ids, or_default, refuse
from service.request import ChatPrompt, OutputOptions, Prompt, TextPrompt, TokenPrompt
from service.status import invalid, prompt_too_long

MAX_PROMPT_SCORES = 1 << 17  # some 3 MB: a unary response stays below what gRPC clients accept
MAX_TOKENIZED_BYTES = 1 << 20  # some second of a thread
MAX_UNARY_SCORES = 1 << 17  # of its output, for the same reason

_LINE_BREAKING = frozenset({"Cc", "Zl", "Zp"})  # Unicode's categories of control characters and separators


def parse_prompt(start: generation_pb2.StartGeneration, info: EngineInfo) -> Prompt:
    match start.WhichOneof("prompt"):
        case "text":
            if not start.text:
                raise refuse(invalid("start.text", "is empty"))
            return TextPrompt(start.text)
        case "token_ids":
            ids = list(start.token_ids.ids)
            if not ids:
                raise refuse(invalid("start.token_ids", "is empty"))
            check_ids("start.token_ids.ids", ids, info)
            check_prompt_length(len(ids), info)
            return TokenPrompt(ids)
        case "chat":
            return parse_chat(start.chat, "start.chat")
        case _:
            raise refuse(invalid("start.prompt", "is missing: set text, token_ids or chat"))


def parse_chat(chat: generation_pb2.Chat, path: str) -> ChatPrompt:
    if not chat.messages:
        raise refuse(invalid(f"{path}.messages", "is empty"))
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise refuse(invalid(f"{path}.messages[{index}].role", "is empty"))
        if any(unicodedata.category(char) in _LINE_BREAKING for char in message.role):
            # A template writes it as it stands: a line of its own could pass for the template's.
            raise refuse(invalid(f"{path}.messages[{index}].role", "has a line break or another control character"))
    return ChatPrompt(
        messages=[{"role": m.role, "content": m.content} for m in chat.messages],
        add_generation_prompt=or_default(chat, "add_generation_prompt", True),
        template_arguments=_parse_template_arguments(chat.template_arguments_json, path),
        argument_bytes=len(chat.template_arguments_json.encode()),
    )


def _parse_template_arguments(text: str, path: str) -> dict[str, Any] | None:
    if not text:
        return None
    field_path = f"{path}.template_arguments_json"
    try:
        value = json.loads(text)
    except RecursionError:
        raise refuse(invalid(field_path, "is nested too deeply")) from None
    except ValueError as error:
        raise refuse(invalid(field_path, f"is not JSON: {error}")) from None
    if not isinstance(value, dict):
        raise refuse(invalid(field_path, "is not a JSON object"))
    return value


def check_output_scores(tokens: int, output: OutputOptions, candidates: int) -> None:
    """Raises RequestRefusedError where a unary response could have more log probabilities than its client takes.
    tokens: the most that a candidate may have."""
    if not output.in_one or output.top_logprobs is None:
        return
    count = candidates * tokens * (1 + output.top_logprobs)
    if count > MAX_UNARY_SCORES:
        problem = f"could give {count} log probabilities; one response has at most {MAX_UNARY_SCORES}: use a stream"
        raise refuse(invalid("start.output.top_logprobs", problem))


def check_prompt_length(tokens: int, info: EngineInfo) -> None:
    """Raises RequestRefusedError, with the numbers, for prompts of no token or of more than the model takes."""
    if tokens == 0:
        raise refuse(invalid("start.prompt", "is empty once tokenized"))
    if tokens > info.max_prompt_tokens:
        raise refuse(
            prompt_too_long(
                f"the prompt has {tokens} tokens; at most {info.max_prompt_tokens} fit "
                f"(context {info.max_context_tokens})",
                {"prompt_tokens": tokens, **_length_limits(info)},
            )
        )


def check_prompt_bytes(size: int, most: int, info: EngineInfo) -> None:
    """Refuses text that cannot fit even if every token were the vocabulary's longest, before it is tokenized."""
    if size > most:
        raise refuse(
            prompt_too_long(
                f"the prompt has {size} bytes; {info.max_prompt_tokens} tokens hold at most {most}",
                {"prompt_bytes": size, "max_prompt_bytes": most, **_length_limits(info)},
            )
        )


def check_tokenized_bytes(prompt: TextPrompt | ChatPrompt, most_of_prompt: int) -> None:
    """Refuses to tokenize more than a prompt may have, or MAX_TOKENIZED_BYTES if that is more."""
    size, most = text_bytes(prompt), max(MAX_TOKENIZED_BYTES, most_of_prompt)
    if size > most:
        path = "text" if isinstance(prompt, TextPrompt) else "chat"
        raise refuse(invalid(path, f"has {size} bytes; at most {most} are tokenized at a time"))


def text_bytes(prompt: Prompt) -> int:
    """Of what has to be tokenized, in UTF-8."""
    match prompt:
        case TextPrompt(text):
            return len(text.encode())
        case ChatPrompt() as chat:
            return chat.text_bytes
        case TokenPrompt():
            return 0


def check_prompt_scores(tokens: int, top: int | None) -> None:
    """Raises RequestRefusedError where a prompt's log probabilities are more than its client could be sent."""
    if top is not None and tokens * (1 + top) > MAX_PROMPT_SCORES:
        problem = f"is {top}: {tokens} prompt tokens then have more than {MAX_PROMPT_SCORES} log probabilities"
        raise refuse(invalid("start.output.prompt_top_logprobs", problem))


def _length_limits(info: EngineInfo) -> dict[str, int]:
    return {"max_prompt_tokens": info.max_prompt_tokens, "max_context_tokens": info.max_context_tokens}
