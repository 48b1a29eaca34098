"""How long a request that came now would wait for its turn, by what runs, what waits before it, and recent speed."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

_MOST_SIMULATED = 256


@dataclass(frozen=True, slots=True)
class Pace:
    """prefill_rate: tokens a second; step_seconds: of a step that only decodes. 0: not known, and counts as no time."""

    prefill_rate: float = 0.0
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Need:
    """Of one sequence: the blocks it will have held in the end, the tokens to compute before it decodes, and those it
    is expected to generate from now on."""

    blocks: int
    uncomputed: int
    remaining: int


def queue_delay(running: Iterable[Need], waiting: Rows[Need], slots: int, blocks: int, pace: Pace) -> float:
    """Seconds until a sequence behind all of `waiting` gets one of `slots`, which are free now, as the `blocks` are
    that nothing running will need. Whoever waits starts in order, when a slot and its blocks are free, and prefills
    behind the one before."""
    token_seconds = 1 / pace.prefill_rate if pace.prefill_rate > 0 else 0.0
    ends = [(need.uncomputed * token_seconds + need.remaining * pace.step_seconds, need.blocks) for need in running]
    heapq.heapify(ends)
    clock = 0.0

    def wait_for(wanted: int) -> None:
        nonlocal clock, slots, blocks
        while ends and (slots < 1 or blocks < wanted):
            end, freed = heapq.heappop(ends)
            clock, slots, blocks = max(clock, end), slots + 1, blocks + freed

    for need in waiting[:_MOST_SIMULATED]:
        wait_for(need.blocks)
        slots, blocks = slots - 1, blocks - need.blocks
        clock += need.uncomputed * token_seconds
        heapq.heappush(ends, (clock + need.remaining * pace.step_seconds, need.blocks))
    wait_for(1)
    return clock * max(1.0, len(waiting) / _MOST_SIMULATED)
