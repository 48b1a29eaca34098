"""rms_norm, silu_mul and copy_blocks against numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine import _runtime, ops
from tests import reference
from tests.cuda.ragged import float64, tensor

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 3) -> torch.Tensor:
    return tensor(np.random.default_rng(seed).normal(size=shape), dtype, device)


def supported(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("the GPU kernels take bfloat16 and float16")


@DTYPES
@pytest.mark.parametrize("hidden", [64, 576, 1536, 3584])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_rms_norm(device: torch.device, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    supported(device, dtype)
    x, weight = normal(tokens, hidden, dtype=dtype, device=device), normal(hidden, dtype=dtype, device=device)
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, 1e-5)
    expected = reference.rms_norm(float64(x), float64(weight), 1e-5)
    np.testing.assert_allclose(float64(out), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@DTYPES
def test_rms_norm_behind_a_residual(device: torch.device, dtype: torch.dtype) -> None:
    supported(device, dtype)
    x, residual = normal(5, 576, dtype=dtype, device=device), normal(5, 576, dtype=dtype, device=device, seed=4)
    weight, out, total = normal(576, dtype=dtype, device=device), torch.empty_like(x), x + residual
    ops.rms_norm(out, x, weight, 1e-5, residual)
    assert torch.equal(residual, total)
    expected = reference.rms_norm(float64(total), float64(weight), 1e-5)
    np.testing.assert_allclose(float64(out), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("inter", [8, 100, 1536])
def test_silu_mul(device: torch.device, inter: int, dtype: torch.dtype) -> None:
    supported(device, dtype)
    if device.type == "cuda" and inter % 8:
        pytest.skip("the GPU kernel takes multiples of 8")
    gate_up = normal(6, 2 * inter, dtype=dtype, device=device) * 4
    out = torch.empty(6, inter, dtype=dtype, device=device)
    ops.silu_mul(out, gate_up)
    expected = reference.silu_mul(float64(gate_up))
    np.testing.assert_allclose(float64(out), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_silu_mul_saturates_without_nan(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 90.0, 1e4] * 2 + [1.0] * 8], dtype=torch.bfloat16, device=device)
    out = torch.empty(1, 8, dtype=torch.bfloat16, device=device)
    ops.silu_mul(out, gate_up)
    np.testing.assert_allclose(float64(out), reference.silu_mul(float64(gate_up)), rtol=1e-2, atol=1e-30)


@DTYPES
def test_copy_blocks(device: torch.device, dtype: torch.dtype) -> None:
    supported(device, dtype)
    pool = normal(6, 2, 2, 3, 16, 64, dtype=dtype, device=device)
    pool[4] = float("nan")
    pairs = torch.tensor([[1, 4], [5, 2]], dtype=torch.int64, device=device)
    expected = reference.copy_blocks(float64(pool), pairs.cpu().numpy())
    ops.copy_blocks(pool, pairs)
    np.testing.assert_array_equal(float64(pool), expected)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x = normal(4, 64, dtype=torch.bfloat16, device=device)
    pool = normal(3, 1, 2, 1, 16, 64, dtype=torch.bfloat16, device=device)
    calls: dict[str, Callable[[], None]] = {
        "rms_norm: out must be bfloat16": lambda: ops.rms_norm(x.float(), x, x[0], 1e-5),
        "rms_norm: x must be contiguous": lambda: ops.rms_norm(x.t(), x.t(), x[:, 0], 1e-5),
        "rms_norm: x must be float32, bfloat16 or float16": lambda: ops.rms_norm(x, x.double(), x[0], 1e-5),
        "rms_norm: weight must have size": lambda: ops.rms_norm(x, x, x[0, :32], 1e-5),
        "rms_norm: residual must be bfloat16": lambda: ops.rms_norm(x, x, x[0], 1e-5, x.float()),
        "silu_mul: gate_up must have size": lambda: ops.silu_mul(x, x),
        "copy_blocks: pairs must be int64": lambda: ops.copy_blocks(pool, x.int()[:, :2]),
        "copy_blocks: kv_pool must have 6 axes": lambda: ops.copy_blocks(x, x.long()[:, :2].contiguous()),
        "copy_blocks: kv_pool must have size 2": lambda: ops.copy_blocks(
            pool[:, :, :1].contiguous(), x.long()[:, :2].contiguous()
        ),
    }
    for message, call in calls.items():
        with pytest.raises(_runtime.OpError, match=message):
            call()


def test_the_cpu_refuses_float16_and_blocks_outside_the_pool() -> None:
    x = torch.ones(2, 8, dtype=torch.float16)
    with pytest.raises(_runtime.OpError, match="not float16"):
        ops.rms_norm(x, x, x[0], 1e-5)
    pool = torch.zeros(3, 1, 2, 1, 16, 64)
    with pytest.raises(_runtime.OpError, match="outside the pool"):
        ops.copy_blocks(pool, torch.tensor([[1, 3]]))


def test_a_build_without_cuda_refuses_gpu_tensors_clearly() -> None:
    if _runtime.has_cuda():
        pytest.skip("this build has CUDA")
    with pytest.raises(_runtime.OpError, match="no CUDA kernels"):
        ops.paged_attention_workspace_bytes(8, 12, 2, 128)


def test_the_number_of_threads_changes_no_result() -> None:
    x = normal(40, 576, dtype=torch.float32, device=torch.device("cpu"))
    threads, results = _runtime.num_threads(), []
    try:
        for count in (1, 2, 5):
            _runtime.set_num_threads(count)
            assert _runtime.num_threads() == count
            out = torch.empty_like(x)
            ops.rms_norm(out, x, x[0], 1e-5)
            results.append(out)
    finally:
        _runtime.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    with pytest.raises(_runtime.OpError, match="from 1 to 1024"):
        _runtime.set_num_threads(0)
