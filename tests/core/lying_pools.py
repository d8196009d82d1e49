"""Plugins that are not what they declare: each is one lie, as hooks for ``registry_of``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve, frozen

from hicache_core.device.base import DeviceRuntime, Stream
from hicache_core.memory.addresses import Provenance
from hicache_core.memory.tables import KernelTable, PoolTables
from hicache_core.pool import HostPool, PoolBuffers, build_pointer_tables
from hicache_core.spec import PoolSpec
from hicache_core.transfer.pairs import PagePairs
from hicache_core.transfer.ways import KernelWay, Way

Hooks = Mapping[str, Callable[..., Any]]


@frozen(kw_only=True, eq=False)
class ChangedWriter:
    """A writer that moves other pages than it was asked to."""

    way: Way
    change: Callable[[PagePairs], PagePairs]

    def submit(self, pairs: PagePairs, layers: range, stream: Stream) -> None:
        """Move the changed pairs."""
        self.way.submit(self.change(pairs), layers, stream)


class IdleWriter:
    """A writer that says it has moved everything and moves nothing."""

    def submit(self, pairs: PagePairs, layers: range, stream: Stream) -> None:
        """Nothing."""


def _writer(make: Callable[[HostPool, DeviceRuntime], Any], only: str) -> Hooks:
    def hicache_staged_write_back(pool: HostPool, device: int) -> Any:
        return make(pool, pool.runtime) if only in ("", pool.spec.pool) else None

    return {"hicache_staged_write_back": hicache_staged_write_back}


def _tables(change: Callable[[KernelTable, KernelTable], KernelTable], only: str) -> Hooks:
    def hicache_build_pointer_table(spec: PoolSpec, buffers: PoolBuffers, device: int) -> PoolTables | None:
        if only not in ("", spec.pool):
            return None
        tables = build_pointer_tables(spec, buffers, device)
        return tuple(evolve(t, host_kernel=change(t.host_kernel, t.host)) for t in tables)  # type: ignore[arg-type]

    return {"hicache_build_pointer_table": hicache_build_pointer_table}


def idle_writer(only: str = "") -> Hooks:
    """Declares staged write-back, and moves nothing."""
    return _writer(lambda pool, runtime: IdleWriter(), only)


def kernel_writer(only: str = "") -> Hooks:
    """Declares staged write-back, and lets a kernel store to host memory: the right bytes, the wrong way."""

    def make(pool: HostPool, runtime: DeviceRuntime) -> KernelWay:
        assert runtime.kernels is not None
        return KernelWay(pool.tables, runtime, runtime.kernels, 0, host_is_target=True)

    return _writer(make, only)


def shifted_writer(only: str = "") -> Hooks:
    """Writes each page to where its neighbour belongs."""

    def shift(pairs: PagePairs) -> PagePairs:
        return PagePairs(host_pages=(pairs.host_pages + 1) % 16, device_pages=pairs.device_pages)

    def make(pool: HostPool, runtime: DeviceRuntime) -> ChangedWriter:
        assert pool.ways is not None
        return ChangedWriter(way=pool.ways.backup, change=shift)

    return _writer(make, only)


def cpu_tables(only: str = "") -> Hooks:
    """Declares the device domain, and puts the CPU addresses into the kernels' table."""
    return _tables(lambda kernel, host: evolve(kernel, bases=host.bases, provenance=Provenance.ALIAS), only)


def far_pages(stride: int, only: str = "") -> Hooks:
    """Tables that start where they should, and whose pages lie ``stride`` bytes apart."""
    return _tables(lambda kernel, host: evolve(kernel, page_stride=stride), only)


def late_base(nbytes: int, only: str = "") -> Hooks:
    """Tables that start a little too late, so that the last page ends behind the memory."""
    return _tables(lambda kernel, host: evolve(kernel, bases=kernel.bases + nbytes), only)


def swapped_layers(only: str = "") -> Hooks:
    """Addresses of its own registrations, those of one layer in the place of another's."""
    return _tables(lambda kernel, host: evolve(kernel, bases=kernel.bases[:, ::-1]), only)


def foreign_device_rows(only: str = "") -> Hooks:
    """Right host tables, and device rows that start a page behind the pool's own."""

    def hicache_build_pointer_table(spec: PoolSpec, buffers: PoolBuffers, device: int) -> PoolTables | None:
        if only not in ("", spec.pool):
            return None
        tables = build_pointer_tables(spec, buffers, device)
        return tuple(evolve(t, device=evolve(t.device, bases=t.device.bases + (1 << 40))) for t in tables)

    return {"hicache_build_pointer_table": hicache_build_pointer_table}
