"""Tokenize, Detokenize, DownloadTokenizer."""

from __future__ import annotations

import hashlib

import grpc
import pytest
import tokenizers
from grpc import aio

from octavo.v1 import generation_pb2
from octavo.v1 import tokenization_pb2 as pb
from tests.service.calls import error_status
from tests.service.server import Running

HELLO = generation_pb2.ChatMessage(role="user", content="hi")


async def tokenize(served: Running, **fields: object) -> pb.TokenizeResponse:
    return await served.tokenization.Tokenize(pb.TokenizeRequest(**fields), timeout=5)  # type: ignore[arg-type]


async def test_text(served: Running) -> None:
    response = await tokenize(served, text="aé")
    assert list(response.token_ids) == [97, 0xC3, 0xA9]
    assert (response.token_count, response.max_context_tokens) == (3, 256)
    assert not response.start_offsets


async def test_offsets_are_in_bytes(served: Running) -> None:
    response = await tokenize(served, text="aéb", return_offsets=True)
    assert list(response.start_offsets) == [0, 1, 1, 3]
    assert list(response.end_offsets) == [1, 3, 3, 4]


async def test_chat_gives_the_rendered_prompt(served: Running) -> None:
    response = await tokenize(served, chat=generation_pb2.Chat(messages=[HELLO]))
    assert response.rendered_prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(response.token_ids).count(256) == 2


async def test_chat_without_generation_prompt(served: Running) -> None:
    chat = generation_pb2.Chat(messages=[HELLO], add_generation_prompt=False)
    assert (await tokenize(served, chat=chat)).rendered_prompt == "<|im_start|>user\nhi<|im_end|>\n"


async def test_empty_text_has_no_tokens(served: Running) -> None:
    assert (await tokenize(served, text="")).token_count == 0


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("input", {}),
        ("chat.messages", {"chat": generation_pb2.Chat()}),
        ("add_special_tokens", {"chat": generation_pb2.Chat(messages=[HELLO]), "add_special_tokens": True}),
        ("return_offsets", {"chat": generation_pb2.Chat(messages=[HELLO]), "return_offsets": True}),
    ],
)
async def test_bad_input_is_named(served: Running, path: str, fields: dict[str, object]) -> None:
    with pytest.raises(aio.AioRpcError) as error:
        await tokenize(served, **fields)
    assert error_status(error.value).fields == [path]


async def test_texts_beyond_a_bound_are_refused_by_name(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.convert.prompts.MAX_TOKENIZED_BYTES", 100)
    served.server.replica.max_prompt_bytes = 10
    assert (await tokenize(served, text="é" * 50)).token_count == 100
    long = generation_pb2.ChatMessage(role="user", content="x" * 97)
    for path, fields in (("text", {"text": "é" * 50 + "x"}), ("chat", {"chat": generation_pb2.Chat(messages=[long])})):
        with pytest.raises(aio.AioRpcError) as error:
            await tokenize(served, **fields)
        status = error_status(error.value)
        assert (status.code, status.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [path])
        assert status.message == f"{path}: has 101 bytes; at most 100 are tokenized at a time"
    served.server.replica.max_prompt_bytes = 101  # what may be a prompt may be counted
    assert (await tokenize(served, text="x" * 101)).token_count == 101


async def test_detokenize(served: Running) -> None:
    async def text(ids: list[int], skip_special_tokens: bool | None = None) -> pb.DetokenizeResponse:
        request = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip_special_tokens)
        return await served.tokenization.Detokenize(request, timeout=5)

    assert (await text([97, 0xC3, 0xA9])).text == "aé"
    broken = await text([97, 0xC3])
    assert (broken.text, broken.raw) == ("a�", b"a\xc3")
    assert (await text([97, 257])).text == "a"
    assert (await text([97, 257], skip_special_tokens=False)).text == "a<|im_end|>"


async def test_detokenize_refuses_ids_outside_the_vocabulary(served: Running) -> None:
    with pytest.raises(aio.AioRpcError) as error:
        await served.tokenization.Detokenize(pb.DetokenizeRequest(token_ids=[1, 300]), timeout=5)
    assert error_status(error.value).fields == ["token_ids[1]"]


async def test_ids_beyond_a_bound_are_refused_by_name(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they are looked at. Those of a whole context are always taken."""
    monkeypatch.setattr("service.convert.tokenization.MAX_DETOKENIZED_IDS", 100)
    most = served.engine.info.max_context_tokens
    assert (await served.tokenization.Detokenize(pb.DetokenizeRequest(token_ids=[97] * most), timeout=5)).text
    with pytest.raises(aio.AioRpcError) as error:
        await served.tokenization.Detokenize(pb.DetokenizeRequest(token_ids=[300] * (most + 1)), timeout=5)
    status = error_status(error.value)
    assert (status.code, status.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["token_ids"])
    assert status.message == f"token_ids: has {most + 1} ids; at most {most} are detokenized at a time"


async def test_downloaded_tokenizer_works(served: Running) -> None:
    chunks = [c async for c in served.tokenization.DownloadTokenizer(pb.DownloadTokenizerRequest(), timeout=5)]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert tokenizers.Tokenizer.from_str(data.decode()).encode("abc").ids == [97, 98, 99]


async def test_unknown_model_is_not_found_everywhere(served: Running) -> None:
    stub = served.tokenization
    for call in (
        stub.Tokenize(pb.TokenizeRequest(model="x", text="a"), timeout=5),
        stub.Detokenize(pb.DetokenizeRequest(model="x"), timeout=5),
    ):
        with pytest.raises(aio.AioRpcError) as error:
            await call
        assert error_status(error.value).code is grpc.StatusCode.NOT_FOUND
    with pytest.raises(aio.AioRpcError) as error:
        await stub.DownloadTokenizer(pb.DownloadTokenizerRequest(model="x"), timeout=5).read()
    assert error_status(error.value).code is grpc.StatusCode.NOT_FOUND
