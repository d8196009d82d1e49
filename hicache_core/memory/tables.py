"""Tables of addresses: where each page of each layer of a buffer lies, for the host or for a device.

The pages of a buffer fall into groups: in every layer the pages of one group lie in one registration::

    address(page p, layer l, row t) = bases[g, l] + (p - first_pages[g]) * page_stride + t * row_stride
                                      where g is the group of p

A device buffer, and a host buffer with one registration, has one group. Inside a group no address is carried
over the end of a registration, so a plan that splits pages at groups and layers at homes never straddles two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from attrs import field, frozen
from attrs import validators as v

from hicache_core.errors import AddressError
from hicache_core.memory.addresses import HostRange, KernelRange, Provenance
from hicache_core.spec.checks import whole
from hicache_core.spec.layout import RowGrid, Strides

Int64Array = npt.NDArray[np.int64]


def _frozen_int64(values: Any) -> Int64Array:
    array = np.array(values, dtype=np.int64)
    array.setflags(write=False)
    return array


@frozen(kw_only=True, eq=False)
class _Table:
    """What both kinds of table hold; see the module's formula.

    Args:
        bases: int64[groups, layers], address of a group's first page in a layer.
        homes: int64[groups, layers], number of the registration or allocation that a base lies in.
        first_pages: int64[groups], first page of each group, ascending from 0.
        grid: the rows that the table covers.
        page_stride: bytes from one page to the next inside a group.
        row_stride: bytes from one row of a page to the next.
    """

    bases: Int64Array = field(converter=_frozen_int64)
    homes: Int64Array = field(converter=_frozen_int64)
    first_pages: Int64Array = field(converter=_frozen_int64)
    grid: RowGrid
    page_stride: int
    row_stride: int

    def covers(self, rows: tuple[int, int, int], device: int) -> bool:
        """Whether it is a table of (layers, rows of a page, row bytes), and of ``device`` where of any."""
        grid = self.grid
        shaped = self.bases.shape == self.homes.shape == (len(self.first_pages), grid.layers)
        starts = len(self.first_pages) > 0 and int(self.first_pages[0]) == 0
        owner = getattr(self, "device", device)
        same_rows = rows == (grid.layers, grid.page_rows, grid.row_bytes)
        return shaped and starts and same_rows and owner == device

    @property
    def one_group(self) -> bool:
        """Whether every page is in group 0."""
        return len(self.first_pages) == 1

    def groups_of(self, pages: Int64Array) -> Int64Array:
        """The group of each page: int64[n]."""
        return np.searchsorted(self.first_pages, pages, side="right") - 1

    def page_offsets(self, pages: Int64Array, groups: Int64Array | None) -> Int64Array:
        """Bytes from the base of each page's group to the page: int64[n]; None stands for one group."""
        inside = pages if groups is None else pages - self.first_pages[groups]
        return inside * self.page_stride


@frozen(kw_only=True, eq=False)
class HostTable(_Table):
    """CPU addresses: for runtime copies that take them, for storage and for metadata; never for a kernel."""


@frozen(kw_only=True, eq=False)
class KernelTable(_Table):
    """Addresses that the kernels of one device dereference.

    Args:
        device: ordinal of the device.
        provenance: why that device sees the addresses.
    """

    device: int
    provenance: Provenance


@frozen(kw_only=True, eq=False)
class BufferTables:
    """The three tables of one buffer.

    Args:
        host: the host rows at CPU addresses.
        host_kernel: the host rows at addresses of the device.
        device: the device rows.
        per_layer: whether there is a series of rows per layer, else one for all of them.
    """

    host: HostTable
    host_kernel: KernelTable
    device: KernelTable
    per_layer: bool = True

    def own(self, layers: range) -> range:
        """Which series of rows move with some layers of the pool: one for all moves with the first."""
        return layers if self.per_layer else range(0 if layers.start else 1)


PoolTables = tuple[BufferTables, ...]
"""One entry per buffer, in the order of the declaration."""


@frozen(kw_only=True)
class Segment:
    """A part of a host buffer with one registration.

    Args:
        offset: byte of the buffer at which it starts.
        host: its CPU addresses; arithmetic on them does not leave the registration.
        registered: whether it is one; False for pageable memory, which no kernel may be given.
    """

    offset: int = field(validator=whole(0))
    host: HostRange = field(validator=v.instance_of(HostRange))
    registered: bool = field(default=True, validator=v.instance_of(bool))


class Aliases(Protocol):
    """What knows where a device sees registered memory; a device runtime does."""

    def alias(self, host: HostRange, device: int) -> KernelRange:
        """The addresses at which ``device`` sees a registered range."""


def seen_from(segment: Segment, runtime: Aliases, device: int) -> KernelRange:
    """Where ``device`` sees a segment: the runtime's alias, or the CPU addresses of pageable memory.

    The latter have a provenance of their own, which launches refuse.
    """
    if segment.registered:
        return runtime.alias(segment.host, device)
    host = segment.host
    return KernelRange(start=host.start, nbytes=host.nbytes, device=device, provenance=Provenance.PAGEABLE)


class _SegmentGrid:
    """Which segment holds each (group, layer), from the starts of the segments."""

    def __init__(self, segments: Sequence[Segment], grid: RowGrid, strides: Strides) -> None:
        self._segments = segments
        starts = np.array([segment.offset for segment in segments], dtype=np.int64)
        within_layer = starts % strides.layer if strides.layer > strides.page else starts
        cut_pages = within_layer // max(strides.page, 1)
        self.first_pages: Int64Array = np.unique(np.append(cut_pages[cut_pages < grid.pages], 0))
        layer_offsets = np.arange(grid.layers, dtype=np.int64) * strides.layer
        self._offsets = self.first_pages[:, None] * strides.page + layer_offsets[None, :]
        self.homes: Int64Array = np.searchsorted(starts, self._offsets, side="right") - 1

    def bases(self, ranges: Sequence[HostRange] | Sequence[KernelRange]) -> Int64Array:
        """The address of each (group, layer), given the range of each segment."""
        bases = np.empty_like(self._offsets)
        for index, segment in enumerate(self._segments):
            chosen = self.homes == index
            inside = self._offsets[chosen] - segment.offset
            if inside.size:
                ranges[index].at(int(inside.max()), 1)
            bases[chosen] = ranges[index].start + inside
        return bases


def host_table(segments: Sequence[Segment], grid: RowGrid, strides: Strides) -> HostTable:
    """The CPU addresses of a host buffer."""
    cells = _SegmentGrid(segments, grid, strides)
    return HostTable(
        bases=cells.bases([segment.host for segment in segments]),
        homes=cells.homes,
        first_pages=cells.first_pages,
        grid=grid,
        page_stride=strides.page,
        row_stride=strides.row,
    )


def host_kernel_table(
    segments: Sequence[Segment],
    ranges: Sequence[KernelRange],
    grid: RowGrid,
    strides: Strides,
    device: int,
) -> KernelTable:
    """The addresses at which ``device`` sees a host buffer.

    Args:
        segments: the buffer's segments.
        ranges: the device's range of each segment, as its runtime gave it.
        grid, strides: the buffer's rows and their arithmetic.
        device: ordinal of the device.

    Raises:
        AddressError: a range is of another device or shorter than its segment, or no range of a device.
    """
    for segment, seen in zip(segments, ranges, strict=True):
        if not isinstance(seen, KernelRange):
            raise AddressError(
                who="pointer table",
                got=f"{seen!r} for a segment at {segment.host.start:#x}",
                expected="a KernelRange, as the device sees it",
                remedy="Ask the runtime for the alias; a CPU address is not one.",
            )
        if seen.device != device or seen.nbytes < segment.host.nbytes:
            raise AddressError(
                who="pointer table",
                got=f"{seen.nbytes} bytes on device {seen.device} for a segment of {segment.host.nbytes}",
                expected=f"a range of device {device} that covers the segment",
                remedy="Ask the runtime for the alias of the same registration and device.",
            )
    cells = _SegmentGrid(segments, grid, strides)
    return KernelTable(
        bases=cells.bases(ranges),
        homes=cells.homes,
        first_pages=cells.first_pages,
        grid=grid,
        page_stride=strides.page,
        row_stride=strides.row,
        device=device,
        provenance=ranges[0].provenance if ranges else Provenance.ALIAS,
    )
