"""The engine in one thread: requests in, a step at a time, events out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass

import msgspec

from engine.config import EngineConfig, check_config
from engine.errors import EngineError, InvalidRequestError
from engine.generation_result import GeneratedCandidate, GenerationResult
from engine.grammar.compiler import GrammarCompiler, GrammarError
from engine.grammar.constraint import GrammarConstraint
from engine.model.loader import load_weights, open_model
from engine.pulse import Pulse
from engine.run.kv_pool import check_pool_size, check_swap_space
from engine.schedule.scheduler import Scheduler
from engine.start import check_step_size, choose_device, set_threads, start_loop
from engine.text.tokenizer import Tokenizer
from engine.types import CachePiece, EngineStats, FailureKind, GenerationRequest, Grammar, StepFrame
from engine.validation import check_request

ProgressCallback = Callable[[str], None]

MAX_COMPILING = 64  # requests whose grammars wait to be compiled
_COMPILING_PAUSE_SECONDS = 0.001
_CACHE_PIECE = 1024  # places of the prefix cache that are read in one step


@dataclass(frozen=True, slots=True)
class _Compiling:
    """A request that waits for its grammar. arrival: `time.monotonic()` seconds."""

    request: GenerationRequest
    arrival: float
    result: Future[GrammarConstraint]


class Engine:
    """Synchronous: the caller's thread is the step thread. LocalEngineClient and the engine process drive it for a
    service; `generate` drives it for offline work."""

    def __init__(
        self, config: EngineConfig, progress: ProgressCallback | None = None, *, warm_grammars: bool = False
    ) -> None:
        """Loads the model and claims all memory. Raises ConfigurationError. warm_grammars: readies, beside that, what
        the first request with a grammar would otherwise wait for."""
        check_config(config)
        report = progress or (lambda _: None)
        device = choose_device(config.device)
        set_threads(config, device)
        opened = open_model(config, device)
        check_step_size(config, opened.spec, opened.dtype, device)
        check_pool_size(config, opened.spec, opened.dtype, opened.max_model_len, device)
        check_swap_space(config, opened.spec, opened.dtype)
        model = load_weights(opened, config, device, report)
        self.config = config
        self.model = model
        self._grammars = GrammarCompiler(lambda: Tokenizer.from_source(model.source), model.eos_token_ids)
        self._compiling: dict[str, _Compiling] = {}
        self._cache_reads: deque[int] = deque()
        self.pulse = Pulse()
        self.failed_steps = 0  # in a row, up to now
        warmed = [self._grammars.warm()] if warm_grammars else []
        self.loop, self.info = start_loop(config, model, device, self.pulse, report)
        wait(warmed)  # whatever came of it: a model without a tokenizer serves all else

    @property
    def scheduler(self) -> Scheduler:
        return self.loop.scheduler

    @property
    def has_work(self) -> bool:
        return self.loop.has_work or bool(self._compiling or self._cache_reads)

    @property
    def steps(self) -> int:
        """Steps committed since the start."""
        return self.loop.steps

    @property
    def stats(self) -> EngineStats:
        return self.loop.stats()

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request; its events, a refusal too, come with the next step."""
        try:
            check_request(request, self.info.vocab_size, self.model.eos_token_ids)
        except InvalidRequestError as error:
            self.scheduler.refuse(request.request_id, error.message, error.field)
            return
        if request.grammar is None:
            self.scheduler.submit(request, time.monotonic())
        else:
            self._compile(request, request.grammar)

    def _compile(self, request: GenerationRequest, grammar: Grammar) -> None:
        name = request.request_id
        if name in self._compiling:
            self.scheduler.refuse(name, "request id is already live", "request_id")
        elif len(self._compiling) >= MAX_COMPILING:
            problem = f"{MAX_COMPILING} grammars wait to be compiled"
            self.scheduler.refuse(name, problem, kind=FailureKind.QUEUE_FULL)
        else:
            self._compiling[name] = _Compiling(request, time.monotonic(), self._grammars.submit(grammar))

    def _queue_compiled(self) -> None:
        """Hands over what has been compiled since the last step."""
        for name, waiting in list(self._compiling.items()):
            if waiting.result.done():
                del self._compiling[name]
                try:
                    self.scheduler.submit(waiting.request, waiting.arrival, waiting.result.result())
                except GrammarError as error:
                    self.scheduler.refuse(name, str(error), "grammar", FailureKind.GRAMMAR_INVALID)

    def cancel(self, request_id: str) -> bool:
        waiting = self._compiling.pop(request_id, None)
        if waiting is not None:
            waiting.result.cancel()
            self.scheduler.withdraw(request_id, time.monotonic() - waiting.arrival)
            return True
        return self.scheduler.cancel(request_id, time.monotonic())

    def stop_candidate(self, request_id: str, candidate: int) -> None:
        self.scheduler.stop_candidate(request_id, candidate, time.monotonic())

    def read_cache(self, start: int) -> None:
        """Tells with a later step what the prefix cache holds from this place on, and with every step from then on what
        changed in it."""
        self._cache_reads.append(start)

    def close(self) -> None:
        """Ends what runs beside the step loop."""
        self._grammars.close()

    def step(self) -> StepFrame:
        """One step of the loop. A step that raises fails every live request, since what it wrote is unknown."""
        if self._compiling:
            self._queue_compiled()
        before = self.loop.steps
        try:
            frame = self.loop.step()
        except Exception as error:
            self.failed_steps += 1
            frame = self.loop.abandon(FailureKind.ENGINE_ERROR, f"step failed: {type(error).__name__}: {error}")
        if self.loop.steps > before:
            self.failed_steps = 0
        return self._with_cache(frame)

    def _with_cache(self, frame: StepFrame) -> StepFrame:
        """The frame with what is to be told of the prefix cache: changes, and one piece a step at most."""
        index = self.scheduler.residency.prefix_index
        if not self._cache_reads and (index is None or not index.followed):
            return frame
        changes = [] if index is None else index.take_changes()
        pieces = []
        if self._cache_reads:
            start = self._cache_reads.popleft()
            pieces = [CachePiece(start, [], None) if index is None else index.read(start, _CACHE_PIECE)]
        return msgspec.structs.replace(frame, cache_changes=changes, cache_pieces=pieces)

    def generate(self, requests: Iterable[GenerationRequest]) -> list[GenerationResult]:
        """Runs requests to their end, batched together; results in the order of the input. Raises EngineError if other
        work is live."""
        requests = list(requests)
        if self.has_work:
            raise EngineError("generate needs an engine without live requests")
        results = {
            request.request_id: GenerationResult(
                request.request_id, [GeneratedCandidate() for _ in range(request.sampling.n)]
            )
            for request in requests
        }
        if len(results) != len(requests):
            raise EngineError("request ids must be distinct")
        for request in requests:
            self.submit(request)
        while True:
            for event in self.step().events:
                results[event.request_id].add(event)
            if not self.has_work:
                return [results[request.request_id] for request in requests]
            if not self.loop.has_work:
                time.sleep(_COMPILING_PAUSE_SECONDS)
