"""The part of torch that a runtime of real devices leans on: memory, streams, and the current device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from hicache_core.device.base import DeviceRuntime, Int64Array, Stream
from hicache_core.device.kernels import Found, find_kernels
from hicache_core.device.runtime_library import LibraryNames, loaded_library
from hicache_core.errors import DeviceError


class TorchSide(Protocol):
    """What :class:`~hicache_core.device.native.NativeRuntime` leaves to torch.

    Its streams have ``cuda_stream``, the handle that the runtime library knows them by, and ``device_index``;
    events that it hands out have ``cuda_event``.
    """

    @property
    def library_path(self) -> str:
        """Path of the runtime library, as this process has loaded it."""

    def current_handle(self, device: int, /) -> int:
        """The handle of the caller's current stream of ``device``, 0 for the default stream."""

    def current_device(self) -> int:
        """The ordinal of the caller's current device."""

    def on(self, device: int) -> AbstractContextManager[Any]:
        """A context in which ``device`` is the current one; the former one is current afterwards."""

    def find_kernels(self, runtime: DeviceRuntime) -> Found:
        """The kernels for the current device, or why there are none."""

    def is_capturing(self) -> bool:
        """Whether the caller's current stream is being captured into a graph."""

    def pci_address(self, device: int) -> str:
        """``domain:bus:device.function`` of a device, as the kernel lists it; empty where it has none."""

    def allocate(self, nbytes: int, device: int) -> torch.Tensor:
        """``uint8[nbytes]`` in the memory of ``device``, its content undefined."""

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """The ordinal of the device whose memory a tensor lies in; None where it is host memory."""

    def upload(self, values: Int64Array, device: int, stream: Stream) -> torch.Tensor:
        """``values`` as an int64 tensor of ``device``, copied in the order of ``stream``."""

    def new_stream(self, device: int) -> Stream:
        """A stream of ``device``."""

    def current_stream(self, device: int) -> Stream:
        """The caller's current stream of ``device``."""


class TorchDevices:
    """The devices of ``torch.cuda``, which is where a ROCm build of torch shows its devices as well.

    Args:
        names: the runtime library that torch was built for.

    Raises:
        DeviceError: torch was built for another one, sees no device, or has not loaded the library.
    """

    def __init__(self, names: LibraryNames) -> None:
        if getattr(torch.version, names.build, None) is None:
            raise _absent(names, f"torch {torch.__version__}, which was built without {names.build}")
        if not torch.cuda.is_available():
            raise _absent(names, "no device")
        torch.cuda.init()
        path = loaded_library(names.file_name)
        if path is None:
            raise _absent(names, f"no {names.file_name} loaded by torch")
        self.library_path = path
        # torch.cuda.current_stream makes an object at each call, which takes 4 us.
        self.current_handle: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice

    def on(self, device: int) -> AbstractContextManager[Any]:
        """See :class:`TorchSide`."""
        return torch.cuda.device(device)

    def find_kernels(self, runtime: DeviceRuntime) -> Found:
        """See :class:`TorchSide`; compiles for the device."""
        return find_kernels(runtime, torch.cuda.current_device())

    def is_capturing(self) -> bool:
        """See :class:`TorchSide`."""
        return torch.cuda.is_current_stream_capturing()

    def pci_address(self, device: int) -> str:
        """See :class:`TorchSide`."""
        # Older releases of torch do not say where a device is.
        facts: Any = torch.cuda.get_device_properties(device)
        if not hasattr(facts, "pci_bus_id"):
            return ""
        return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"

    def allocate(self, nbytes: int, device: int) -> torch.Tensor:
        """See :class:`TorchSide`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """See :class:`TorchSide`."""
        return tensor.device.index if tensor.device.type == "cuda" else None

    def upload(self, values: Int64Array, device: int, stream: torch.cuda.Stream) -> torch.Tensor:
        """See :class:`TorchSide`; what ``stream`` has is not waited for."""
        # A copy from pageable memory would wait for everything that the stream has before it.
        pinned = torch.empty(values.shape, dtype=torch.int64, pin_memory=True)
        pinned.numpy()[...] = values
        with torch.cuda.stream(stream):
            return pinned.to(f"cuda:{device}", non_blocking=True)

    def new_stream(self, device: int) -> torch.cuda.Stream:
        """See :class:`TorchSide`."""
        return torch.cuda.Stream(device)

    def current_stream(self, device: int) -> torch.cuda.Stream:
        """See :class:`TorchSide`."""
        return torch.cuda.current_stream(device)


def _absent(names: LibraryNames, got: str) -> DeviceError:
    return DeviceError(
        who=names.prefix,
        got=got,
        expected=f"a torch built for {names.build} that sees a device",
        remedy="Install one, or use the simulator.",
    )
