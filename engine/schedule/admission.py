"""Whether a request may wait at all: what could never fit, and what the queue has no room for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.schedule.queue_fill import QueueFill
from engine.types import FailureKind, GenerationRequest, RequestFailed

_LEAST_RETRY_SECONDS = 0.1
_MOST_RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_context_tokens: prompt + output of one sequence; never more than the pool holds, so that the head of the
    queue can always run alone. watermark_blocks: kept free when admitting beside running sequences, against
    preemption storms."""

    max_num_seqs: int
    max_batched_tokens: int
    max_context_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    watermark_blocks: int = 0


def refusal(
    request: GenerationRequest,
    limits: SchedulerLimits,
    live: bool,
    fill: QueueFill,
    queue_delay: float,
) -> RequestFailed | None:
    """Why a request cannot be queued, or None. `live`: its id is in use; `fill` waits already, for some `queue_delay`
    seconds. A prompt needs room for one token of output."""
    name, prompt, limit = request.request_id, len(request.prompt_token_ids), limits.max_context_tokens
    problem = _malformed(request, live)
    if problem is not None:
        field, message = problem
        return RequestFailed(name, FailureKind.INVALID, message, field=field)
    if prompt >= limit:
        message = f"prompt has {prompt} tokens; at most {limit - 1} fit a context of {limit} with one token of output"
        numbers = {"prompt_tokens": prompt, "max_prompt_tokens": limit - 1, "max_context_tokens": limit}
        details = {key: str(value) for key, value in numbers.items()}
        return RequestFailed(name, FailureKind.PROMPT_TOO_LONG, message, field="prompt", details=details)
    if not fill.holds(prompt):
        message = f"the queue is full: {fill.wording}; this prompt has {prompt}"
        return RequestFailed(name, FailureKind.QUEUE_FULL, message, details=_details(fill, queue_delay))
    return None


def shed(request_id: str, fill: QueueFill, queue_delay: float) -> RequestFailed:
    """Of a request that waited and gave way to one of a higher priority."""
    message = f"a request of a higher priority came while the queue was full: {fill.wording}"
    return RequestFailed(request_id, FailureKind.SHED, message, details=_details(fill, queue_delay))


def _details(fill: QueueFill, queue_delay: float) -> dict[str, str]:
    retry_after = min(_MOST_RETRY_SECONDS, max(_LEAST_RETRY_SECONDS, queue_delay))
    return {"retry_after": f"{retry_after:.3f}", **fill.numbers}


def too_late(request_id: str, estimated: float, left: float) -> RequestFailed:
    """Of a request whose first token is so many seconds away at least, and its deadline fewer."""
    message = f"the first token is at least {estimated:.3f} s away, the deadline {max(0.0, left):.3f} s"
    details = {"estimated_ms": str(math.ceil(estimated * 1000))}
    return RequestFailed(request_id, FailureKind.DEADLINE_UNATTAINABLE, message, details=details)


def _malformed(request: GenerationRequest, live: bool) -> tuple[str, str] | None:
    """Field and message of what makes no sense in any queue."""
    if live:
        return "request_id", "request id is already live"
    if not request.prompt_token_ids:
        return "prompt", "prompt is empty"
    if request.sampling.n < 1:
        return "sampling.n", "n must be at least 1"
    if request.stop.max_tokens is not None and request.stop.max_tokens < 1:
        return "stop.max_tokens", "max_tokens must be at least 1"
    return None
