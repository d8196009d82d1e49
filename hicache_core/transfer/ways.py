"""Ways to move the pages of a pool: bound to its tables once, then given pairs and layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from attrs import frozen

from hicache_core.device.base import (
    BatchCopies,
    DeviceRuntime,
    GatherUnits,
    Int64Array,
    Kernels,
    MoveRows,
    Stream,
)
from hicache_core.memory.tables import BufferTables, HostTable, KernelTable, PoolTables
from hicache_core.spec.pool import PoolSpec
from hicache_core.transfer.pairs import PagePairs
from hicache_core.transfer.plan import Planner
from hicache_core.transfer.staging import StagingRing


class Way(Protocol):
    """Moves pages of one pool in one direction."""

    def submit(self, pairs: PagePairs, layers: range, stream: Stream) -> None:
        """Submit the movement of the pool's own ``layers`` of all pairs to ``stream``."""


Writer = Way
"""A way that moves all layers of a pool from device to host."""


@frozen(kw_only=True, eq=False)
class PoolWays:
    """How the rows of a pool move.

    Args:
        spec: the pool's declaration.
        backup, load: the way of each direction.
    """

    spec: PoolSpec
    backup: Way
    load: Way

    @property
    def space(self) -> str:
        """Name of the index space whose pages name the rows."""
        return self.spec.index_space.name


def copied_host_rows(tables: BufferTables, runtime: DeviceRuntime) -> HostTable | KernelTable:
    """The host rows as the runtime's copies want them: CPU addresses where every kind takes them."""
    return tables.host if runtime.platform.copies_take_host else tables.host_kernel


class CopyWay:
    """Runtime copies straight between the rows: strided where layers lie at equal distances, plain elsewhere.

    Args:
        tables: the pool's tables.
        runtime: the runtime of the device.
        host_is_target: whether this is a backup.
    """

    def __init__(self, tables: PoolTables, runtime: DeviceRuntime, *, host_is_target: bool) -> None:
        self._runtime = runtime
        self._planners = [
            (t, Planner(copied_host_rows(t, runtime), t.device, host_is_target=host_is_target))
            for t in tables
        ]

    def submit(self, pairs: PagePairs, layers: range, stream: Stream) -> None:
        """See :class:`Way`."""
        for tables, planner in self._planners:
            for copies in planner.copies(pairs, tables.own(layers)):
                copies.submit(self._runtime, stream)


class KernelWay:
    """A kernel that reads or writes host rows through the pointer tables.

    Args:
        tables: the pool's tables.
        runtime: the runtime of the device.
        kernels: its kernels.
        device: ordinal of the device.
        host_is_target: whether this is a backup.
    """

    def __init__(
        self,
        tables: PoolTables,
        runtime: DeviceRuntime,
        kernels: Kernels,
        device: int,
        *,
        host_is_target: bool,
    ) -> None:
        self._runtime = runtime
        self._kernels = kernels
        self._device = device
        self._host_is_target = host_is_target
        self._tables = tables

    def submit(self, pairs: PagePairs, layers: range, stream: Stream) -> None:
        """See :class:`Way`."""
        host_pages = pairs.uploaded_host(self._runtime, self._device, stream)
        device_pages = pairs.uploaded_device(self._runtime, self._device, stream)
        for tables in self._tables:
            own = tables.own(layers)
            if not own:
                continue
            sides = ((tables.host_kernel, host_pages), (tables.device, device_pages))
            (target, target_pages), (source, source_pages) = sides if self._host_is_target else sides[::-1]
            self._kernels.move_rows(
                MoveRows(
                    target=target,
                    source=source,
                    target_pages=target_pages,
                    source_pages=source_pages,
                    layers=own,
                ),
                stream,
            )


class StagedWay:
    """Backups of page_first rows: a kernel lays rows out in the ring in host order, copies carry them over.

    A chunk is a run of rows in host order; it may split a page, never a row. Rows larger than the ring go by
    strided copies. No kernel touches host memory.

    Args:
        tables: the pool's tables; host rows are page_first.
        runtime: the runtime of the device.
        kernels: its kernels.
        device: ordinal of the device.
        ring: the device's staging ring.
    """

    def __init__(
        self,
        tables: PoolTables,
        runtime: DeviceRuntime,
        kernels: Kernels,
        device: int,
        ring: StagingRing,
    ) -> None:
        self._runtime = runtime
        self._kernels = kernels
        self._device = device
        self._ring = ring
        fits = [t for t in tables if ring.rows(t.device.grid.row_bytes)]
        self._staged = [(t.device, copied_host_rows(t, runtime)) for t in fits]
        if fits:
            # Now, so that a device without room says so at construction.
            ring.range()
        too_large = tuple(t for t in tables if not ring.rows(t.device.grid.row_bytes))
        self._bypass = CopyWay(too_large, runtime, host_is_target=True)

    def submit(self, pairs: PagePairs, layers: range, stream: Stream) -> None:
        """See :class:`Way`; ``layers`` are all of the pool's."""
        self._bypass.submit(pairs, layers, stream)
        for source, host in self._staged:
            self._stage(pairs, source, host, stream)

    def _stage(
        self, pairs: PagePairs, source: KernelTable, host: HostTable | KernelTable, stream: Stream
    ) -> None:
        device_pages = pairs.uploaded_device(self._runtime, self._device, stream)
        row_bytes = source.grid.row_bytes
        page_units = source.grid.layers * source.grid.page_rows
        ring = self._ring.range()
        runs = _HostRuns(pairs.host_pages, host, page_units, row_bytes)
        for first, units in _chunks(len(pairs) * page_units, self._ring.rows(row_bytes)):
            self._kernels.gather_units(
                GatherUnits(
                    source=source, pages=device_pages, first_unit=first, units=units, target=ring
                ),
                stream,
            )
            self._runtime.batch_copies(runs.copies(first, units, ring.start), stream)


def _chunks(total: int, most: int) -> Iterator[tuple[int, int]]:
    for first in range(0, total, most):
        yield first, min(most, total - first)


class _HostRuns:
    """The runs of host bytes that a list of page_first pages makes, neighbours of one registration merged.

    Runs are kept as units (rows in host order): run i holds units ``starts[i]`` to ``starts[i + 1] - 1``.
    """

    def __init__(
        self, pages: Int64Array, host: HostTable | KernelTable, page_units: int, row_bytes: int
    ) -> None:
        groups = host.groups_of(pages)
        breaks = (np.diff(pages) != 1) | (np.diff(groups) != 0)
        first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        self._starts = np.append(first, len(pages)) * page_units
        offsets = host.page_offsets(pages[first], groups[first])
        self._addresses = host.bases[groups[first], 0] + offsets
        self._row_bytes = row_bytes

    def copies(self, first: int, units: int, ring_start: int) -> BatchCopies:
        """The copies that carry units ``first`` to ``first + units - 1`` from the ring to the host."""
        stop = first + units
        low = int(np.searchsorted(self._starts, first, side="right")) - 1
        high = int(np.searchsorted(self._starts, stop, side="left"))
        begin = np.maximum(self._starts[low:high], first)
        end = np.minimum(self._starts[low + 1 : high + 1], stop)
        inside = (begin - self._starts[low:high]) * self._row_bytes
        return BatchCopies(
            targets=self._addresses[low:high] + inside,
            sources=ring_start + (begin - first) * self._row_bytes,
            sizes=(end - begin) * self._row_bytes,
            host_is_target=True,
        )
