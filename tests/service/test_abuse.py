"""Two hundred clients, most of them bad, at several times what the engine can take."""

from __future__ import annotations

import signal

import pytest

from service.client import Client, prompt_request
from tests.service.abuse import OVERLOADED, abuse
from tests.service.process import server_process


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_abuse_harms_nobody_else_and_leaves_nothing_behind() -> None:
    async with server_process("-m", "tests.service.fake_server", env=OVERLOADED) as server:
        report = await abuse(server, 15.0)
        print(report.as_json())
        assert set(report.outcomes) == {"OK", "QUEUE_FULL", "SERVING"}, "only typed ends, and always healthy"
        assert report.wrong_texts == 0
        assert report.outcomes["QUEUE_FULL"] > 100, "no overload, no proof"
        assert report.memory_growth < 0.05
        async with Client(server.address) as client:
            texts = [event.delta.text async for event in client.generate(prompt_request("canary", max_tokens=5))]
            assert "".join(texts) == "abcde"
        server.process.send_signal(signal.SIGTERM)
        assert await server.end() == 0
        assert not [line for line in server.log if '"level": "error"' in line]
