"""EngineClient by thread and by process: the same events, cancels, stops and deaths."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from engine import ConfigurationError, EngineConfig, EngineDiedError, EngineState, create_engine_client
from engine.local import LocalEngineClient
from engine.process import ProcessEngineClient
from engine.types import (
    Admitted,
    BlockStored,
    CacheChange,
    Event,
    FailureKind,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParameters,
    StopCriteria,
    TokensGenerated,
)
from tests.model.tiny import write_tiny_model
from tests.service.process import ROOT

pytestmark = pytest.mark.asyncio(loop_scope="module")

Client = LocalEngineClient | ProcessEngineClient


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def config(path: Path) -> EngineConfig:
    return EngineConfig(model=str(path), max_num_seqs=4, max_model_len=400, block_size=4, num_threads=1)


@asynccontextmanager
async def started(path: Path, kind: str) -> AsyncIterator[Client]:
    made = create_engine_client(config(path), in_process=kind == "thread")
    assert isinstance(made, Client)
    await made.start()
    assert made.stats.heartbeat > 0  # known from the start
    yield made
    await made.stop()


@pytest_asyncio.fixture(params=["thread", "process"], scope="module", loop_scope="module")
async def lasting(request: pytest.FixtureRequest, tiny: Path) -> AsyncIterator[Client]:
    """A process takes seconds to start: one serves test after test."""
    async with started(tiny, request.param) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(lasting: Client) -> AsyncIterator[Client]:
    """Holds nothing before and after."""
    await idle(lasting)
    yield lasting
    await idle(lasting)
    assert lasting.state is EngineState.READY


class Collector:
    """A sink that can be waited on."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = asyncio.Event()

    def __call__(self, events: Sequence[Event]) -> None:
        self.events += events
        self._changed.set()

    async def until(self, kind: type) -> Event:
        async with asyncio.timeout(60):
            while True:
                for event in self.events:
                    if isinstance(event, kind):
                        return event
                self._changed.clear()
                await self._changed.wait()

    @property
    def tokens(self) -> list[int]:
        return [t for event in self.events if isinstance(event, TokensGenerated) for t in event.token_ids]


def item(name: str, max_tokens: int = 8, n: int = 1) -> GenerationRequest:
    sampling = SamplingParameters(temperature=0.0, n=n)
    return GenerationRequest(name, [3, 4, 5, 6], sampling, StopCriteria(max_tokens=max_tokens, ignore_eos=True))


async def idle(client: Client) -> None:
    async with asyncio.timeout(30):
        while client.stats.live_blocks or client.stats.running_requests or client.stats.queued_requests:
            await asyncio.sleep(0.02)


async def test_events_in_order(client: Client) -> None:
    sink, other = Collector(), Collector()
    client.submit(item("a"), sink)
    client.submit(item("b", 5), other)
    await sink.until(RequestFinished)
    await other.until(RequestFinished)
    assert isinstance(sink.events[0], Admitted)
    assert isinstance(sink.events[-1], RequestFinished)
    assert len(sink.tokens) == 8
    assert sink.tokens[:5] == other.tokens
    assert {event.request_id for event in sink.events} == {"a"}
    await idle(client)


async def test_cancel_frees_and_tells(client: Client) -> None:
    sink = Collector()
    client.submit(item("a", 380), sink)
    await sink.until(TokensGenerated)
    assert client.cancel("a")
    end = await sink.until(RequestFinished)
    assert isinstance(end, RequestFinished)
    assert end.cancelled
    assert sink.events[-1] is end
    assert not client.cancel("a")
    assert not client.cancel("unknown")
    await idle(client)


async def test_stopped_candidate_is_silent_and_the_other_goes_on(client: Client) -> None:
    sink = Collector()
    client.submit(item("a", 60, n=2), sink)
    await sink.until(TokensGenerated)
    client.stop_candidate("a", 0)
    seen = len([e for e in sink.events if isinstance(e, TokensGenerated) and e.candidate == 0])
    await sink.until(RequestFinished)
    tokens = [e.candidate for e in sink.events if isinstance(e, TokensGenerated)]
    assert tokens.count(0) == seen < 60
    assert tokens.count(1) == 60
    await idle(client)


async def test_a_live_id_is_refused(client: Client) -> None:
    sink, second = Collector(), Collector()
    client.submit(item("a", 200), sink)
    client.submit(item("a"), second)
    failure = await second.until(RequestFailed)
    assert isinstance(failure, RequestFailed)
    assert (failure.kind, failure.field) == (FailureKind.INVALID, "request_id")
    await sink.until(RequestFinished)


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_cache_is_read_and_followed(tiny: Path, kind: str) -> None:
    """What was there before the first read, what came after, and nothing of what has a salt."""
    async with started(tiny, kind) as client:
        await read_and_follow(client)


async def read_and_follow(client: Client) -> None:
    sink, salted, late = Collector(), Collector(), Collector()
    client.submit(msgspec.structs.replace(item("a", 20), prompt_token_ids=list(range(3, 43))), sink)
    client.submit(msgspec.structs.replace(item("b", 20), cache_salt="tenant"), salted)
    await sink.until(RequestFinished)
    await salted.until(RequestFinished)
    changes: list[CacheChange] = []
    client.on_cache_changes(changes.extend)
    piece = await client.read_cache(0)
    block = client.info.block_size
    assert [tuple(stored.token_ids) for stored in piece.blocks][: 40 // block] == [
        tuple(range(3 + begin, 3 + begin + block)) for begin in range(0, 40 // block * block, block)
    ]
    assert piece.blocks[0].parent is None
    assert [stored.parent for stored in piece.blocks[1:]] == [stored.hash for stored in piece.blocks[:-1]]
    assert len(piece.blocks) == (40 + 20 - 1) // block
    assert changes == []
    client.submit(msgspec.structs.replace(item("c", 2), prompt_token_ids=list(range(100, 140))), late)
    await late.until(RequestFinished)
    assert [change.token_ids[0] for change in changes if isinstance(change, BlockStored)] == [
        100 + begin for begin in range(0, 40 // block * block, block)
    ]


async def test_reading_the_cache_of_an_engine_that_ends(tiny: Path) -> None:
    client = create_engine_client(config(tiny), in_process=True)
    await client.start()
    await client.read_cache(0)
    await client.stop()
    with pytest.raises(EngineDiedError):
        await client.read_cache(0)


async def test_heartbeat_goes_on_when_idle(client: Client) -> None:
    seen: list[float] = []
    client.on_stats(lambda stats, state: seen.append(stats.heartbeat))
    async with asyncio.timeout(30):
        while len(set(seen)) < 3:
            await asyncio.sleep(0.05)
    assert client.state is EngineState.READY


async def test_events_come_after_the_loop_was_busy(client: Client) -> None:
    """Heartbeats arrive while the event loop is held up; a request sent right then must still be heard of."""
    for turn in range(4):
        await asyncio.sleep(0.05)
        time.sleep(0.3)  # noqa: ASYNC251  # the loop is to be busy
        sink = Collector()
        client.submit(item(str(turn)), sink)
        async with asyncio.timeout(10):
            await sink.until(RequestFinished)
    assert client.stats.heartbeat > 0


async def test_stop_fails_what_is_live_and_is_idempotent(tiny: Path) -> None:
    for in_process in (True, False):
        client = create_engine_client(config(tiny), in_process=in_process)
        await client.start()
        sink = Collector()
        client.submit(item("a", 380), sink)
        await sink.until(TokensGenerated)
        await client.stop()
        failure = await sink.until(RequestFailed)
        assert isinstance(failure, RequestFailed)
        assert failure.kind is FailureKind.ENGINE_DIED
        assert client.state is EngineState.STOPPED
        with pytest.raises(EngineDiedError):
            client.submit(item("b"), sink)
        await client.stop()


async def test_death_of_the_process_fails_every_request(tiny: Path) -> None:
    client = ProcessEngineClient(config(tiny))
    await client.start()
    states: list[EngineState] = []
    client.on_stats(lambda stats, state: states.append(state))
    sinks = [Collector(), Collector()]
    for index, sink in enumerate(sinks):
        client.submit(item(str(index), 380), sink)
        await sink.until(TokensGenerated)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    for sink in sinks:
        failure = await sink.until(RequestFailed)
        assert isinstance(failure, RequestFailed)
        assert failure.kind is FailureKind.ENGINE_DIED
        assert sink.events[-1] is failure
    assert client.state is EngineState.FAILED
    assert "-9" in client.problem
    assert states[-1] is EngineState.FAILED
    with pytest.raises(EngineDiedError):
        client.submit(item("x"), sinks[0])
    await client.stop()


@pytest.mark.parametrize("in_process", [True, False])
async def test_a_model_that_is_not_there_is_one_line(in_process: bool) -> None:
    client = create_engine_client(EngineConfig(model="/nowhere/at-all"), in_process=in_process)
    with pytest.raises(ConfigurationError, match="nowhere") as caught:
        await client.start()
    assert "\n" not in str(caught.value)
    await client.stop()


@pytest.mark.parametrize("in_process", [True, False])
async def test_a_configuration_that_cannot_be_names_its_setting(in_process: bool) -> None:
    client = create_engine_client(EngineConfig(model="/nowhere", block_size=24), in_process=in_process)
    with pytest.raises(ConfigurationError, match="block_size") as caught:
        await client.start()
    assert caught.value.settings == ("block_size",)
    await client.stop()


_PARENT = """
import asyncio, sys
from engine import EngineConfig, create_engine_client
async def main():
    client = create_engine_client(EngineConfig(model=sys.argv[1], max_model_len=64, num_threads=1))
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_the_engine_process_does_not_outlive_its_parent(tiny: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PARENT, str(tiny)), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(30):
        with contextlib.suppress(psutil.NoSuchProcess):
            while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.05)
