"""What an engine is started with. Checked once at start; a bad value is a ConfigurationError before any weight
loads."""

from __future__ import annotations

import enum
import math

import msgspec

from engine.errors import ConfigurationError

MOST_BLOCK_SIZE = 256  # tokens
MOST_COUNT = 2**31 - 1  # of any figure that counts something
MOST_SEED = 2**64 - 1  # of weights and of requests


class Device(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class AllocatorKind(enum.StrEnum):
    """native: C++; oracle: pure Python; checked: both in lock-step, raising at the first difference."""

    NATIVE = "native"
    ORACLE = "oracle"
    CHECKED = "checked"


class LoadFormat(enum.StrEnum):
    AUTO = "auto"
    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    DUMMY = "dummy"  # random weights from config.json alone


class PreemptionMode(enum.StrEnum):
    """How a preempted sequence gives up its blocks: copied to host memory, dropped and computed again, or by cost."""

    AUTO = "auto"
    SWAP = "swap"
    RECOMPUTE = "recompute"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """model: "demo", a Hugging Face directory or a .gguf file. dtype: "auto" (fp32 on CPU, bf16 on CUDA), "float32",
    "bfloat16", "float16". kv_cache_tokens None: derived (CUDA: what `gpu_memory_utilization` leaves; CPU: enough for
    `max_num_seqs` of 2048 tokens, at most 1 GiB). swap_space_gib: none, or at least one block; preemption_mode SWAP
    needs some. max_num_batched_tokens: token budget of one step. batch_invariant: a request's tokens and log
    probabilities are the same, to the bit, whatever runs beside it, whether it was preempted and however large the pool
    is, among engines that agree in model, device and every other option of steps: nothing is shared between requests,
    and prompts are computed one at a time."""

    model: str = "demo"
    served_model_name: str = ""
    device: Device = Device.AUTO
    dtype: str = "auto"
    load_format: LoadFormat = LoadFormat.AUTO
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space_gib: float = 0.0
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    admission_forecast: bool = True
    enable_prefix_caching: bool = True
    allocator: AllocatorKind = AllocatorKind.NATIVE
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_048_576
    enforce_eager: bool = False
    batch_invariant: bool = False
    seed: int = 0
    num_threads: int | None = None

    def step_tokens(self, device_type: str) -> int:
        """The token budget of one step on "cpu" or "cuda"."""
        default = {"cpu": 256, "cuda": 2048}[device_type]
        return default if self.max_num_batched_tokens is None else self.max_num_batched_tokens


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
        if value is not None and value > MOST_COUNT:
            raise ConfigurationError(f"{name} must be at most {MOST_COUNT}, not {value}", name)
    if not 0 <= config.seed <= MOST_SEED:
        raise ConfigurationError(f"seed must be within 0 to {MOST_SEED}, not {config.seed}", "seed")
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
    if not 0.0 <= config.swap_space_gib < math.inf:  # NaN, too
        problem = f"swap_space_gib must be a number of at least 0, not {config.swap_space_gib}"
        raise ConfigurationError(problem, "swap_space_gib")
    if config.preemption_mode is PreemptionMode.SWAP and not config.swap_space_gib:
        problem = "preemption_mode swap needs host memory: set swap_space_gib"
        raise ConfigurationError(problem, "preemption_mode", "swap_space_gib")
