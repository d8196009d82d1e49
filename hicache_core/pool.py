"""A host pool: the host rows of one declaration, their tables and the ways they move."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from hicache_core.compat import Path, PoolPlan
from hicache_core.device.base import DeviceRuntime, Stream
from hicache_core.device_pool import DevicePool
from hicache_core.errors import AddressError, TransferError, UnknownNameError
from hicache_core.memory.addresses import Provenance
from hicache_core.memory.allocation import HostAllocator
from hicache_core.memory.host import HostBuffer, HostMemory, destroy_after, destroy_all
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.options import MemoryOptions
from hicache_core.memory.tables import (
    BufferTables,
    KernelTable,
    PoolTables,
    host_kernel_table,
    host_table,
    seen_from,
)
from hicache_core.spec import BufferSpec, Layout, PoolSpec, RowGrid
from hicache_core.storage import PageStorage
from hicache_core.transfer.index_cache import IndexCache
from hicache_core.transfer.pairs import page_pairs
from hicache_core.transfer.staging import StagingRing
from hicache_core.transfer.tokens import TokenCopies
from hicache_core.transfer.ways import CopyWay, KernelWay, PoolWays, StagedWay, Way

_MEMORY = MemoryOptions()


@frozen(kw_only=True, eq=False)
class PoolBuffers:
    """What pointer tables are made of, for the hook that builds them.

    Args:
        host: the host rows, one entry per buffer.
        device: the device rows.
        runtime: the runtime that knows the aliases.
    """

    host: tuple[HostBuffer, ...]
    device: DevicePool
    runtime: DeviceRuntime


def device_table(
    device_pool: DevicePool, buffer: BufferSpec, runtime: DeviceRuntime, device: int
) -> KernelTable:
    """The addresses of a buffer's device rows; refuses a tensor of another device."""
    layers = device_pool.layers[buffer.name]
    spec = device_pool.spec
    strides = [layer.stride(0) * layer.element_size() for layer in layers]
    stride = strides[0] if strides else buffer.row_bytes
    ranges = [runtime.device_range(layer, device) for layer in layers]
    return KernelTable(
        bases=[[seen.start for seen in ranges]],
        homes=[[runtime.allocation_of(layer) for layer in layers]],
        first_pages=[0],
        grid=RowGrid(
            pages=device_pool.pages or 0,
            layers=spec.layers_of(buffer),
            page_rows=spec.page_rows,
            row_bytes=buffer.row_bytes,
        ),
        page_stride=stride * spec.page_rows,
        row_stride=stride,
        device=device,
        provenance=Provenance.DEVICE_MEMORY,
    )


def build_pointer_tables(spec: PoolSpec, buffers: PoolBuffers, device: int) -> PoolTables:
    """The core's pointer tables for strided rows: aliases asked of the runtime per registration.

    Args:
        spec: the pool's declaration.
        buffers: its host and device rows.
        device: ordinal of the device that the tables are for.
    """
    return tuple(
        BufferTables(
            host=host_table(b.memory.segments, b.grid, b.strides),
            host_kernel=host_kernel_table(
                b.memory.segments,
                [seen_from(segment, buffers.runtime, device) for segment in b.memory.segments],
                b.grid,
                b.strides,
                device,
            ),
            device=device_table(buffers.device, b.spec, buffers.runtime, device),
            per_layer=b.spec.per_layer,
        )
        for b in buffers.host
    )


class HostPool:
    """The host rows of one pool.

    Args:
        device_pool: the declaration and the device rows it mirrors, checked by :func:`check_device_pool`.
        layout: the host layout.
        pages: host pages.
        runtime: the runtime that registers the memory.
        memory: how host memory is obtained, populated and registered.
        allocator: what gives it; None for the core's allocator that ``memory`` names.
        ledger: where it is booked; None for books of the pool's own.

    Attributes:
        tables, ways: set by :meth:`bind`; none before, and no ways after :meth:`destroy`.
        staged: whether its backups are a staged write-back.
        load_indices: the converted indices of the load that :meth:`load_layer` is driving, and their counts.

    Raises:
        HostMemoryError: memory was refused; nothing is left behind.
    """

    def __init__(
        self,
        device_pool: DevicePool,
        layout: Layout,
        pages: int,
        runtime: DeviceRuntime,
        *,
        memory: MemoryOptions = _MEMORY,
        allocator: HostAllocator | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.spec = device_pool.spec
        self.device_pool = device_pool
        self.pages = pages
        self.runtime = runtime
        self.tables: PoolTables = ()
        self.ways: PoolWays | None = None
        self.staged = False
        self.load_indices = IndexCache(
            functools.partial(
                page_pairs,
                space=self.spec.index_space,
                host_pages=pages,
                device_pages=device_pool.pages or 0,
                who=f"pool '{self.spec.pool}', load_layer",
                host_is_target=False,
            )
        )
        obtain = functools.partial(
            HostMemory,
            runtime=runtime,
            options=memory,
            allocator=allocator,
            ledger=Ledger() if ledger is None else ledger,
        )
        made: list[HostBuffer] = []
        try:
            for buffer in self.spec.buffers:
                made.append(self._make(buffer, layout, obtain))
            self.buffers = tuple(made)
            self.storage = PageStorage(self.spec, layout, pages, self.buffers)
        except BaseException as error:
            destroy_after(error, [b.memory for b in reversed(made)], who=f"pool '{self.spec.pool}'")
            raise

    def _make(self, buffer: BufferSpec, layout: Layout, obtain: Callable[..., HostMemory]) -> HostBuffer:
        grid = RowGrid(
            pages=self.pages,
            layers=self.spec.layers_of(buffer),
            page_rows=self.spec.page_rows,
            row_bytes=buffer.row_bytes,
        )
        strides = layout.strides(grid)
        memory = obtain(grid.nbytes, strides.copy_unit, who=f"pool '{self.spec.pool}', {buffer.name}")
        return HostBuffer(spec=buffer, grid=grid, strides=strides, memory=memory)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory of all buffers."""
        return sum(buffer.grid.nbytes for buffer in self.buffers)

    def pool_buffers(self) -> PoolBuffers:
        """What the pointer tables of this pool are made of."""
        return PoolBuffers(host=self.buffers, device=self.device_pool, runtime=self.runtime)

    @property
    def pageable(self) -> str:
        """Why some of the pool's memory is not registered; empty where all of it is."""
        return "; ".join(f"{b.spec.name}: {b.memory.pageable}" for b in self.buffers if b.memory.pageable)

    def bind(self, tables: PoolTables, plan: PoolPlan, ring: StagingRing, device: int) -> None:
        """Give the pool its tables and the ways that the plan names.

        Raises:
            AddressError: the plan names a kernel over host memory, and the pool's is pageable.
        """
        if self.pageable and Path.KERNEL in (plan.backup, plan.load):
            raise AddressError(
                who=f"pool '{self.spec.pool}'",
                got=f"pageable memory ({self.pageable})",
                expected="registered memory, since kernels would read or write it",
                remedy="Choose io_backend 'direct', or let the memory be registered.",
            )
        self.tables = tables
        self.staged = plan.staged
        self.ways = PoolWays(
            spec=self.spec,
            backup=_WAYS[plan.backup](self, ring, device, True),
            load=_WAYS[plan.load](self, ring, device, False),
        )

    def token_copies(self, device: int = 0) -> TokenCopies:
        """Copies of single tokens over ``device``; UnsupportedTokensError where the pool has none."""
        return TokenCopies(self.spec, self.tables, self.runtime, device)

    def load_layer(self, host_slots: Any, device_slots: Any, layer: int, stream: Stream) -> None:
        """Copy one layer of whole pages from host to device, for an engine that drives its loads itself.

        Only submits: no page is held, no ticket is made and no other stream waits. The engine itself orders
        the copies after whatever still uses the device pages; until ``stream`` has passed it neither writes
        the host pages, nor gives them back, nor closes the controller. Indices are read before the call
        returns and converted once for all layers of a load; a change in place between two layers is followed
        from the next layer on (what is seen: :class:`IndexCache`).

        Args:
            host_slots: int64[n], whole host pages that the caller owns; not changed.
            device_slots: int64[n], whole device pages, paired with the host slots, each at most once; not
                changed. Both are numpy arrays or tensors, native on the CPU; a tensor of an accelerator is
                copied there, at one synchronisation a conversion.
            layer: number of the layer within the pool, from 0. Rows that are no layer's go with the first.
            stream: the runtime's stream on which it is submitted; zero slots submit nothing.

        Raises:
            UnknownNameError: the pool has no such layer.
            TransferError: the pool is not bound to a device yet, or was destroyed.
            IndicesError: the slots are not what they must be; nothing has moved.
            DeviceError: the runtime refused a submission; the caller waits for ``stream`` before it goes on.
        """
        ways = self._ways_of(layer)
        pairs = self.load_indices.pairs(host_slots, device_slots, stream)
        if len(pairs):
            ways.load.submit(pairs, range(layer, layer + 1), stream)

    def _ways_of(self, layer: int) -> PoolWays:
        who, layers = f"pool '{self.spec.pool}', load_layer", self.spec.layer_count
        if type(layer) is not int or layer not in range(layers):
            raise UnknownNameError(
                who=who,
                got=f"layer {layer!r}",
                expected=f"a layer of the pool's own, from 0 to {layers - 1}" if layers else "no layer",
                remedy="Number the pool's own layers, which may be fewer than the model's.",
            )
        if self.ways is None:
            raise TransferError(
                who=who,
                got="a pool without a way to move",
                expected="a pool that a controller has bound and not closed",
                remedy="Take the pool from the group of an open controller.",
            )
        return self.ways

    def destroy(self) -> None:
        """Unregister and release the host memory; a second call does nothing.

        Raises:
            UnregisterError: some could not be unregistered and stays mapped; the rest is released.
        """
        self.ways = None
        self.load_indices.forget()
        destroy_all((b.memory for b in reversed(self.buffers)), who=f"pool '{self.spec.pool}'")


def _copy_way(pool: HostPool, ring: StagingRing, device: int, host_is_target: bool) -> Way:
    return CopyWay(pool.tables, pool.runtime, host_is_target=host_is_target)


def _kernel_way(pool: HostPool, ring: StagingRing, device: int, host_is_target: bool) -> Way:
    kernels = pool.runtime.kernels
    assert kernels is not None, "the solver plans no kernel for a runtime without kernels"
    return KernelWay(pool.tables, pool.runtime, kernels, device, host_is_target=host_is_target)


def _staged_way(pool: HostPool, ring: StagingRing, device: int, host_is_target: bool) -> Way:
    kernels = pool.runtime.kernels
    assert kernels is not None, "the solver plans no kernel for a runtime without kernels"
    return StagedWay(pool.tables, pool.runtime, kernels, device, ring)


_WAYS: Mapping[Path, Callable[[HostPool, StagingRing, int, bool], Way]] = {
    Path.COPIES: _copy_way,
    Path.KERNEL: _kernel_way,
    Path.STAGED: _staged_way,
}
