"""Prefill attention over cached prefixes, ragged, at lengths around its tiles, against float64."""

from __future__ import annotations

import pytest
import torch

from engine import ops
from tests.gpu.paged_case import paged_case, relative_error

pytestmark = pytest.mark.gpu

MODELS = [(12, 2, 128), (16, 8, 128), (9, 3, 64), (8, 1, 80), (5, 5, 96), (7, 1, 128)]
BOUND = {torch.bfloat16: 5e-3, torch.float16: 8e-4}
# (context, queries): no prefix, a prefix, decode rows, an empty sequence, tile edges.
PAIRS = [
    (1, 1),
    (64, 64),
    (65, 65),
    (63, 63),
    (128, 1),
    (500, 500),
    (1000, 129),
    (0, 0),
    (777, 300),
    (2049, 17),
    (16, 2),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", MODELS, ids=str)
def test_ragged_with_cached_prefixes(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    contexts, queries = (list(column) for column in zip(*PAIRS, strict=True))
    case = paged_case(contexts, queries, heads=heads, dtype=dtype)
    assert relative_error(case.attend(case.workspace()), case.truth()) < BOUND[dtype]


def test_many_sequences() -> None:
    """More than a warp's worth of sequences: the search for a block's rows takes several rounds."""
    contexts = [20 + 3 * index % 150 for index in range(100)]
    queries = [1 + index % 20 for index in range(100)]
    case = paged_case(contexts, queries, heads=(4, 2, 64))
    assert relative_error(case.attend(case.workspace()), case.truth()) < BOUND[torch.bfloat16]


def test_prefill_equals_decode_for_one_token() -> None:
    """The last row of a chunk against the decode kernel: two kernels, one truth."""
    decode = paged_case([1234, 77, 16])
    chunk = paged_case([1234, 77, 16], [2, 2, 2])
    chunk.pool.copy_(decode.pool)
    chunk.block_tables.copy_(decode.block_tables)
    chunk.query[1::2] = decode.query
    last = chunk.attend(chunk.workspace())[1::2]
    assert relative_error(last, decode.attend(decode.workspace()).double()) < BOUND[torch.bfloat16]


def test_one_long_prompt() -> None:
    case = paged_case([3000], [3000])
    out, truth = case.attend(case.workspace()), case.truth()
    assert relative_error(out, truth) < BOUND[torch.bfloat16]
    rows = (out.double() - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
    assert float(rows.max()) < 3 * BOUND[torch.bfloat16]


# Stretches of a thread block that end inside a tile of query rows: one long prompt; few queries behind a long prefix,
# whose tile is cut for most of the GPU; a batch of both with empty sequences between. Four prompts with 16/8/128 heads
# are more keys and values than one round takes.
CUTS = {
    "one prompt": ([2048], [2048]),
    "four prompts": ([2048] * 4, [2048] * 4),
    "long prefix": ([8192], [64]),
    "short query": ([40_000, 3], [2, 3]),
    "mixed": ([3000, 0, 8000, 500, 0, 16, 2100], [3000, 0, 40, 500, 0, 16, 7]),
    "hundreds": ([10 + 37 * index % 900 for index in range(300)], [1 + 5 * index % 10 for index in range(300)]),
}


@pytest.mark.parametrize("heads", [(12, 2, 128), (16, 8, 128), (9, 3, 64), (8, 1, 128)], ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_shared_out_over_blocks(cut: str, heads: tuple[int, int, int]) -> None:
    """Right, the same bits again (parts are added in the order of their keys), and with the workspace as before."""
    contexts, queries = CUTS[cut]
    case = paged_case(contexts, queries, heads=heads)
    workspace = case.workspace()
    out, truth = case.attend(workspace), case.truth()
    assert relative_error(out, truth) < BOUND[torch.bfloat16]
    rows = (out.double() - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
    assert float(rows.max()) < 4 * BOUND[torch.bfloat16]
    for _ in range(3):
        assert torch.equal(case.attend(workspace), out)


@pytest.mark.parametrize("heads", [(12, 2, 128), (9, 3, 64)], ids=str)
def test_bits_depend_on_no_neighbour(heads: tuple[int, int, int]) -> None:
    """A tile's rows past the end of its sequence hold another's queries, or nothing: neither shows."""
    case = paged_case([70, 300], [70, 300], heads=heads)
    workspace = case.workspace()
    out = case.attend(workspace)
    case.query[70:] *= 100
    case.attend(workspace)  # leaves other rows in shared memory
    other = case.attend(workspace)
    assert torch.equal(other[:70], out[:70])
    assert not torch.equal(other[70:], out[70:])


def test_a_plan_serves_every_call_and_leaves_the_decode_plan_alone() -> None:
    chunk, decode = paged_case([900, 3000], [900, 100]), paged_case([1234, 77, 16])
    workspace = decode.workspace(8)
    q_heads, kv_heads, head_dim = 12, 2, 128
    ops.plan_attention(decode.context_lens, q_heads, kv_heads, head_dim, workspace)
    ops.plan_prefill(chunk.query_start, chunk.context_lens, q_heads, kv_heads, head_dim, workspace)
    for _ in range(2):
        for case in (chunk, decode):
            assert relative_error(case.attend(workspace, planned=True), case.truth()) < BOUND[torch.bfloat16]


def test_large_scores_do_not_overflow() -> None:
    """Scores that grow along the context by more than a 16-bit float holds: the running maximum must follow."""
    case = paged_case([700], [700], dtype=torch.float16)
    case.pool[case.block_tables[0, :44].long(), case.layer, 0] *= torch.linspace(0.1, 30, 44, device="cuda").half()[
        :, None, None, None
    ]
    truth = case.truth()
    assert relative_error(case.attend(case.workspace()), truth) < BOUND[torch.float16] * 4
