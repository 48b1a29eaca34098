"""
Octavo's native runtime: the block allocator and the ops, on the CPU and on NVIDIA GPUs.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray
import torch


def has_cuda() -> bool:
    """Whether this build has GPU kernels."""

def build_info() -> dict[str, str | bool]:
    """How this build was made: cuda, architectures, compiler."""

def set_num_threads(count: int) -> None:
    """Threads of the CPU ops, the caller included."""

def num_threads() -> int: ...

class OpError(RuntimeError):
    pass

def paged_attention(out: torch.Tensor, query: torch.Tensor, kv_pool: torch.Tensor, layer: int, block_tables: torch.Tensor, query_start: torch.Tensor, context_lens: torch.Tensor, max_query_len: int, scale: float, workspace: torch.Tensor | None, stream: int) -> None: ...

def paged_attention_workspace_bytes(max_seqs: int, q_heads: int, kv_heads: int, head_dim: int) -> int: ...

def write_kv(query_out: torch.Tensor, qkv: torch.Tensor, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, slots: torch.Tensor, cos_sin: torch.Tensor, bias: torch.Tensor | None, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, norm_eps: float, stream: int) -> None: ...

def copy_blocks(kv_pool: torch.Tensor, pairs: torch.Tensor, stream: int) -> None: ...

def rms_norm(out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, stream: int) -> None: ...

def silu_mul(out: torch.Tensor, gate_up: torch.Tensor, stream: int) -> None: ...

class BlockAllocator:
    """The native engine.kv.allocator.BlockAllocator."""

    def __init__(self, num_blocks: int) -> None: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def num_cached(self) -> int: ...

    @property
    def num_live(self) -> int: ...

    def allocate(self, count: int) -> list[int]: ...

    def retain(self, blocks: Sequence[int]) -> None: ...

    def release(self, blocks: Sequence[int]) -> None: ...

    def ref_count(self, block: int) -> int: ...

    def publish(self, block: int, key: int) -> int: ...

    def find(self, key: int) -> int: ...

    def grow_tables(self, tables: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')], lengths: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], wanted: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')]) -> int: ...

    def release_row(self, tables: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')], lengths: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], row: int) -> None: ...

    def reset(self) -> None: ...

    def check(self) -> None: ...
