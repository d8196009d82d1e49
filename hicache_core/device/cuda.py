"""CUDA devices: host memory and copies by the runtime library that torch has loaded, the rest by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve

from hicache_core.device.base import BatchCopies, Event, Int64Array, StridedCopies
from hicache_core.device.cudart import COPY_DEFAULT, CudaRt, loaded_library
from hicache_core.device.kernels import Found, find_kernels
from hicache_core.errors import AddressError, DeviceError, RegistrationError
from hicache_core.memory.addresses import HostRange, KernelRange, Provenance
from hicache_core.spec.platform import PLATFORMS, Platform

_FEW_COPIES = 4
"""Up to so many plain copies, calls of their own are cheaper than one batch."""
_MANY_STRIDED, _LARGE_STRIDED = 32, 1 << 20
"""From so many strided copies of so many bytes on, one batch call saves host time at little cost to the link:
on an H200, 64 copies of 4 MB take 0.29 ms to submit against 0.41, and 4.98 ms in all against 4.86. Smaller
ones end later in a batch."""


class CudaEvent:
    """A point in a stream; see :class:`~hicache_core.device.base.Event`.

    Its handle comes from a pool and goes back there with the object: whoever waits for the event has taken it
    as it was by then.
    """

    __slots__ = ("_pool", "_rt", "handle")

    def __init__(self, rt: CudaRt, pool: list[int], stream: int) -> None:
        self._rt = rt
        self._pool = pool
        try:
            self.handle = pool.pop()
        except IndexError:
            self.handle = rt.new_event()
        rt.record(self.handle, stream)

    def query(self) -> bool:
        """Whether everything before it has run; DeviceError for what failed there."""
        return self._rt.query(self.handle)

    def synchronize(self) -> None:
        """Wait until everything before it has run; DeviceError for what failed there."""
        self._rt.synchronize(self.handle)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._pool.append(self.handle)


class CudaRuntime:
    """The CUDA devices that torch sees, with kernels where Triton serves the current one.

    Where ``kernels`` is None, ``kernels_reason`` says why, and what needs one is refused at construction.

    Args:
        platform: facts about the devices, of a profile of CUDA.

    Raises:
        DeviceError: torch sees no device or has not loaded the runtime library, or the platform is another's.
    """

    vendors = frozenset({"cuda"})

    def __init__(self, platform: Platform = PLATFORMS["cuda"]) -> None:
        if platform.vendor not in self.vendors:
            raise DeviceError(
                who="cuda",
                got=f"platform {platform.name}",
                expected=f"a platform of {', '.join(self.vendors)}",
                remedy="Give --platform cuda, or --device sim to simulate the platform.",
            )
        if not torch.cuda.is_available():
            raise _absent("no CUDA device")
        torch.cuda.init()
        path = loaded_library("libcudart.so")
        if path is None:
            raise _absent("no libcudart loaded by torch")
        self._rt = CudaRt(path)
        # torch.cuda.current_stream makes an object at each call, which takes 4 us.
        self._current_handle: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._events: dict[int, list[int]] = {}
        self._fences: dict[int, int] = {}
        found = Found(reason=f"platform {platform.name} has none")
        if platform.has_kernels:
            found = find_kernels(self, torch.cuda.current_device())
        self.kernels, self.kernels_reason = found.kernels, found.reason
        self.platform = evolve(platform, has_kernels=found.kernels is not None)

    def register(self, host: HostRange) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`; refused while a graph is being captured."""
        if torch.cuda.is_current_stream_capturing():
            raise _refused(host, 900, "a graph capture in progress")
        rc = self._rt.register(host.start, host.nbytes)
        if rc:
            raise _refused(host, rc, f"return code {rc} of cudaHostRegister")

    def unregister(self, host: HostRange) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        rc = self._rt.unregister(host.start)
        if rc:
            raise _refused(host, rc, f"return code {rc} of cudaHostUnregister")

    def alias(self, host: HostRange, device: int) -> KernelRange:
        """See :class:`~hicache_core.device.base.DeviceRuntime`; the current device is left as it was."""
        with torch.cuda.device(device):
            start = self._rt.alias(host.start)
        return KernelRange(start=start, nbytes=host.nbytes, device=device, provenance=Provenance.ALIAS)

    def allocate(self, nbytes: int, device: int) -> torch.Tensor:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")

    def device_range(self, tensor: torch.Tensor, device: int) -> KernelRange:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        if tensor.device.type != "cuda" or tensor.device.index != device:
            raise AddressError(
                who=f"cuda device {device}",
                got=f"a tensor on {tensor.device}",
                expected=f"memory of cuda:{device}",
                remedy="Allocate it on that device.",
            )
        offset = tensor.storage_offset() * tensor.element_size()
        return KernelRange(
            start=tensor.data_ptr(),
            nbytes=int(tensor.untyped_storage().nbytes()) - int(offset),
            device=device,
            provenance=Provenance.DEVICE_MEMORY,
        )

    def allocation_of(self, tensor: torch.Tensor) -> int:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        return tensor.untyped_storage().data_ptr()

    def upload(self, values: Int64Array, device: int, stream: torch.cuda.Stream) -> torch.Tensor:
        """See :class:`~hicache_core.device.base.DeviceRuntime`; what ``stream`` has is not waited for."""
        # A copy from pageable memory would wait for everything that the stream has before it.
        pinned = torch.empty(values.shape, dtype=torch.int64, pin_memory=True)
        pinned.numpy()[...] = values
        with torch.cuda.stream(stream):
            return pinned.to(f"cuda:{device}", non_blocking=True)

    def new_stream(self, device: int) -> torch.cuda.Stream:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        return torch.cuda.Stream(device)

    def current_stream(self, device: int) -> torch.cuda.Stream:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        return torch.cuda.current_stream(device)

    def record(self, stream: torch.cuda.Stream) -> CudaEvent:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        device = stream.device_index
        pool = self._events.get(device)
        if pool:
            return CudaEvent(self._rt, pool, stream.cuda_stream)
        pool = self._events.setdefault(device, [])
        # A new event belongs to the current device, and is recorded in streams of that device alone.
        with torch.cuda.device(device):
            return CudaEvent(self._rt, pool, stream.cuda_stream)

    def wait_event(self, stream: torch.cuda.Stream, event: Event) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`; events of torch serve as well."""
        theirs: Any = event
        self._rt.wait(stream.cuda_stream, event.handle if isinstance(event, CudaEvent) else theirs.cuda_event)

    def wait_current(self, stream: torch.cuda.Stream, device: int) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`; the engine calls it under its lock."""
        handle = stream.cuda_stream
        fence = self._fences.get(handle)
        if fence is None:
            with torch.cuda.device(device):
                fence = self._fences[handle] = self._rt.new_event()
        # A wait takes the event as it is when it is submitted, so that one event serves all.
        self._rt.record(fence, self._current_handle(device))
        self._rt.wait(handle, fence)

    def synchronize(self, stream: torch.cuda.Stream) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        self.record(stream).synchronize()

    def takes_batch(self, copies: StridedCopies) -> bool:
        """Whether strided copies go in one call."""
        many = self._rt.has_batch and len(copies) >= _MANY_STRIDED
        return many and copies.smallest() >= _LARGE_STRIDED

    def strided_copies(self, copies: StridedCopies, stream: torch.cuda.Stream) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        handle = stream.cuda_stream
        if self.takes_batch(copies):
            self._rt.copy_2d_batch(copies, handle)
            return
        call = self._rt.copy_2d
        target_pitch, source_pitch = copies.target_pitch, copies.source_pitch
        for target, source, width, height in copies.rows():
            rc = call(target, target_pitch, source, source_pitch, width, height, COPY_DEFAULT, handle)
            if rc:
                self._rt.check(rc, f"cudaMemcpy2DAsync of {height} runs of {width} bytes")

    def batch_copies(self, copies: BatchCopies, stream: torch.cuda.Stream) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        handle = stream.cuda_stream
        if len(copies) > _FEW_COPIES and self._rt.has_batch:
            self._rt.copy_batch(copies.targets, copies.sources, copies.sizes, handle)
            return
        for target, source, size in zip(
            copies.targets.tolist(), copies.sources.tolist(), copies.sizes.tolist(), strict=True
        ):
            rc = self._rt.copy(target, source, size, COPY_DEFAULT, handle)
            if rc:
                self._rt.check(rc, f"cudaMemcpyAsync of {size} bytes")


def _absent(got: str) -> DeviceError:
    return DeviceError(
        who="cuda",
        got=got,
        expected="a CUDA build of torch that sees a device",
        remedy="Install one, or use the simulator.",
    )


def _refused(host: HostRange, rc: int, got: str) -> RegistrationError:
    return RegistrationError(
        who="cuda",
        got=f"{got} ({host.nbytes} bytes at {host.start:#x})",
        expected="a range that can be registered once and unregistered once",
        remedy="Raise the memlock limit, or register smaller parts, each once and outside of a capture.",
        rc=rc,
        offset_bytes=0,
        nbytes=host.nbytes,
    )
