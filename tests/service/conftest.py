from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.service.server import Running, running


@pytest.fixture
async def served() -> AsyncIterator[Running]:
    """A server over a fresh scripted engine; afterwards the engine holds nothing."""
    async with running() as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nothing here takes long, unless it says so: what hangs shows soon."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(60))
