"""paged_attention against numpy: ragged, decode and chunked prefill, over a pool full of NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import _runtime, ops
from tests import reference
from tests.cuda.ragged import RaggedBatch, float64, ragged_batch

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
DECODE = [1, 15, 16, 17, 0, 100, 33, 700]
PREFILL = [(5, 5), (40, 40), (64, 16), (100, 37), (17, 1), (0, 0), (300, 130)]


def workspace_for(batch: RaggedBatch) -> torch.Tensor | None:
    if not batch.query.is_cuda:
        return None
    _, heads, head_dim = batch.query.shape
    size = ops.paged_attention_workspace_bytes(len(batch.context_lens), heads, batch.kv_pool.shape[3], head_dim)
    return torch.zeros(size, dtype=torch.uint8, device=batch.query.device)


def attend(batch: RaggedBatch, layer: int = 1, workspace: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full_like(batch.query, float("nan"))
    if workspace is None:
        workspace = workspace_for(batch)
    ops.paged_attention(
        out,
        batch.query,
        batch.kv_pool,
        layer,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        max_query_len=batch.max_query_len,
        scale=batch.query.shape[2] ** -0.5,
        workspace=workspace,
    )
    return out


def expected(batch: RaggedBatch, layer: int = 1) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return reference.paged_attention(
        float64(batch.query),
        float64(batch.kv_pool),
        layer,
        batch.block_tables.cpu().numpy(),
        batch.query_start.cpu().numpy(),
        batch.context_lens.cpu().numpy(),
        batch.query.shape[2] ** -0.5,
    )


def supported(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("the GPU kernels take bfloat16 and float16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 6, 8])
def test_decode(device: torch.device, group: int, head_dim: int, dtype: torch.dtype) -> None:
    supported(device, dtype)
    batch = ragged_batch(
        DECODE, [1] * len(DECODE), q_heads=2 * group, kv_heads=2, head_dim=head_dim, dtype=dtype, device=device
    )
    np.testing.assert_allclose(float64(attend(batch)), expected(batch), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 6, 8])
def test_chunked_prefill(device: torch.device, group: int, head_dim: int, dtype: torch.dtype) -> None:
    supported(device, dtype)
    contexts, query_lens = (list(column) for column in zip(*PREFILL, strict=True))
    batch = ragged_batch(
        contexts, query_lens, q_heads=2 * group, kv_heads=2, head_dim=head_dim, dtype=dtype, device=device
    )
    np.testing.assert_allclose(float64(attend(batch)), expected(batch), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_sequence_without_context_gets_zeros(device: torch.device) -> None:
    batch = ragged_batch([0, 5], [1, 1], q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device)
    out = attend(batch)
    assert (out[0] == 0).all()
    assert out[1].isfinite().all()


def test_rows_past_the_last_sequence_are_left_alone(device: torch.device) -> None:
    batch = ragged_batch([20, 9], [3, 2], q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device)
    padded = RaggedBatch(
        torch.cat([batch.query, batch.query[:2]]),
        batch.kv_pool,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        batch.max_query_len,
    )
    out = attend(padded)
    assert torch.equal(out[:5], attend(batch))
    assert out[5:].isnan().all()


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    batch = ragged_batch([50], [1], q_heads=2, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device)
    batch.query.mul_(200.0)
    np.testing.assert_allclose(float64(attend(batch)), expected(batch), atol=8e-3, rtol=8e-3)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_company_or_chunk(dtype: torch.dtype) -> None:
    """Alone, batched, in one chunk or as the last token of a long one: the same bits."""
    contexts, query_lens = [70, 33, 128], [70, 33, 128]
    together = ragged_batch(
        contexts, query_lens, q_heads=6, kv_heads=2, head_dim=64, dtype=dtype, device=torch.device("cpu")
    )
    whole = attend(together)
    for seq, context in enumerate(contexts):
        first = int(together.query_start[seq])
        for start, stop in [(0, context), (0, context // 2), (context // 2, context), (context - 1, context)]:
            alone = RaggedBatch(
                together.query[first + start : first + stop].clone(),
                together.kv_pool,
                together.block_tables[seq : seq + 1].clone(),
                torch.tensor([0, stop - start], dtype=torch.int32),
                torch.tensor([stop], dtype=torch.int32),
                stop - start,
            )
            assert torch.equal(attend(alone), whole[first + start : first + stop])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    batch = ragged_batch([20, 9], [1, 1], q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device)
    wrong = {
        "query must be bfloat16": {"query": batch.query.half()},
        "query must be contiguous": {"query": batch.query.transpose(0, 1).contiguous().transpose(0, 1)},
        "query must have a multiple": {"query": batch.query[:, :3].contiguous()},
        "query must have 3 axes": {"query": batch.query[None]},
        "query and kv_pool differ in head_dim": {"query": batch.query[..., :32].contiguous()},
        "block_tables must be int32": {"block_tables": batch.block_tables.long()},
        "block_tables must be contiguous": {"block_tables": batch.block_tables[:, ::2]},
        "query_start must have size 3": {"query_start": batch.query_start[:2]},
        "context_lens must be int32": {"context_lens": batch.context_lens.long()},
        "kv_pool must be contiguous": {"kv_pool": batch.kv_pool[..., :32]},
    }
    workspace = workspace_for(batch)
    for message, change in wrong.items():
        with pytest.raises(_runtime.OpError, match=message):
            attend(RaggedBatch(**{**vars(batch), **change}), workspace=workspace)
    with pytest.raises(_runtime.OpError, match="kv_pool has no layer 2"):
        attend(batch, layer=2)


def test_metadata_that_leads_outside_is_refused_on_the_cpu() -> None:
    batch = ragged_batch(
        [20, 9], [1, 1], q_heads=4, kv_heads=2, head_dim=64, dtype=torch.float32, device=torch.device("cpu")
    )
    int32 = torch.int32
    wrong = {
        "longer than the block table": {"context_lens": torch.tensor([20, 999], dtype=int32)},
        "more queries than context": {
            "query_start": torch.tensor([0, 0, 2], dtype=int32),
            "context_lens": torch.tensor([20, 1], dtype=int32),
        },
        "beyond the rows of query": {"query_start": torch.tensor([0, 1, 3], dtype=int32)},
        "a block outside the pool": {"block_tables": batch.block_tables + 99},
    }
    for message, change in wrong.items():
        with pytest.raises(_runtime.OpError, match=message):
            attend(RaggedBatch(**{**vars(batch), **change}))


@pytest.mark.gpu
def test_tensors_on_two_devices_are_refused() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    batch = ragged_batch(
        [20], [1], q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=torch.device("cuda")
    )
    with pytest.raises(_runtime.OpError, match="context_lens must be on the device of kv_pool"):
        attend(RaggedBatch(**{**vars(batch), "context_lens": batch.context_lens.cpu()}))


@pytest.mark.parametrize("block_size", [1, 3, 4, 8, 24, 32])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_any_block_size_on_the_cpu(block_size: int, head_dim: int) -> None:
    """A block shorter or longer than the keys that are scored at once; head_dim no multiple of a vector."""
    for contexts, query_lens in ((DECODE, [1] * len(DECODE)), ([c for c, _ in PREFILL], [q for _, q in PREFILL])):
        batch = ragged_batch(
            contexts,
            query_lens,
            q_heads=6,
            kv_heads=2,
            head_dim=head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
            block_size=block_size,
        )
        np.testing.assert_allclose(float64(attend(batch)), expected(batch), atol=2e-6, rtol=0)
