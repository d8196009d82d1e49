"""Tests that need a CUDA device: skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest
import torch

from hicache_core.device.cuda import CudaRuntime


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder."""
    for item in items:
        if "tests/gpu/" in str(item.path).replace("\\", "/"):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def cuda() -> CudaRuntime:
    """The runtime of the devices that torch sees."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return CudaRuntime()
