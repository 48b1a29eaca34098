"""A rolling restart under load: no accepted request is lost, and every refusal says what to do."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from service.client import Client, GenerationError, Session, prompt_request
from tests.service.process import Process, server_process
from tests.service.server import until

CLIENTS = 12
TOKENS = 25  # half a second each


class Balancer:
    """Knows which replicas take requests, as an orchestrator's endpoints do; drops one that says DRAINING."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.outcomes: Counter[str] = Counter()
        self.stop = False

    async def client(self, number: int) -> None:
        while not self.stop:
            session = self.sessions[number % len(self.sessions)]
            try:
                events = session.generate(prompt_request("slow", max_tokens=TOKENS))
                text = "".join([event.delta.text async for event in events])
                self.outcomes["OK" if text == "abcdefghijklmnopqrstuvwxyz"[:TOKENS] else f"lost: {text}"] += 1
            except GenerationError as error:
                self.outcomes[error.reason or f"untyped {error.code.name}: {error.message}"] += 1
                if session in self.sessions:
                    self.sessions.remove(session)


@pytest.mark.slow
async def test_rolling_drain_loses_nothing() -> None:
    balancer = Balancer()
    async with AsyncExitStack() as stack:

        async def start() -> tuple[Process, Session]:
            server = await stack.enter_async_context(server_process("-m", "tests.service.fake_server"))
            client = await stack.enter_async_context(Client(server.address))
            return server, await stack.enter_async_context(client.session())

        replicas = [await start(), await start()]
        balancer.sessions = [session for _, session in replicas]
        tasks = [asyncio.create_task(balancer.client(number)) for number in range(CLIENTS)]
        await until(lambda: balancer.outcomes["OK"] >= CLIENTS)
        for _ in range(3):
            old, _ = replicas.pop(0)
            replicas.append(await start())
            balancer.sessions.append(replicas[-1][1])
            old.process.send_signal(signal.SIGTERM)
            assert await old.end() == 0
            served = balancer.outcomes["OK"]
            await until(lambda served=served: balancer.outcomes["OK"] >= served + CLIENTS)  # type: ignore[misc]
        balancer.stop = True
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert set(balancer.outcomes) <= {"OK", "DRAINING"}
    assert balancer.outcomes["DRAINING"] >= 3
