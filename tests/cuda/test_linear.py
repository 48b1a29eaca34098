"""linear against numpy, for every weight format and instruction set; rows must not depend on their company."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine import _runtime, ops
from tests import reference

BLOCK_TYPES = ["Q4_0", "Q4_1", "Q8_0"]
FORMATS = ["float32", "bfloat16", *BLOCK_TYPES]


pytestmark = pytest.mark.usefixtures("instruction_set")


class Weight:
    """A random weight in a format: `stored` as linear takes it, `values` as the format defines them."""

    def __init__(self, name: str, rows: int, length: int, seed: int = 11) -> None:
        values = np.random.default_rng(seed).normal(size=(rows, length)).astype(np.float32)
        self.block_type = name if name in BLOCK_TYPES else ""
        if self.block_type:
            kind = gguf.GGMLQuantizationType[name]
            blocks = gguf.quants.quantize(values, kind)
            self.stored = torch.from_numpy(blocks.copy())
            self.values = gguf.quants.dequantize(blocks, kind)
        else:
            self.stored = torch.from_numpy(values).to(getattr(torch, name))
            self.values = self.stored.float().numpy()
        self.packed = ops.pack_linear(self.stored, self.block_type)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.full((len(x), len(self.values)), float("nan"), dtype=x.dtype)
        ops.linear(out, x, self.packed, bias)
        return out


def normal(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "length"), [(1, 32), (70, 96), (9, 2080)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 13, 40])
def test_against_numpy(tokens: int, rows: int, length: int, name: str) -> None:
    weight, x, bias = Weight(name, rows, length), normal(tokens, length), normal(rows, seed=6)
    expected = reference.linear(x.numpy(), weight.values, bias.numpy())
    np.testing.assert_allclose(weight(x, bias).numpy(), expected, rtol=1e-5, atol=2e-6 * length**0.5)


@pytest.mark.parametrize("length", [1, 7, 50, 577])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_lengths_that_fill_no_vector(name: str, length: int) -> None:
    weight, x = Weight(name, 11, length), normal(8, length)
    np.testing.assert_allclose(weight(x).numpy(), reference.linear(x.numpy(), weight.values), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_bfloat16_activations(name: str) -> None:
    weight, x, bias = Weight(name, 33, 64), normal(5, 64).bfloat16(), normal(33).bfloat16()
    expected = reference.linear(x.float().numpy(), weight.values, bias.float().numpy())
    np.testing.assert_allclose(weight(x, bias).float().numpy(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 20])
def test_blocks_mean_exactly_what_the_format_says(tokens: int, name: str) -> None:
    """Rows of the unit matrix pick single weights out, so nothing is rounded twice."""
    weight, unit = Weight(name, 21, 96), torch.eye(96)
    picked = torch.cat([weight(unit[start : start + tokens]) for start in range(0, 96, tokens)])
    assert torch.equal(picked.T, torch.from_numpy(weight.values.copy()))


@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_scales_at_the_ends_of_float16(block_type: str) -> None:
    weight = Weight(block_type, 6, 32)
    scales = torch.tensor([0.0, 5.96e-8, 6.1e-5, -1.5, 65504.0, 1.0], dtype=torch.float16)
    weight.stored[:, :2] = scales[:, None].view(torch.uint8).reshape(6, 2)
    kind = gguf.GGMLQuantizationType[block_type]
    expected = gguf.quants.dequantize(weight.stored.numpy(), kind)
    weight.packed = ops.pack_linear(weight.stored, block_type)
    assert torch.equal(weight(torch.eye(32)).T, torch.from_numpy(expected.copy()))


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_its_company(name: str) -> None:
    weight, x = Weight(name, 70, 1600), normal(600, 1600)
    together = weight(x)
    for tokens in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 31, 64):
        for start in (0, 100, 600 - tokens):
            assert torch.equal(weight(x[start : start + tokens].clone()), together[start : start + tokens])


@pytest.mark.parametrize("name", FORMATS)
def test_the_number_of_threads_changes_no_bit(name: str) -> None:
    weight, x, threads = Weight(name, 3000, 256), normal(9, 256), _runtime.num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            _runtime.set_num_threads(count)
            results.append(weight(x))
    finally:
        _runtime.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_denormal_numbers_count_as_zero_on_every_thread() -> None:
    """They would make a multiplication a hundred times slower, and they would differ by thread."""
    weight, x = Weight("float32", 4000, 64), normal(20, 64)
    tiny = torch.full_like(x, 1e-39)
    assert (weight(tiny) == 0).all()
    assert torch.equal(weight(torch.cat([x, tiny])), torch.cat([weight(x), torch.zeros(20, 4000)]))
    assert (torch.tensor(1e-39) * 1.0).item() > 0  # and the caller's own arithmetic is as before


def test_nan_and_infinity_pass_through() -> None:
    x = normal(3, 64)
    x[1, 5] = float("nan")
    x[2, 9] = float("inf")
    out = Weight("Q4_1", 10, 64)(x)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert not out[2].isfinite().any()


def test_what_does_not_fit_is_refused() -> None:
    x, out, weight = normal(4, 64), torch.empty(4, 8), Weight("Q4_1", 8, 64).packed
    wrong: dict[str, tuple[Any, ...]] = {
        "x must be contiguous": (out, normal(64, 4).T, weight),
        "x must have size 64 on axis 1": (out, normal(4, 32), weight),
        "out must be float32": (out.bfloat16(), x, weight),
        "out must have size 8 on axis 1": (torch.empty(4, 9), x, weight),
        "bias must have size 8": (out, x, weight, normal(7)),
        "bias must be float32": (out, x, weight, normal(8).bfloat16()),
    }
    for message, arguments in wrong.items():
        with pytest.raises(_runtime.OpError, match=f"linear: {message}"):
            ops.linear(*arguments)


def test_what_cannot_be_packed_is_refused() -> None:
    blocks = Weight("Q4_1", 8, 64).stored
    wrong: dict[str, tuple[Any, ...]] = {
        "must be float32, bfloat16 or float16": (blocks,),
        "must be float32, bfloat16 or blocks": (normal(8, 64).half(),),
        "must be contiguous": (normal(64, 8).T,),
        "must have 2 axes": (normal(64),),
        "has block type Q5_K": (blocks, "Q5_K"),
        "has block type float32": (normal(8, 64), "float32"),
        "must be uint8": (normal(8, 40), "Q4_1"),
        "must have rows of whole blocks, 34 bytes each": (blocks, "Q8_0"),
    }
    for message, arguments in wrong.items():
        with pytest.raises(_runtime.OpError, match=f"pack_linear: weight {message}"):
            ops.pack_linear(*arguments)


def test_a_packed_weight_says_what_it_is_and_keeps_nothing() -> None:
    stored = normal(50, 96)
    weight, expected = ops.pack_linear(stored), stored.clone()
    stored.fill_(float("nan"))
    assert (weight.out_features, weight.in_features, weight.format) == (50, 96, "float32")
    assert weight.nbytes == 96 * 96 * 4  # columns are padded to a multiple of 48
    out = torch.empty(96, 50)
    ops.linear(out, torch.eye(96), weight)
    assert torch.equal(out.T, expected)
    assert Weight("Q4_1", 96, 64).packed.nbytes == 96 * 2 * 20


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(_runtime.OpError, match="mmx"):
        _runtime.set_instruction_set("mmx")
