"""CUDA devices, through libcudart."""

from __future__ import annotations

from hicache_core.device.native import NativeRuntime
from hicache_core.device.runtime_library import CUDA
from hicache_core.device.torch_side import TorchSide
from hicache_core.spec.platform import PLATFORMS, Platform


class CudaRuntime(NativeRuntime):
    """The CUDA devices that torch sees, with kernels where Triton serves the current one.

    Args:
        platform: facts about the devices, of a profile of CUDA.
        torch_side: what torch does for the runtime; the devices of ``torch.cuda`` where absent.

    Raises:
        DeviceError: torch sees no CUDA device or has not loaded libcudart, or the platform is another's.
    """

    def __init__(self, platform: Platform = PLATFORMS["cuda"], torch_side: TorchSide | None = None) -> None:
        super().__init__(platform, CUDA, torch_side)
