"""The simulated runtime: registration, copies and streams over the simulator's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hicache_core.device.base import BatchCopies, Int64Array, StridedCopies
from hicache_core.device.sim.faults import Faults
from hicache_core.device.sim.kernels import SimKernels
from hicache_core.device.sim.memory import AddressSpace, Region, SimMemory, Unseen
from hicache_core.device.sim.streams import Scheduler, SimEvent, SimStream
from hicache_core.errors import DeviceError, RegistrationError
from hicache_core.memory.addresses import HostRange, KernelRange, Provenance
from hicache_core.spec.platform import PLATFORMS, Alias, CopyKind, Platform

_INVALID_VALUE = 1
_ALREADY_REGISTERED = 712


class SimRuntime:
    """A machine with simulated devices.

    It is strict: an address that a device cannot see faults with that address and the reason, and one copy
    may not cross two registrations. It is asynchronous: any call may run some of what is queued, drawn from
    the seed. Device memory lives as long as the runtime.

    Args:
        platform: the facts to simulate, such as aliases that differ from CPU addresses.
        devices: how many devices there are.
        seed: seed of the order of operations and of the distances between aliases.
        faults: what goes wrong, and when.
    """

    def __init__(
        self,
        platform: Platform = PLATFORMS["cpu-sim"],
        *,
        devices: int = 1,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self.platform = platform
        self.faults = faults or Faults()
        self.memory = SimMemory(devices, distinct=platform.alias is Alias.DISTINCT, seed=seed)
        self.scheduler = Scheduler(seed)
        self.kernels: SimKernels | None = None
        self.kernels_reason = "" if platform.has_kernels else f"platform {platform.name} has none"
        if platform.has_kernels:
            self.kernels = SimKernels(self.memory, self.scheduler.submit)
        self.registration_calls = 0
        self.copy_calls = 0
        self._current = [self.new_stream(device) for device in range(devices)]
        self._copy_spaces = {kind: _CopySpaces(self.memory, platform, kind) for kind in CopyKind}

    def register(self, host: HostRange) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        self.registration_calls += 1
        limit = self.faults.refuse_registration_above
        if self.registration_calls == self.faults.refuse_registration_at:
            raise self._refused(host, 2, "an injected refusal")
        if limit is not None and host.nbytes > limit:
            raise self._refused(host, 2, f"more than {limit} bytes")
        if self.memory.overlaps(host):
            raise self._refused(host, _ALREADY_REGISTERED, "memory that is registered already")
        self.memory.register(host)

    def unregister(self, host: HostRange) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        known = self.memory.registrations.get(host.start)
        if known is None or known.host != host:
            raise self._refused(host, _INVALID_VALUE, "no registration that starts there and has that size")
        self.memory.unregister(host)

    def _refused(self, host: HostRange, rc: int, got: str) -> RegistrationError:
        return RegistrationError(
            who="sim",
            got=f"{got} ({host.nbytes} bytes at {host.start:#x})",
            expected="a range that can be registered once and unregistered once",
            remedy="Register smaller parts, each once.",
            rc=rc,
            offset_bytes=0,
            nbytes=host.nbytes,
        )

    def alias(self, host: HostRange, device: int) -> KernelRange:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        known = self.memory.registrations.get(host.start)
        if known is None or known.host.nbytes < host.nbytes:
            raise self._refused(host, _INVALID_VALUE, "no registration that starts there")
        region = known.aliases[device]
        raw = self.platform.alias is Alias.NONE
        provenance = Provenance.RAW if raw else Provenance.ALIAS
        return KernelRange(start=region.start, nbytes=host.nbytes, device=device, provenance=provenance)

    def allocate(self, nbytes: int, device: int) -> torch.Tensor:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        return torch.from_numpy(self.memory.allocate(nbytes, device))

    def device_range(self, tensor: torch.Tensor, device: int) -> KernelRange:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        start = tensor.data_ptr()
        region = self.memory.device_region(start, device)
        return KernelRange(
            start=start, nbytes=region.end - start, device=device, provenance=Provenance.DEVICE_MEMORY
        )

    def allocation_of(self, tensor: torch.Tensor) -> int:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        return tensor.untyped_storage().data_ptr()

    def upload(self, values: Int64Array, device: int, stream: SimStream) -> torch.Tensor:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        snapshot = values.copy()
        tensor = torch.full((len(values),), -1, dtype=torch.int64)
        self.scheduler.submit(stream, lambda: np.copyto(tensor.numpy(), snapshot))
        return tensor

    def new_stream(self, device: int) -> SimStream:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        number = len(self.scheduler.streams)
        return self.scheduler.new_stream(device, slow=number in self.faults.slow_streams)

    def current_stream(self, device: int) -> SimStream:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        return self._current[device]

    def launch(self, operation: Callable[[], None], stream: SimStream) -> None:
        """Queue work of the caller's own on a stream, as an engine's kernels would be."""
        self.scheduler.submit(stream, operation)

    def record(self, stream: SimStream) -> SimEvent:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        return self.scheduler.record(stream)

    def wait_event(self, stream: SimStream, event: Any) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        self.scheduler.wait(stream, event)

    def wait_current(self, stream: SimStream, device: int) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        self.wait_event(stream, self.record(self._current[device]))

    def synchronize(self, stream: SimStream) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        self.record(stream).synchronize()

    def strided_copies(self, copies: StridedCopies, stream: SimStream) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        fails = self._count_copy()
        spaces = self._copy_spaces[CopyKind.TWO_D]
        shapes = [(height, width) for _, _, width, height in copies.rows()]
        heights, widths = np.array(shapes, dtype=np.int64).reshape(-1, 2).T
        targets = spaces.find(copies.targets, (heights - 1) * copies.target_pitch + widths, stream)
        sources = spaces.find(copies.sources, (heights - 1) * copies.source_pitch + widths, stream)
        pitches = copies.target_pitch, copies.source_pitch

        def run() -> None:
            _fail_if(fails)
            for (to, to_at), (frm, from_at), shape in zip(targets, sources, shapes, strict=True):
                target = np.ndarray(shape, np.uint8, to.data, to_at, (pitches[0], 1))
                target[...] = np.ndarray(shape, np.uint8, frm.data, from_at, (pitches[1], 1))

        self.scheduler.submit(stream, run)

    def batch_copies(self, copies: BatchCopies, stream: SimStream) -> None:
        """See :class:`~hicache_core.device.base.DeviceRuntime`."""
        fails = self._count_copy()
        spaces = self._copy_spaces[CopyKind.BATCH]
        targets = spaces.find(copies.targets, copies.sizes, stream)
        sources = spaces.find(copies.sources, copies.sizes, stream)
        sizes = copies.sizes.tolist()

        def run() -> None:
            _fail_if(fails)
            for (to, to_at), (frm, from_at), size in zip(targets, sources, sizes, strict=True):
                ctypes.memmove(to.data.ctypes.data + to_at, frm.data.ctypes.data + from_at, size)

        self.scheduler.submit(stream, run)

    def _count_copy(self) -> bool:
        self.copy_calls += 1
        if self.copy_calls == self.faults.refuse_copy_at:
            raise DeviceError(
                who="sim",
                got="an injected refusal of a copy",
                expected="a copy that is accepted",
                remedy="It was asked for by the test.",
                rc=_INVALID_VALUE,
            )
        return self.copy_calls == self.faults.fail_copy_at


class _CopySpaces:
    """What one kind of copy accepts: device memory, aliases, and CPU addresses where the platform says so."""

    def __init__(self, memory: SimMemory, platform: Platform, kind: CopyKind) -> None:
        self._memory = memory
        self._kind = kind
        self._spaces = [*memory.kernel_spaces]
        if kind in platform.copy_accepts_host_address:
            self._spaces.append(memory.host_space)

    def find(self, starts: Int64Array, sizes: Int64Array, stream: SimStream) -> list[tuple[Region, int]]:
        """The region of each run of bytes and where in it the run starts; DeviceFault where there is none."""
        unseen: Unseen | None = None
        for space in self._spaces:
            try:
                return self._found(space, starts, sizes)
            except Unseen as error:
                # Its traceback would hold this frame, and all above, until the garbage is collected.
                found = error.with_traceback(None)
                unseen = found if unseen is None or found.crossing else unseen
        if unseen is None:
            return []
        raise self._memory.fault(unseen, stream.device, f"{self._kind.value} copy")

    def _found(self, space: AddressSpace, starts: Int64Array, sizes: Int64Array) -> list[tuple[Region, int]]:
        regions = space.resolve(starts, sizes)
        return [
            (region, address - region.start)
            for region, address in zip(regions, starts.tolist(), strict=True)
        ]


def _fail_if(fails: bool) -> None:
    if fails:
        raise DeviceError(
            who="sim",
            got="an injected failure of a copy",
            expected="a copy that runs",
            remedy="It was asked for by the test.",
            rc=_INVALID_VALUE,
        )
