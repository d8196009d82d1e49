"""Tests that need a CUDA device: skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from hicache_core.device.cuda import CudaRuntime
from hicache_core.spec import platform_named


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder."""
    for item in items:
        if "tests/gpu/" in str(item.path).replace("\\", "/"):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def cuda() -> CudaRuntime:
    """The runtime of the devices that torch sees, with kernels where triton serves them."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return CudaRuntime()


@pytest.fixture(scope="session")
def launching(cuda: CudaRuntime) -> CudaRuntime:
    """The runtime, which has kernels."""
    if cuda.kernels is None:
        pytest.skip(cuda.kernels_reason)
    return cuda


@pytest.fixture(scope="session")
def copying(cuda: CudaRuntime) -> CudaRuntime:
    """A runtime of the same devices that has no kernels."""
    return CudaRuntime(evolve(platform_named("cuda"), has_kernels=False))
