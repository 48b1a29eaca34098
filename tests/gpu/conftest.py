from __future__ import annotations

import pytest
import torch

from engine import _runtime


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    """These tests need an NVIDIA GPU and a build with kernels, and so do the fixtures of their modules."""
    if not (torch.cuda.is_available() and _runtime.has_cuda()):
        pytest.skip("no NVIDIA GPU, or a build without CUDA")
