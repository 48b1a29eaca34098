"""Refusals that need no step of the engine: draining, dead, full, or a deadline that cannot be met."""

from __future__ import annotations

import time

from engine import EngineState, EngineStats, QueueFill, too_late
from service.replica import Replica
from service.request import Generation
from service.status import (
    Failure,
    RequestRefusedError,
    draining,
    engine_died,
    engine_stalled,
    engine_starting,
    from_engine,
    queue_full,
)

LEAST_RETRY_SECONDS = 0.1
MOST_RETRY_SECONDS = 30.0


class Admission:
    """The first bound; the engine's own queue is the second. Both refuse with the same statuses."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._newest: tuple[EngineStats, int, Failure] | None = None  # the last refusal and what it is of

    def refusal(self, priority: int) -> Failure | None:
        """Why no request of this priority is taken now, whatever else it is."""
        return self._unavailable() or self._full(priority)

    def check_prompt(self, generation: Generation, prompt_tokens: int, deadline: float | None) -> None:
        """Once the prompt's length is known. deadline: `time.monotonic()` seconds for its turn."""
        failure = (
            self._unavailable()
            or self._queue_without_room(generation.priority, prompt_tokens)
            or self._too_late(deadline)
        )
        if failure is not None:
            raise RequestRefusedError(failure)

    def queue_delay(self) -> float:
        """Seconds until a request sent now would be scheduled, by the engine's estimate."""
        return self._with_prefill(self._replica.engine.stats.queue_delay_seconds)

    def retry_after(self) -> float:
        return min(MOST_RETRY_SECONDS, max(LEAST_RETRY_SECONDS, self.queue_delay()))

    def _with_prefill(self, delay: float) -> float:
        """At least what waits to be computed by the newest count needs, at the recent prefill rate."""
        stats = self._replica.engine.stats
        if not stats.queued_requests or stats.prefill_tokens_per_second <= 0:
            return delay
        return max(delay, stats.queued_uncached_tokens / stats.prefill_tokens_per_second)

    def _unavailable(self) -> Failure | None:
        if self._replica.draining:
            return draining()
        match self._replica.engine.state:
            case EngineState.READY:
                return engine_stalled() if self._replica.is_stalled else None
            case EngineState.STARTING:
                return engine_starting()
            case _:
                return engine_died(self._replica.info.instance_id, self._replica.problem)

    def _makes_room(self, priority: int) -> bool:
        """Whether somebody who waits would give way to it; the engine has the last word on that."""
        return priority > self._replica.engine.stats.least_priority < 0

    def _full(self, priority: int) -> Failure | None:
        """Refuses without a step, which may take longer than a client should wait for a no. The engine's queue
        is as its newest frame has it. What is refused for the same numbers is refused with the same failure."""
        info, stats = self._replica.info, self._replica.engine.stats
        # Those that the newest frame does not know of yet wait, too, if slots do not suffice for them.
        beyond = len(self._replica.live) - info.max_num_seqs
        requests = max(stats.queued_requests - stats.starting_requests, beyond)
        if requests < info.max_queued_requests or self._makes_room(priority):
            return None
        if self._newest is None or self._newest[0] is not stats or self._newest[1] != requests:
            fill = self._fill(requests)
            self._newest = stats, requests, self._queue_full(fill, fill.wording)
        return self._newest[2]

    def _queue_without_room(self, priority: int, prompt_tokens: int) -> Failure | None:
        """Of one whose number is no hindrance."""
        stats = self._replica.engine.stats
        fill = self._fill(stats.queued_requests - stats.starting_requests)
        if self._makes_room(priority) or fill.requests >= fill.max_requests or fill.holds(prompt_tokens):
            return None
        return self._queue_full(fill, f"{fill.wording}; this prompt has {prompt_tokens}")

    def _fill(self, requests: int) -> QueueFill:
        info, stats = self._replica.info, self._replica.engine.stats
        return QueueFill(
            requests,
            stats.queued_prompt_tokens - stats.starting_prompt_tokens,
            info.max_queued_requests,
            info.max_queued_tokens,
        )

    def _queue_full(self, fill: QueueFill, problem: str) -> Failure:
        return queue_full(f"the queue is full: {problem}", self.retry_after(), fill.numbers)

    def _too_late(self, deadline: float | None) -> Failure | None:
        """By the queue alone; what of the prompt is cached, and so how long it takes itself, the engine knows."""
        replica = self._replica
        delay = self._with_prefill(replica.engine.stats.least_delay_seconds)
        if deadline is None or delay <= 0:
            return None
        left = deadline - time.monotonic()
        return None if delay <= left else from_engine(too_late("", delay, left), replica.info.instance_id)
