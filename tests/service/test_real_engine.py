"""Text and sampling through gRPC with a real engine behind it, a tiny model in fp32: what a client asks for is what the
engine does when it is asked directly."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import aio
from msgspec import structs

from engine import (
    EngineConfig,
    GenerationRequest,
    Grammar,
    GrammarKind,
    SamplingParameters,
    StopCriteria,
    Tokenizer,
    TokenLogprob,
    load_tokenizer,
)
from engine.engine import Engine
from engine.generation_result import GenerationResult
from engine.local import LocalEngineClient
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import tokenization_pb2
from service.config import ServiceConfig
from service.server import Server
from tests.mixture import random_request
from tests.model.tiny import write_tiny_model
from tests.service.calls import RequestLog, Stream, cancel_message, run_bidi, run_stream, run_unary, start_message
from tests.service.server import Running
from tests.text.corpus import CORPUS, PROMPTS

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [7, 300, 12, 45, 45, 9, 200, 31]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "neutral": {"seed": 1},
    "temperature": {"temperature": 0.5, "seed": 2},
    "top_k": {"top_k": 4, "seed": 3},
    "top_p": {"top_p": 0.5, "seed": 4},
    "min_p": {"min_p": 0.25, "seed": 5},
    "repetition": {"temperature": 0.0, "repetition_penalty": 2.0},
    "presence": {"temperature": 0.0, "presence_penalty": -2.0},
    "frequency": {"seed": 6, "temperature": 0.25, "frequency_penalty": 2.0},
    "bias": {"temperature": 0.0, "logit_bias": {60: 8.0, 61: -8.0}},
    "allowed": {"seed": 7, "allowed_token_ids": list(range(100, 110))},
    "candidates": {"seed": 8, "n": 3, "temperature": 1.25},
    "mixture": {"seed": 9, "temperature": 1.25, "top_k": 60, "top_p": 0.875, "frequency_penalty": 0.5},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="module")
def config(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), max_num_seqs=16, max_model_len=512, block_size=4, num_threads=1)


@pytest.fixture(scope="module")
def direct(config: EngineConfig) -> Engine:
    return Engine(config)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(str(model))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(config: EngineConfig, tokenizer: Tokenizer) -> AsyncIterator[Running]:
    engine = LocalEngineClient(config)
    await engine.start()
    server = Server(engine, tokenizer, ServiceConfig(port=0, drain_grace=0.0))
    await server.start()
    async with aio.insecure_channel(server.address) as channel:
        yield Running(server, engine, channel)  # type: ignore[arg-type]  # not the scripted one
    await server.stop()
    await engine.stop()


def asked(sampling: dict[str, Any], stop: dict[str, Any] | None = None, **fields: Any) -> pb.StartGeneration:
    fields.setdefault("output", pb.OutputOptions(token_ids=True))
    return pb.StartGeneration(
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParameters(**sampling),
        stop=pb.StopCriteria(**(stop or {"max_tokens": 12, "ignore_eos": True})),
        **fields,
    )


def alone(direct: Engine, sampling: dict[str, Any], stop: dict[str, Any] | None = None) -> GenerationResult:
    criteria = StopCriteria(**(stop or {"max_tokens": 12, "ignore_eos": True}))
    item = GenerationRequest("a", PROMPT, SamplingParameters(**sampling), criteria, top_logprobs=3)
    return direct.generate([item])[0]


def candidates_of(log: RequestLog, count: int) -> list[list[int]]:
    return [log.token_ids(index) for index in range(count)]


async def test_every_sampling_field_in_one_batch_equals_the_engine_alone(served: Running, direct: Engine) -> None:
    requests = []
    for name, fields in SAMPLING.items():
        request = asked(fields, request_id=name)
        requests.append(pb.GenerateRequest(start=request))
    for order in (requests, requests[::-1]):
        logs = await run_bidi(served, *order)
        for name, fields in SAMPLING.items():
            expected = [candidate.token_ids for candidate in alone(direct, fields).candidates]
            assert candidates_of(logs[name], len(expected)) == expected, name
    distinct = {tuple(logs[name].token_ids()) for name in SAMPLING}
    assert len(distinct) == len(SAMPLING), "a field that does not show"


async def test_a_seed_is_reproducible_and_its_absence_is_not(served: Running) -> None:
    runs = [await run_stream(served, asked({"temperature": 1.5, "n": 2})) for _ in range(2)]
    assert len({tuple(log.token_ids(index)) for log in runs for index in range(2)}) == 4
    drawn = runs[0].admitted.sampling.seed
    again = await run_stream(served, asked({"temperature": 1.5, "n": 2, "seed": drawn}))
    assert candidates_of(again, 2) == candidates_of(runs[0], 2)


@pytest.mark.parametrize("least", [0, 1, 7])
async def test_min_tokens(served: Running, direct: Engine, least: int) -> None:
    """The end would come at once: it is what the bias asks for."""
    [eos] = direct.info.eos_token_ids[:1]
    sampling = {"temperature": 0.0, "logit_bias": {eos: 100.0}}
    log = await run_stream(served, asked(sampling, {"max_tokens": 20, "min_tokens": least}))
    assert log.finish_reason() == "END_OF_SEQUENCE"
    assert len(log.token_ids()) == least
    assert log.finished.usage.completion_tokens == least + 1


async def test_ignore_eos_and_stop_tokens(served: Running, direct: Engine) -> None:
    eos = direct.info.eos_token_ids
    sampling = {"temperature": 0.0, "allowed_token_ids": eos}
    through = await run_stream(served, asked(sampling, {"max_tokens": 9, "ignore_eos": True}))
    assert (through.finish_reason(), len(through.token_ids())) == ("MAX_TOKENS", 9)
    stopped = await run_stream(served, asked(sampling, {"max_tokens": 9, "ignore_eos": True, "token_ids": eos}))
    assert (stopped.finish_reason(), len(stopped.token_ids())) == ("STOP", 0)
    kept = asked(sampling, {"max_tokens": 9, "ignore_eos": True, "token_ids": eos, "include_in_output": True})
    assert len((await run_stream(served, kept)).token_ids()) == 1


async def test_stop_sequences_and_their_inclusion(served: Running, direct: Engine, tokenizer: Tokenizer) -> None:
    whole = tokenizer.decode(alone(direct, {"temperature": 0.0}).token_ids)
    stop = whole[len(whole) // 2 :][:3]
    before = whole[: whole.index(stop)]
    for include, expected in ((False, before), (True, before + stop)):
        fields = {"max_tokens": 12, "ignore_eos": True, "sequences": ["\x00", stop], "include_in_output": include}
        log = await run_stream(served, asked({"temperature": 0.0}, fields))
        assert log.text() == expected
        finish = log.finish()
        assert finish is not None
        assert (finish.reason, finish.sequence) == (pb.FINISH_REASON_STOP, stop)


async def test_echo_and_log_probabilities_of_prompt_and_output(served: Running, direct: Engine) -> None:
    sampling = SamplingParameters(temperature=0.0)
    criteria = StopCriteria(max_tokens=12, ignore_eos=True)
    item = GenerationRequest("a", PROMPT, sampling, criteria, top_logprobs=3, prompt_top_logprobs=2)
    expected = direct.generate([item])[0]
    output = pb.OutputOptions(token_ids=True, top_logprobs=3, prompt_top_logprobs=2, echo_prompt_token_ids=True)
    log = await run_stream(served, asked({"temperature": 0.0}, output=output))
    assert list(log.admitted.prompt.token_ids) == PROMPT
    scores = [score for event in log.events for score in event.prompt.logprobs]
    assert not scores[0].HasField("logprob")
    assert [told(score) for score in scores[1:]] == [meant(score) for score in expected.prompt_logprobs]
    found = [told(logprob) for delta in log.deltas for logprob in delta.logprobs]
    assert found == [meant(score) for score in expected.candidates[0].logprobs]


def message_of(request: GenerationRequest) -> pb.GenerateRequest:
    fields = {name: value for name, value in structs.asdict(request.sampling).items() if value is not None}
    output = pb.OutputOptions(token_ids=True, top_logprobs=request.top_logprobs)
    if request.prompt_top_logprobs is not None:
        output.prompt_top_logprobs = request.prompt_top_logprobs
    start = pb.StartGeneration(
        request_id=request.request_id,
        token_ids=pb.TokenIds(ids=request.prompt_token_ids),
        sampling=pb.SamplingParameters(**fields),
        stop=pb.StopCriteria(**structs.asdict(request.stop), include_in_output=True),
        output=output,
        scheduling=pb.Scheduling(priority=request.priority),
        cache=pb.CacheOptions(salt=request.cache_salt, bypass=request.cache_bypass),
    )
    match request.grammar:
        case Grammar(GrammarKind.REGEX, text):
            start.structured_output.regex = text
        case Grammar(GrammarKind.CHOICES, text):
            start.structured_output.choices.choices.extend(json.loads(text))
    return pb.GenerateRequest(start=start)


async def test_a_random_stream_of_all_kinds_gives_each_what_it_gives_alone(served: Running, direct: Engine) -> None:
    """On one stream, at most ten at once, some of them cancelled."""
    source, stream = random.Random(1), Stream(served)
    requests = {str(index): random_request(source, str(index)) for index in range(50)}
    sent: list[str] = []
    cancelled: set[str] = set()
    while not all(stream.logs[name].ended for name in requests):
        live = [name for name in sent if not stream.logs[name].ended]
        if len(sent) < len(requests) and len(live) < 10:
            sent.append(str(len(sent)))
            await stream.send(message_of(requests[sent[-1]]))
        elif source.random() < 0.05:
            cancelled.add(name := source.choice(live))
            await stream.send(cancel_message(name))
        else:
            assert await stream.read()
    assert await stream.finish() is grpc.StatusCode.OK
    assert cancelled
    for name, request in requests.items():
        [expected], log = direct.generate([request]), stream.logs[name]
        assert log.kinds[-1] == "finished", log.events[-1]
        for index, candidate in enumerate(expected.candidates):
            found = log.token_ids(index)
            scores = [told(score) for delta in log.deltas if delta.candidate_index == index for score in delta.logprobs]
            meant_scores = [meant(score) for score in candidate.logprobs]
            if name in cancelled:
                assert found == candidate.token_ids[: len(found)], request
                assert scores == meant_scores[: len(scores)]
            else:
                assert found == candidate.token_ids, request
                assert scores == meant_scores
                assert candidate.finish is not None
                assert log.finish_reason(index) == candidate.finish.reason.name


def told(score: pb.TokenLogprob) -> tuple[Any, ...]:
    top = [(item.token_id, pytest.approx(item.logprob, abs=1e-6)) for item in score.top]
    return score.token_id, pytest.approx(score.logprob, abs=1e-6), score.rank, top


def meant(score: TokenLogprob) -> tuple[Any, ...]:
    return score.token_id, score.logprob, score.rank, score.top


async def test_prompts_in_every_script_there_and_back(served: Running, tokenizer: Tokenizer) -> None:
    """Through the chat path: the prompt's tokens say what was written, and the answer's pieces join to its tokens'
    text."""
    texts = [*PROMPTS.values(), *CORPUS]
    requests = [
        start_message(
            request_id=str(index),
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=text)]),
            sampling=pb.SamplingParameters(seed=index),
            output=pb.OutputOptions(token_ids=True, echo_prompt_token_ids=True, skip_special_tokens=False),
            max_tokens=8,
        )
        for index, text in enumerate(texts)
    ]
    logs = {}
    for first in range(0, len(requests), 16):
        logs |= await run_bidi(served, *requests[first : first + 16])
    for index, text in enumerate(texts):
        log = logs[str(index)]
        prompt = list(log.admitted.prompt.token_ids)
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])
        rendered = await served.tokenization.Tokenize(tokenization_pb2.TokenizeRequest(chat=chat), timeout=10)
        assert prompt == list(rendered.token_ids)
        back = await served.tokenization.Detokenize(
            tokenization_pb2.DetokenizeRequest(token_ids=prompt, skip_special_tokens=False), timeout=10
        )
        assert f"user\n{text}<|im_end|>" in back.text
        assert log.text() == tokenizer.decode(log.token_ids(), skip_special_tokens=False)


async def test_unary_answers_are_those_of_the_stream(served: Running, direct: Engine) -> None:
    for name in ("greedy", "candidates", "mixture"):
        response = await run_unary(served, asked(SAMPLING[name]))
        expected = [candidate.token_ids for candidate in alone(direct, SAMPLING[name]).candidates]
        assert [list(candidate.token_ids) for candidate in response.candidates] == expected
