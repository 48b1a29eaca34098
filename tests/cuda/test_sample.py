"""sample against a numpy version of its definition, on the CPU and on the GPU: the same tokens, not nearly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine import _runtime, ops
from tests.run.philox import philox_words

VOCAB = 5003  # neither a multiple of 8 nor of 4


def parameters(rows: int, device: torch.device, **given: list[float] | list[int]) -> dict[str, torch.Tensor]:
    values: dict[str, list[float] | list[int]] = {
        "temperature": [1.0] * rows,
        "top_k": [0] * rows,
        "top_p": [1.0] * rows,
        "min_p": [0.0] * rows,
        "seeds": list(range(7, 7 + rows)),
        "positions": list(range(100, 100 + rows)),
        **given,
    }
    dtypes = {"top_k": torch.int32, "positions": torch.int32, "seeds": torch.int64}
    return {
        name: torch.tensor(value, dtype=dtypes.get(name, torch.float32), device=device)
        for name, value in values.items()
    }


def draw(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    tokens = torch.full((len(logits),), -99, dtype=torch.int32, device=logits.device)
    workspace = None
    if logits.is_cuda:
        size = ops.sample_workspace_bytes(len(logits))
        workspace = torch.zeros(size, dtype=torch.uint8, device=logits.device)
    ops.sample(tokens, logits, workspace=workspace, **options)
    return tokens.cpu()


def noise(seed: int, position: int, count: int) -> NDArray[np.float64]:
    words = philox_words(seed % 2**64, position, count).astype(np.float64)
    return -np.log(-np.log1p(-np.minimum((words + 0.5) * 2.0**-32, 1 - 2.0**-24)))


def expected(logits: torch.Tensor, options: dict[str, torch.Tensor], row: int) -> int:
    """The definition in cuda/include/octavo/sample.h, in float64 but for the scores."""
    scores = logits[row].float().cpu().numpy() * (np.float32(1) / options["temperature"][row].cpu().numpy())
    top_k, top_p, min_p = (options[name][row].item() for name in ("top_k", "top_p", "min_p"))
    weights = np.exp(scores.astype(np.float64) - scores.max())
    kept = np.ones(len(scores), bool)
    if top_k:
        kept &= scores >= np.sort(scores)[-min(int(top_k), len(scores))]
    if top_p < 1:
        order = np.argsort(-scores[kept], kind="stable")
        above = np.concatenate([[0], np.cumsum(weights[kept][order])])
        likelier = above[np.searchsorted(-scores[kept][order], -scores, side="left")]
        kept &= likelier < top_p * above[-1]
    if min_p:
        kept &= weights >= min_p
    drawn = scores + noise(int(options["seeds"][row]), int(options["positions"][row]), len(scores))
    return int(np.argmax(np.where(kept, drawn, -np.inf)))


def logits_of(rows: int, dtype: torch.dtype, device: torch.device, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, vocab, generator=generator)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_takes_the_lowest_id_of_the_largest(device: torch.device, dtype: torch.dtype) -> None:
    logits = logits_of(9, dtype, device)
    for row in range(9):
        logits[row, [row * 500 + 3, row * 400 + 1000, VOCAB - 1]] = 50.0
    first = [min(row * 500 + 3, row * 400 + 1000) for row in range(9)]
    assert draw(logits).tolist() == first
    assert draw(logits, **parameters(9, device, temperature=[0.0] * 9)).tolist() == first


@pytest.mark.parametrize("vocab", [8, 100, VOCAB, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_follow_the_definition(device: torch.device, dtype: torch.dtype, vocab: int) -> None:
    rows = 24
    logits = logits_of(rows, dtype, device, vocab=vocab)
    options = parameters(
        rows,
        device,
        temperature=[0.3, 0.8, 1.0, 1.7] * 6,
        top_k=[0, 0, 1, 5, 50, 7] * 4,
        top_p=[1.0, 0.9, 1.0, 0.5, 0.95, 0.05] * 4,
        min_p=[0.0, 0.0, 0.0, 0.05] * 6,
        seeds=[-3, 2**40, *range(22)],
    )
    assert draw(logits, **options).tolist() == [expected(logits, options, row) for row in range(rows)]


@pytest.mark.parametrize("spread", [0.02, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_filters_over_a_large_vocabulary(device: torch.device, dtype: torch.dtype, spread: float) -> None:
    """The cut-off lies among tens of thousands of nearly equal scores, or far out in the tail."""
    rows, vocab = 16, 151_936
    generator = torch.Generator().manual_seed(5)
    logits = (spread * torch.randn(rows, vocab, generator=generator)).to(dtype).to(device)
    options = parameters(
        rows,
        device,
        top_k=[0, 0, 40, 20_000] * 4,
        top_p=[0.9, 0.5, 1.0, 0.9] * 4,
        min_p=[0.0] * 12 + [0.2] * 4,
    )
    assert draw(logits, **options).tolist() == [expected(logits, options, row) for row in range(rows)]


LARGE = 20_000  # more than the GPU lists of a row: its blocks take a sample first


@pytest.mark.parametrize("rows", [1, 3, 64, 256])
def test_any_number_of_rows(device: torch.device, rows: int) -> None:
    """A GPU splits rows over its thread blocks by how many there are."""
    logits = logits_of(min(rows, 16), torch.bfloat16, device, vocab=LARGE).repeat(-(-rows // 16), 1)[:rows]
    options = parameters(
        rows,
        device,
        top_k=[(0, 50, 0, 0)[row % 4] for row in range(rows)],
        top_p=[(0.9, 0.95, 1.0, 1.0)[row % 4] for row in range(rows)],
        min_p=[(0.0, 0.0, 0.05, 0.0)[row % 4] for row in range(rows)],
    )
    tokens = draw(logits, **options)
    for row in {*range(0, rows, 37), rows - 1}:
        assert tokens[row] == expected(logits, options, row)


@pytest.mark.parametrize("vocab", [1000, LARGE])
def test_equal_scores_at_the_cut_off_stay_or_go_together(device: torch.device, vocab: int) -> None:
    rows = 16
    logits = logits_of(rows, torch.float32, device, vocab=vocab).mul(2).round().div(2)
    options = parameters(rows, device, top_k=[0, 3, 100, 0] * 4, top_p=[0.9, 1.0, 0.9, 0.3] * 4, min_p=[0.0, 0.1] * 8)
    assert draw(logits, **options).tolist() == [expected(logits, options, row) for row in range(rows)]


def test_masked_rows(device: torch.device) -> None:
    """A grammar leaves a handful of tokens, of which a sample of the row need not show any."""
    rows = 10
    logits = logits_of(rows, torch.float32, device, vocab=LARGE)
    allowed = torch.zeros(LARGE, dtype=torch.bool, device=device)
    allowed[[7, 1001, 12_003, 12_004, LARGE - 1]] = True
    logits[:8, ~allowed] = -float("inf")
    logits[8, ~allowed] = torch.finfo(torch.float32).min
    logits[9] = torch.finfo(torch.float32).min
    options = parameters(
        rows,
        device,
        top_k=[0, 3, 1, 0, 50, 19_000, 0, 0, 9, 0],
        top_p=[0.9, 0.9, 1.0, 1.0, 0.5, 0.9, 0.9, 1.0, 0.9, 0.9],
        min_p=[0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0],
    )
    assert draw(logits, **options).tolist() == [expected(logits, options, row) for row in range(rows)]


def test_shapes_of_a_distribution(device: torch.device) -> None:
    """All equal; one token with nearly everything; k of 1 and beyond the vocabulary; hot and cold."""
    rows = 12
    logits = logits_of(rows, torch.float32, device, vocab=LARGE)
    logits[:4] = 1.25
    logits[4:7, 12_345] = 60.0
    options = parameters(
        rows,
        device,
        temperature=[1.0] * 9 + [0.01, 0.2, 3.0],
        top_k=[0, 0, 50, 0, 0, 50, 0, 1, LARGE + 7, 0, 5, 7000],
        top_p=[0.9, 0.9999, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 0.9, 0.9, 0.5, 0.99],
        min_p=[0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0],
    )
    assert draw(logits, **options).tolist() == [expected(logits, options, row) for row in range(rows)]


@pytest.mark.parametrize("steps", [-12, -4, 4, 12])
def test_top_p_near_the_sum_that_decides(device: torch.device, steps: int) -> None:
    """Two tokens of 40 % and 30 %: whether the second stays depends on top_p's last bits, so on the exact weights of
    all the others."""
    rows = 8
    logits = logits_of(rows, torch.float32, device, vocab=LARGE).mul(0.5)
    weights = logits.double().exp().sum(dim=1)
    logits[:, 5000], logits[:, 15_000] = (weights * 4 / 3).log().float(), weights.log().float()
    exact = logits.double().softmax(dim=1).max(dim=1).values.cpu().numpy().astype(np.float32)
    for _ in range(abs(steps)):
        exact = np.nextafter(exact, np.float32(np.sign(steps)))
    options = parameters(rows, device, top_p=exact.tolist())
    tokens = draw(logits, **options).tolist()
    assert tokens == [expected(logits, options, row) for row in range(rows)]
    assert set(tokens) == ({5000} if steps < 0 else {5000, 15_000})


@pytest.mark.parametrize("k", [0, 50])
def test_large_rows_that_are_not_finite_give_minus_one(device: torch.device, k: int) -> None:
    logits = logits_of(5, torch.float32, device, vocab=LARGE)
    logits[0, 13_333] = float("nan")
    logits[1, 13_333] = float("inf")
    logits[2] = -float("inf")
    logits[3] = float("nan")
    logits[4, :-1] = -float("inf")
    tokens = draw(logits, **parameters(5, device, top_p=[0.9] * 5, top_k=[k] * 5))
    assert tokens.tolist() == [-1, -1, -1, -1, LARGE - 1]


def test_a_row_does_not_depend_on_its_company(device: torch.device) -> None:
    logits = logits_of(40, torch.bfloat16, device)
    options = parameters(40, device, top_p=[0.9, 1.0] * 20)
    together = draw(logits, **options)
    for row in (0, 1, 17, 39):
        alone = {name: value[row : row + 1] for name, value in options.items()}
        assert draw(logits[row : row + 1], **alone)[0] == together[row]
    crowd = {name: value.repeat(5) for name, value in options.items()}
    assert draw(logits.repeat(5, 1), **crowd).tolist() == together.tolist() * 5


def test_frequencies_are_the_softmax(device: torch.device) -> None:
    rows = 20_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0], device=device).repeat(rows, 1)
    options = parameters(rows, device, seeds=[1] * rows, positions=list(range(rows)))
    counts = torch.bincount(draw(logits, **options).long(), minlength=5) / rows
    assert torch.allclose(counts, logits[0].cpu().softmax(0), atol=0.012)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_give_minus_one(device: torch.device, temperature: float) -> None:
    logits = logits_of(5, torch.float32, device)
    logits[0, 4000] = float("nan")
    logits[1, 17] = float("inf")
    logits[2] = -float("inf")
    logits[3, 1:] = -float("inf")
    tokens = draw(logits, **parameters(5, device, temperature=[temperature] * 5, top_p=[1.0, 0.9, 0.9, 0.9, 1.0]))
    assert tokens[:4].tolist() == [-1, -1, -1, 0]
    assert tokens[4] >= 0


def test_newest_tokens_are_scattered(device: torch.device) -> None:
    logits = logits_of(3, torch.float32, device)
    logits[1, 0] = float("nan")
    newest = torch.full((10,), 5, dtype=torch.int32, device=device)
    targets = torch.tensor([7, 2, 0], device=device)
    tokens = draw(logits, newest=newest, targets=targets)
    assert newest[[7, 2, 0]].tolist() == [tokens[0], 0, tokens[2]]
    assert newest[[1, 3, 4, 5, 6, 8, 9]].eq(5).all()


def test_rows_may_be_strided_and_misaligned(device: torch.device) -> None:
    wide = logits_of(4, torch.bfloat16, device, vocab=VOCAB + 50)
    rows = wide[:, 3 : 3 + VOCAB]
    options = parameters(4, device, top_k=[0, 20, 0, 0])
    assert draw(rows, **options).tolist() == draw(rows.contiguous(), **options).tolist()


def test_temperature_needs_its_company(device: torch.device) -> None:
    logits = logits_of(2, torch.float32, device)
    with pytest.raises(_runtime.OpError, match="temperature needs"):
        draw(logits, temperature=torch.ones(2, device=device))
