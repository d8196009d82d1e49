"""Kernels in Triton for CUDA and ROCm devices. Importing this package imports no triton."""

from __future__ import annotations

from attrs import frozen

from hicache_core.device.base import DeviceRuntime, Kernels
from hicache_core.errors import DeviceError


@frozen(kw_only=True)
class Found:
    """The kernels of a runtime, or why there are none.

    Args:
        kernels: the kernels; None where there are none.
        reason: why not; empty where there are.
    """

    kernels: Kernels | None = None
    reason: str = ""


def find_kernels(runtime: DeviceRuntime, device: int) -> Found:
    """Kernels for the devices of a runtime whose streams and tensors are torch's, or why there are none.

    The kernels of ``device`` are compiled, which takes seconds the first time on a machine.
    """
    try:
        from hicache_core.device.kernels.compiled import load_launcher
    except ImportError as error:
        return Found(reason=f"triton cannot be imported ({error}); install hicache-core[kernels]")
    from hicache_core.device.kernels.launch import TritonKernels

    try:
        launcher = load_launcher(device)
    except DeviceError as error:
        return Found(reason=str(error))
    return Found(kernels=TritonKernels(runtime, launcher))
