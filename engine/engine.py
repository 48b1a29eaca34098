"""The engine in one thread: model, KV pool, scheduler and step loop, built from a configuration."""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import msgspec
import torch

from engine import _runtime
from engine.config import Device, EngineConfig, PreemptionMode
from engine.errors import ConfigurationError, EngineError, InvalidRequestError
from engine.grammar.compiler import GrammarCompiler, GrammarError
from engine.grammar.constraint import GrammarConstraint
from engine.kv.allocator import make_allocator
from engine.kv.block_table import BlockTables
from engine.kv.prefix_index import PrefixIndex
from engine.kv.swap import SwapSpace
from engine.loop import Runner, StepLoop
from engine.model.loader import load_weights, open_model
from engine.pulse import Pulse
from engine.run.block_moves import BlockMover
from engine.run.cuda_runner import GRAPH_BYTES, CudaRunner, profile_largest_step
from engine.run.kv_pool import (
    allocate_pool,
    check_pool_size,
    check_swap_space,
    cpu_pool_blocks,
    cuda_pool_blocks,
    swap_too_large,
)
from engine.run.runner import EagerRunner
from engine.schedule.admission import SchedulerLimits
from engine.schedule.composition import SeparateSteps
from engine.schedule.forecast import OutputForecast
from engine.schedule.preemption import PreemptionCost
from engine.schedule.residency import Residency
from engine.schedule.scheduler import Scheduler
from engine.text.tokenizer import Tokenizer
from engine.types import (
    CachePiece,
    CandidateFinish,
    EngineInfo,
    EngineStats,
    Event,
    FailureKind,
    GenerationRequest,
    Grammar,
    PromptScored,
    RequestFailed,
    RequestFinished,
    StepFrame,
    StopCriteria,
    TokenLogprob,
    TokensGenerated,
    Usage,
)
from engine.validation import check_request

ProgressCallback = Callable[[str], None]

MOST_BLOCK_SIZE = 256  # tokens
MAX_COMPILING = 64  # requests whose grammars wait to be compiled
_COMPILING_PAUSE_SECONDS = 0.001
_CACHE_PIECE = 1024  # places of the prefix cache that are read in one step
_WATERMARK_SHARE = 100  # one block in so many stays free when admitting beside running sequences


@dataclass(slots=True)
class GeneratedCandidate:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: CandidateFinish | None = None


@dataclass(slots=True)
class GenerationResult:
    """What `Engine.generate` gives for one request. `failure` is set if it failed."""

    request_id: str
    candidates: list[GeneratedCandidate]
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the prompt's second token on
    failure: RequestFailed | None = None

    @property
    def token_ids(self) -> list[int]:
        """Of the first candidate."""
        return self.candidates[0].token_ids


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
        check_pool_size(config, opened.spec, opened.dtype, opened.max_model_len, device)
        check_swap_space(config)
        model = load_weights(opened, config, device, report)
        self.config = config
        self.model = model
        self._grammars = GrammarCompiler(lambda: Tokenizer.from_source(model.source), model.eos_token_ids)
        self._compiling: dict[str, _Compiling] = {}
        self._cache_reads: deque[int] = deque()
        self.pulse = Pulse()
        self.failed_steps = 0  # in a row, up to now
        warmed = [self._grammars.warm()] if warm_grammars else []
        self._build(device, report)
        wait(warmed)  # whatever came of it: a model without a tokenizer serves all else

    def _build(self, device: torch.device, report: ProgressCallback) -> None:
        config, model = self.config, self.model
        dtype = model.decoder.dtype
        max_batched_tokens = config.step_tokens(device.type)
        num_blocks = self._pool_blocks(device, report)
        max_context = min(model.max_model_len, num_blocks * config.block_size)
        report(f"claiming KV cache: {num_blocks * config.block_size} tokens")
        pool = allocate_pool(model.spec, num_blocks, config.block_size, dtype, device)
        allocator = make_allocator(config.allocator, num_blocks)
        width = -(-max_context // config.block_size)
        tables = BlockTables(allocator, config.max_num_seqs, width, config.block_size)
        limits = SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            max_context_tokens=max_context,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            watermark_blocks=num_blocks // _WATERMARK_SHARE,
        )
        mover = _block_mover(config, pool)
        residency = self._residency(tables, mover, pool[0].nbytes)
        forecast = OutputForecast() if config.admission_forecast else None
        composition = SeparateSteps(max_batched_tokens) if config.batch_invariant else None
        if composition is not None:
            report(f"batch-invariant: prompts run alone, {max_batched_tokens} tokens a step; no prefix cache")
        scheduler = Scheduler(
            residency, limits, frozenset(model.eos_token_ids), forecast=forecast, composition=composition
        )
        runner = self._runner(pool, tables, mover, report)
        check_outputs(model.source.name, runner, residency, limits, batch_invariant=config.batch_invariant)
        self.loop = StepLoop(scheduler, runner, self.pulse)
        self.info = self._info(device, limits, num_blocks)

    def _pool_blocks(self, device: torch.device, report: ProgressCallback) -> int:
        config, model = self.config, self.model
        dtype = model.decoder.dtype
        if device.type == "cpu":
            return cpu_pool_blocks(config, model.spec, dtype, model.max_model_len)
        report("profiling the largest step")
        profile_largest_step(model.decoder, config.block_size, batch_invariant=config.batch_invariant)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return cuda_pool_blocks(
            *(config, model.spec, dtype, model.max_model_len),
            total_bytes=total_bytes,
            used_bytes=total_bytes - free_bytes,
            graph_bytes=0 if config.enforce_eager else GRAPH_BYTES,
        )

    def _residency(self, tables: BlockTables, mover: BlockMover, block_bytes: int) -> Residency:
        config = self.config
        swap_blocks, mode, shares = mover.num_host_blocks, config.preemption_mode, not config.batch_invariant
        if config.batch_invariant and mode is PreemptionMode.AUTO:
            mode = PreemptionMode.SWAP  # computing again takes a step for each token of the output
        return Residency(
            tables,
            PrefixIndex(tables.allocator, config.block_size) if shares and config.enable_prefix_caching else None,
            SwapSpace(make_allocator(config.allocator, swap_blocks)) if swap_blocks else None,
            PreemptionCost(mode, block_bytes, mover.measure_rate()),
            shares=shares,
        )

    def _runner(self, pool: torch.Tensor, tables: BlockTables, mover: BlockMover, report: ProgressCallback) -> Runner:
        config, decoder, vocab_size = self.config, self.model.decoder, self.model.sampled_vocab_size
        invariant = config.batch_invariant
        if not pool.is_cuda:
            return EagerRunner(decoder, pool, tables, vocab_size, mover, self.pulse, batch_invariant=invariant)
        runner = CudaRunner(
            *(decoder, pool, tables, vocab_size, mover, self.pulse),
            use_graphs=not config.enforce_eager,
            batch_invariant=invariant,
        )
        report(f"capturing {runner.num_graphs} decode graphs")
        runner.capture()
        return runner

    def _info(self, device: torch.device, limits: SchedulerLimits, num_blocks: int) -> EngineInfo:
        return EngineInfo(
            instance_id=uuid.uuid4().hex,
            model=self.config.served_model_name or self.model.source.name,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            dtype=str(self.model.decoder.dtype).removeprefix("torch."),
            vocab_size=self.model.sampled_vocab_size,
            max_context_tokens=limits.max_context_tokens,
            max_prompt_tokens=limits.max_context_tokens - 1,
            max_num_seqs=limits.max_num_seqs,
            max_queued_requests=limits.max_queued_requests,
            max_queued_tokens=limits.max_queued_tokens,
            block_size=self.config.block_size,
            num_blocks=num_blocks,
            eos_token_ids=sorted(self.model.eos_token_ids),
        )

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
                _collect(results[event.request_id], event)
            if not self.has_work:
                return [results[request.request_id] for request in requests]
            if not self.loop.has_work:
                time.sleep(_COMPILING_PAUSE_SECONDS)


def check_config(config: EngineConfig) -> None:
    """Raises ConfigurationError for the first figure that makes no sense."""
    least = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "block_size": 1,
        "max_model_len": 2,
        "kv_cache_tokens": 2,
        "max_queued_requests": 1,
        "max_queued_tokens": 1,
        "num_threads": 1,
    }
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise ConfigurationError(f"{name} must be at least {bound}, not {value}", name)
    size = config.block_size
    if size > MOST_BLOCK_SIZE or size & (size - 1):
        problem = f"block_size must be a power of two of at most {MOST_BLOCK_SIZE}, not {size}"
        raise ConfigurationError(problem, "block_size")
    if config.kv_cache_tokens is not None and config.kv_cache_tokens < size:
        problem = f"kv_cache_tokens {config.kv_cache_tokens} is less than one block of {size}"
        raise ConfigurationError(problem, "kv_cache_tokens")
    if not 0.0 < config.gpu_memory_utilization <= 1.0:
        problem = f"gpu_memory_utilization must be in (0, 1], not {config.gpu_memory_utilization}"
        raise ConfigurationError(problem, "gpu_memory_utilization")


def check_outputs(
    model: str, runner: Runner, residency: Residency, limits: SchedulerLimits, *, batch_invariant: bool
) -> None:
    """Runs one token through the model and raises ConfigurationError if nothing can be drawn behind it: weights that
    are no numbers have the right shapes, and would fail every request."""
    composition = SeparateSteps(limits.max_batched_tokens) if batch_invariant else None
    scheduler = Scheduler(residency, limits, composition=composition)
    scheduler.submit(GenerationRequest("start", [0], stop=StopCriteria(max_tokens=1), cache_bypass=True), 0.0)
    plan = scheduler.plan(0.0)
    if plan is None:
        raise EngineError("an empty pool has no room for one token")
    outcome = runner.launch(plan).wait()
    scheduler.commit(plan, outcome, 0.0)
    for problem in outcome.failures.values():
        raise ConfigurationError(f"{model}: {problem}: its weights are damaged")


def _block_mover(config: EngineConfig, pool: torch.Tensor) -> BlockMover:
    try:
        return BlockMover(pool, int(config.swap_space_gib * 2**30) // pool[0].nbytes)
    except RuntimeError:
        raise swap_too_large(config) from None


def set_threads(config: EngineConfig, device: torch.device) -> None:
    """The runtime's own threads do a CPU step's work; torch's would only compete with them for the cores."""
    if device.type == "cpu":
        torch.set_num_threads(1)
        try:
            _runtime.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        except _runtime.OpError as error:
            raise ConfigurationError(f"num_threads {config.num_threads}: {error}", "num_threads") from None


def choose_device(device: Device) -> torch.device:
    """AUTO takes CUDA where torch and the runtime have it. Raises ConfigurationError if CUDA is asked for and
    missing."""
    usable = torch.cuda.is_available() and _runtime.has_cuda()
    if device is Device.CUDA and not usable:
        missing = "torch sees no GPU" if not torch.cuda.is_available() else "the runtime was built without CUDA"
        raise ConfigurationError(f"device cuda: {missing}")
    return torch.device("cuda" if usable and device is not Device.CPU else "cpu")


def _collect(result: GenerationResult, event: Event) -> None:
    match event:
        case TokensGenerated():
            candidate = result.candidates[event.candidate]
            candidate.token_ids += event.token_ids
            candidate.logprobs += event.logprobs
            candidate.finish = event.finish
        case PromptScored():
            result.prompt_logprobs += event.logprobs
        case RequestFinished():
            result.usage = event.usage
        case RequestFailed():
            result.failure = event
            result.usage = event.usage
        case _:
            pass
