"""embed and advance: what heads a step."""

from __future__ import annotations

import pytest
import torch

from engine import _runtime, ops

HIDDEN, VOCAB = 96, 40


def table(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_come_from_ids_or_from_the_newest_tokens(device: torch.device, dtype: torch.dtype) -> None:
    weights = table(device, dtype)
    out = torch.full((5, HIDDEN), torch.nan, dtype=dtype, device=device)
    ids, newest = ints([3, 0, 39, 1, 2], device), ints([30, 31, 32], device)
    ops.embed(out, weights, ids, ints([-1, 2, -1, 0, -1], device), newest)
    assert torch.equal(out, weights[[3, 32, 39, 30, 2]])
    ops.embed(out, weights, ids)
    assert torch.equal(out, weights[ids.long()])


def test_ids_outside_the_vocabulary_give_zeros(device: torch.device) -> None:
    out = torch.full((3, HIDDEN), torch.nan, dtype=torch.bfloat16, device=device)
    ops.embed(out, table(device), ints([-1, VOCAB, 5], device))
    assert not out[:2].any()
    assert torch.equal(out[2], table(device)[5])


def test_sources_need_newest(device: torch.device) -> None:
    out = torch.empty((1, HIDDEN), dtype=torch.bfloat16, device=device)
    with pytest.raises(_runtime.OpError, match="newest"):
        ops.embed(out, table(device), ints([0], device), ints([0], device))


def test_advance_moves_each_sequence_one_token_on(device: torch.device) -> None:
    weights = table(device)
    newest = ints([7, 8, 9, 10], device)
    rows = ints([2, -1, 0], device)
    context_lens = ints([16, 0, 5], device)
    block_tables = ints([4, 9, 0, 0, 0, 0, 6, 0, 0], device).view(3, 3)
    positions, slots = ints([-5] * 3, device), torch.full((3,), -5, device=device)
    out = torch.full((3, HIDDEN), torch.nan, dtype=torch.bfloat16, device=device)
    ops.advance(out, weights, newest, rows, context_lens, positions, slots, block_tables, 16)
    assert positions.tolist() == [16, 0, 5]
    assert slots.tolist() == [9 * 16, 0, 6 * 16 + 5]
    assert context_lens.tolist() == [17, 0, 6]
    assert torch.equal(out[[0, 2]], weights[[9, 7]])
    assert not out[1].any()
    ops.advance(out, weights, newest, rows, context_lens, positions, slots, block_tables, 16)
    assert (positions.tolist(), context_lens.tolist()) == ([17, 0, 6], [18, 0, 7])
