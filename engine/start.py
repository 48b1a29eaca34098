"""From a configuration and a model to a step loop: claims the KV pool and whatever else a step needs."""

from __future__ import annotations

import os
import uuid

import torch

from engine import _runtime
from engine.config import Device, EngineConfig, PreemptionMode
from engine.errors import ConfigurationError, EngineError
from engine.kv.allocator import make_allocator
from engine.kv.block_table import BlockTables
from engine.kv.prefix_index import PrefixIndex
from engine.kv.swap import SwapSpace
from engine.loop import Runner, StepLoop
from engine.model.buffers import buffer_bytes
from engine.model.loader import LoadedModel, Report
from engine.model.spec import ModelSpec
from engine.pulse import Pulse
from engine.run.block_moves import BlockMover
from engine.run.cuda_runner import GRAPH_BYTES, CudaRunner, profile_largest_step
from engine.run.kv_pool import allocate_pool, cpu_pool_blocks, cuda_pool_blocks, gib, host_bytes, swap_too_large
from engine.run.runner import EagerRunner
from engine.schedule.admission import SchedulerLimits
from engine.schedule.composition import SeparateSteps
from engine.schedule.forecast import OutputForecast
from engine.schedule.preemption import PreemptionCost
from engine.schedule.residency import Residency
from engine.schedule.scheduler import Scheduler
from engine.types import EngineInfo, GenerationRequest, StopCriteria

_WATERMARK_SHARE = 100  # one block in so many stays free when admitting beside running sequences


def choose_device(device: Device) -> torch.device:
    """AUTO takes CUDA where torch and the runtime have it. Raises ConfigurationError if CUDA is asked for and
    missing."""
    usable = torch.cuda.is_available() and _runtime.has_cuda()
    if device is Device.CUDA and not usable:
        missing = "torch sees no GPU" if not torch.cuda.is_available() else "the runtime was built without CUDA"
        raise ConfigurationError(f"device cuda: {missing}", "device")
    return torch.device("cuda" if usable and device is not Device.CPU else "cpu")


def set_threads(config: EngineConfig, device: torch.device) -> None:
    """The runtime's own threads do a CPU step's work; torch's would only compete with them for the cores."""
    if device.type == "cpu":
        torch.set_num_threads(1)
        try:
            _runtime.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        except _runtime.OpError as error:
            raise ConfigurationError(f"num_threads {config.num_threads}: {error}", "num_threads") from None


def check_step_size(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Refuses, before any weight is read, steps whose activations and logits the machine could not hold if it held
    nothing else."""
    most = host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]
    tokens, sequences = config.step_tokens(device.type), config.max_num_seqs
    needed = buffer_bytes(spec, max(tokens, sequences), sequences, dtype)
    if needed > most:
        raise ConfigurationError(
            f"steps of max_num_batched_tokens {tokens} and max_num_seqs {sequences} need {gib(needed)} of activations"
            f" and logits, but {gib(most)} is all the memory there is",
            *("max_num_batched_tokens", "max_num_seqs"),
        )


def start_loop(
    config: EngineConfig, model: LoadedModel, device: torch.device, pulse: Pulse, report: Report
) -> tuple[StepLoop, EngineInfo]:
    """Claims all memory that is not claimed yet. Raises ConfigurationError if there is too little, or if the model's
    weights turn out to be damaged."""
    max_batched_tokens = config.step_tokens(device.type)
    num_blocks = _pool_blocks(config, model, device, report)
    max_context = min(model.max_model_len, num_blocks * config.block_size)
    report(f"claiming KV cache: {num_blocks * config.block_size} tokens")
    pool = allocate_pool(model.spec, num_blocks, config.block_size, model.decoder.dtype, device)
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
    residency = _residency(config, tables, mover, pool[0].nbytes)
    forecast = OutputForecast() if config.admission_forecast else None
    composition = SeparateSteps(max_batched_tokens) if config.batch_invariant else None
    if composition is not None:
        report(f"batch-invariant: prompts run alone, {max_batched_tokens} tokens a step; no prefix cache")
    scheduler = Scheduler(residency, limits, frozenset(model.eos_token_ids), forecast=forecast, composition=composition)
    runner = _runner(config, model, pool, tables, mover, pulse, report)
    _check_outputs(model.source.name, runner, residency, limits, batch_invariant=config.batch_invariant)
    return StepLoop(scheduler, runner, pulse), _info(config, model, device, limits, num_blocks)


def _pool_blocks(config: EngineConfig, model: LoadedModel, device: torch.device, report: Report) -> int:
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


def _block_mover(config: EngineConfig, pool: torch.Tensor) -> BlockMover:
    try:
        return BlockMover(pool, int(config.swap_space_gib * 2**30) // pool[0].nbytes)
    except RuntimeError:
        raise swap_too_large(config) from None


def _residency(config: EngineConfig, tables: BlockTables, mover: BlockMover, block_bytes: int) -> Residency:
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


def _runner(
    config: EngineConfig,
    model: LoadedModel,
    pool: torch.Tensor,
    tables: BlockTables,
    mover: BlockMover,
    pulse: Pulse,
    report: Report,
) -> Runner:
    decoder, vocab_size, invariant = model.decoder, model.sampled_vocab_size, config.batch_invariant
    if not pool.is_cuda:
        return EagerRunner(decoder, pool, tables, vocab_size, mover, pulse, batch_invariant=invariant)
    runner = CudaRunner(
        *(decoder, pool, tables, vocab_size, mover, pulse),
        use_graphs=not config.enforce_eager,
        batch_invariant=invariant,
    )
    report(f"capturing {runner.num_graphs} decode graphs")
    runner.capture()
    return runner


def _check_outputs(
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


def _info(
    config: EngineConfig, model: LoadedModel, device: torch.device, limits: SchedulerLimits, num_blocks: int
) -> EngineInfo:
    return EngineInfo(
        instance_id=uuid.uuid4().hex,
        model=config.served_model_name or model.source.name,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(model.decoder.dtype).removeprefix("torch."),
        vocab_size=model.sampled_vocab_size,
        max_context_tokens=limits.max_context_tokens,
        max_prompt_tokens=limits.max_context_tokens - 1,
        max_num_seqs=limits.max_num_seqs,
        max_queued_requests=limits.max_queued_requests,
        max_queued_tokens=limits.max_queued_tokens,
        block_size=config.block_size,
        num_blocks=num_blocks,
        eos_token_ids=sorted(model.eos_token_ids),
    )
