"""FlashInfer on our pool, where it is installed (`pip install flashinfer-python`): the peer of decode attention."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import Any

import torch

BLOCK = 16


def flashinfer_version() -> str | None:
    return version("flashinfer-python") if importlib.util.find_spec("flashinfer") else None


class FlashInferDecode:
    """BatchDecodeWithPagedKVCacheWrapper over each set of block tables; plans are made here, outside any timing."""

    def __init__(self, case: Any, use_tensor_cores: bool) -> None:
        import flashinfer

        self.case = case
        q_heads, kv_heads, head_dim = case.heads
        blocks = [-(-context // BLOCK) for context in case.contexts]
        indptr = torch.tensor([0, *blocks]).cumsum(0).int()
        last = torch.tensor([(context - 1) % BLOCK + 1 for context in case.contexts], dtype=torch.int32)
        self.wrappers = []
        for table in case.tables:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"),
                "HND",
                use_cuda_graph=True,
                use_tensor_cores=use_tensor_cores,
                paged_kv_indptr_buffer=indptr.cuda(),
                paged_kv_indices_buffer=torch.empty(int(indptr[-1]), dtype=torch.int32, device="cuda"),
                paged_kv_last_page_len_buffer=last.cuda(),
            )
            indices = torch.cat([table[seq, :count] for seq, count in enumerate(blocks)])
            wrapper.plan(
                indptr,
                indices,
                last,
                q_heads,
                kv_heads,
                head_dim,
                BLOCK,
                q_data_type=torch.bfloat16,
                kv_data_type=torch.bfloat16,
            )
            self.wrappers.append(wrapper)
        self.out = torch.empty_like(case.query)

    @classmethod
    def peers(cls, case: Any) -> dict[str, FlashInferDecode]:
        """Its two kernels: with tensor cores, and without where that one has the group."""
        q_heads, kv_heads, _ = case.heads
        plain = {"fi": cls(case, False)} if q_heads // kv_heads in (1, 2, 3, 4, 8) else {}
        return plain | {"fi-tc": cls(case, True)}

    def attend(self, index: int, layer: int) -> torch.Tensor:
        self.wrappers[index].run(self.case.query, self.case.pool[:, layer], out=self.out)
        return self.out

    def step(self) -> None:
        for index in range(len(self.wrappers)):
            for layer in range(self.case.layers):
                self.attend(index, layer)
