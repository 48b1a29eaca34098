"""Continuous batching: which tokens of which sequences the next step runs, and what its outcome means.

There is no prefill phase and no decode phase: a sequence has `num_tokens` and `num_computed`, and a plan says how many
of its uncomputed tokens to run. `plan` may be called while the step before is still running (its sampled tokens are
then pending), so the host works while the device does.
"""

from __future__ import annotations

from itertools import repeat

from engine.errors import EngineError
from engine.schedule.admission import SchedulerLimits, refusal, shed
from engine.schedule.composition import Composition, MixedSteps, Wanted, unfinished
from engine.schedule.counters import Counters
from engine.schedule.deadlines import Deadlines
from engine.schedule.finish import finish_after
from engine.schedule.first_token import TELLING_TOKENS, PrefillBound
from engine.schedule.forecast import Demand, OutputForecast
from engine.schedule.live_requests import LiveRequests
from engine.schedule.live_sequences import LiveSequences
from engine.schedule.plan import ScheduledSequence, StepOutcome, StepPlan
from engine.schedule.policy import Policy, PriorityWithAgeing
from engine.schedule.queue_bounds import QueueBounds
from engine.schedule.residency import Residency
from engine.schedule.sequence import Constraint, Phase, RequestGroup, Sequence
from engine.schedule.waiting_time import WaitingTime
from engine.types import (
    Admitted,
    CandidateFinish,
    Event,
    FailureKind,
    FinishReason,
    GenerationRequest,
    PromptScored,
    RequestFailed,
    RequestFinished,
    Scheduled,
    Timing,
    TokenLogprob,
    TokensGenerated,
    Usage,
)

_MAX_SKIPS = 32  # a sequence that blocks cannot be found for is overtaken at most so often
_SKIP_WINDOW = 8  # and by one of the next so many only


class Scheduler:
    def __init__(
        self,
        residency: Residency,
        limits: SchedulerLimits,
        eos_token_ids: frozenset[int] = frozenset(),
        policy: Policy | None = None,
        forecast: OutputForecast | None = None,
        composition: Composition | None = None,
    ) -> None:
        """forecast None: admission looks at what is free now, and preemption settles the rest. composition None: steps
        mix decodes and prompts."""
        tables = residency.tables
        if limits.max_context_tokens > tables.allocator.num_blocks * tables.block_size:
            raise ValueError("max_context_tokens must not exceed the pool")
        self.residency = residency
        self.tables = tables
        self.limits = limits
        self.counters = Counters()
        self.forecast = forecast
        self.requests = LiveRequests(limits.max_context_tokens, eos_token_ids, shares=residency.shares)
        self.sequences = LiveSequences(policy or PriorityWithAgeing())
        self.queue = QueueBounds(self.requests, self.sequences, residency, limits, forecast)
        self._composition: Composition = composition or MixedSteps(limits.max_batched_tokens)
        self.waiting_time = WaitingTime(
            *(self.sequences, residency, self._composition),
            outputs=forecast or OutputForecast(),
            prefill=PrefillBound(min(TELLING_TOKENS, -(-limits.max_batched_tokens // 2))),
        )
        self._deadlines = Deadlines(self.requests)
        self._events: list[Event] = []
        self._steps = 0

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, now: float, constraint: Constraint | None = None) -> None:
        """Queues a request, or refuses it with a RequestFailed event. constraint: of the request's grammar."""
        live = request.request_id in self.requests
        position, fill, delay = self.queue.num_queued_requests, self.queue.fill, self.waiting_time.queue_delay
        refused = refusal(request, self.limits, live, fill, delay)
        full = refused is not None and refused.kind is FailureKind.QUEUE_FULL
        giving = self.queue.giving_way(request) if full else []
        refused = (None if giving else refused) or self.waiting_time.refusal(request, now)
        if refused is not None:
            self._events.append(refused)
            return
        for other in giving:
            self._drop_group(other)
            self._events.append(shed(other.request_id, fill, delay))
        position -= len(giving)
        group = self.requests.add(request, now, constraint)
        self._deadlines.add(group)
        for sequence in group.sequences:
            self.sequences.wait(sequence)
            self.queue.take(sequence)
        self.counters.prompt_tokens += len(request.prompt_token_ids)
        self._events.append(Admitted(request.request_id, len(request.prompt_token_ids), position))

    def refuse(self, request_id: str, message: str, field: str = "", kind: FailureKind = FailureKind.INVALID) -> None:
        """Answers a request that gets no further for a reason the scheduler does not know of."""
        self._events.append(RequestFailed(request_id, kind, message, field=field))

    def withdraw(self, request_id: str, waited: float) -> None:
        """Answers a request that was cancelled before it came here, after so many seconds."""
        timing = Timing(queued=waited, time_to_first_token=waited, total=waited)
        self._events.append(RequestFinished(request_id, Usage(), timing, cancelled=True))

    def cancel(self, request_id: str, now: float) -> bool:
        """Ends a request wherever it is; its blocks are free at once. False if it is not live."""
        group = self.requests.get(request_id)
        if group is None:
            return False
        self._drop_group(group)
        self._events.append(RequestFinished(request_id, group.usage(), group.timing(now), cancelled=True))
        return True

    def stop_candidate(self, request_id: str, candidate: int, now: float) -> None:
        """Ends one candidate whose text met a stop string; the caller has told its client already."""
        group = self.requests.get(request_id)
        if group is None or candidate >= len(group.sequences):
            return
        sequence = group.sequences[candidate]
        if sequence.phase is not Phase.FINISHED:
            self.waiting_time.outputs.observe(sequence.num_generated)
            self._end(sequence, CandidateFinish(FinishReason.STOP))
            self._finish_group_if_done(group, now)

    def fail(self, request_id: str, kind: FailureKind, message: str, field: str = "") -> None:
        """Ends a request with a failure event. Unknown ids are ignored: it ended before."""
        group = self.requests.get(request_id)
        if group is None:
            return
        self._drop_group(group)
        self._events.append(RequestFailed(request_id, kind, message, usage=group.usage(), field=field))

    def fail_all(self, kind: FailureKind, message: str) -> None:
        for group in list(self.requests):
            self.fail(group.request_id, kind, message)

    def take_events(self) -> list[Event]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # -- steps ---------------------------------------------------------------------------------------------------------

    def plan(self, now: float, moved: int | None = None) -> StepPlan | None:
        """The next step, or None if nothing can run now. Marks its tokens as computed and its samples as pending.

        moved: the newest step whose sequences have all been copied in from host memory; a sequence on its way joins
        once it is there, unless nothing else can run meanwhile. None: they are there as soon as planned."""
        self._expire(now)
        self.queue.reopen()
        self.residency.begin_plan()
        self.sequences.land(moved)
        wanted, preempted = self._schedule_running()
        if not preempted and self.sequences.waiting:
            wanted.pieces.extend(self._admit(wanted, now, overlap=moved is not None))
        if self.sequences.arriving and not wanted.decodes and not wanted.pieces:
            self.sequences.land(None)
            wanted, _ = self._schedule_running()
        decodes, pieces = self._composition.step(wanted.decodes, wanted.pieces)
        moves = self.residency.end_plan()
        if not decodes and not pieces and not moves:
            return None
        self.residency.take_freed(moves)
        scheduled = self._take(decodes, pieces)
        sampling = [entry for entry in scheduled if entry.samples] if pieces else scheduled
        self._steps += 1
        self.counters.computed_tokens += len(decodes) + sum(entry.count for entry in pieces)
        edited, scored = self.requests.edited(sampling), self.requests.scored(scheduled)
        return StepPlan(self._steps, scheduled, sampling, moves, edited, scored)

    def prepare_commit(self, plan: StepPlan) -> None:
        """What `commit` needs and can be computed while the step runs."""
        for entry in plan.scheduled:
            if entry.count > 1:
                self.residency.hash_ahead(entry.sequence, entry.start + entry.count)

    def _take(self, decodes: list[Sequence], pieces: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """The plan's entries, those of one token first, with their tokens marked as computed and samples as pending."""
        scheduled = []
        for sequence in decodes:
            start = sequence.num_computed
            scheduled.append(ScheduledSequence(sequence, sequence.slot, start, 1, True))
            sequence.num_computed = start + 1
            sequence.num_pending += 1
        for entry in pieces:
            entry.sequence.num_computed = entry.start + entry.count
            entry.sequence.num_pending += entry.samples
        # The last piece of a prefill may be one token: it goes with the decodes.
        scheduled += [entry for entry in pieces if entry.count == 1]
        scheduled += [entry for entry in pieces if entry.count > 1]
        return scheduled

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> None:
        """Takes a step's sampled tokens into their sequences. Tokens of sequences that ended meanwhile are dropped.

        A loop over every sequence of every step: what most tokens do not need is behind `_settle`."""
        sampling, tokens, logprobs = plan.sampling, outcome.token_ids, outcome.logprobs or repeat(None)
        if len(sampling) != len(tokens):
            raise EngineError(f"{len(tokens)} tokens of {len(sampling)} samples")
        for index, scores in outcome.prompt_logprobs.items():
            self._take_scores(plan.scheduled[index], scores)
        for index, problem in outcome.failures.items():
            self._fail_draw(sampling[index].sequence, problem, index in outcome.refused)
        size, events, finished, generated = self.tables.block_size, self._events, Phase.FINISHED, 0
        for entry, token, logprob in zip(sampling, tokens, logprobs, strict=False):
            sequence = entry.sequence
            sequence.num_pending -= 1
            if sequence.phase is finished:
                continue
            group, token_ids = sequence.group, sequence.token_ids
            computed = entry.start + entry.count
            if entry.count > 1 or computed % size == 0:
                self.residency.publish(sequence, computed)
            token_ids.append(token)
            generated += 1
            ends = token in group.ending_ids or len(token_ids) >= sequence.max_tokens_total
            if ends or logprob is not None or group.first_token is None:
                self._settle(sequence, token, ends, logprob, now)
            else:
                events.append(TokensGenerated(group.request_id, sequence.candidate, [token]))
        self.counters.generated_tokens += generated

    def _fail_draw(self, sequence: Sequence, message: str, refused: bool) -> None:
        """No token could be drawn. A grammar that can be followed no further says why itself."""
        name, constraint = sequence.group.request_id, sequence.constraint
        if not refused:
            self.fail(name, FailureKind.ENGINE_ERROR, message)
        elif constraint is not None and constraint.error:
            self.fail(name, FailureKind.GRAMMAR_INVALID, constraint.error, "grammar")
        else:
            self.fail(name, FailureKind.INVALID, message)

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def awaits_tokens(self) -> bool:
        """Whether a running request needs the tokens of the last step before the next one is launched."""
        return self.requests.await_tokens(self.sequences.running)

    def check_idle(self) -> None:
        """Raises EngineError unless there is no work and nothing is held for any."""
        if self.has_work or self.sequences.waiting or self.sequences.running or self.sequences.arriving:
            raise EngineError("check_idle with live requests")
        self.residency.check_idle()
        if self.sequences.waiting.prompt_tokens:
            raise EngineError(f"{self.sequences.waiting.prompt_tokens} queued prompt tokens with an empty queue")

    def _take_scores(self, entry: ScheduledSequence, scores: list[TokenLogprob]) -> None:
        """A preempted prompt is computed again: what is known of it is not told twice."""
        group = entry.sequence.group
        new = scores[group.scored_tokens - entry.start - 1 :]
        if new and entry.sequence.phase is not Phase.FINISHED:
            self.requests.take_scores(group, len(new))
            self._events.append(PromptScored(group.request_id, new))

    # -- planning ------------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        """Fails what is past its deadline, before any of its tokens are planned."""
        for request_id, kind, message in self._deadlines.missed(now):
            self.fail(request_id, kind, message)

    def _schedule_running(self) -> tuple[Wanted, bool]:
        """What of the running sequences can run, and whether any had to yield for it: from the end of the policy's
        order, until blocks suffice."""
        preempted = False
        while True:
            wanted = self._composition.wanted(self.sequences.running)
            if not wanted.needy or self.residency.grow(wanted.needy):
                return wanted, preempted
            self._preempt(self.sequences.last_resident)
            preempted = True

    def _preempt(self, sequence: Sequence) -> None:
        """Gives back slot and blocks; the tokens stay, and its turn comes again before any later sequence's."""
        self.sequences.remove(sequence)
        self.counters.swaps += self.residency.preempt(sequence)
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.sequences.wait(sequence)
        self.queue.reopen()

    def _admit(self, wanted: Wanted, now: float, *, overlap: bool) -> list[ScheduledSequence]:
        """Waiting sequences in order while budget, slots and blocks last. Behind one that finds no blocks, a few
        smaller ones may go first, a bounded number of times; behind one whose turn it is not yet, because a long prompt
        is not through, as often as they fit beside that. Nobody overtakes a preempted one. overlap: those from host
        memory are only on their way."""
        sequences, entries = self.sequences, list[ScheduledSequence]()
        budget, long = self._composition.room(wanted), unfinished(wanted.pieces)
        blocked: Sequence | None = None
        window = _SKIP_WINDOW
        demand = Demand.of(self.forecast, self.tables, sequences.resident) if budget > 0 else None
        for sequence in sequences.waiting.first(_SKIP_WINDOW + self.limits.max_num_seqs):
            if budget <= 0 or window <= 0 or sequences.num_resident >= self.limits.max_batched_tokens:
                break
            if sequence.num_pending or self._waits_for_sibling(sequence):
                continue
            if long is not None and not self._composition.admits(
                sequence, self._uncomputed(sequence, budget), budget, long
            ):
                window = 0 if sequence.preemptions else window - 1
                continue
            alone = not sequences.num_resident
            swapped = bool(sequence.swapped_blocks)
            fits = alone or demand is None or demand.fits(sequence)
            if fits and self.residency.claim(sequence, alone=alone, watermark=self.limits.watermark_blocks):
                if demand is not None:
                    demand.add(sequence)
                sequences.remove(sequence)
                if swapped and overlap:
                    sequences.arrive(sequence, self._steps + 1)
                else:
                    entry = self._start(sequence, budget, now)
                    budget = self._composition.left(budget, entry)
                    if entry is not None:
                        entries.append(entry)
                        long = long or unfinished([entry])
                if blocked is not None:
                    blocked.skips += 1
            elif blocked is None:
                blocked = sequence
            if blocked is not None:
                window = 0 if blocked.preemptions or blocked.skips >= _MAX_SKIPS else window - 1
        if blocked is not None:
            self.queue.close()
        return entries

    def _uncomputed(self, sequence: Sequence, enough: int) -> int:
        """Tokens of a waiting sequence that would have to run; more than `enough` is not told exactly."""
        count = 1 if sequence.swapped_blocks else sequence.num_uncomputed
        if count <= enough:
            return count
        return count - min(self.residency.cached_tokens(sequence.group.request), count - 1)

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """The first candidate computes the prompt, the others then share its blocks."""
        first = sequence.group.sequences[0]
        return (
            self.residency.shares
            and sequence is not first
            and not sequence.num_generated
            and first.phase is not Phase.FINISHED
            and first.num_computed < sequence.num_prompt
        )

    def _start(self, sequence: Sequence, budget: int, now: float) -> ScheduledSequence | None:
        group = sequence.group
        self.sequences.run(sequence)
        if group.first_scheduled is None:
            group.first_scheduled = now
            if group.request.queue_deadline is not None:
                self._events.append(Scheduled(group.request_id))
            group.cached_prompt_tokens = sequence.num_computed
            self.counters.cached_prompt_tokens += group.cached_prompt_tokens
            if self.residency.reads_cache(group.request):
                self.waiting_time.prompts.observe(group.cached_prompt_tokens, sequence.num_prompt)
        return self._composition.entrance(sequence, budget)

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def _settle(self, sequence: Sequence, token: int, ends: bool, logprob: TokenLogprob | None, now: float) -> None:
        """The event of a token that is its sequence's first, may be its last, or has log probabilities."""
        group = sequence.group
        if group.first_token is None:
            group.first_token = now
        finish = finish_after(sequence, token) if ends else None
        logprobs = [] if logprob is None else [logprob]
        self._events.append(TokensGenerated(group.request_id, sequence.candidate, [token], logprobs, finish))
        if finish is not None:
            self.waiting_time.outputs.observe(sequence.num_generated)
            self._end(sequence, finish)
            self._finish_group_if_done(group, now)

    def _end(self, sequence: Sequence, finish: CandidateFinish) -> None:
        self.sequences.remove(sequence)
        self.residency.release(sequence)
        self.queue.reopen()
        sequence.phase = Phase.FINISHED
        sequence.finish = finish

    def _finish_group_if_done(self, group: RequestGroup, now: float) -> None:
        if group.done:
            self.requests.forget(group)
            self.counters.finished_requests += 1
            self._events.append(RequestFinished(group.request_id, group.usage(), group.timing(now)))

    def _drop_group(self, group: RequestGroup) -> None:
        for sequence in group.sequences:
            if sequence.phase is not Phase.FINISHED:
                self._end(sequence, CandidateFinish(FinishReason.CANCELLED))
        self.requests.forget(group)
