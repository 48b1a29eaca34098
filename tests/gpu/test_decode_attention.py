"""Decode attention at the sizes where its grids, splits and clusters differ, against float64."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from engine import ops
from tests.gpu.paged_case import BLOCK, DEVICE, PagedCase, paged_case, relative_error

pytestmark = pytest.mark.gpu

MODELS = [(12, 2, 128), (16, 8, 128), (9, 3, 64), (8, 1, 80), (5, 5, 96)]
EDGES = [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 0, 127, 128, 129, 255, 256, 257, 511, 513, 1000, 2049, 4100]
# bf16: probabilities and outputs are rounded to 8 bits.
BOUND = {torch.bfloat16: 5e-3, torch.float16: 8e-4}


def ragged(count: int, longest: int, seed: int) -> list[int]:
    lengths = random.Random(seed)
    return [lengths.randint(1, longest) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", MODELS, ids=str)
def test_lengths_around_every_edge(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = paged_case(EDGES, heads=heads, dtype=dtype)
    out = case.attend(case.workspace())
    assert relative_error(out, case.truth()) < BOUND[dtype]
    assert not out[EDGES.index(0)].any()


@pytest.mark.parametrize("heads", MODELS, ids=str)
@pytest.mark.parametrize("batch", [1, 2, 5, 8, 20, 30, 40, 70, 140])
def test_every_grid(batch: int, heads: tuple[int, int, int]) -> None:
    """From one cluster a pair to several rounds of single blocks; uneven lengths."""
    case = paged_case(ragged(batch, 3000, batch), heads=heads)
    assert relative_error(case.attend(case.workspace()), case.truth()) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("heads", MODELS[:3], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 12, 40, 100])
@pytest.mark.parametrize("least_tokens", [1, 200, 1000, 5000, 10**6])
def test_every_way_of_splitting(least_tokens: int, batch: int, heads: tuple[int, int, int]) -> None:
    case = paged_case([9000, *ragged(batch - 1, 2500, least_tokens)], heads=heads)
    assert (
        relative_error(case.attend(case.workspace(), least_tokens=least_tokens), case.truth()) < BOUND[torch.bfloat16]
    )


def test_a_workspace_serves_batches_of_every_size_in_turn() -> None:
    """Tickets and plans of one grid must not trip over another's partial results."""
    cases = [paged_case([6000, *ragged(batch - 1, 900, batch)], seed=batch) for batch in (1, 130, 9, 64, 2, 33)]
    workspace = cases[1].workspace()
    for _ in range(2):
        for case in cases:
            assert relative_error(case.attend(workspace, least_tokens=0), case.truth()) < BOUND[torch.bfloat16]


def test_the_same_bits_every_time() -> None:
    case = paged_case([7777, *ragged(30, 3000, 0)])
    workspace = case.workspace()
    first = case.attend(workspace)
    for _ in range(20):
        assert torch.equal(case.attend(workspace), first)


@pytest.mark.parametrize(
    ("heads", "batch", "longest"), [((16, 8, 128), 48, 10000), ((12, 2, 128), 100, 16000), ((9, 3, 64), 160, 14000)]
)
def test_pieces_that_any_block_may_take(heads: tuple[int, int, int], batch: int, longest: int) -> None:
    """Of long contexts a part is taken by whichever block gets there: chance, which no result shows, nor the count that
    is left to the next launch."""
    case = paged_case(ragged(batch, longest, 1), heads=heads, layers=1)
    workspace = case.workspace()
    first = case.attend(workspace)
    assert relative_error(first, case.truth()) < BOUND[torch.bfloat16]
    ops.plan_attention(case.context_lens, heads[0], heads[1], heads[2], workspace)
    chained = [torch.empty_like(first) for _ in range(4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in chained:
            case.attend(workspace, planned=True, pdl=True, out=out)
    for _ in range(5):
        for out in chained:
            out.fill_(torch.nan)
        graph.replay()
        for out in chained:
            assert torch.equal(out, first)


@pytest.mark.parametrize("heads", MODELS, ids=str)
@pytest.mark.parametrize("batch", [1, 4, 33, 64])
def test_fixed_splits_give_a_sequence_the_same_bits_in_any_company(batch: int, heads: tuple[int, int, int]) -> None:
    case = paged_case([0, 9000, *ragged(batch, 3000, batch)], heads=heads)
    workspace = case.workspace(fixed=True)
    out = case.attend(workspace, fixed=True)
    assert relative_error(out, case.truth()) < BOUND[torch.bfloat16]
    assert torch.equal(case.attend(workspace, fixed=True), out)
    for seq in (1, len(case.contexts) - 1, len(case.contexts) // 2):
        alone = dataclasses.replace(
            case,
            query=case.query[seq : seq + 1],
            block_tables=case.block_tables[seq : seq + 1].contiguous(),
            query_start=case.query_start[:2],
            context_lens=case.context_lens[seq : seq + 1],
            contexts=case.contexts[seq : seq + 1],
            query_lens=[1],
        )
        assert torch.equal(alone.attend(workspace, fixed=True)[0], out[seq])


def test_planned_once_equals_planned_by_the_op() -> None:
    case = paged_case(ragged(17, 2000, 1))
    assert torch.equal(case.attend(case.workspace()), case.attend(case.workspace(), least_tokens=0))


def test_infinities_past_the_end_do_not_leak() -> None:
    case = paged_case([5, 40, 100])
    case.pool.nan_to_num_(nan=float("inf"))
    assert relative_error(case.attend(case.workspace()), case.truth()) < BOUND[torch.bfloat16]


def test_blocks_beyond_two_to_the_31_elements() -> None:
    small = paged_case(ragged(4, 600, 3), heads=(16, 8, 128), layers=1)
    far = 2**31 // small.pool[0].numel() + 10
    pool = torch.empty(far + len(small.pool), *small.pool.shape[1:], dtype=small.pool.dtype, device=DEVICE)
    pool[far:] = small.pool
    moved = PagedCase(
        small.query,
        pool,
        small.layer,
        small.block_tables + far,
        small.query_start,
        small.context_lens,
        small.contexts,
        small.query_lens,
    )
    assert torch.equal(moved.attend(small.workspace()), small.attend(small.workspace()))


@pytest.mark.parametrize("options", [(), ("bias",), ("q_norm", "k_norm"), ("bias", "q_norm", "k_norm")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", MODELS, ids=str)
def test_the_fused_op_equals_write_kv_and_attention(
    heads: tuple[int, int, int], dtype: torch.dtype, options: tuple[str, ...]
) -> None:
    """The newest rows of the pool start as NaN, so that reading one before it is written would show."""
    q_heads, kv_heads, head_dim = heads
    case = paged_case(EDGES, heads=heads, dtype=dtype)
    generator = torch.Generator(device=DEVICE).manual_seed(3)
    width = (q_heads + 2 * kv_heads) * head_dim

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    sizes = {"bias": width, "q_norm": head_dim, "k_norm": head_dim}
    given = {name: random_tensor(sizes[name]) for name in options} | {"norm_eps": 1e-6}
    qkv = random_tensor(len(EDGES), width + 64)[:, :width]
    angles = 6 * torch.rand(max(EDGES), head_dim // 2, generator=generator, device=DEVICE)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = (case.context_lens - 1).clamp_min(0)
    blocks = case.block_tables.gather(1, (positions // BLOCK).long()[:, None])[:, 0].long()
    slots = torch.where(case.context_lens > 0, blocks * BLOCK + positions % BLOCK, -1)
    live = slots[slots >= 0]
    case.pool[live // BLOCK, case.layer, :, :, live % BLOCK] = torch.nan
    separate = dataclasses.replace(case, query=torch.empty_like(case.query), pool=case.pool.clone())
    ops.write_kv(
        separate.query,
        qkv,
        separate.pool,
        case.layer,
        positions,
        slots,
        cos_sin,
        **given,  # type: ignore[arg-type]
    )
    for least_tokens in (0, 10**6):
        out = torch.full_like(case.query, float("nan"))
        ops.plan_attention(
            case.context_lens, q_heads, kv_heads, head_dim, workspace := case.workspace(), least_tokens=least_tokens
        )
        ops.decode_attention(
            out,
            qkv,
            case.pool,
            case.layer,
            case.block_tables,
            case.context_lens,
            cos_sin,
            scale=case.scale,
            workspace=workspace,
            planned=True,
            **given,  # type: ignore[arg-type]
        )
        assert relative_error(out, separate.truth()) < 1.2 * BOUND[dtype]
        assert torch.equal(case.pool.isnan(), separate.pool.isnan())
        assert relative_error(case.pool.nan_to_num(), separate.pool.nan_to_num().double()) < BOUND[dtype] / 20
        case.pool[live // BLOCK, case.layer, :, :, live % BLOCK] = torch.nan


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("heads", [(12, 2, 128), (16, 8, 128), (9, 3, 64)], ids=str)
@pytest.mark.parametrize("batch", [1, 8, 40, 90])
def test_a_chain_with_programmatic_launches_gives_the_same_bits(
    batch: int, heads: tuple[int, int, int], fused: bool
) -> None:
    """Layer after layer in one graph, each layer's input made of the previous one's output, so that a kernel that did
    not wait would read stale numbers. New K and V rows start as NaN."""
    plain, chained = (DecodeChain(batch, heads, pdl, fused) for pdl in (False, True))
    assert torch.equal(plain.run(), chained.run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chained.step()
    for _ in range(10):
        chained.reset()
        graph.replay()
        assert torch.equal(chained.hidden, plain.hidden)
        assert torch.equal(chained.case.pool.nan_to_num(), plain.case.pool.nan_to_num())


class DecodeChain:
    """rms_norm -> write_kv -> paged_attention, or the two in one, over all layers of a pool. The norm's row stands in
    for the projection's."""

    LAYERS = 6

    def __init__(self, batch: int, heads: tuple[int, int, int], pdl: bool, fused: bool) -> None:
        self.pdl, self.fused = pdl, fused
        self.heads = heads
        q_heads, kv_heads, head_dim = heads
        self.case = paged_case(ragged(batch, 1500, batch), heads=heads, layers=self.LAYERS, seed=1)
        self.case.pool.nan_to_num_(nan=0.25)
        generator = torch.Generator(device=DEVICE).manual_seed(5)
        width = (q_heads + 2 * kv_heads) * head_dim
        self.start = torch.randn(batch, width, generator=generator, device=DEVICE).bfloat16()
        self.hidden = self.start.clone()
        self.normed = torch.empty_like(self.start)
        self.query = torch.empty_like(self.case.query)
        self.out = torch.empty_like(self.case.query)
        self.weight = torch.ones(width, dtype=torch.bfloat16, device=DEVICE)
        angles = torch.rand(2000, head_dim // 2, generator=generator, device=DEVICE)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.positions = self.case.context_lens - 1
        blocks = self.case.block_tables.gather(1, (self.positions // BLOCK).long()[:, None])[:, 0]
        self.slots = blocks.long() * BLOCK + self.positions % BLOCK
        self.workspace = self.case.workspace()
        self.reset()

    def reset(self) -> None:
        self.hidden.copy_(self.start)
        self.case.pool[self.slots // BLOCK, :, :, :, self.slots % BLOCK] = torch.nan
        torch.cuda.synchronize()

    def run(self) -> torch.Tensor:
        self.reset()
        self.step()
        torch.cuda.synchronize()
        return self.hidden

    def step(self) -> None:
        q_heads, kv_heads, head_dim = self.heads
        case, pdl = self.case, self.pdl
        ops.plan_attention(case.context_lens, q_heads, kv_heads, head_dim, self.workspace)
        for layer in range(self.LAYERS):
            ops.rms_norm(self.normed, self.hidden, self.weight, 1e-6, pdl=pdl)
            self.fused_attention(layer) if self.fused else self.attention(layer)
            self.hidden[:, : q_heads * head_dim] += self.out.flatten(1)

    def attention(self, layer: int) -> None:
        case = self.case
        ops.write_kv(self.query, self.normed, case.pool, layer, self.positions, self.slots, self.cos_sin, pdl=self.pdl)
        ops.paged_attention(
            self.out,
            self.query,
            case.pool,
            layer,
            case.block_tables,
            case.query_start,
            case.context_lens,
            max_query_len=1,
            scale=case.scale,
            workspace=self.workspace,
            planned=True,
            pdl=self.pdl,
        )

    def fused_attention(self, layer: int) -> None:
        case = self.case
        ops.decode_attention(
            self.out,
            self.normed,
            case.pool,
            layer,
            case.block_tables,
            case.context_lens,
            self.cos_sin,
            scale=case.scale,
            workspace=self.workspace,
            planned=True,
            pdl=self.pdl,
        )
