"""TokenizationService: the served model's tokenizer, without the accelerator."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from grpc import aio

from engine import InvalidRequestError
from octavo.v1 import tokenization_pb2, tokenization_pb2_grpc
from service.convert.prompts import check_tokenized_bytes
from service.convert.tokenization import (
    detokenize_response,
    parse_detokenize,
    parse_tokenize,
    tokenize_response,
    tokenizer_chunk,
)
from service.replica import Replica
from service.request import ChatPrompt, TextPrompt
from service.status import RequestRefusedError, abort, internal, invalid

LOGGER = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 10

T = TypeVar("T")
Context = aio.ServicerContext[Any, Any]


class TokenizationService(tokenization_pb2_grpc.TokenizationServiceServicer):
    """Everything runs in the tokenizer's threads, so that a long text delays no stream."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def Tokenize(
        self, request: tokenization_pb2.TokenizeRequest, context: Context
    ) -> tokenization_pb2.TokenizeResponse:
        return await self._apart(context, lambda: self._tokenize(request))

    async def Detokenize(
        self, request: tokenization_pb2.DetokenizeRequest, context: Context
    ) -> tokenization_pb2.DetokenizeResponse:
        return await self._apart(context, lambda: self._detokenize(request))

    async def DownloadTokenizer(  # type: ignore[override]  # writes by context.write
        self, request: tokenization_pb2.DownloadTokenizerRequest, context: Context
    ) -> None:
        data = await self._apart(context, lambda: self._download(request))
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            last = start + CHUNK_BYTES >= len(data)
            await context.write(tokenizer_chunk(chunk, hashlib.sha256(data).hexdigest() if last else ""))

    async def _apart(self, context: Context, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._replica.tokenizer_threads, work)
        except RequestRefusedError as error:
            await abort(context, error.failure)
        except InvalidRequestError as error:
            await abort(context, invalid(error.field, error.message))
        except Exception as error:
            LOGGER.exception("tokenization failed")
            await abort(context, internal(f"{type(error).__name__} while tokenizing"))

    def _tokenize(self, request: tokenization_pb2.TokenizeRequest) -> tokenization_pb2.TokenizeResponse:
        tokenizer, info = self._replica.tokenizer, self._replica.info
        parsed = parse_tokenize(request, self._replica.model)
        check_tokenized_bytes(parsed.prompt, self._replica.max_prompt_bytes)
        match parsed.prompt:
            case TextPrompt(text):
                ids, spans = tokenizer.encode_with_offsets(text, add_special_tokens=parsed.add_special_tokens)
                return tokenize_response(ids, byte_offsets(text, spans) if parsed.offsets else [], "", info)
            case ChatPrompt(messages, add_generation_prompt, arguments):
                ids, rendered = tokenizer.encode_chat(messages, add_generation_prompt, arguments)
                return tokenize_response(ids, [], rendered, info)

    def _detokenize(self, request: tokenization_pb2.DetokenizeRequest) -> tokenization_pb2.DetokenizeResponse:
        tokenizer = self._replica.tokenizer
        ids, skip_special = parse_detokenize(request, self._replica.model)
        raw = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        return detokenize_response(tokenizer.decode(ids, skip_special_tokens=skip_special), raw)

    def _download(self, request: tokenization_pb2.DownloadTokenizerRequest) -> bytes:
        self._replica.model.check_name(request.model)
        return self._replica.tokenizer.to_json().encode()


def byte_offsets(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, end) of tokens in the text's UTF-8 bytes, from those in characters."""
    starts = list(accumulate((len(character.encode()) for character in text), initial=0))
    return [(starts[start], starts[end]) for start, end in spans]
