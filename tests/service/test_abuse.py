"""Two hundred clients, most of them bad, at several times what the engine can take."""

from __future__ import annotations

import signal

import pytest

from tests.service.abuse import OVERLOADED, abuse
from tests.service.process import server_process


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_abuse_harms_nobody_else_and_leaves_nothing_behind() -> None:
    """Ten seconds of it; the benchmark has a whole minute, and the times."""
    async with server_process("-m", "tests.service.fake_server", env=OVERLOADED) as server:
        report = await abuse(server, 10.0)
        print(report.figures())
        report.check()
        server.process.send_signal(signal.SIGTERM)
        assert await server.end() == 0
        assert not [line for line in server.log if '"level": "error"' in line]
