"""Why a candidate ends."""

from __future__ import annotations

from engine.schedule.sequence import Sequence
from engine.types import CandidateFinish, FinishReason


def finish_after(sequence: Sequence, token: int) -> CandidateFinish | None:
    """Whether and how a candidate ends with its newest token."""
    group = sequence.group
    if sequence.num_generated >= group.request.stop.min_tokens:
        if token in group.stop_ids:
            return CandidateFinish(FinishReason.STOP, token_id=token)
        if token in group.eos_ids:
            return CandidateFinish(FinishReason.END_OF_SEQUENCE, token_id=token)
    if len(sequence.token_ids) < sequence.max_tokens_total:
        return None
    max_tokens = group.request.stop.max_tokens
    by_request = max_tokens is not None and sequence.num_generated >= max_tokens
    return CandidateFinish(FinishReason.MAX_TOKENS if by_request else FinishReason.CONTEXT_LIMIT)
