"""The smallest loop that drives a Decoder over a paged pool: one sequence, greedy, any chunk size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model.batch import ForwardBatch
from engine.model.decoder import Decoder


class PagedSequence:
    """One sequence's blocks in a pool of its own, scattered, with NaN wherever nothing was written."""

    def __init__(self, decoder: Decoder, max_tokens: int, block_size: int = 4) -> None:
        spec = decoder.spec
        blocks = -(-max_tokens // block_size)
        shape = (blocks + 1, spec.num_layers, 2, spec.kv_heads, block_size, spec.head_dim)
        self._decoder = decoder
        self._pool = torch.full(shape, float("nan"), dtype=decoder.dtype, device=decoder.device)
        self._table = torch.arange(blocks, 0, -1, dtype=torch.int32, device=decoder.device)
        self._block_size = block_size
        self._length = 0

    def feed(self, ids: Sequence[int]) -> torch.Tensor:
        """Runs `ids` as one chunk; fp32 logits [len(ids), vocab], a copy."""
        start, count = self._length, len(ids)
        positions = torch.arange(start, start + count, device=self._table.device)
        blocks = self._table[positions // self._block_size].long()
        batch = ForwardBatch(
            token_ids=self._int32(ids),
            positions=positions.int(),
            slots=blocks * self._block_size + positions % self._block_size,
            block_tables=self._table.unsqueeze(0),
            query_start=self._int32([0, count]),
            context_lens=self._int32([start + count]),
            max_query_len=count,
            logits_rows=torch.arange(count, device=self._table.device),
            kv_pool=self._pool,
        )
        self._length += count
        return self._decoder.logits(self._decoder.forward(batch)).clone()

    def _int32(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self._table.device)


def prompt_logits(decoder: Decoder, prompt: Sequence[int], chunk: int | None = None) -> torch.Tensor:
    """fp32 [len(prompt), vocab], the prompt run in chunks."""
    sequence = PagedSequence(decoder, len(prompt))
    chunk = chunk or len(prompt)
    return torch.cat([sequence.feed(prompt[at : at + chunk]) for at in range(0, len(prompt), chunk)])


def greedy(decoder: Decoder, prompt: Sequence[int], count: int, chunk: int | None = None) -> list[int]:
    """The `count` likeliest tokens after `prompt`, one at a time."""
    sequence = PagedSequence(decoder, len(prompt) + count)
    chunk = chunk or len(prompt)
    for at in range(0, len(prompt), chunk):
        logits = sequence.feed(prompt[at : at + chunk])
    output = [int(logits[-1].argmax())]
    while len(output) < count:
        output.append(int(sequence.feed(output[-1:])[-1].argmax()))
    return output
