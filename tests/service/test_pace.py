"""With many streams open, each sends what several steps brought in one message; first tokens and ends never wait."""

from __future__ import annotations

import pytest

from octavo.v1 import generation_pb2 as pb
from service import pace as pacing
from service.pace import MOST_PACE_SECONDS, pace
from tests.service.calls import Stream, run_stream, start, start_message
from tests.service.fake_engine import Script
from tests.service.server import Running


def test_few_streams_send_every_token_at_once_and_no_token_waits_long() -> None:
    paces = [pace(streams) for streams in range(1000)]
    assert paces[1] == paces[3] == 0.0
    assert paces == sorted(paces)
    assert paces[8] < 0.006
    assert paces[64] == paces[-1] == MOST_PACE_SECONDS == 0.010


def test_messages_of_several_streams_take_an_eighth_of_a_core() -> None:
    assert all(streams / pace(streams) < 1600 for streams in range(4, 16))


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever waits for its turn waits for longer than any of these tests may take."""
    monkeypatch.setattr(pacing, "pace", lambda streams: 3600.0)


@pytest.mark.usefixtures("paced")
async def test_tokens_of_several_steps_share_a_message(served: Running) -> None:
    served.engine.step_delay = 0.005
    log = await run_stream(served, start(max_tokens=26))
    assert log.text() == "abcdefghijklmnopqrstuvwxyz"
    assert log.deltas[0].token_count == 1
    assert len(log.deltas) <= 3


@pytest.mark.usefixtures("paced")
async def test_each_first_token_goes_at_once(served: Running) -> None:
    """Also that of a second request on a stream that has just sent."""
    served.engine.plan = lambda _: Script(steps_per_token=10**9, steps_before_first=0)
    stream = Stream(served)
    for request_id in ("a", "b", "c"):
        await stream.send(start_message(request_id=request_id))
        while not stream.logs[request_id].events:
            await stream.read()
        (live,) = [live for live in served.engine.live if live.steps < 10**9 and live.script.steps_per_token > 1]
        live.script = Script(steps_per_token=1)
        await stream.read_until_tokens(request_id, 1)
        live.script = Script(steps_per_token=10**9 + 1)
        live.steps = 10**9
    stream.call.cancel()


@pytest.mark.usefixtures("paced")
async def test_an_end_goes_at_once(served: Running) -> None:
    served.engine.plan = lambda _: Script(tokens=[97, 98], fail_after=2)
    stream = Stream(served)
    await stream.send(start_message(request_id="a", output=pb.OutputOptions()))
    await stream.read_until_ended("a")
    assert stream.logs["a"].failed.usage.completion_tokens == 2
    stream.call.cancel()
