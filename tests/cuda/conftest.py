"""Where the op tests run: the CPU with each instruction set that it has, and the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine import _runtime

INSTRUCTION_SETS = _runtime.instruction_sets()


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU ops run on this one for the length of the test."""
    before = _runtime.instruction_set()
    _runtime.set_instruction_set(request.param)
    yield request.param
    _runtime.set_instruction_set(before)


@pytest.fixture(params=[*INSTRUCTION_SETS, pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU with each instruction set, then the GPU."""
    if request.param == "cuda":
        if not (torch.cuda.is_available() and _runtime.has_cuda()):
            pytest.skip("no NVIDIA GPU, or a build without CUDA")
        yield torch.device("cuda")
        return
    before = _runtime.instruction_set()
    _runtime.set_instruction_set(request.param)
    yield torch.device("cpu")
    _runtime.set_instruction_set(before)
