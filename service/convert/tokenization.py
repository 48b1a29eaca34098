"""Tokenization requests and responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine import EngineInfo
from octavo.v1 import tokenization_pb2
from service.convert.fields import check_ids, or_default, refuse
from service.convert.model import ServedModel
from service.convert.prompts import parse_chat
from service.request import ChatPrompt, TextPrompt
from service.status import invalid

MAX_DETOKENIZED_IDS = 1 << 18  # about what MAX_TOKENIZED_BYTES gives


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Text or chat to tokenize. add_special_tokens None: the default of the input's kind."""

    prompt: TextPrompt | ChatPrompt
    add_special_tokens: bool
    offsets: bool


def parse_tokenize(request: tokenization_pb2.TokenizeRequest, model: ServedModel) -> Tokenization:
    model.check_name(request.model)
    match request.WhichOneof("input"):
        case "text":
            return Tokenization(
                TextPrompt(request.text), or_default(request, "add_special_tokens", True), request.return_offsets
            )
        case "chat":
            if request.add_special_tokens:
                problem = "has no meaning for chat: the template has them"
                raise refuse(invalid("add_special_tokens", problem))
            if request.return_offsets:
                raise refuse(invalid("return_offsets", "needs text: a chat is rendered before it is tokenized"))
            return Tokenization(parse_chat(request.chat, "chat"), False, False)
        case _:
            raise refuse(invalid("input", "is missing: set text or chat"))


def tokenize_response(
    token_ids: Sequence[int], offsets: Sequence[tuple[int, int]], rendered: str, info: EngineInfo
) -> tokenization_pb2.TokenizeResponse:
    """offsets: (start, end) of each token in the input's UTF-8 bytes, or none."""
    return tokenization_pb2.TokenizeResponse(
        token_ids=token_ids,
        start_offsets=[start for start, _ in offsets],
        end_offsets=[end for _, end in offsets],
        token_count=len(token_ids),
        max_context_tokens=info.max_context_tokens,
        rendered_prompt=rendered,
    )


def parse_detokenize(request: tokenization_pb2.DetokenizeRequest, model: ServedModel) -> tuple[list[int], bool]:
    """Token ids, and whether to skip special ones. Refuses more ids than a context has, or MAX_DETOKENIZED_IDS if that
    is more."""
    model.check_name(request.model)
    count, most = len(request.token_ids), max(MAX_DETOKENIZED_IDS, model.info.max_context_tokens)
    if count > most:
        raise refuse(invalid("token_ids", f"has {count} ids; at most {most} are detokenized at a time"))
    ids = list(request.token_ids)
    check_ids("token_ids", ids, model.info)
    return ids, or_default(request, "skip_special_tokens", True)


def detokenize_response(text: str, raw: bytes) -> tokenization_pb2.DetokenizeResponse:
    return tokenization_pb2.DetokenizeResponse(text=text, raw=raw)


def tokenizer_chunk(data: bytes, sha256: str = "") -> tokenization_pb2.DownloadTokenizerResponse:
    return tokenization_pb2.DownloadTokenizerResponse(data=data, sha256=sha256)
