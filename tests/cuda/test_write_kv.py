"""write_kv against numpy: bias, QK-norm, rotation, and exactly the given slots written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine import _runtime, ops
from tests import reference
from tests.cuda.ragged import BLOCK_SIZE, LAYERS, float64, tensor

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
NUM_BLOCKS, TOKENS, KV_HEADS = 5, 9, 2


class Case:
    """One call's tensors. Slots are a random choice; token 3 writes none."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, group: int, head_dim: int, rotary_dim: int, extras: bool
    ):
        random = np.random.default_rng(7)
        width = (group * KV_HEADS + 2 * KV_HEADS) * head_dim
        slots = random.permutation(np.arange(BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE))[:TOKENS]
        slots[3] = -1
        pool_shape = (NUM_BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, head_dim)
        wide = tensor(random.normal(size=(TOKENS, width + 24)), dtype, device)
        self.tensors: dict[str, torch.Tensor] = {
            "query_out": torch.full((TOKENS, group * KV_HEADS, head_dim), float("nan"), dtype=dtype, device=device),
            "qkv": wide[:, :width],  # rows are strided
            "kv_pool": torch.full(pool_shape, float("nan"), dtype=dtype, device=device),
            "positions": tensor(random.integers(0, 3000, TOKENS), torch.int32, device),
            "slots": tensor(slots, torch.int64, device),
            "cos_sin": tensor(reference.rotary_table(3000, rotary_dim), torch.float32, device),
        }
        self.extras: dict[str, Any] = {}
        if extras:
            self.extras = {
                "bias": tensor(random.normal(size=width), dtype, device),
                "q_norm": tensor(random.normal(size=head_dim), dtype, device),
                "k_norm": tensor(random.normal(size=head_dim), dtype, device),
                "norm_eps": 1e-6,
            }

    def run(self, **changed: Any) -> None:
        call = {**self.tensors, **self.extras, **changed}
        ops.write_kv(layer=1, **call)

    def expected(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        arrays = {k: v.cpu().numpy() if not v.is_floating_point() else float64(v) for k, v in self.tensors.items()}
        del arrays["query_out"]
        extras = {k: float64(v) if isinstance(v, torch.Tensor) else v for k, v in self.extras.items()}
        return reference.write_kv(layer=1, **arrays, **extras)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias-and-qk-norm"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 96), (128, 128)])
@pytest.mark.parametrize("group", [1, 3, 6])
def test_against_numpy(
    device: torch.device, group: int, head_dim: int, rotary_dim: int, extras: bool, dtype: torch.dtype
) -> None:
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("the GPU kernels take bfloat16 and float16")
    case = Case(dtype, device, group, head_dim, rotary_dim, extras)
    query, pool = case.expected()
    case.run()
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(float64(case.tensors["query_out"]), query, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(float64(case.tensors["kv_pool"]), pool, atol=tolerance, rtol=tolerance, equal_nan=True)


def test_a_token_gets_the_same_bits_among_many_and_few(device: torch.device) -> None:
    """Ten heads a token, of which the GPU takes several at once where there are many tokens."""
    tokens, head_dim, shape = 1000, 64, (66, 1, 2, KV_HEADS, BLOCK_SIZE, 64)
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(tokens, 10 * head_dim, generator=generator).bfloat16().to(device)
    norm = torch.randn(head_dim, generator=generator).bfloat16().to(device)
    slots = torch.randperm(65 * BLOCK_SIZE, generator=generator)[:tokens].to(device)
    positions = torch.randint(0, 3000, (tokens,), generator=generator, dtype=torch.int32).to(device)
    cos_sin = tensor(reference.rotary_table(3000, head_dim), torch.float32, device)

    def run(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        query = torch.full((tokens, 6, head_dim), torch.nan, dtype=torch.bfloat16, device=device)
        pool = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        for at in range(0, tokens, step):
            rows = slice(at, at + step)
            given = (query[rows], qkv[rows], pool, 0, positions[rows], slots[rows], cos_sin)
            ops.write_kv(*given, q_norm=norm, k_norm=norm, norm_eps=1e-6)
        return query, pool

    for many, few in zip(run(tokens), run(50), strict=True):
        assert torch.equal(many, few)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    case = Case(torch.bfloat16, device, 3, 64, 64, True)
    given = {**case.tensors, **case.extras}
    wrong: dict[str, dict[str, torch.Tensor]] = {
        "qkv must be bfloat16": {"qkv": given["qkv"].float()},
        "qkv must have dense rows": {"qkv": given["qkv"].t().contiguous().t()},
        "qkv must have size": {"qkv": given["qkv"][:, :-8]},
        "query_out must be contiguous": {"query_out": given["query_out"].transpose(0, 1).contiguous().transpose(0, 1)},
        "positions must be int32": {"positions": given["positions"].long()},
        "slots must be int64": {"slots": given["slots"].int()},
        "slots must have size": {"slots": given["slots"][:-1]},
        "cos_sin must be float32": {"cos_sin": given["cos_sin"].bfloat16()},
        "cos_sin must have an even width": {"cos_sin": torch.cat([given["cos_sin"]] * 2, 1)},
        "bias must have size": {"bias": given["bias"][:-1]},
        "q_norm must be bfloat16": {"q_norm": given["q_norm"].float()},
        "k_norm must have size": {"k_norm": given["k_norm"][:-1]},
    }
    for message, change in wrong.items():
        with pytest.raises(_runtime.OpError, match=f"write_kv: {message}"):
            case.run(**change)
    assert case.tensors["kv_pool"].isnan().all()


def test_positions_and_slots_that_lead_outside_are_refused_on_the_cpu() -> None:
    case = Case(torch.float32, torch.device("cpu"), 3, 64, 64, False)
    for name, value in (("positions", 3000), ("positions", -1), ("slots", NUM_BLOCKS * BLOCK_SIZE)):
        bad = case.tensors[name].clone()
        bad[4] = value
        with pytest.raises(_runtime.OpError, match=name):
            case.run(**{name: bad})
    assert case.tensors["kv_pool"].isnan().all()
