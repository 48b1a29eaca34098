"""Whether a sequence that must yield is copied to host memory or computed again."""

from __future__ import annotations

import pytest

from engine.config import PreemptionMode
from engine.schedule.preemption import PreemptionCost


@pytest.mark.parametrize(("tokens", "swaps"), [(9, False), (10, False), (11, True)])
def test_the_shorter_way_is_taken(tokens: int, swaps: bool) -> None:
    """Five blocks of 1 kB out and back at 1 MB/s: 10 ms, in which 10 tokens are computed."""
    cost = PreemptionCost(block_bytes=1000, transfer_rate=1e6, prefill_rate=1000.0)
    assert cost.prefers_swap(5, tokens) is swaps


def test_what_is_not_known_yet() -> None:
    """Before any prompt was computed copying is right; without a rate of copies computing is."""
    assert PreemptionCost(block_bytes=1000, transfer_rate=1.0).prefers_swap(5, 1)
    assert not PreemptionCost(block_bytes=1, prefill_rate=0.001).prefers_swap(1, 1000)


def test_a_mode_that_is_set_decides() -> None:
    assert PreemptionCost(PreemptionMode.SWAP, 10**9, 1.0, 1e9).prefers_swap(100, 1)
    assert not PreemptionCost(PreemptionMode.RECOMPUTE, 1, 1e9, 1.0).prefers_swap(1, 10**6)
