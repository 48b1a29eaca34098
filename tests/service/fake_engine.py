"""A scripted engine: the EngineClient protocol with deterministic tokens and every failure on demand.

By default token i of candidate c is the letter `alphabet[(i + c) % 26]`, one a step, so that "abc..." is what a client
reads. A test scripts a request through `plan`, and the engine through `hang`, `die` and `hold`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine import (
    Admitted,
    BlockStored,
    CacheChange,
    CachePiece,
    CandidateFinish,
    EngineDiedError,
    EngineInfo,
    EngineState,
    EngineStats,
    Event,
    EventSink,
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

BLOCK_SIZE = 16
CACHE_PIECE = 3  # blocks of the prefix cache that one read gives
HEARTBEAT_SECONDS = 0.05


@dataclass(frozen=True)
class Script:
    """What one request does. tokens: what it generates, then it ends by itself. fail_after: tokens until it fails."""

    tokens: Sequence[int] | None = None
    tokens_per_step: int = 1
    finish: FinishReason = FinishReason.END_OF_SEQUENCE
    end_token: int | None = None
    fail_after: int | None = None
    fail_kind: FailureKind = FailureKind.ENGINE_ERROR
    steps_before_first: int = 0
    steps_per_token: int = 1


def slow_if_asked(request: GenerationRequest) -> Script:
    """A prompt that starts with "slow" gets a token every twenty steps."""
    return Script(steps_per_token=20) if request.prompt_token_ids[:4] == list(b"slow") else Script()


@dataclass
class FakeCandidate:
    generated: int = 0
    ended: bool = False


@dataclass
class FakeRequest:
    request: GenerationRequest
    sink: EventSink
    script: Script
    arrival: float
    candidates: list[FakeCandidate]
    running: bool = False
    steps: int = 0
    events: list[Event] = field(default_factory=list)

    @property
    def usage(self) -> Usage:
        completion = sum(candidate.generated for candidate in self.candidates)
        return Usage(prompt_tokens=len(self.request.prompt_token_ids), completion_tokens=completion)

    @property
    def timing(self) -> Timing:
        return Timing(queued=0.001, time_to_first_token=0.002, total=time.monotonic() - self.arrival)

    @property
    def blocks(self) -> int:
        usage = self.usage
        return -(-(usage.prompt_tokens + usage.completion_tokens) // BLOCK_SIZE) if self.running else 0


class FakeEngineClient:
    """step_delay: seconds between steps; a step serves every running request. record: keeps what was asked of it."""

    def __init__(
        self,
        *,
        step_delay: float = 0.001,
        max_num_seqs: int = 64,
        max_context_tokens: int = 256,
        max_queued_requests: int = 64,
        max_queued_tokens: int = 4096,
        vocab_size: int = 300,
        first_letter: int = 97,
        state: EngineState = EngineState.READY,
        instance_id: str = "fake-1",
        record: bool = True,
    ) -> None:
        self.step_delay = step_delay
        self.plan: Callable[[GenerationRequest], Script] = lambda _: Script()
        self.submitted: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.stopped_candidates: list[tuple[str, int]] = []
        self.problem = ""
        self.hold = False  # nothing leaves the queue
        self.stats_overrides: dict[str, float] = {}
        self._record = record
        self._first_letter = first_letter
        self._info = EngineInfo(
            instance_id=instance_id,
            model="fake",
            device="fake",
            dtype="none",
            vocab_size=vocab_size,
            max_context_tokens=max_context_tokens,
            max_prompt_tokens=max_context_tokens - 1,
            max_num_seqs=max_num_seqs,
            max_queued_requests=max_queued_requests,
            max_queued_tokens=max_queued_tokens,
            block_size=BLOCK_SIZE,
            num_blocks=max_num_seqs * max_context_tokens // BLOCK_SIZE,
        )
        self._state = state
        self._live: dict[str, FakeRequest] = {}
        self._listeners: list[Callable[[EngineStats, EngineState], None]] = []
        self.cache: dict[int, BlockStored] = {}
        self._cache_listeners: list[Callable[[Sequence[CacheChange]], None]] = []
        self._step = 0
        self._generated = 0
        self._finished = 0
        self._hung = False
        self._task: asyncio.Task[None] | None = None
        self._heartbeat = self._progressed = time.monotonic()
        self._spinning = False

    # --- EngineClient -----------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def stats(self) -> EngineStats:
        running = [live for live in self._live.values() if live.running]
        queued = [live for live in self._live.values() if not live.running]
        blocks = sum(live.blocks for live in running)
        figures: dict[str, float] = {
            "step": self._step,
            "heartbeat": self._heartbeat,
            "progressed": self._progressed,
            "running_requests": len(running),
            "queued_requests": len(queued),
            "queued_prompt_tokens": sum(len(live.request.prompt_token_ids) for live in queued),
            "queued_uncached_tokens": sum(len(live.request.prompt_token_ids) for live in queued),
            "free_blocks": self._info.num_blocks - blocks,
            "live_blocks": blocks,
            "generated_tokens": self._generated,
            "finished_requests": self._finished,
            "last_step_seconds": self.step_delay,
        }
        return EngineStats(**{**figures, **self.stats_overrides})  # type: ignore[arg-type]

    async def start(self) -> EngineInfo:
        self._task = asyncio.create_task(self._loop())
        return self._info

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        if self._state is not EngineState.READY:
            raise EngineDiedError(f"engine is {self._state}")
        if self._record:
            self.submitted.append(request)
        queued = sum(not live.running for live in self._live.values())
        if queued >= self._info.max_queued_requests:
            details = {"retry_after": "0.25", "waiting_requests": str(queued)}
            sink([RequestFailed(request.request_id, FailureKind.QUEUE_FULL, "queue is full", details=details)])
            return
        candidates = [FakeCandidate() for _ in range(request.sampling.n)]
        live = FakeRequest(request, sink, self.plan(request), time.monotonic(), candidates)
        live.events.append(Admitted(request.request_id, len(request.prompt_token_ids), queued))
        self._live[request.request_id] = live

    def cancel(self, request_id: str) -> bool:
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        if self._record:
            self.cancelled.append(request_id)
        event = RequestFinished(request_id, live.usage, live.timing, cancelled=True)
        self._answer(live.sink, [*live.events, event])
        return True

    def _answer(self, sink: EventSink, events: list[Event]) -> None:
        """Through the loop, as a real engine's answer comes."""
        asyncio.get_running_loop().call_soon(sink, events)

    def stop_candidate(self, request_id: str, candidate: int) -> None:
        self.stopped_candidates.append((request_id, candidate))
        live = self._live.get(request_id)
        if live is not None:
            live.candidates[candidate].ended = True

    def on_stats(self, listener: Callable[[EngineStats, EngineState], None]) -> None:
        self._listeners.append(listener)

    async def read_cache(self, start: int) -> CachePiece:
        if self._state is not EngineState.READY:
            raise EngineDiedError(f"engine is {self._state}")
        await asyncio.sleep(0)
        places = list(self.cache.values())
        end = start + CACHE_PIECE
        return CachePiece(start, places[start:end], end if end < len(places) else None)

    def on_cache_changes(self, listener: Callable[[Sequence[CacheChange]], None]) -> None:
        self._cache_listeners.append(listener)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._end(EngineState.STOPPED)

    # --- script -----------------------------------------------------------------------------------------------------

    @property
    def live_requests(self) -> int:
        return len(self._live)

    @property
    def live(self) -> list[FakeRequest]:
        return list(self._live.values())

    def hang(self) -> None:
        """No step and no heartbeat from now on."""
        self._hung = True

    def change_cache(self, *changes: CacheChange) -> None:
        """What one step stores and evicts."""
        for change in changes:
            if isinstance(change, BlockStored):
                self.cache[change.hash] = change
            else:
                del self.cache[change.hash]
        for listener in self._cache_listeners:
            listener(changes)

    def spin(self) -> None:
        """Heartbeats, but no step."""
        self._spinning = True

    def recover(self) -> None:
        self._hung = self._spinning = False

    def die(self) -> None:
        """As if the process was killed."""
        self._hung = True
        self.problem = "engine process ended with code -9"
        self._end(EngineState.FAILED)

    def set_state(self, state: EngineState) -> None:
        self._state = state
        self._notify()

    # --- steps ------------------------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        idle_since = 0.0
        while True:
            await asyncio.sleep(self.step_delay)
            if self._hung:
                continue
            now = time.monotonic()
            if self._live:
                self.run_step(now)
            elif now - idle_since > HEARTBEAT_SECONDS:
                idle_since = self._heartbeat = self._progressed = now
                self._notify()

    def run_step(self, now: float) -> None:
        self._heartbeat = now
        if self._spinning:
            self._notify()
            return
        self._progressed = now
        self._admit()
        self._step += any(live.running for live in self._live.values())
        for live in list(self._live.values()):
            self._advance(live, now)
        for live in list(self._live.values()):
            self._deliver(live)
        self._notify()

    def _admit(self) -> None:
        running = sum(live.running for live in self._live.values())
        for live in self._live.values():
            if not live.running and not self.hold and running < self._info.max_num_seqs:
                live.running = True
                running += 1
                if live.request.queue_deadline is not None:
                    live.events.append(Scheduled(live.request.request_id))
                live.events += self._prompt_scores(live.request)

    def _advance(self, live: FakeRequest, now: float) -> None:
        expired = self._expired(live, now)
        if expired is not None:
            live.events.append(RequestFailed(live.request.request_id, expired, "too late", usage=live.usage))
        elif live.running:
            live.steps += 1
            if live.steps > live.script.steps_before_first and live.steps % live.script.steps_per_token == 0:
                self._generate(live)

    def _expired(self, live: FakeRequest, now: float) -> FailureKind | None:
        request = live.request
        limits = [limit for limit in (request.deadline, request.queue_deadline) if limit is not None]
        if not live.running and any(limit <= now for limit in limits):
            return FailureKind.EXPIRED_IN_QUEUE
        if request.deadline is not None and request.deadline <= now:
            return FailureKind.DEADLINE_EXCEEDED
        return None

    def _generate(self, live: FakeRequest) -> None:
        request, script = live.request, live.script
        for index, candidate in enumerate(live.candidates):
            if not candidate.ended:
                self._generate_candidate(live, index, candidate)
            if script.fail_after is not None and candidate.generated >= script.fail_after:
                message = "non-finite logits"
                live.events.append(RequestFailed(request.request_id, script.fail_kind, message, usage=live.usage))
                return
        if all(candidate.ended for candidate in live.candidates):
            live.events.append(RequestFinished(request.request_id, live.usage, live.timing))

    def _generate_candidate(self, live: FakeRequest, index: int, candidate: FakeCandidate) -> None:
        script, request = live.script, live.request
        budget = min(script.tokens_per_step, self._limit(live) - candidate.generated)
        token_ids: list[int] = []
        finish = None
        for _ in range(budget):
            token = self._token(script, index, candidate.generated)
            if token is None:
                finish = CandidateFinish(script.finish, script.end_token)
                if script.end_token is not None:
                    token_ids.append(script.end_token)
                    candidate.generated += 1
                break
            token_ids.append(token)
            candidate.generated += 1
        if finish is None and candidate.generated >= self._limit(live):
            finish = CandidateFinish(self._limit_reason(live))
        self._generated += len(token_ids)
        candidate.ended = finish is not None
        logprobs = self._logprobs(request, token_ids)
        live.events.append(TokensGenerated(request.request_id, index, token_ids, logprobs, finish))

    def _token(self, script: Script, candidate: int, position: int) -> int | None:
        if script.tokens is not None:
            return script.tokens[position] if position < len(script.tokens) else None
        return self._first_letter + (position + candidate) % 26

    def _prompt_scores(self, request: GenerationRequest) -> list[PromptScored]:
        """In two pieces, as from two chunks of a prefill."""
        top = request.prompt_top_logprobs
        if top is None:
            return []
        alternatives = [(token, -float(token + 1)) for token in range(top)]
        scores = [TokenLogprob(token, -0.25, 1, alternatives) for token in request.prompt_token_ids[1:]]
        half = len(scores) // 2
        return [PromptScored(request.request_id, piece) for piece in (scores[:half], scores[half:]) if piece]

    def _logprobs(self, request: GenerationRequest, token_ids: Sequence[int]) -> list[TokenLogprob]:
        if request.top_logprobs is None:
            return []
        top = [(token, -float(token + 1)) for token in range(request.top_logprobs)]
        return [TokenLogprob(token, -0.5, 1, top) for token in token_ids]

    def _limit(self, live: FakeRequest) -> int:
        context = self._info.max_context_tokens - len(live.request.prompt_token_ids)
        most = live.request.stop.max_tokens
        return context if most is None else min(most, context)

    def _limit_reason(self, live: FakeRequest) -> FinishReason:
        most = live.request.stop.max_tokens
        return FinishReason.MAX_TOKENS if most == self._limit(live) else FinishReason.CONTEXT_LIMIT

    def _deliver(self, live: FakeRequest) -> None:
        events, live.events = live.events, []
        if not events:
            return
        if isinstance(events[-1], RequestFinished | RequestFailed):
            self._live.pop(live.request.request_id, None)
            self._finished += 1
        live.sink(events)

    def _end(self, state: EngineState) -> None:
        if self._state in (EngineState.FAILED, EngineState.STOPPED):
            return
        self._state = state
        for live in list(self._live.values()):
            request_id = live.request.request_id
            del self._live[request_id]
            live.sink(
                [*live.events, RequestFailed(request_id, FailureKind.ENGINE_DIED, self.problem or "engine was stopped")]
            )
        self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener(self.stats, self._state)
