"""Grammars by thread and by process: hostile ones hold nobody up, and nothing outlives the engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import pytest_asyncio

from engine.process import ProcessEngineClient
from engine.text.tokenizer import Tokenizer
from engine.types import (
    Event,
    FailureKind,
    GenerationRequest,
    Grammar,
    GrammarKind,
    PromptScored,
    RequestFailed,
    RequestFinished,
    SamplingParameters,
    StopCriteria,
)
from tests.grammar.test_compiler import nested_all_of
from tests.model.tiny import write_byte_level_model
from tests.test_clients_of_engine import Client, Collector, config, idle, item, started

pytestmark = pytest.mark.asyncio(loop_scope="module")

REGEX = Grammar(GrammarKind.REGEX, "[a-c]{3,9}-[0-9]{2}")
HOSTILE = Grammar(GrammarKind.JSON_SCHEMA, nested_all_of(30))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest_asyncio.fixture(params=["thread", "process"], scope="module", loop_scope="module")
async def client(request: pytest.FixtureRequest, tiny: Path) -> AsyncIterator[Client]:
    async with started(tiny, request.param) as made:
        yield made
        await idle(made)


def constrained(name: str, grammar: Grammar) -> GenerationRequest:
    sampling = SamplingParameters(seed=5)
    stop = StopCriteria(max_tokens=60)
    return GenerationRequest(name, [3, 4, 5], sampling, stop, grammar=grammar, prompt_top_logprobs=1)


async def until_last(sink: Collector) -> Event:
    async with asyncio.timeout(60):
        while not (sink.events and isinstance(sink.events[-1], RequestFinished | RequestFailed)):
            await asyncio.sleep(0.01)
    return sink.events[-1]


async def test_an_answer_follows_its_grammar_and_has_its_prompts_scores(client: Client, tiny: Path) -> None:
    sink = Collector()
    client.submit(constrained("a", REGEX), sink)
    assert isinstance(await until_last(sink), RequestFinished)
    text = Tokenizer.load(str(tiny)).decode(sink.tokens)
    assert re.fullmatch(REGEX.text, text), text
    scores = [score.token_id for event in sink.events if isinstance(event, PromptScored) for score in event.logprobs]
    assert scores == [4, 5]


async def test_hostile_grammars_hold_no_stream_up(client: Client) -> None:
    """Tokens go on coming while the grammars are tried, one after the other, each to its limit."""
    hostile = [Collector() for _ in range(3)]
    for index, sink in enumerate(hostile):
        client.submit(constrained(f"hostile{index}", HOSTILE), sink)
    finished = 0
    while not all(sink.events for sink in hostile):
        stream = Collector()
        client.submit(item(f"stream{finished}", max_tokens=300), stream)
        await stream.until(RequestFinished)
        assert len(stream.tokens) == 300
        finished += not all(sink.events for sink in hostile)
    for sink in hostile:
        [failure] = sink.events
        assert isinstance(failure, RequestFailed)
        assert failure.kind is FailureKind.GRAMMAR_INVALID
        assert "MiB" in failure.message
    assert finished >= 1
    await idle(client)


async def test_the_trial_ends_with_its_engine(tiny: Path) -> None:
    client = ProcessEngineClient(config(tiny))
    await client.start()
    sink = Collector()
    client.submit(constrained("a", REGEX), sink)
    await until_last(sink)
    assert client.pid is not None
    engine = psutil.Process(client.pid)
    [trial] = [child for child in engine.children() if "checker.py" in " ".join(child.cmdline())]
    client.submit(constrained("b", HOSTILE), sink)
    await asyncio.sleep(0.2)
    engine.kill()
    async with asyncio.timeout(30):
        while trial.is_running() and trial.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.05)
    await client.stop()
