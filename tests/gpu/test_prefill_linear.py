"""The many-row matmuls against float64, and against themselves: a row is the same whatever it is batched with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine import _runtime, ops_prefill
from engine.model.layers import LEAST_EFFICIENCY, LEAST_QKV_EFFICIENCY, Linear
from tests import reference

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
BOUND = {torch.bfloat16: 4e-3, torch.float16: 5e-4}  # of one rounding, with room
# (rows, out_features, in_features): the models', fewer rows than a tile, ragged edges in every direction.
SHAPES = [
    (2048, 1536, 8960),
    (300, 1024, 2048),
    (1, 576, 576),
    (129, 1152, 896),
    (257, 4864, 904),
    (1000, 200, 72),
    (2047, 8960, 1536),
    (1024, 8960, 1536),  # of gate-up narrow tiles alone, on 132 multiprocessors
]


@pytest.fixture(autouse=True)
def warpgroups(gpu: None) -> None:
    if ops_prefill.efficiency("plain", 2048, 2048, 1536, torch.bfloat16) == 0:
        pytest.skip("these kernels need compute capability 9.0")


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)


def weight(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return random(rows, columns, dtype=dtype, scale=columns**-0.5, seed=1)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def guarded(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An output full of NaN, and the rows behind it, which must stay so."""
    whole = torch.full((rows + 256, columns), torch.nan, device="cuda", dtype=dtype)
    return whole[:rows], whole[rows:]


@DTYPES
@pytest.mark.parametrize("columns", [0, 128, 192, 256])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), SHAPES)
def test_linear_and_add(rows: int, out_features: int, in_features: int, columns: int, dtype: torch.dtype) -> None:
    x, matrix = random(rows, in_features, dtype=dtype), weight(out_features, in_features, dtype)
    bias, residual = random(out_features, dtype=dtype), random(rows, out_features, dtype=dtype, seed=2)
    product = x.double() @ matrix.double().t()
    out, behind = guarded(rows, out_features, dtype)
    ops_prefill.linear(out, x, matrix, tile_columns=columns)
    assert error(out, product) < BOUND[dtype]
    ops_prefill.linear(out, x, matrix, bias, tile_columns=columns)
    assert error(out, product + bias.double()) < BOUND[dtype]
    out.copy_(residual)
    ops_prefill.add(out, x, matrix, tile_columns=columns)
    assert error(out, product + residual.double()) < BOUND[dtype]
    assert torch.isnan(behind).all()


@DTYPES
@pytest.mark.parametrize("columns", [0, 128, 256])
@pytest.mark.parametrize(("rows", "inter", "hidden"), SHAPES)
def test_gate_up(rows: int, inter: int, hidden: int, columns: int, dtype: torch.dtype) -> None:
    x, matrix = random(rows, hidden, dtype=dtype, scale=2), weight(2 * inter, hidden, dtype)
    gate, up = (x.double() @ matrix.double().t()).split(inter, dim=1)
    out, behind = guarded(rows, inter, dtype)
    ops_prefill.gate_up(out, x, matrix, tile_columns=columns)
    assert error(out, torch.nn.functional.silu(gate) * up) < 1.3 * BOUND[dtype]
    assert torch.isnan(behind).all()


def test_silu_saturates_without_nan() -> None:
    """Gates of -1e4 and 1e4: exp overflows, and the product is 0 or the gate times up."""
    x = torch.tensor([[-100.0] * 8, [100.0] * 8], device="cuda", dtype=torch.bfloat16)
    matrix = torch.full((16, 8), 12.5, device="cuda", dtype=torch.bfloat16)
    out = torch.full((2, 8), torch.nan, device="cuda", dtype=torch.bfloat16)
    ops_prefill.gate_up(out, x, matrix)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.equal(out[1], torch.full_like(out[1], 1e8))


@DTYPES
@pytest.mark.parametrize(("out_features", "in_features"), [(1536, 1536), (1024, 3072)])
def test_a_row_depends_on_nothing_but_itself(out_features: int, in_features: int, dtype: torch.dtype) -> None:
    """Bit by bit the same in a batch of any size, in any place, and by any tile."""
    x, matrix = random(2048, in_features, dtype=dtype), weight(out_features, in_features, dtype)
    gates, residual = weight(2 * out_features, in_features, dtype), random(2048, out_features, dtype=dtype)

    def run(rows: slice, columns: int) -> list[Tensor]:
        outs = [residual[rows].clone() for _ in range(3)]
        ops_prefill.linear(outs[0], x[rows].contiguous(), matrix, tile_columns=columns)
        ops_prefill.add(outs[1], x[rows].contiguous(), matrix, tile_columns=columns)
        wide = 256 if columns == 192 else columns
        ops_prefill.gate_up(outs[2], x[rows].contiguous(), gates, tile_columns=wide)
        return outs

    whole = run(slice(0, 2048), 0)
    for columns in (0, 128, 192, 256):
        for rows in (slice(7, 8), slice(40, 140), slice(100, 1124)):
            for some, every in zip(run(rows, columns), whole, strict=True):
                assert torch.equal(some, every[rows])


class Heads:
    """One call of `query_and_kv`: scattered slots, every fifth token without one, NaN wherever nothing is written."""

    def __init__(
        self, rows: int, q_heads: int, kv_heads: int, head_dim: int, hidden: int, dtype: torch.dtype, extras: bool
    ) -> None:
        width = (q_heads + 2 * kv_heads) * head_dim
        blocks = rows // 16 + 3
        slots = torch.randperm(16 * (blocks - 1), device="cuda")[:rows] + 16
        slots[::5] = -1
        self.rows, self.shape = rows, (rows, q_heads, head_dim)
        self.tensors: dict[str, Tensor] = {
            "x": random(rows, hidden, dtype=dtype),
            "weight": weight(width, hidden, dtype),
            "positions": torch.randint(0, 3000, (rows,), device="cuda", dtype=torch.int32),
            "slots": slots,
            "cos_sin": torch.from_numpy(reference.rotary_table(3000, head_dim)).cuda(),
        }
        self.pool_shape = (blocks, 2, 2, kv_heads, 16, head_dim)
        self.extras: dict[str, Any] = {}
        if extras:
            norms = {name: random(head_dim, dtype=dtype, seed=seed) for seed, name in enumerate(("q_norm", "k_norm"))}
            self.extras = {"bias": random(width, dtype=dtype), "norm_eps": 1e-6, **norms}

    def run(self, columns: int = 0, pdl: bool = False) -> tuple[Tensor, Tensor]:
        """Queries and pool; checks that nothing lies behind the queries."""
        dtype = self.tensors["x"].dtype
        query, behind = guarded(self.rows, self.shape[1] * self.shape[2], dtype)
        pool = torch.full(self.pool_shape, torch.nan, device="cuda", dtype=dtype)
        given = {**self.tensors, **self.extras}
        ops_prefill.query_and_kv(query.view(self.shape), kv_pool=pool, layer=1, tile_columns=columns, pdl=pdl, **given)
        assert torch.isnan(behind).all()
        return query.view(self.shape), pool

    def expected(self) -> tuple[Tensor, Tensor]:
        given = {name: tensor.cpu().numpy() for name, tensor in self.tensors.items() if name not in ("x", "weight")}
        extras = {k: v.double().cpu().numpy() if isinstance(v, Tensor) else v for k, v in self.extras.items()}
        qkv = (self.tensors["x"].double() @ self.tensors["weight"].double().t()).cpu().numpy()
        pool = torch.full(self.pool_shape, torch.nan).numpy()
        found = reference.write_kv(qkv, pool, 1, **given, **extras)
        return torch.from_numpy(found[0]).cuda(), torch.from_numpy(found[1]).cuda()


HEADS = [  # rows, q_heads, kv_heads, head_dim, hidden
    (300, 12, 2, 128, 1536),
    (129, 5, 1, 128, 200),
    (257, 9, 3, 64, 576),
    (1, 3, 1, 64, 72),
    (400, 3, 1, 96, 96),
    (130, 16, 8, 128, 1024),
    (2047, 0, 2, 128, 1536),  # keys and values alone
    (100, 0, 3, 64, 576),
]


@DTYPES
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias-and-qk-norm"])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_query_and_kv(shape: tuple[int, int, int, int, int], extras: bool, dtype: torch.dtype) -> None:
    case = Heads(*shape, dtype, extras)
    query, pool = case.expected()
    written = ~torch.isnan(pool)
    for columns in (0, 128, 192, 256):
        if columns % shape[3] != 0:
            continue
        got, got_pool = case.run(columns)
        if shape[1] > 0:
            assert error(got, query) < BOUND[dtype]
        assert torch.equal(~torch.isnan(got_pool), written)
        if written.any():
            assert error(got_pool[written], pool[written]) < BOUND[dtype]


def test_query_and_kv_of_a_row_depend_on_nothing_but_itself() -> None:
    case = Heads(600, 12, 2, 128, 1536, torch.bfloat16, True)
    query, pool = case.run()
    part = Heads(600, 12, 2, 128, 1536, torch.bfloat16, True)
    for name in ("x", "positions", "slots"):
        part.tensors[name] = case.tensors[name][100:173].contiguous()
    part.tensors = {**case.tensors, **{name: part.tensors[name] for name in ("x", "positions", "slots")}}
    part.extras, part.rows, part.shape = case.extras, 73, (73, 12, 128)
    for columns in (128, 256):
        some, some_pool = part.run(columns)
        assert torch.equal(some, query[100:173])
        there = ~torch.isnan(some_pool)
        assert there.any()
        assert torch.equal(some_pool[there], pool[there])


def test_query_and_kv_refuse_what_they_do_not_serve() -> None:
    case = Heads(20, 4, 1, 80, 64, torch.bfloat16, False)
    with pytest.raises(_runtime.OpError, match="no tiles for this head_dim"):
        case.run()
    assert ops_prefill.query_and_kv_efficiency(8192, 480, 80, 64, torch.bfloat16) == 0
    case = Heads(20, 4, 1, 128, 64, torch.bfloat16, False)
    case.tensors["cos_sin"] = case.tensors["cos_sin"][:, :64].contiguous()
    with pytest.raises(_runtime.OpError, match="whole head"):
        case.run()
    case.tensors["weight"] = case.tensors["weight"][:-8]
    with pytest.raises(_runtime.OpError, match="weight"):
        case.run()


def test_a_layer_makes_query_and_kv_where_that_is_faster() -> None:
    linear = Linear(weight(2048, 1536, torch.bfloat16))
    assert linear.makes_query_and_kv(2048, 128)
    assert not linear.makes_query_and_kv(64, 128)
    assert not linear.makes_query_and_kv(8192, 80)
    few = ops_prefill.query_and_kv_efficiency(64, 2048, 128, 1536, torch.bfloat16)
    assert 0 < few < LEAST_QKV_EFFICIENCY


def test_a_captured_chain_with_early_launches_equals_eager() -> None:
    """Each kernel reads what the one before it wrote, and overwrites what the one before that has read."""
    rows, hidden, inter, dtype = 2048, 1536, 8960, torch.bfloat16
    gates = [random(2 * inter, hidden, dtype=dtype, scale=hidden**-0.5, seed=seed) for seed in range(4)]
    downs = [random(hidden, inter, dtype=dtype, scale=inter**-0.5, seed=seed) for seed in range(4)]
    start = random(rows, hidden, dtype=dtype)
    stream, activated = start.clone(), torch.empty(rows, inter, device="cuda", dtype=dtype)

    def run(pdl: bool) -> None:
        for gate, down in zip(gates, downs, strict=True):
            ops_prefill.gate_up(activated, stream, gate, pdl=pdl)
            ops_prefill.add(stream, activated, down, pdl=pdl)

    run(pdl=False)
    expected = stream.clone()
    assert torch.isfinite(expected).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(pdl=True)
    for _ in range(5):
        stream.copy_(start)
        activated.fill_(torch.nan)
        graph.replay()
        assert torch.equal(stream, expected)


def test_efficiency_grows_with_the_work_and_is_0_where_not_served() -> None:
    bf16 = torch.bfloat16
    few, many = (ops_prefill.efficiency("gate_up", rows, 8960, 1536, bf16) for rows in (64, 8192))
    assert 0 < few < 0.3
    assert 0.85 < many < 1
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        # 4.2 rounds of wide tiles would take five, and reach 0.78; five of narrow ones take less.
        assert ops_prefill.efficiency("gate_up", 1024, 8960, 1536, bf16) > 0.85
    assert ops_prefill.efficiency("plain", 8192, 1532, 1536, bf16) == 0
    assert ops_prefill.efficiency("plain", 8192, 1536, 1536, torch.float32) == 0


@pytest.mark.parametrize("rows", [64, 2048])
def test_a_layer_uses_them_where_they_fill_the_gpu(rows: int) -> None:
    """Few rows: `add` and `gate_up` decline and change nothing. Many: they do what the plain product does."""
    x, matrix = random(rows, 1536, dtype=torch.bfloat16), weight(2 * 8960, 1536, torch.bfloat16)
    linear, total = Linear(matrix), torch.zeros(rows, 2 * 8960, device="cuda", dtype=torch.bfloat16)
    many = ops_prefill.efficiency("add", rows, 2 * 8960, 1536, torch.bfloat16) >= LEAST_EFFICIENCY["add"]
    assert many == (rows == 2048)
    assert linear.add(x, total) == many
    product = linear(x, torch.empty_like(total))
    assert error(product, x.double() @ matrix.double().t()) < BOUND[torch.bfloat16]
    assert torch.equal(total, product if many else torch.zeros_like(total))
    assert linear.gate_up(x, torch.empty(rows, 8960, device="cuda", dtype=torch.bfloat16)) == many


def test_what_is_not_served_is_refused() -> None:
    x, out = torch.zeros(4, 60, device="cuda").bfloat16(), torch.zeros(4, 64, device="cuda").bfloat16()
    with pytest.raises(_runtime.OpError, match="not served"):
        ops_prefill.linear(out, x, torch.zeros(64, 60, device="cuda").bfloat16())
    with pytest.raises(_runtime.OpError, match="weight"):
        ops_prefill.linear(out, x, torch.zeros(63, 60, device="cuda").bfloat16())
