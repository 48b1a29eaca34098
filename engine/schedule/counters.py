"""What a scheduler has done since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    finished_requests: int = 0
