"""The decode matmuls against float64, and against themselves: alone = in a batch, eager = in a graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from engine import _runtime, ops, ops_decode
from engine.ops_decode import ResidualStream

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
EPS = 1e-6
DTYPES = [torch.bfloat16, torch.float16]
# (hidden, query and KV width, query width, inter) of Qwen2.5-1.5B, Qwen3-0.6B, SmolLM2-135M and odd ones.
MODELS = [
    (1536, 2048, 1536, 8960),
    (1024, 4096, 2048, 3072),
    (576, 960, 576, 1536),
    (896, 1152, 896, 4864),
    (2048, 12288, 2048, 11008),
    (5120, 2048, 1024, 2048),
    (512, 1152, 512, 14336),  # several tiles a thread block
]
BATCHES = [1, 7, 8, 13, 32, 48, 64]
PATHS = pytest.mark.parametrize("portable", [False, True], ids=["best", "portable"])


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)


def weight(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return random(rows, columns, dtype=dtype, scale=columns**-0.5, seed=seed)


def error(got: Tensor, expected: Tensor) -> float:
    """Relative to the norm of what was expected; NaN fails every comparison."""
    return float((got.double() - expected).norm() / expected.norm())


def rounding(dtype: torch.dtype) -> float:
    """What one rounding to `dtype` may cost, with room."""
    return {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}[dtype]


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, device="cuda", dtype=dtype)


def new_stream(batch: int, hidden: int, dtype: torch.dtype) -> ResidualStream:
    stream = ResidualStream.allocate(batch, hidden, dtype, torch.device("cuda"))
    for buffer in (stream.residual, stream.scaled, stream.square_sums):
        buffer.fill_(torch.nan)
    return stream


def started(batch: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> ResidualStream:
    stream = new_stream(batch, hidden, dtype)
    ops_decode.start(stream, random(batch, hidden, dtype=dtype, scale=3, seed=seed), norm_of(hidden, dtype))
    return stream


def norm_of(hidden: int, dtype: torch.dtype) -> Tensor:
    return 1 + random(hidden, dtype=dtype, scale=0.3, seed=5)


def normed(stream: ResidualStream) -> Tensor:
    """float64 RMSNorm(residual) * weight, from the rounded product that the matmul reads."""
    scale = 1 / 16 if stream.scaled.dtype == torch.float16 else 1
    rms = (stream.residual.double().square().mean(1, keepdim=True) + EPS).sqrt()
    return stream.scaled.double() / scale / rms


def check_stream(stream: ResidualStream, residual: Tensor, norm: Tensor, tolerance: float) -> None:
    scale = 1 / 16 if stream.scaled.dtype == torch.float16 else 1
    assert error(stream.residual, residual) < tolerance
    assert error(stream.scaled, stream.residual.double() * norm.double() * scale) < rounding(stream.scaled.dtype)
    parts = stream.square_sums.shape[1]
    squares = stream.residual.double().square().view(residual.shape[0], parts, -1).sum(2)
    assert error(stream.square_sums, squares) < rounding(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [576, 896, 1024, 1536, 2048, 4096])
def test_start(hidden: int, dtype: torch.dtype) -> None:
    stream = new_stream(5, hidden, dtype)
    x, norm = random(5, hidden, dtype=dtype, scale=3), norm_of(hidden, dtype)
    ops_decode.start(stream, x, norm)
    assert torch.equal(stream.residual, x.float())
    check_stream(stream, x.double(), norm, 1e-9)


@PATHS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_norm_linear(model: tuple[int, ...], batch: int, dtype: torch.dtype, portable: bool) -> None:
    hidden, width, _, _ = model
    stream, matrix = started(batch, hidden, dtype), weight(width, hidden, dtype)
    expected = normed(stream) @ matrix.double().t()
    for out_dtype in (dtype, torch.float32):
        out = poisoned(batch, width, dtype=out_dtype)
        ops_decode.norm_linear(out, stream, matrix, EPS, portable=portable)
        assert error(out, expected) < rounding(out_dtype)


@PATHS
@pytest.mark.parametrize("batch", [1, 16, 33, 64])
@pytest.mark.parametrize(("vocab", "hidden"), [(151936, 1024), (49152, 576), (151936, 1536), (50264, 896)])
def test_head(vocab: int, hidden: int, batch: int, portable: bool) -> None:
    """Several tiles a thread block; 50264 is no multiple of any tile."""
    dtype = torch.bfloat16
    stream, matrix = started(batch, hidden, dtype), weight(vocab, hidden, dtype)
    logits = poisoned(batch, vocab, dtype=torch.float32)
    ops_decode.norm_linear(logits, stream, matrix, EPS, portable=portable)
    assert error(logits, normed(stream) @ matrix.double().t()) < rounding(torch.float32)


@pytest.mark.parametrize("batch", [1, 9, 31, 64])
@pytest.mark.parametrize(
    ("vocab", "used", "hidden"), [(151936, 151665, 1536), (49152, 49152, 576), (151936, 151936, 1024)]
)
def test_the_head_finds_what_the_sampler_finds(vocab: int, used: int, hidden: int, batch: int) -> None:
    """Also among equals, and beside rows that are not finite. Logits are stored of the rows wanted only."""
    dtype = torch.bfloat16
    assert ops_decode.head_finds_best(vocab, hidden, dtype)
    stream, matrix = started(batch, hidden, dtype), weight(vocab, hidden, dtype)
    for row in (used // 3, used - 1):  # the largest logits of most rows, twice and three times
        matrix[row] = 40 * normed(stream)[0].to(dtype) / hidden
        matrix[row // 2] = matrix[row]
    if used < vocab:
        matrix[used] = 10 * matrix[used - 1]  # no token
    if batch > 20:
        stream.scaled[20, 5] = torch.nan
        stream.scaled[13, 5] = torch.inf
    plain = poisoned(batch, vocab, dtype=torch.float32)
    ops_decode.norm_linear(plain, stream, matrix, EPS)
    logits = torch.full_like(plain, 7.0)
    best = torch.zeros(batch, dtype=torch.int64, device="cuda")
    wanted = (torch.arange(batch, device="cuda") % 3 == 1).int()
    expected, tokens, newest = (torch.full((batch,), -9, dtype=torch.int32, device="cuda") for _ in range(3))
    workspace = torch.zeros(ops.sample_workspace_bytes(batch), dtype=torch.uint8, device="cuda")
    ops.sample(expected, plain[:, :used], workspace=workspace)
    for _ in range(2):
        ops_decode.head(logits, stream, matrix, EPS, best=best, wanted=wanted, vocab_size=used, pdl=True)
        ops.sample(
            tokens,
            logits[:, :used],
            best=best,
            newest=newest,
            targets=torch.arange(batch, device="cuda").flip(0),
            workspace=workspace,
            pdl=True,
        )
        assert torch.equal(tokens, expected)
        assert torch.equal(newest.flip(0), expected.clamp_min(0))
        assert not best.any()
    kept = wanted.bool()
    assert torch.equal(logits[kept].nan_to_num(), plain[kept].nan_to_num())
    assert (logits[~kept] == 7.0).all()
    if batch > 20:
        assert expected[13] == expected[20] == -1


@pytest.mark.parametrize("batch", [2, 33])
def test_a_drawn_row_leaves_no_best_to_the_next_step(batch: int) -> None:
    """Rows are greedy and drawn in turn; each step's tokens are those of all its logits."""
    vocab, hidden = 49152, 576
    dtype = torch.bfloat16
    matrix = weight(vocab, hidden, dtype)
    best = torch.zeros(batch, dtype=torch.int64, device="cuda")
    wanted, rows = torch.ones(batch, dtype=torch.int32, device="cuda"), torch.arange(batch, device="cuda")
    tokens, expected = (torch.full((batch,), -9, dtype=torch.int32, device="cuda") for _ in range(2))
    workspace = torch.zeros(ops.sample_workspace_bytes(batch), dtype=torch.uint8, device="cuda")
    for step, size in enumerate((4.0, 1.0, 0.25)):  # the largest logits come first
        stream = started(batch, hidden, dtype)
        logits = poisoned(batch, vocab, dtype=torch.float32)
        ops_decode.head(logits, stream, matrix * size, EPS, best=best, wanted=wanted, vocab_size=vocab)
        drawing = {
            "temperature": ((rows + step) % 2).float(),
            "top_k": torch.zeros(batch, dtype=torch.int32, device="cuda"),
            "top_p": torch.ones(batch, device="cuda"),
            "min_p": torch.zeros(batch, device="cuda"),
            "seeds": rows * 7919,
            "positions": rows.int() + step,
            "workspace": workspace,
        }
        ops.sample(tokens, logits, best=best, **drawing)
        ops.sample(expected, logits, **drawing)
        assert torch.equal(tokens, expected)
        assert not best.any()


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 5, 64])
def test_begin_equals_embed_start_and_plan(batch: int, dtype: torch.dtype, fixed: bool) -> None:
    hidden, vocab, heads = 1536, 500, (12, 2, 128)
    table, norm = random(vocab, hidden, dtype=dtype), norm_of(hidden, dtype)
    token_ids = torch.arange(batch, dtype=torch.int32, device="cuda") * 9 - 2  # ids outside the table, too
    sources = (torch.arange(batch, dtype=torch.int32, device="cuda") % 3 - 1) * 2
    newest = torch.arange(3, dtype=torch.int32, device="cuda") + 490
    lens = torch.randint(0, 3000, (batch,), dtype=torch.int32, device="cuda")
    size = ops.paged_attention_workspace_bytes(batch, *heads, fixed)
    expected, got = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    embedded = poisoned(batch, hidden, dtype=dtype)
    ops.embed(embedded, table, token_ids, sources, newest)
    one, two = new_stream(batch, hidden, dtype), new_stream(batch, hidden, dtype)
    ops_decode.start(one, embedded, norm)
    ops.plan_attention(lens, *heads, expected, fixed=fixed)
    ops_decode.begin(two, table, token_ids, norm, lens, *heads, got, sources=sources, newest=newest, fixed=fixed)
    assert torch.equal(one.residual, two.residual)
    assert torch.equal(one.scaled, two.scaled)
    assert torch.equal(one.square_sums, two.square_sums)
    lens_of_zero = int((lens == 0).sum())
    assert lens_of_zero > 1 or torch.equal(expected, got)  # several empty sequences are listed in any order


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_step_that_starts_early_reads_the_plan_of_its_own_lengths(batch: int) -> None:
    """begin lets the first matmul start beside it; attention, which reads the plan early, comes behind both. Weights
    that its idle blocks fetch change nothing."""
    hidden, vocab, heads, dtype = 1536, 500, (12, 2, 128), torch.bfloat16
    q_heads, kv_heads, head_dim = heads
    table, norm, matrix = random(vocab, hidden, dtype=dtype), norm_of(hidden, dtype), weight(2048, hidden, dtype)
    token_ids = torch.arange(batch, dtype=torch.int32, device="cuda")
    width = 200
    pool = random(batch * width + 1, 1, 2, kv_heads, 16, head_dim, dtype=dtype)
    tables = 1 + torch.arange(batch * width, dtype=torch.int32, device="cuda").view(batch, width)
    lens = torch.ones(batch, dtype=torch.int32, device="cuda")
    cos_sin = random(16 * width, head_dim, dtype=torch.float32)
    stream, qkv = new_stream(batch, hidden, dtype), poisoned(batch, 2048, dtype=dtype)
    out = poisoned(batch, q_heads, head_dim, dtype=dtype)
    workspace = torch.zeros(ops.paged_attention_workspace_bytes(batch, *heads, False), dtype=torch.uint8, device="cuda")

    def run(pdl: bool) -> None:
        ops_decode.begin(stream, table, token_ids, norm, lens, *heads, workspace, pdl=pdl)
        ops_decode.norm_linear(qkv, stream, matrix, EPS, opens_step=True, pdl=pdl)
        ops.decode_attention(
            *(out, qkv, pool, 0, tables, lens, cos_sin),
            scale=0.1,
            workspace=workspace,
            planned=True,
            ahead=matrix if pdl else None,
            pdl=pdl,
        )

    run(pdl=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(pdl=True)
    for longest in (3100, 40, 2000, 16, 900, 3000):
        lens.copy_(torch.randint(1, longest + 1, (batch,)))
        run(pdl=False)
        expected = out.clone()
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, expected)


@PATHS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_norm_gate_up(model: tuple[int, ...], batch: int, dtype: torch.dtype, portable: bool) -> None:
    hidden, _, _, inter = model
    stream, matrix = started(batch, hidden, dtype), weight(2 * inter, hidden, dtype)
    gate, up = (normed(stream) @ matrix.double().t()).split(inter, dim=1)
    out = poisoned(batch, inter, dtype=dtype)
    ops_decode.norm_gate_up(out, stream, matrix, EPS, portable=portable)
    assert error(out, torch.nn.functional.silu(gate) * up) < rounding(dtype)


@PATHS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_linear_add(model: tuple[int, ...], batch: int, dtype: torch.dtype, portable: bool) -> None:
    hidden, _, attended, inter = model
    for width in (attended, inter):
        stream, matrix = started(batch, hidden, dtype), weight(hidden, width, dtype)
        x, norm = random(batch, width, dtype=dtype), 2 + random(hidden, dtype=dtype, seed=9)
        expected = stream.residual.double() + x.double() @ matrix.double().t()
        ops_decode.linear_add(stream, x, matrix, norm, portable=portable)
        check_stream(stream, expected, norm, rounding(torch.float32))


Op = Callable[[Tensor, Tensor], list[Tensor]]


def every_op(model: tuple[int, ...], dtype: torch.dtype, portable: bool) -> list[Op]:
    """Each op as a function of the residual's rows [B, H] and other rows [B, inter]; returns what it wrote."""
    hidden, width, attended, inter = model
    qkv, gate_up = weight(width, hidden, dtype), weight(2 * inter, hidden, dtype)
    norm = norm_of(hidden, dtype)

    def start(rows: Tensor) -> ResidualStream:
        stream = new_stream(rows.shape[0], hidden, dtype)
        ops_decode.start(stream, rows, norm)
        return stream

    def run_qkv(rows: Tensor, _: Tensor) -> list[Tensor]:
        out = poisoned(rows.shape[0], width, dtype=dtype)
        ops_decode.norm_linear(out, start(rows), qkv, EPS, portable=portable)
        return [out]

    def run_gate_up(rows: Tensor, _: Tensor) -> list[Tensor]:
        out = poisoned(rows.shape[0], inter, dtype=dtype)
        ops_decode.norm_gate_up(out, start(rows), gate_up, EPS, portable=portable)
        return [out]

    def run_add(in_features: int) -> Op:
        matrix = weight(hidden, in_features, dtype)

        def run(rows: Tensor, x: Tensor) -> list[Tensor]:
            stream = start(rows)
            ops_decode.linear_add(stream, x[:, :in_features].contiguous(), matrix, norm, portable=portable)
            return [stream.residual, stream.scaled, stream.square_sums]

        return run

    return [run_qkv, run_gate_up, run_add(attended), run_add(inter)]


@PATHS
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_row_depends_on_nothing_but_itself(model: tuple[int, ...], portable: bool) -> None:
    """Bit by bit the same alone, in every bucket, in another place and beside other rows; and again."""
    hidden, _, attended, inter = model
    dtype, most = torch.bfloat16, max(attended, inter)
    rows, x = random(64, hidden, dtype=dtype, scale=3), random(64, most, dtype=dtype)
    for op in every_op(model, dtype, portable):
        whole = op(rows, x)
        assert all(torch.equal(a, b) for a, b in zip(whole, op(rows, x), strict=True))
        for batch, first in itertools.product([1, 5, 16, 31, 48], [0, 11]):
            taken = slice(first, first + batch)
            for some, all_rows in zip(op(rows[taken], x[taken]), whole, strict=True):
                assert torch.equal(some, all_rows[taken])


@PATHS
@pytest.mark.parametrize(("vocab", "hidden"), [(151936, 1536), (49152, 576), (50264, 896)])
def test_a_row_of_logits_depends_on_nothing_but_itself(vocab: int, hidden: int, portable: bool) -> None:
    """The head has more tiles than there are multiprocessors, and sums of one chain."""
    dtype = torch.bfloat16
    rows, matrix = random(64, hidden, dtype=dtype, scale=3), weight(vocab, hidden, dtype)

    def run(taken: slice) -> Tensor:
        stream = new_stream(rows[taken].shape[0], hidden, dtype)
        ops_decode.start(stream, rows[taken].contiguous(), norm_of(hidden, dtype))
        out = poisoned(rows[taken].shape[0], vocab, dtype=torch.float32)
        ops_decode.norm_linear(out, stream, matrix, EPS, portable=portable)
        return out

    whole = run(slice(0, 64))
    for batch, first in itertools.product([1, 5, 16, 31, 48], [0, 11]):
        assert torch.equal(run(slice(first, first + batch)), whole[first : first + batch])


@PATHS
def test_rows_beyond_the_batch_stay(portable: bool) -> None:
    hidden, inter, dtype = 1536, 8960, torch.bfloat16
    stream = started(16, hidden, dtype)
    before = [stream.residual[9:].clone(), stream.scaled[9:].clone(), stream.square_sums[9:].clone()]
    x, norm = random(9, inter, dtype=dtype), norm_of(hidden, dtype)
    ops_decode.linear_add(stream, x, weight(hidden, inter, dtype), norm, portable=portable)
    for old, buffer in zip(before, (stream.residual, stream.scaled, stream.square_sums), strict=True):
        assert torch.equal(old, buffer[9:])


@PATHS
@pytest.mark.parametrize("batch", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_captured_chain_equals_eager(model: tuple[int, ...], batch: int, portable: bool) -> None:
    """Twelve layers with programmatic launches and weights fetched ahead, in a graph, against one op at a time."""
    hidden, width, attended, inter = model
    dtype = torch.bfloat16
    layers = [
        (
            weight(width, hidden, dtype, seed),
            weight(hidden, attended, dtype, seed),
            weight(2 * inter, hidden, dtype, seed),
            weight(hidden, inter, dtype, seed),
        )
        for seed in range(12)
    ]
    x, norm = random(batch, hidden, dtype=dtype), norm_of(hidden, dtype)
    qkv = poisoned(batch, width, dtype=dtype)
    activated = poisoned(batch, inter, dtype=dtype)
    logits = poisoned(batch, width, dtype=torch.float32)
    stream = new_stream(batch, hidden, dtype)

    def run(pdl: bool) -> None:
        ops_decode.start(stream, x, norm)
        for w_qkv, w_o, w_gate_up, w_down in layers:
            ahead = w_gate_up if pdl else None
            ops_decode.norm_linear(qkv, stream, w_qkv, EPS, portable=portable, pdl=pdl)
            attention = qkv.view(-1)[: batch * attended].view(batch, attended)
            ops_decode.linear_add(stream, attention, w_o, norm, portable=portable, ahead=ahead, pdl=pdl)
            ops_decode.norm_gate_up(activated, stream, w_gate_up, EPS, portable=portable, pdl=pdl)
            ops_decode.linear_add(stream, activated, w_down, norm, portable=portable, ahead=layers[0][0], pdl=pdl)
        ops_decode.norm_linear(logits, stream, layers[0][0], EPS, portable=portable, pdl=pdl)

    run(pdl=False)
    expected = [logits.clone(), stream.residual.clone()]
    assert torch.isfinite(expected[0]).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(pdl=True)
    for _ in range(5):
        logits.fill_(torch.nan)
        stream.residual.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(logits, expected[0])
        assert torch.equal(stream.residual, expected[1])


def test_large_fp16_residuals_do_not_overflow() -> None:
    hidden, dtype = 1536, torch.float16
    stream, norm = new_stream(2, hidden, dtype), 8 * norm_of(hidden, dtype)
    x = random(2, hidden, dtype=dtype)
    x[:, 7] = 30000
    ops_decode.start(stream, x, norm)
    matrix = weight(2048, hidden, dtype)
    out = poisoned(2, 2048, dtype=torch.float32)
    ops_decode.norm_linear(out, stream, matrix, EPS)
    assert error(out, normed(stream) @ matrix.double().t()) < rounding(torch.float32)


def test_what_is_not_served_says_so() -> None:
    bf16 = torch.bfloat16
    assert ops_decode.supported("norm_linear", 2048, 1536, 64, bf16)
    assert not ops_decode.supported("norm_linear", 2048, 1536, 65, bf16)
    assert not ops_decode.supported("norm_linear", 2048, 1500, 8, bf16)
    assert not ops_decode.supported("norm_linear", 2044, 1536, 8, bf16)
    assert not ops_decode.supported("norm_gate_up", 8964, 1536, 8, bf16)
    assert not ops_decode.supported("linear_add", 1536, 1536, 8, torch.float32)
    stream = started(2, 576, bf16)
    with pytest.raises(_runtime.OpError):
        ops_decode.linear_add(stream, random(2, 100, dtype=bf16), weight(576, 100, bf16), norm_of(576, bf16))
