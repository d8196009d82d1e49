"""Devices of a vendor: host memory and copies by the library that torch has loaded, the rest by torch."""

from __future__ import annotations

import threading
from typing import Any

import torch
from attrs import evolve

from hicache_core.device.base import BatchCopies, Event, Int64Array, Stream, StridedCopies
from hicache_core.device.kernels import Found
from hicache_core.device.runtime_library import COPY_DEFAULT, LibraryNames, RuntimeLibrary
from hicache_core.device.torch_side import TorchDevices, TorchSide
from hicache_core.errors import AddressError, DeviceError, RegistrationError
from hicache_core.machine.limits import device_node
from hicache_core.memory.addresses import HostRange, KernelRange, Provenance
from hicache_core.spec.platform import Platform

_FEW_COPIES = 4
"""Up to so many plain copies, calls of their own are cheaper than one batch."""
_MANY_STRIDED, _LARGE_STRIDED = 32, 1 << 20
"""From so many strided copies of so many bytes on, one batch call saves host time at little cost to the link:
on an H200, 64 copies of 4 MB take 0.29 ms to submit against 0.41, and 4.98 ms in all against 4.86. Smaller
ones end later in a batch."""


class NativeEvent:
    """A point in a stream; see :class:`~hicache_core.device.base.Event`.

    Its handle comes from a pool and goes back there with the object: whoever waits for the event has taken it
    as it was by then.
    """

    __slots__ = ("_pool", "_rt", "handle")

    def __init__(self, rt: RuntimeLibrary, pool: list[int], handle: int) -> None:
        self._rt = rt
        self._pool = pool
        self.handle = handle

    def query(self) -> bool:
        """Whether everything before it has run; DeviceError for what failed there."""
        return self._rt.query(self.handle)

    def synchronize(self) -> None:
        """Wait until everything before it has run; DeviceError for what failed there."""
        self._rt.synchronize(self.handle)

    def __del__(self) -> None:
        self._pool.append(self.handle)


class NativeRuntime:
    """The devices of one vendor that torch sees, with kernels where there are some for the current one.

    Where ``kernels`` is None, ``kernels_reason`` says why, and what needs one is refused at construction.

    A default stream has the handle 0, which the library takes for that of the current device; for another
    device's, calls are made with that device current.

    Args:
        platform: facts about the devices, of a profile of the vendor.
        names: the vendor's runtime library.
        torch_side: what torch does for the runtime; the devices of ``torch.cuda`` where absent.

    Raises:
        DeviceError: the platform is another vendor's; torch was built for another one, sees no device or has
            not loaded the runtime library.
    """

    def __init__(self, platform: Platform, names: LibraryNames, torch_side: TorchSide | None = None) -> None:
        if platform.vendor != names.vendor:
            raise DeviceError(
                who=names.prefix,
                got=f"platform {platform.name}",
                expected=f"a platform of {names.vendor}",
                remedy=f"Give --platform {names.vendor}, or --device sim to simulate the platform.",
            )
        self._torch = torch_side or TorchDevices(names)
        self._prefix = names.prefix
        self._rt = RuntimeLibrary(self._torch.library_path, names)
        self._current_handle = self._torch.current_handle
        self._current_device = self._torch.current_device
        self._events: dict[int, list[int]] = {}
        self._fences: dict[tuple[int, int], int] = {}
        self._fencing = threading.Lock()
        found = Found(reason=f"platform {platform.name} has none")
        if platform.has_kernels:
            found = self._torch.find_kernels(self)
        self.kernels, self.kernels_reason = found.kernels, found.reason
        self.platform = evolve(platform, has_kernels=found.kernels is not None)

    def register(self, host: HostRange) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`; refused while a graph is being captured."""
        if self._torch.is_capturing():
            raise self._refused(host, 900, "a graph capture in progress")
        rc = self._rt.register(host.start, host.nbytes)
        if rc:
            raise self._refused(host, rc, f"return code {rc} of {self._prefix}HostRegister")

    def unregister(self, host: HostRange) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        rc = self._rt.unregister(host.start)
        if rc:
            raise self._refused(host, rc, f"return code {rc} of {self._prefix}HostUnregister")

    def _refused(self, host: HostRange, rc: int, got: str) -> RegistrationError:
        return RegistrationError(
            who=self._prefix,
            got=f"{got} ({host.nbytes} bytes at {host.start:#x})",
            expected="a range that can be registered once and unregistered once",
            remedy="Raise the memlock limit, or register smaller parts, each once and outside of a capture.",
            rc=rc,
            offset_bytes=0,
            nbytes=host.nbytes,
        )

    def alias(self, host: HostRange, device: int) -> KernelRange:
        """See :class:`~hicache_core.device.base.DeviceRuntime`; the current device is left as it was."""
        with self._torch.on(device):
            start = self._rt.alias(host.start)
        return KernelRange(start=start, nbytes=host.nbytes, device=device, provenance=Provenance.ALIAS)

    def numa_node(self, device: int) -> int | None:
        """The NUMA node near a device, for ``MemoryOptions.numa_node``; None where nobody says."""
        address = self._torch.pci_address(device)
        return device_node(address) if address else None

    def allocate(self, nbytes: int, device: int) -> torch.Tensor:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        return self._torch.allocate(nbytes, device)

    def device_range(self, tensor: torch.Tensor, device: int) -> KernelRange:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        if self._torch.device_of(tensor) != device:
            raise AddressError(
                who=f"{self._prefix} device {device}",
                got=f"a tensor on {tensor.device}",
                expected=f"memory of device {device}",
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

    def upload(self, values: Int64Array, device: int, stream: Stream) -> torch.Tensor:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        return self._torch.upload(values, device, stream)

    def new_stream(self, device: int) -> Stream:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        return self._torch.new_stream(device)

    def current_stream(self, device: int) -> Stream:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        return self._torch.current_stream(device)

    def record(self, stream: Stream) -> NativeEvent:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        device, handle = stream.device_index, stream.cuda_stream
        pool = self._events.get(device)
        if pool is None:
            pool = self._events.setdefault(device, [])
        try:
            event = NativeEvent(self._rt, pool, pool.pop())
        except IndexError:
            # A new event belongs to the current device, and is recorded in streams of that device alone.
            with self._torch.on(device):
                event = NativeEvent(self._rt, pool, self._rt.new_event())
        if handle or self._current_device() == device:
            self._rt.record(event.handle, handle)
        else:
            with self._torch.on(device):
                self._rt.record(event.handle, handle)
        return event

    def wait_event(self, stream: Stream, event: Event) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`; events of torch serve as well."""
        handle = stream.cuda_stream
        if not handle and self._is_elsewhere(stream):
            with self._torch.on(stream.device_index):
                self.wait_event(stream, event)
            return
        theirs: Any = event
        self._rt.wait(handle, event.handle if isinstance(event, NativeEvent) else theirs.cuda_event)

    def wait_current(self, stream: Stream, device: int) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        handle = stream.cuda_stream
        current = self._current_handle(device)
        # A wait takes the event as it is when it is submitted, so that one event serves all, one at a time:
        # torch hands the same stream out again after it has made some.
        with self._fencing:
            fence = self._fences.get((device, handle))
            if fence is None:
                with self._torch.on(device):
                    fence = self._fences[device, handle] = self._rt.new_event()
            if current or self._current_device() == device:
                self._rt.record(fence, current)
            else:
                with self._torch.on(device):
                    self._rt.record(fence, current)
            if handle or not self._is_elsewhere(stream):
                self._rt.wait(handle, fence)
            else:
                with self._torch.on(stream.device_index):
                    self._rt.wait(handle, fence)

    def _is_elsewhere(self, stream: Stream) -> bool:
        return self._current_device() != int(stream.device_index)

    def synchronize(self, stream: Stream) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        self.record(stream).synchronize()

    def takes_batch(self, copies: StridedCopies) -> bool:
        """Whether strided copies go in one call."""
        many = self._rt.has_strided_batch and len(copies) >= _MANY_STRIDED
        return many and copies.smallest() >= _LARGE_STRIDED

    def strided_copies(self, copies: StridedCopies, stream: Stream) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        handle = stream.cuda_stream
        if not handle and self._is_elsewhere(stream):
            with self._torch.on(stream.device_index):
                self.strided_copies(copies, stream)
            return
        if self.takes_batch(copies):
            self._rt.copy_2d_batch(copies, handle)
            return
        call = self._rt.copy_2d
        target_pitch, source_pitch = copies.target_pitch, copies.source_pitch
        for target, source, width, height in copies.rows():
            rc = call(target, target_pitch, source, source_pitch, width, height, COPY_DEFAULT, handle)
            if rc:
                self._rt.check(rc, f"Memcpy2DAsync of {height} runs of {width} bytes")

    def batch_copies(self, copies: BatchCopies, stream: Stream) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        handle = stream.cuda_stream
        if not handle and self._is_elsewhere(stream):
            with self._torch.on(stream.device_index):
                self.batch_copies(copies, stream)
            return
        if len(copies) > _FEW_COPIES and self._rt.has_batch:
            self._rt.copy_batch(copies.targets, copies.sources, copies.sizes, handle)
            return
        for target, source, size in zip(
            copies.targets.tolist(), copies.sources.tolist(), copies.sizes.tolist(), strict=True
        ):
            rc = self._rt.copy(target, source, size, COPY_DEFAULT, handle)
            if rc:
                self._rt.check(rc, f"MemcpyAsync of {size} bytes")
