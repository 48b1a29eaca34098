"""The step loop: plan -> run -> commit, on one thread."""

from __future__ import annotations

import time
from itertools import takewhile
from typing import Protocol

from engine.pulse import Pulse
from engine.schedule.plan import ScheduledSequence, StepOutcome, StepPlan
from engine.schedule.queue_delay import Pace
from engine.schedule.scheduler import Scheduler
from engine.types import EngineStats, FailureKind, StepFrame

_RATE_SMOOTHING = 0.1
_ESTIMATE_SECONDS = 0.25  # the queue's delay is estimated so often


def _is_chunk(entry: ScheduledSequence) -> bool:
    return entry.count > 1


class PendingStep(Protocol):
    """A launched step whose outcome may still be on its way."""

    def wait(self) -> StepOutcome: ...


class Runner(Protocol):
    """Runs plans. `lookahead`: a step is launched before the one before it has been waited for."""

    lookahead: bool

    @property
    def moved(self) -> int | None:
        """The newest step whose sequences have all been copied in from host memory, and those of every step before;
        None where a step's copies are made before it computes."""
        ...

    def launch(self, plan: StepPlan) -> PendingStep: ...


class StepLoop:
    """Owns scheduler and runner. Every method is called from one thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner, pulse: Pulse | None = None) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.pulse = pulse or Pulse()
        self._in_flight: tuple[StepPlan, PendingStep] | None = None
        self._prefill_rate = 0.0
        self._decode_rate = 0.0
        self._last_step_seconds = 0.0
        self._decode_step_seconds = 0.0
        self._estimated_at = 0.0
        self._committed_at = time.monotonic()
        self.steps = 0
        self._integrity_errors = 0
        self._had_work = False

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def step(self) -> StepFrame:
        """Launches the next step and commits the one before it (with lookahead) or itself. While a request runs whose
        next token depends on its last, each step is committed before the next is planned. Also called when idle: the
        frame then carries what submit and cancel left behind, and the newest figures."""
        if self._in_flight is not None and self.scheduler.awaits_tokens:
            known, self._in_flight = self._in_flight, None
            self._commit(*known)
        self._had_work = self._had_work or self.has_work
        now = time.monotonic()
        if self._in_flight is None:
            self._committed_at = now
        plan = self.scheduler.plan(now, self.runner.moved)
        launched = (plan, self.runner.launch(plan)) if plan is not None else None
        if plan is not None:
            self.scheduler.prepare_commit(plan)
        if self.runner.lookahead:
            finished, self._in_flight = self._in_flight, launched
        else:
            finished = launched
        if finished is not None:
            self._commit(*finished)
        self._check_drained()
        if not self.has_work:
            self.pulse()
        return StepFrame(self.scheduler.take_events(), self.stats())

    def abandon(self, kind: FailureKind, message: str) -> StepFrame:
        """Fails every live request, as when the runner is beyond use."""
        self._in_flight = None
        self.scheduler.fail_all(kind, message)
        return StepFrame(self.scheduler.take_events(), self.stats())

    def stats(self) -> EngineStats:
        scheduler, counters = self.scheduler, self.scheduler.counters
        self._estimate_delay()
        queue, waiting, waiting_time = scheduler.queue, scheduler.sequences.waiting, scheduler.waiting_time
        starting_requests, starting_tokens = queue.starting
        allocator, running = scheduler.tables.allocator, queue.num_running_requests
        return EngineStats(
            step=self.steps,
            heartbeat=time.monotonic(),
            progressed=self.pulse.at,
            running_requests=running,
            queued_requests=len(scheduler.requests) - running,
            queued_prompt_tokens=waiting.prompt_tokens,
            queued_uncached_tokens=waiting_time.queued_uncached_tokens,
            starting_requests=starting_requests,
            starting_prompt_tokens=starting_tokens,
            free_blocks=allocator.num_free,
            cached_blocks=allocator.num_cached,
            live_blocks=allocator.num_live,
            swapped_blocks=scheduler.residency.swap.num_used if scheduler.residency.swap else 0,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            finished_requests=counters.finished_requests,
            prefill_tokens_per_second=self._prefill_rate,
            decode_tokens_per_second=self._decode_rate,
            last_step_seconds=self._last_step_seconds,
            queue_delay_seconds=waiting_time.queue_delay,
            least_delay_seconds=waiting_time.least_delay,
            integrity_errors=self._integrity_errors,
            least_priority=waiting.least_priority,
        )

    def _check_drained(self) -> None:
        """Once after every drain of work: whatever is held then is lost."""
        had_work, self._had_work = self._had_work, self.has_work
        if had_work and not self._had_work and not self.scheduler.residency.is_empty:
            self._integrity_errors += 1

    def _commit(self, plan: StepPlan, pending: PendingStep) -> None:
        outcome = pending.wait()
        now = time.monotonic()
        self.scheduler.commit(plan, outcome, now)
        self.steps += 1
        self.pulse()
        self._measure(plan, now - self._committed_at)
        self._committed_at = now

    def _measure(self, plan: StepPlan, seconds: float) -> None:
        self._last_step_seconds = seconds
        prefill = sum(entry.count for entry in takewhile(_is_chunk, reversed(plan.scheduled)))
        rate = (prefill or len(plan.scheduled)) / max(seconds, 1e-9)
        if prefill:
            self.scheduler.waiting_time.prefill.observe(prefill, seconds, time.monotonic())
            self._prefill_rate += (rate - self._prefill_rate) * (_RATE_SMOOTHING if self._prefill_rate else 1.0)
            self.scheduler.residency.cost.prefill_rate = self._prefill_rate
        elif plan.scheduled:  # some steps only move blocks
            smoothing = _RATE_SMOOTHING if self._decode_rate else 1.0
            self._decode_rate += (rate - self._decode_rate) * smoothing
            self._decode_step_seconds += (seconds - self._decode_step_seconds) * smoothing

    def _estimate_delay(self) -> None:
        now = time.monotonic()
        if now - self._estimated_at >= _ESTIMATE_SECONDS or not self.has_work:
            self._estimated_at = now
            self.scheduler.waiting_time.estimate(Pace(self._prefill_rate, self._decode_step_seconds))
