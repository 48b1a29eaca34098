"""Continuous batching: which tokens of which sequences the next step runs, and what its outcome means.

There is no prefill phase and no decode phase: a sequence has `num_tokens` and `num_computed`, and a plan says how many
of its uncomputed tokens to run. `plan` may be called while the step before is still running (its sampled tokens are
then pending), so the host works while the device does.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from itertools import repeat

from engine.errors import EngineError
from engine.schedule.admission import SchedulerLimits, refusal, shed, too_late
from engine.schedule.composition import Composition, MixedSteps, Wanted, unfinished
from engine.schedule.counters import Counters
from engine.schedule.deadlines import Deadlines
from engine.schedule.finish import finish_after
from engine.schedule.first_token import TELLING_TOKENS, PrefillBound, common_tokens
from engine.schedule.forecast import Demand, OutputForecast, PromptForecast, own_tokens
from engine.schedule.live_requests import LiveRequests
from engine.schedule.openings import Openings, no_openings
from engine.schedule.plan import ScheduledSequence, StepOutcome, StepPlan
from engine.schedule.policy import Policy, PriorityWithAgeing
from engine.schedule.queue_delay import Need, Pace, queue_delay
from engine.schedule.queue_fill import QueueFill
from engine.schedule.queued_work import QueuedWork
from engine.schedule.residency import Residency
from engine.schedule.sequence import Constraint, Phase, RequestGroup, Sequence
from engine.schedule.shedding import giving_way
from engine.schedule.waiting_queue import WaitingQueue
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
        self.queue_delay = 0.0  # seconds, by the last estimate
        self.least_delay = 0.0  # likewise, of what is known: nobody is refused by guesses
        self.prefill = PrefillBound(min(TELLING_TOKENS, -(-limits.max_batched_tokens // 2)))
        self._outputs = forecast or OutputForecast()
        self._prompts = PromptForecast()
        self._policy: Policy = policy or PriorityWithAgeing()
        self._composition: Composition = composition or MixedSteps(limits.max_batched_tokens)
        self._live = LiveRequests(limits.max_context_tokens, eos_token_ids, shares=residency.shares)
        self._waiting = WaitingQueue(self._policy)
        self._running: list[Sequence] = []
        self._arriving: list[Sequence] = []
        self._events: list[Event] = []
        self._steps = 0
        self._deadlines = Deadlines(self._live)
        self._work = QueuedWork(residency)
        self._openings: Openings | None = None  # until something changes what is free

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, now: float, constraint: Constraint | None = None) -> None:
        """Queues a request, or refuses it with a RequestFailed event. constraint: of the request's grammar."""
        live = request.request_id in self._live
        position = self.num_queued_requests
        fill = self.queue_fill
        refused = refusal(request, self.limits, live, fill, self.queue_delay)
        full = refused is not None and refused.kind is FailureKind.QUEUE_FULL
        giving = self._giving_way(request) if full else []
        refused = (None if giving else refused) or self._too_late(request, now)
        if refused is not None:
            self._events.append(refused)
            return
        for other in giving:
            self._drop_group(other)
            self._events.append(shed(other.request_id, fill, self.queue_delay))
        position -= len(giving)
        group = self._live.add(request, now, constraint)
        self._deadlines.add(group)
        for sequence in group.sequences:
            self._waiting.add(sequence)
            if self._openings is not None:
                self._openings.take(sequence)
        self.counters.prompt_tokens += len(request.prompt_token_ids)
        self._events.append(Admitted(request.request_id, len(request.prompt_token_ids), position))

    def _giving_way(self, request: GenerationRequest) -> list[RequestGroup]:
        """Those who make room for a request in a queue that is full."""
        fill = self.queue_fill
        requests = fill.requests + 1 - fill.max_requests
        tokens = fill.prompt_tokens - max(0, fill.max_prompt_tokens - len(request.prompt_token_ids))
        return giving_way(self._waiting, request.priority, requests, tokens)

    def _too_late(self, request: GenerationRequest, now: float) -> RequestFailed | None:
        """Refuses what cannot have a token by its deadline: after the prompts that run, or its turn, comes its own."""
        if request.deadline is None or request.deadline <= now:  # the latter has expired, and is told so
            return None
        own, left = len(request.prompt_token_ids), request.deadline - now
        if self._seconds_to_first_token(request, own, now) <= left:
            return None
        if self.residency.reads_cache(request):
            others = [*self._running, *self._arriving, *self._waiting]
            found = max(self.residency.cached_tokens(request), common_tokens(request, others, self.tables.block_size))
            own -= min(found, own - 1)
        estimated = self._seconds_to_first_token(request, own, now)
        return too_late(request.request_id, estimated, left) if estimated > left else None

    def _seconds_to_first_token(self, request: GenerationRequest, length: int, now: float) -> float:
        """Of a request that came now, with so many tokens to compute. What came since the last estimate of the delay
        is in the queue: a burst is told at once."""
        if not self.prefill.known:
            return self.least_delay
        ahead = self._composition.ahead(self._running, length)
        most = self._composition.not_overtaken(length)
        resident = [*self._running, *self._arriving]
        queued = self._work.ahead_of(request.priority, resident, self._waiting, most)
        return max(self.prefill.seconds(ahead + queued, now), self.least_delay) + self.prefill.seconds(length, now)

    def refuse(self, request_id: str, message: str, field: str = "", kind: FailureKind = FailureKind.INVALID) -> None:
        """Answers a request that gets no further for a reason the scheduler does not know of."""
        self._events.append(RequestFailed(request_id, kind, message, field=field))

    def withdraw(self, request_id: str, waited: float) -> None:
        """Answers a request that was cancelled before it came here, after so many seconds."""
        timing = Timing(queued=waited, time_to_first_token=waited, total=waited)
        self._events.append(RequestFinished(request_id, Usage(), timing, cancelled=True))

    def cancel(self, request_id: str, now: float) -> bool:
        """Ends a request wherever it is; its blocks are free at once. False if it is not live."""
        group = self._live.get(request_id)
        if group is None:
            return False
        self._drop_group(group)
        self._events.append(RequestFinished(request_id, group.usage(), group.timing(now), cancelled=True))
        return True

    def stop_candidate(self, request_id: str, candidate: int, now: float) -> None:
        """Ends one candidate whose text met a stop string; the caller has told its client already."""
        group = self._live.get(request_id)
        if group is None or candidate >= len(group.sequences):
            return
        sequence = group.sequences[candidate]
        if sequence.phase is not Phase.FINISHED:
            self._outputs.observe(sequence.num_generated)
            self._end(sequence, CandidateFinish(FinishReason.STOP))
            self._finish_group_if_done(group, now)

    def fail(self, request_id: str, kind: FailureKind, message: str, field: str = "") -> None:
        """Ends a request with a failure event. Unknown ids are ignored: it ended before."""
        group = self._live.get(request_id)
        if group is None:
            return
        self._drop_group(group)
        self._events.append(RequestFailed(request_id, kind, message, usage=group.usage(), field=field))

    def fail_all(self, kind: FailureKind, message: str) -> None:
        for group in list(self._live):
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
        self._openings = None
        self.residency.begin_plan()
        if self._arriving:
            self._land(moved)
        wanted, preempted = self._schedule_running()
        if not preempted and self._waiting:
            wanted.pieces.extend(self._admit(wanted, now, overlap=moved is not None))
        if self._arriving and not wanted.decodes and not wanted.pieces:
            self._land(None)
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
        edited, scored = self._live.edited(sampling), self._live.scored(scheduled)
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
        return bool(self._live)

    @property
    def awaits_tokens(self) -> bool:
        """Whether a running request needs the tokens of the last step before the next one is launched."""
        return self._live.await_tokens(self._running)

    @property
    def num_running_requests(self) -> int:
        return len({sequence.group.order for sequence in self._running + self._arriving})

    @property
    def num_requests(self) -> int:
        return len(self._live)

    @property
    def num_queued_requests(self) -> int:
        return self.num_requests - self.num_running_requests

    @property
    def starting(self) -> tuple[int, int]:
        """Of those in the queue, requests and prompt tokens that have slots and blocks at once, and wait for a place in
        a step only. They do not count against the queue's bounds."""
        if not self._waiting:
            return 0, 0
        openings = self._opened()
        return openings.requests, openings.prompt_tokens

    @property
    def queue_fill(self) -> QueueFill:
        requests, tokens = self.starting
        return QueueFill(
            self.num_queued_requests - requests,
            self._waiting.prompt_tokens - tokens,
            self.limits.max_queued_requests,
            self.limits.max_queued_tokens,
        )

    @property
    def least_priority(self) -> int:
        return self._waiting.least_priority

    @property
    def queued_prompt_tokens(self) -> int:
        return self._waiting.prompt_tokens

    @property
    def queued_uncached_tokens(self) -> int:
        """Of these, those that will likely have to be computed."""
        return self._waiting.prompt_tokens - self._prompts.found(self._waiting.prompt_tokens)

    def estimate_delay(self, pace: Pace) -> None:
        """Brings `queue_delay` and `least_delay` up to date. They differ until a first output has ended: how long
        outputs are is a guess then, which the least delay takes for nothing."""
        self.queue_delay = self._delay(pace, self._outputs.remaining)
        self.least_delay = self.queue_delay if self._outputs.observed else self._delay(pace, lambda _: 0)

    def _delay(self, pace: Pace, remaining_of: Callable[[Sequence], int]) -> float:
        """remaining_of: tokens that a sequence is expected to add."""
        tables = self.tables
        allocator, size = tables.allocator, tables.block_size

        def need(sequence: Sequence) -> Need:
            remaining = remaining_of(sequence)
            found = self._expected_found(sequence)
            blocks = (own_tokens(sequence, size, remaining) - found) // size
            return Need(blocks, sequence.num_uncomputed - found, remaining)

        resident = self._running + self._arriving
        running = [need(sequence) for sequence in resident]
        shared = max(0, allocator.num_live - sum(own_tokens(sequence, size) for sequence in resident) // size)
        free = allocator.num_blocks - shared - sum(item.blocks for item in running)
        waiting = [need(sequence) for sequence in self._waiting]
        return queue_delay(running, waiting, tables.num_free_slots, free, pace)

    def _expected_found(self, sequence: Sequence) -> int:
        """How many tokens of a prompt that waits for its first turn will then be there already."""
        if not sequence.awaits_first_turn:
            return 0
        return self._prompts.found(sequence.num_prompt) if self.residency.reads_cache(sequence.group.request) else 0

    def check_idle(self) -> None:
        """Raises EngineError unless there is no work and nothing is held for any."""
        if self.has_work or self._waiting or self._running or self._arriving:
            raise EngineError("check_idle with live requests")
        self.residency.check_idle()
        if self._waiting.prompt_tokens:
            raise EngineError(f"{self._waiting.prompt_tokens} queued prompt tokens with an empty queue")

    def _take_scores(self, entry: ScheduledSequence, scores: list[TokenLogprob]) -> None:
        """A preempted prompt is computed again: what is known of it is not told twice."""
        group = entry.sequence.group
        new = scores[group.scored_tokens - entry.start - 1 :]
        if new and entry.sequence.phase is not Phase.FINISHED:
            self._live.take_scores(group, len(new))
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
            wanted = self._composition.wanted(self._running)
            if not wanted.needy or self.residency.grow(wanted.needy):
                return wanted, preempted
            self._preempt(self._last())
            preempted = True

    def _last(self) -> Sequence:
        """Of those that hold blocks, the last in the policy's order."""
        if not self._arriving:
            return self._running[-1]
        return max(self._running[-1:] + self._arriving, key=self._policy.key)

    def _land(self, moved: int | None) -> None:
        """Lets those run that have been copied in; None: all of them."""
        landed = [sequence for sequence in self._arriving if moved is None or sequence.arrival_step <= moved]
        for sequence in landed:
            self._arriving.remove(sequence)
            self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.phase = Phase.RUNNING
        bisect.insort(self._running, sequence, key=self._policy.key)

    def _preempt(self, sequence: Sequence) -> None:
        """Gives back slot and blocks; the tokens stay, and its turn comes again before any later sequence's."""
        (self._arriving if sequence.phase is Phase.ARRIVING else self._running).remove(sequence)
        self.counters.swaps += self.residency.preempt(sequence)
        sequence.preemptions += 1
        sequence.phase = Phase.WAITING
        self.counters.preemptions += 1
        self._waiting.add(sequence)
        self._openings = None

    def _admit(self, wanted: Wanted, now: float, *, overlap: bool) -> list[ScheduledSequence]:
        """Waiting sequences in order while budget, slots and blocks last. Behind one that finds no blocks, a few
        smaller ones may go first, a bounded number of times; behind one whose turn it is not yet, because a long prompt
        is not through, as often as they fit beside that. Nobody overtakes a preempted one. overlap: those from host
        memory are only on their way."""
        entries: list[ScheduledSequence] = []
        budget, long = self._composition.room(wanted), unfinished(wanted.pieces)
        blocked: Sequence | None = None
        window = _SKIP_WINDOW
        demand = self._demand() if budget > 0 else None
        for sequence in self._waiting.first(_SKIP_WINDOW + self.limits.max_num_seqs):
            if budget <= 0 or window <= 0 or len(self._running) + len(self._arriving) >= self.limits.max_batched_tokens:
                break
            if sequence.num_pending or self._waits_for_sibling(sequence):
                continue
            if long is not None and not self._composition.admits(
                sequence, self._uncomputed(sequence, budget), budget, long
            ):
                window = 0 if sequence.preemptions else window - 1
                continue
            alone = not self._running and not self._arriving
            swapped = bool(sequence.swapped_blocks)
            fits = alone or demand is None or demand.fits(sequence)
            if fits and self.residency.claim(sequence, alone=alone, watermark=self.limits.watermark_blocks):
                if demand is not None:
                    demand.add(sequence)
                self._waiting.remove(sequence)
                if swapped and overlap:
                    self._expect(sequence)
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
            self._openings = no_openings()
        return entries

    def _opened(self) -> Openings:
        if self._openings is None:
            resident = self._running + self._arriving
            places = min(self.tables.num_free_slots, self.limits.max_batched_tokens - len(resident))
            self._openings = Openings(
                slots=places,
                blocks=self.residency.available_blocks,
                watermark=self.limits.watermark_blocks,
                block_size=self.tables.block_size,
                alone=not resident,
                running=frozenset(sequence.group.order for sequence in resident),
                make_demand=self._demand,
            )
            for sequence in self._waiting:
                if not self._openings.take(sequence):
                    break
        return self._openings

    def _uncomputed(self, sequence: Sequence, enough: int) -> int:
        """Tokens of a waiting sequence that would have to run; more than `enough` is not told exactly."""
        count = 1 if sequence.swapped_blocks else sequence.num_uncomputed
        if count <= enough:
            return count
        return count - min(self.residency.cached_tokens(sequence.group.request), count - 1)

    def _demand(self) -> Demand | None:
        if self.forecast is None:
            return None
        tables = self.tables
        total, live = tables.allocator.num_blocks, tables.allocator.num_live
        demand = Demand(self.forecast, total * tables.block_size, tables.block_size, live * tables.block_size)
        for sequence in self._running + self._arriving:
            demand.add(sequence)
        return demand

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """The first candidate computes the prompt, the others then share its blocks."""
        first = sequence.group.sequences[0]
        return (
            self.residency.shares
            and sequence is not first
            and not sequence.num_generated
            and first.phase is not Phase.FINISHED
            and first.num_computed < sequence.num_prompt
            and not first.preemptions
        )

    def _expect(self, sequence: Sequence) -> None:
        sequence.phase = Phase.ARRIVING
        sequence.arrival_step = self._steps + 1
        self._arriving.append(sequence)

    def _start(self, sequence: Sequence, budget: int, now: float) -> ScheduledSequence | None:
        group = sequence.group
        self._run(sequence)
        if group.first_scheduled is None:
            group.first_scheduled = now
            if group.request.queue_deadline is not None:
                self._events.append(Scheduled(group.request_id))
            group.cached_prompt_tokens = min(sequence.num_computed, sequence.num_prompt)
            self.counters.cached_prompt_tokens += group.cached_prompt_tokens
            if self.residency.reads_cache(group.request):
                self._prompts.observe(group.cached_prompt_tokens, sequence.num_prompt)
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
            self._outputs.observe(sequence.num_generated)
            self._end(sequence, finish)
            self._finish_group_if_done(group, now)

    def _end(self, sequence: Sequence, finish: CandidateFinish) -> None:
        match sequence.phase:
            case Phase.RUNNING:
                self._running.remove(sequence)
            case Phase.ARRIVING:
                self._arriving.remove(sequence)
            case Phase.WAITING:
                self._waiting.remove(sequence)
        self.residency.release(sequence)
        self._openings = None
        sequence.phase = Phase.FINISHED
        sequence.finish = finish

    def _finish_group_if_done(self, group: RequestGroup, now: float) -> None:
        if group.done:
            self._live.forget(group)
            self.counters.finished_requests += 1
            self._events.append(RequestFinished(group.request_id, group.usage(), group.timing(now)))

    def _drop_group(self, group: RequestGroup) -> None:
        for sequence in group.sequences:
            if sequence.phase is not Phase.FINISHED:
                self._end(sequence, CandidateFinish(FinishReason.CANCELLED))
        self._live.forget(group)
