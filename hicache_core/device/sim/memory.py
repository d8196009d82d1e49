"""Address spaces of the simulator: which bytes an address stands for, for whom, or why for nobody."""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
from bisect import bisect_right

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from hicache_core.errors import AddressError, CapacityError, DeviceFault
from hicache_core.memory.addresses import HostRange

Int64Array = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

ARENA_BYTES = 64 << 30
_ALIGN = 512
# Linux; the module names it only in newer Pythons.
_MAP_NORESERVE = 0x4000
_GAP = 4096
_MOST_ALIAS_GAP_PAGES = 64


@frozen(kw_only=True, eq=False)
class Region:
    """A run of addresses and the bytes behind it.

    Args:
        start: first address.
        data: the bytes.
        what: for errors.
    """

    start: int
    data: Bytes = field(repr=False)
    what: str

    @property
    def end(self) -> int:
        """One past the last address."""
        return self.start + self.data.size


class AddressSpace:
    """The regions that somebody sees: a device's kernels, or a kind of copy.

    Args:
        device: ordinal of the device, for errors.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._set([])

    @property
    def regions(self) -> list[Region]:
        """The regions by address; not changed, but replaced where one comes or goes."""
        return self._seen[0]

    def add(self, region: Region) -> None:
        """Make a region visible."""
        with self._lock:
            self._set([*self.regions, region])

    def remove(self, region: Region) -> None:
        """Make it invisible again."""
        with self._lock:
            self._set([kept for kept in self.regions if kept is not region])

    def _set(self, unordered: list[Region]) -> None:
        regions = sorted(unordered, key=lambda r: r.start)
        starts: Int64Array = np.array([r.start for r in regions], dtype=np.int64)
        ends: Int64Array = np.array([r.end for r in regions], dtype=np.int64)
        # In one assignment, for threads that copy meanwhile.
        self._seen = regions, starts, ends

    def find(self, address: int) -> Region | None:
        """The region that holds an address."""
        regions = self.regions
        index = bisect_right(regions, address, key=lambda r: r.start) - 1
        return regions[index] if index >= 0 and address < regions[index].end else None

    def bytes_at(self, start: int, nbytes: int) -> Bytes:
        """The bytes behind one run of addresses; raises as :meth:`resolve`."""
        region = self.find(start)
        if region is None:
            raise Unseen(start, crossing=False)
        if start + nbytes > region.end:
            raise Unseen(region.end, crossing=True)
        return region.data[start - region.start : start - region.start + nbytes]

    def resolve(self, starts: Int64Array, sizes: Int64Array) -> list[Region]:
        """The region that holds each run of bytes.

        Raises:
            Unseen: the first run of which a byte lies in no region, or that crosses from one to the next.
        """
        regions, first_bytes, last_ends = self._seen
        indices = np.searchsorted(first_bytes, starts, side="right") - 1
        known = indices >= 0
        ends = np.where(known, last_ends[indices], 0) if len(regions) else np.zeros_like(starts)
        outside = np.flatnonzero(~known | (starts >= ends))
        if outside.size:
            raise Unseen(int(starts[outside[0]]), crossing=False)
        crossing = np.flatnonzero(starts + sizes > ends)
        if crossing.size:
            first = int(crossing[0])
            raise Unseen(int(ends[first]), crossing=True)
        return [regions[index] for index in indices.tolist()]


class Unseen(Exception):
    def __init__(self, address: int, crossing: bool) -> None:
        self.address = address
        self.crossing = crossing


@frozen(kw_only=True, eq=False)
class Registration:
    """Host memory that was registered: its bytes, and where each device sees them."""

    host: HostRange
    region: Region
    aliases: tuple[Region, ...]
    reservations: tuple[mmap.mmap, ...]


class SimMemory:
    """All memory of a simulated machine.

    Args:
        devices: how many devices it has.
        distinct: whether a device sees registered memory at an address of its own.
        seed: seed of the distances between aliases.
    """

    def __init__(self, devices: int, *, distinct: bool, seed: int) -> None:
        self.kernel_spaces = [AddressSpace(device) for device in range(devices)]
        self.alias_space = AddressSpace(0)
        self.host_space = AddressSpace(0)
        self.registrations: dict[int, Registration] = {}
        self._distinct = distinct
        self._random = random.Random(seed)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        arenas = [mmap.mmap(-1, ARENA_BYTES, flags=flags) for _ in range(devices)]
        self._arenas = [np.frombuffer(arena, dtype=np.uint8) for arena in arenas]
        self._used = [_GAP] * devices

    def allocate(self, nbytes: int, device: int) -> Bytes:
        """Device memory, apart from every other allocation so that an overrun is seen."""
        start = self._used[device]
        if start + nbytes + _GAP > ARENA_BYTES:
            raise CapacityError(
                who=f"sim device {device}",
                got=f"{nbytes} bytes with {ARENA_BYTES - start} left",
                expected="an allocation that fits the device",
                remedy="Ask for fewer device pages.",
            )
        data = self._arenas[device][start : start + nbytes]
        self._used[device] = -(-(start + nbytes + _GAP) // _ALIGN) * _ALIGN
        region = Region(start=data.ctypes.data, data=data, what=f"memory of device {device}")
        self.kernel_spaces[device].add(region)
        return data

    def register(self, host: HostRange) -> None:
        """Give every device a sight of host memory."""
        data = _bytes_at(host)
        region = Region(start=host.start, data=data, what="host memory")
        aliases, reservations = [], []
        for space in self.kernel_spaces:
            alias = region
            if self._distinct:
                reserved = self._reserve(host.nbytes)
                reservations.append(reserved)
                start = np.frombuffer(reserved, dtype=np.uint8).ctypes.data
                alias = Region(start=start, data=data, what=f"alias on device {space.device}")
                self.alias_space.add(alias)
            space.add(alias)
            aliases.append(alias)
        self.host_space.add(region)
        self.registrations[host.start] = Registration(
            host=host, region=region, aliases=tuple(aliases), reservations=tuple(reservations)
        )

    def _reserve(self, nbytes: int) -> mmap.mmap:
        """Addresses that die when they are dereferenced, at a distance of their own."""
        gap = self._random.randint(1, _MOST_ALIAS_GAP_PAGES) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        return mmap.mmap(-1, nbytes + gap, flags=flags, prot=0)

    def unregister(self, host: HostRange) -> None:
        """Take the sight away again."""
        registration = self.registrations.pop(host.start)
        self.host_space.remove(registration.region)
        for space, alias in zip(self.kernel_spaces, registration.aliases, strict=True):
            space.remove(alias)
            if self._distinct:
                self.alias_space.remove(alias)

    def overlaps(self, host: HostRange) -> bool:
        """Whether a part of the range is registered already."""
        return any(
            r.host.start < host.start + host.nbytes and host.start < r.host.start + r.host.nbytes
            for r in self.registrations.values()
        )

    def device_region(self, address: int, device: int) -> Region:
        """The allocation of ``device`` that holds an address.

        Raises:
            AddressError: it is memory of another device, or of none.
        """
        for space in self.kernel_spaces:
            region = space.find(address)
            if region is not None and region.what.startswith("memory"):
                if space.device == device:
                    return region
                raise _not_of_device(address, device, region.what)
        raise _not_of_device(address, device, "memory of no device")

    def fault(self, unseen: Unseen, device: int, who: str) -> DeviceFault:
        """Why an address is not seen, as an error."""
        host = self.host_space.find(unseen.address)
        other = next(
            (r for space in self.kernel_spaces if (r := space.find(unseen.address)) is not None), None
        )
        if unseen.crossing:
            reason, remedy = "the run crosses the end of a registration or allocation", "Split it there."
        elif host is not None and self._distinct:
            reason = "it is the CPU address of registered memory, which the device sees elsewhere"
            remedy = "Take the address from the pointer table."
        elif other is not None:
            reason, remedy = f"it is {other.what}", "Use addresses of the launching device."
        else:
            reason, remedy = "nothing is mapped or registered there", "Register the memory first."
        return DeviceFault(who=who, address=unseen.address, device=device, reason=reason, remedy=remedy)


def _not_of_device(address: int, device: int, what: str) -> AddressError:
    return AddressError(
        who=f"sim device {device}",
        got=f"a tensor at {address:#x}, which is {what}",
        expected=f"memory of device {device}",
        remedy="Allocate it on that device with the runtime.",
    )


def _bytes_at(host: HostRange) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * host.nbytes).from_address(host.start))
