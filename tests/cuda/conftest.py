"""Devices that the op tests run on, and the ragged batches that they run."""

from __future__ import annotations

import pytest
import torch

from engine import _runtime


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not (torch.cuda.is_available() and _runtime.has_cuda()):
        pytest.skip("no NVIDIA GPU, or a build without CUDA")
    return torch.device(request.param)
