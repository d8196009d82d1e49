"""Binding a host pool to a device: its pointer tables, its ways and, where its family has one, its writer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve

from hicache_core.compat import Plan
from hicache_core.device.base import DeviceRuntime
from hicache_core.errors import PluginError
from hicache_core.memory.addresses import HostRange, KernelRange
from hicache_core.memory.tables import HostTable, Int64Array, KernelTable, seen_from
from hicache_core.plugins import PluginRegistry
from hicache_core.pool import HostPool, build_pointer_tables
from hicache_core.transfer.staging import StagingRing

_SIDES: Mapping[str, type[HostTable] | type[KernelTable]] = {
    "host": HostTable,
    "host_kernel": KernelTable,
    "device": KernelTable,
}


class Binder:
    """Binds pools to one device, and holds what plugins return against what the core knows.

    Args:
        registry: the plugins that own the families.
        runtime: the runtime of the device.
        ring: its staging ring.
        device: its ordinal.
    """

    def __init__(
        self, registry: PluginRegistry, runtime: DeviceRuntime, ring: StagingRing, device: int
    ) -> None:
        self._registry = registry
        self._runtime = runtime
        self._ring = ring
        self._device = device

    def bind(self, pool: HostPool, plan: Plan) -> None:
        """Give a pool its tables and ways; one without bytes or layers gets none.

        Raises:
            PluginError: the owner of its family returned tables of other rows or addresses, or no writer.
            AddressError: a device tensor is not memory of the device.
        """
        spec, own = pool.spec, plan.pools.get(pool.spec.pool)
        if own is None or not spec.layer_count:
            return
        buffers = pool.pool_buffers()
        tables = self._registry.ask(
            spec.family, "hicache_build_pointer_table", spec=spec, buffers=buffers, device=self._device
        )
        if tables is None:
            tables = build_pointer_tables(spec, buffers, self._device)
        else:
            self._check_tables(pool, tables)
        pool.bind(tables, own, self._ring, self._device)
        if own.staged:
            self._bind_writer(pool)

    def _bind_writer(self, pool: HostPool) -> None:
        family = pool.spec.family
        writer = self._registry.ask(family, "hicache_staged_write_back", pool=pool, device=self._device)
        if writer is not None and not callable(getattr(writer, "submit", None)):
            raise PluginError(
                who=self._registry.owner(family).title,
                got=f"{writer!r} as the writer of pool '{pool.spec.pool}'",
                expected="an object with submit(pairs, layers, stream), or None",
                remedy="Correct hicache_staged_write_back.",
            )
        if writer is not None and pool.ways is not None:
            pool.ways = evolve(pool.ways, backup=writer)

    def _check_tables(self, pool: HostPool, tables: Any) -> None:
        """Refuse tables of other rows, of another device, or of pages outside the pool's own memory."""
        if not isinstance(tables, tuple | list) or len(tables) != len(pool.buffers):
            raise self._bad(pool, repr(tables), f"{len(pool.buffers)} BufferTables, one per buffer")
        for table, buffer in zip(tables, pool.buffers, strict=True):
            rows = (buffer.grid.layers, buffer.grid.page_rows, buffer.grid.row_bytes)
            if getattr(table, "per_layer", None) is not buffer.spec.per_layer:
                got = f"per_layer = {getattr(table, 'per_layer', None)!r} of {buffer.spec.name}"
                raise self._bad(pool, got, f"{buffer.spec.per_layer}, as declared")
            for side, kind in _SIDES.items():
                found = getattr(table, side, None)
                if not isinstance(found, kind) or not found.covers(rows, self._device):
                    expected = f"a {kind.__name__} of {rows} (layers, rows, bytes) for device {self._device}"
                    raise self._bad(pool, f"{side} = {found!r}", expected)
            segments, layers = buffer.memory.segments, pool.device_pool.layers[buffer.spec.name]
            hosts = [segment.host for segment in segments]
            aliases = [seen_from(segment, self._runtime, self._device) for segment in segments]
            devices = [self._runtime.device_range(layer, self._device) for layer in layers]
            what, device_pages = buffer.spec.name, pool.device_pool.pages or 0
            self._check_inside(pool, f"host of {what}", table.host, pool.pages, hosts)
            self._check_inside(pool, f"host_kernel of {what}", table.host_kernel, pool.pages, aliases)
            self._check_inside(pool, f"device of {what}", table.device, device_pages, devices)

    def _check_inside(
        self,
        pool: HostPool,
        what: str,
        table: HostTable | KernelTable,
        pages: int,
        ranges: Sequence[HostRange] | Sequence[KernelRange],
    ) -> None:
        outside = next(_outside(table, pages, ranges), None)
        if outside is not None:
            first = f"{ranges[0].start:#x}" if ranges else "none"
            got = f"{outside:#x} in {what}"
            raise self._bad(pool, got, f"addresses of the pool's own memory there, from {first} on")

    def _bad(self, pool: HostPool, got: str, expected: str) -> PluginError:
        return PluginError(
            who=self._registry.owner(pool.spec.family).title,
            got=f"{got} as pointer tables of pool '{pool.spec.pool}'",
            expected=expected,
            remedy="Correct hicache_build_pointer_table.",
        )


def _outside(
    table: HostTable | KernelTable, pages: int, ranges: Sequence[HostRange] | Sequence[KernelRange]
) -> Iterator[int]:
    """The bases that lie in none of the ranges, or whose pages leave the range that they start in."""
    ordered = sorted((seen.start, seen.start + seen.nbytes) for seen in ranges)
    if not ordered:
        yield from table.bases.ravel().tolist()
        return
    starts = np.array([start for start, _ in ordered], dtype=np.int64)
    ends = np.array([end for _, end in ordered], dtype=np.int64)
    found = np.maximum(np.searchsorted(starts, table.bases, side="right") - 1, 0)
    before, behind = (reach.reshape(-1, 1) for reach in _reaches(table, pages))
    # Differences alone, since a stride of a plugin may be beyond what a sum of addresses holds.
    bad = (table.bases < starts[found]) | (table.bases - starts[found] < before)
    bad |= ends[found] - table.bases < behind
    yield from table.bases[bad].tolist()


def _reaches(table: HostTable | KernelTable, pages: int) -> tuple[Int64Array, Int64Array]:
    """How far each group's pages reach before and behind its base, in bytes: int64[groups] each."""
    most = int(np.iinfo(np.int64).max)
    counts = np.diff(np.append(table.first_pages, pages)).tolist()
    before, behind = [], []
    for count in counts:
        steps = (max(count - 1, 0) * table.page_stride, (table.grid.page_rows - 1) * table.row_stride)
        before.append(min(-sum(min(step, 0) for step in steps), most))
        behind.append(min(sum(max(step, 0) for step in steps) + table.grid.row_bytes, most))
    return np.array(before, dtype=np.int64), np.array(behind, dtype=np.int64)
