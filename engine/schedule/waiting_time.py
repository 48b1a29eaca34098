"""How long a request that came now would wait: for its turn, and for its first token."""

from __future__ import annotations

from collections.abc import Callable

from engine.schedule.admission import too_late
from engine.schedule.composition import Composition
from engine.schedule.first_token import PrefillBound, common_tokens
from engine.schedule.forecast import OutputForecast, PromptForecast, own_tokens
from engine.schedule.live_sequences import LiveSequences
from engine.schedule.queue_delay import Need, Pace, queue_delay
from engine.schedule.queued_work import QueuedWork
from engine.schedule.residency import Residency
from engine.schedule.sequence import Sequence
from engine.types import GenerationRequest, RequestFailed


class WaitingTime:
    """In seconds. `queue_delay` is the best guess, for hints; `least_delay` is of what is known, since nobody is
    refused by guesses. `outputs`, `prompts` and `prefill` are told what became of requests and steps."""

    def __init__(
        self,
        sequences: LiveSequences,
        residency: Residency,
        composition: Composition,
        outputs: OutputForecast,
        prefill: PrefillBound,
    ) -> None:
        self.queue_delay = 0.0  # by the last estimate
        self.least_delay = 0.0  # likewise
        self.outputs = outputs
        self.prompts = PromptForecast()
        self.prefill = prefill
        self._sequences = sequences
        self._residency = residency
        self._composition = composition
        self._work = QueuedWork(residency)

    @property
    def queued_uncached_tokens(self) -> int:
        """Of the prompt tokens that wait, those that will likely have to be computed."""
        queued = self._sequences.waiting.prompt_tokens
        return queued - self.prompts.found(queued)

    def estimate(self, pace: Pace) -> None:
        """Brings `queue_delay` and `least_delay` up to date. They differ until a first output has ended: how long
        outputs are is a guess then, which the least delay takes for nothing."""
        if not self._sequences.num_resident and not self._sequences.waiting:
            self.queue_delay = self.least_delay = 0.0
            return
        self.queue_delay = self._delay(pace, self.outputs.remaining)
        self.least_delay = self.queue_delay if self.outputs.observed else self._delay(pace, lambda _: 0)

    def refusal(self, request: GenerationRequest, now: float) -> RequestFailed | None:
        """Refuses what cannot have a token by its deadline: after the prompts that run, or its turn, comes its own."""
        if request.deadline is None or request.deadline <= now:  # the latter has expired, and is told so
            return None
        own, left = len(request.prompt_token_ids), request.deadline - now
        if self._to_first_token(request, own, now) <= left:
            return None
        if self._residency.reads_cache(request):
            others = [*self._sequences.resident, *self._sequences.waiting]
            block_size = self._residency.tables.block_size
            found = max(self._residency.cached_tokens(request), common_tokens(request, others, block_size))
            own -= min(found, own - 1)
        estimated = self._to_first_token(request, own, now)
        return too_late(request.request_id, estimated, left) if estimated > left else None

    def _to_first_token(self, request: GenerationRequest, length: int, now: float) -> float:
        """Of a request that came now, with so many tokens to compute. What came since the last estimate of the delay
        is in the queue: a burst is told at once."""
        if not self.prefill.known:
            return self.least_delay
        ahead = self._composition.ahead(self._sequences.running, length)
        most = self._composition.not_overtaken(length)
        queued = self._work.ahead_of(request.priority, self._sequences.resident, self._sequences.waiting, most)
        return max(self.prefill.seconds(ahead + queued, now), self.least_delay) + self.prefill.seconds(length, now)

    def _delay(self, pace: Pace, remaining_of: Callable[[Sequence], int]) -> float:
        """remaining_of: tokens that a sequence is expected to add."""
        tables = self._residency.tables
        allocator, size = tables.allocator, tables.block_size

        def need(sequence: Sequence) -> Need:
            remaining = remaining_of(sequence)
            found = self._expected_found(sequence)
            blocks = (own_tokens(sequence, size, remaining) - found) // size
            return Need(blocks, sequence.num_uncomputed - found, remaining)

        resident = self._sequences.resident
        running = [need(sequence) for sequence in resident]
        shared = max(0, allocator.num_live - sum(own_tokens(sequence, size) for sequence in resident) // size)
        free = allocator.num_blocks - shared - sum(item.blocks for item in running)
        waiting = [need(sequence) for sequence in self._sequences.waiting]
        return queue_delay(running, waiting, tables.num_free_slots, free, pace)

    def _expected_found(self, sequence: Sequence) -> int:
        """How many tokens of a prompt that waits for its first turn will then be there already."""
        if not sequence.awaits_first_turn or not self._residency.reads_cache(sequence.group.request):
            return 0
        return self.prompts.found(sequence.num_prompt)
