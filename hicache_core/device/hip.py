"""ROCm devices, through libamdhip64."""

from __future__ import annotations

from hicache_core.device.native import NativeRuntime
from hicache_core.device.runtime_library import HIP
from hicache_core.device.torch_side import TorchSide
from hicache_core.spec.platform import PLATFORMS, Platform


class HipRuntime(NativeRuntime):
    """The ROCm devices that torch sees. It has no kernels yet: what needs one is refused at construction.

    ROCm builds of torch present their devices as ``torch.cuda``. Batch copies are used where the library
    exports them, else plain ones. This has run against a stand-in of the library alone, on no AMD device.

    Args:
        platform: facts about the devices, of a profile of ROCm.
        torch_side: what torch does for the runtime; the devices of ``torch.cuda`` where absent.

    Raises:
        DeviceError: torch sees no ROCm device or has not loaded libamdhip64, or the platform is another's.
    """

    def __init__(self, platform: Platform = PLATFORMS["rocm"], torch_side: TorchSide | None = None) -> None:
        super().__init__(platform, HIP, torch_side)
