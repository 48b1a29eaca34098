"""The KV pool: one tensor, claimed once at start, that never grows."""

from __future__ import annotations

import os

import torch

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.model.spec import ModelSpec

_CPU_DEFAULT_BYTES = 1 << 30
_CPU_DEFAULT_TOKENS_PER_SEQUENCE = 2048


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """K and V of one token in every layer."""
    return 2 * spec.num_layers * spec.kv_heads * spec.head_dim * dtype.itemsize


def cpu_pool_blocks(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, max_model_len: int) -> int:
    """Usable blocks of a pool in main memory: as asked for, else room for every sequence within a GiB, and at least one
    full-length sequence."""
    if config.kv_cache_tokens is not None:
        return config.kv_cache_tokens // config.block_size
    wanted = min(
        config.max_num_seqs * min(max_model_len, _CPU_DEFAULT_TOKENS_PER_SEQUENCE),
        _CPU_DEFAULT_BYTES // bytes_per_token(spec, dtype),
    )
    return -(-max(wanted, max_model_len) // config.block_size)


def cuda_pool_blocks(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    max_model_len: int,
    *,
    total_bytes: int,
    used_bytes: int,
    graph_bytes: int,
) -> int:
    """Usable blocks of a pool in device memory: as asked for, else what `gpu_memory_utilization` leaves beside weights,
    activations and graphs. Raises ConfigurationError with the numbers if that does not hold one full-length
    sequence."""
    block_bytes = bytes_per_token(spec, dtype) * config.block_size
    budget = int(total_bytes * config.gpu_memory_utilization) - used_bytes - graph_bytes
    blocks = budget // block_bytes - 1  # the scratch block
    if config.kv_cache_tokens is not None:
        asked = config.kv_cache_tokens // config.block_size
        if asked > blocks:
            raise ConfigurationError(
                f"kv_cache_tokens {config.kv_cache_tokens} needs {gib(asked * block_bytes)}, but {gib(budget)} is left"
                f" of {gib(total_bytes)} at gpu_memory_utilization {config.gpu_memory_utilization}",
                *("kv_cache_tokens", "gpu_memory_utilization"),
            )
        return asked
    needed = -(-max_model_len // config.block_size)
    if blocks < needed:
        raise ConfigurationError(
            f"one sequence of max_model_len {max_model_len} needs {gib(needed * block_bytes)} of KV cache, but"
            f" {gib(budget)} is left of {gib(total_bytes)} at gpu_memory_utilization {config.gpu_memory_utilization}:"
            f" {gib(used_bytes)} hold weights and activations, {gib(graph_bytes)} are for graphs",
            *("max_model_len", "gpu_memory_utilization"),
        )
    return blocks


def check_pool_size(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, max_model_len: int, device: torch.device
) -> None:
    """Refuses, before any weight is read, a pool that the machine could not hold if it held nothing else."""
    if device.type == "cpu":
        blocks, most = cpu_pool_blocks(config, spec, dtype, max_model_len), host_bytes()
    elif config.kv_cache_tokens is None:
        return
    else:
        blocks, most = config.kv_cache_tokens // config.block_size, torch.cuda.mem_get_info(device)[1]
    if blocks * config.block_size * bytes_per_token(spec, dtype) > most:
        raise _too_large(spec, blocks, config.block_size, dtype)


def check_swap_space(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> None:
    """Refuses, before any weight is read, swap space that the machine does not have or that no block fits into."""
    asked, block_bytes = config.swap_space_gib * 2**30, bytes_per_token(spec, dtype) * config.block_size
    if asked > host_bytes():
        raise swap_too_large(config)
    if 0 < asked < block_bytes:
        problem = f"swap_space_gib {config.swap_space_gib:g} is less than one block of {block_bytes} bytes"
        raise ConfigurationError(problem, "swap_space_gib")


def swap_too_large(config: EngineConfig) -> ConfigurationError:
    problem = f"swap_space_gib {config.swap_space_gib:g} is more than this host can hold"
    return ConfigurationError(problem, "swap_space_gib")


def host_bytes() -> int:
    """Main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def allocate_pool(
    spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[num_blocks + 1, layers, 2, kv_heads, block_size, head_dim], zeroed (so every page is resident); block 0 is
    scratch."""
    shape = (num_blocks + 1, spec.num_layers, 2, spec.kv_heads, block_size, spec.head_dim)
    try:
        return torch.empty(shape, dtype=dtype, device=device).zero_()
    except RuntimeError:  # torch's out-of-memory errors are of this kind
        raise _too_large(spec, num_blocks, block_size, dtype) from None


def _too_large(spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> ConfigurationError:
    tokens = num_blocks * block_size
    size = gib(tokens * bytes_per_token(spec, dtype))
    problem = f"a KV cache of {tokens} tokens ({size}) cannot be allocated: lower kv_cache_tokens"
    return ConfigurationError(problem, "kv_cache_tokens")
