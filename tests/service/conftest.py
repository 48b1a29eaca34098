from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.service.server import Running, running


@pytest.fixture
async def served() -> AsyncIterator[Running]:
    """A server over a fresh scripted engine; afterwards the engine holds nothing."""
    async with running() as server:
        yield server
