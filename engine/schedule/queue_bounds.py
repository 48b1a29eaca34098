"""How full the queue is, and who makes room in it. Its bounds are for those that wait for others: whoever needs nothing
but a place in a step does not count."""

from __future__ import annotations

from engine.schedule.admission import SchedulerLimits
from engine.schedule.forecast import Demand, OutputForecast
from engine.schedule.live_requests import LiveRequests
from engine.schedule.live_sequences import LiveSequences
from engine.schedule.openings import Openings, no_openings
from engine.schedule.queue_fill import QueueFill
from engine.schedule.residency import Residency
from engine.schedule.sequence import RequestGroup, Sequence
from engine.schedule.shedding import giving_way
from engine.types import GenerationRequest


class QueueBounds:
    def __init__(
        self,
        requests: LiveRequests,
        sequences: LiveSequences,
        residency: Residency,
        limits: SchedulerLimits,
        forecast: OutputForecast | None,
    ) -> None:
        """forecast: that of admission, if it uses one."""
        self._requests = requests
        self._sequences = sequences
        self._residency = residency
        self._limits = limits
        self._forecast = forecast
        self._openings: Openings | None = None  # until something changes what is free

    @property
    def num_running_requests(self) -> int:
        return len(self._sequences.resident_requests)

    @property
    def num_queued_requests(self) -> int:
        return len(self._requests) - self.num_running_requests

    @property
    def starting(self) -> tuple[int, int]:
        """Of those in the queue, requests and prompt tokens that have slots and blocks at once, and wait for a place in
        a step only. They do not count against the queue's bounds."""
        if not self._sequences.waiting:
            return 0, 0
        openings = self._opened()
        return openings.requests, openings.prompt_tokens

    @property
    def fill(self) -> QueueFill:
        requests, tokens = self.starting
        return QueueFill(
            self.num_queued_requests - requests,
            self._sequences.waiting.prompt_tokens - tokens,
            self._limits.max_queued_requests,
            self._limits.max_queued_tokens,
        )

    def giving_way(self, request: GenerationRequest) -> list[RequestGroup]:
        """Those who make room for a request in a queue that is full."""
        fill = self.fill
        requests = fill.requests + 1 - fill.max_requests
        tokens = fill.prompt_tokens - max(0, fill.max_prompt_tokens - len(request.prompt_token_ids))
        return giving_way(self._sequences.waiting, request.priority, requests, tokens)

    def take(self, sequence: Sequence) -> None:
        """One more waits, behind all others."""
        if self._openings is not None:
            self._openings.take(sequence)

    def reopen(self) -> None:
        """Something changed what is free."""
        self._openings = None

    def close(self) -> None:
        """Somebody waits for blocks, and all behind it for its turn."""
        self._openings = no_openings()

    def _opened(self) -> Openings:
        if self._openings is None:
            resident, tables = self._sequences.resident, self._residency.tables
            self._openings = Openings(
                slots=min(tables.num_free_slots, self._limits.max_batched_tokens - len(resident)),
                blocks=self._residency.available_blocks,
                watermark=self._limits.watermark_blocks,
                block_size=tables.block_size,
                alone=not resident,
                running=frozenset(self._sequences.resident_requests),
                make_demand=lambda: Demand.of(self._forecast, tables, resident),
            )
            for sequence in self._sequences.waiting:
                if not self._openings.take(sequence):
                    break
        return self._openings
