"""FlashAttention-3 on our pool, where FLASH_ATTENTION_3 names its library: a peer of decode attention.

The library is `vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so` out of the wheel of vllm 0.24.0; it needs torch 2.11 only.
It takes a slower path for pages of 16 than for pages that fill its tiles, so it runs on pages of 256 as well: the same
memory under another view, with a table of its own for each layer.
"""

from __future__ import annotations

import os
from typing import Any

import torch

OUR_PAGE = 16
LARGE_PAGE = 256
LIBRARY = "FLASH_ATTENTION_3"


def flash_attention_present() -> bool:
    return bool(os.environ.get(LIBRARY))


class FlashAttentionDecode:
    """One query a sequence. The plan (scheduler metadata) is made here, outside any timing."""

    def __init__(self, case: Any, page: int) -> None:
        torch.ops.load_library(os.environ[LIBRARY])
        self.case, self.page = case, page
        self.out = torch.empty_like(case.query)
        self.starts = torch.arange(len(case.contexts) + 1, dtype=torch.int32, device="cuda")
        self.views, self.tables = self._large_pages() if page == LARGE_PAGE else self._our_pages()
        q_heads, kv_heads, head_dim = case.heads
        self.plan = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            len(case.contexts),
            1,
            max(case.contexts),
            q_heads,
            kv_heads,
            head_dim,
            head_dim,
            torch.bfloat16,
            case.lens,
            self.starts,
            *[None] * 4,
            page,
            0,
            True,
            -1,
            -1,
            False,
            0,
            None,
            0,
        )

    @classmethod
    def peers(cls, case: Any) -> dict[str, FlashAttentionDecode]:
        return {f"fa3-{page}": cls(case, page) for page in (OUR_PAGE, LARGE_PAGE)}

    def _our_pages(self) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """K and V of each layer as [blocks, 2, 16, kv heads, head dim]; every layer has the case's own tables."""
        views = [self.case.pool[:, layer].transpose(2, 3) for layer in range(self.case.layers)]
        return views, [[table] * self.case.layers for table in self.case.tables]

    def _large_pages(self) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """The pool's memory as [pages, 2, 256, kv heads, head dim], pages dealt out at random; where partly filled
        pages need more than there are, the first ones are dealt again."""
        case = self.case
        _, kv_heads, head_dim = case.heads
        page_elements = 2 * LARGE_PAGE * kv_heads * head_dim
        count = case.pool.numel() // page_elements
        memory = case.pool.view(-1)[: count * page_elements]
        view = memory.view(count, 2, LARGE_PAGE, kv_heads, head_dim)
        columns = -(-max(case.contexts) // LARGE_PAGE)
        needed = case.calls * len(case.contexts) * columns
        ids = torch.randperm(count).repeat(-(-needed // count))[:needed].int().cuda()
        tables = ids.view(len(case.tables), case.layers, len(case.contexts), columns)
        return [view] * case.layers, [list(of_set) for of_set in tables]

    def attend(self, index: int, layer: int) -> torch.Tensor:
        case, kv = self.case, self.views[layer]
        torch.ops._vllm_fa3_C.fwd(
            case.query,
            kv[:, 0],
            kv[:, 1],
            *[None] * 3,
            self.out,
            self.starts,
            *[None] * 3,
            case.lens,
            1,
            max(case.contexts),
            self.tables[index][layer],
            *[None] * 8,
            case.heads[2] ** -0.5,
            True,
            -1,
            -1,
            0.0,
            True,
            self.plan,
            0,
            None,
            0,
            None,
            1,
            0,
            None,
        )
        return self.out

    def expected(self, index: int, layer: int) -> torch.Tensor:
        """The same in fp32 with gathered K and V, for the first sequence: [1, q heads, head dim]."""
        case, kv = self.case, self.views[layer]
        length = case.contexts[0]
        pages = self.tables[index][layer][0, : -(-length // self.page)].long()
        keys, values = (kv[pages, part].flatten(0, 1)[:length].float().transpose(0, 1) for part in (0, 1))
        group = case.heads[0] // case.heads[1]
        query = case.query[0].float()[:, None]
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        ).transpose(0, 1)

    def step(self) -> None:
        for index in range(len(self.case.tables)):
            for layer in range(self.case.layers):
                self.attend(index, layer)
