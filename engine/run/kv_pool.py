"""The KV pool: one tensor, claimed once at start, that never grows."""

from __future__ import annotations

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
        blocks = config.kv_cache_tokens // config.block_size
        if blocks < 1:
            raise ConfigurationError(f"kv_cache_tokens {config.kv_cache_tokens} is less than one block")
        return blocks
    wanted = min(
        config.max_num_seqs * min(max_model_len, _CPU_DEFAULT_TOKENS_PER_SEQUENCE),
        _CPU_DEFAULT_BYTES // bytes_per_token(spec, dtype),
    )
    return -(-max(wanted, max_model_len) // config.block_size)


def allocate_pool(
    spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[num_blocks + 1, layers, 2, kv_heads, block_size, head_dim], zeroed (so every page is resident); block 0 is
    scratch."""
    shape = (num_blocks + 1, spec.num_layers, 2, spec.kv_heads, block_size, spec.head_dim)
    return torch.empty(shape, dtype=dtype, device=device).zero_()
