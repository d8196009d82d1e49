"""The engine's door: checks at construction, then backup and load with tickets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen
from attrs import validators as v

from hicache_core.compat import DEFAULT_RING_BYTES, Member, Plan, Query, solve
from hicache_core.device.base import DeviceRuntime, Event
from hicache_core.device_pool import DevicePool, check_apart, check_device_pool
from hicache_core.errors import PairingError, PluginError, SpecError
from hicache_core.group import HostGroup
from hicache_core.memory.allocation import BUILT_IN
from hicache_core.memory.host import destroy_after
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.options import MemoryOptions
from hicache_core.memory.slots import Int64Array, PageAllocator, pages_of
from hicache_core.memory.tables import HostTable, KernelTable
from hicache_core.plugins import PluginRegistry
from hicache_core.pool import HostPool, build_pointer_tables
from hicache_core.spec import layout_named
from hicache_core.spec.checks import whole
from hicache_core.transfer.engine import Engine, load_groups
from hicache_core.transfer.index_cache import IndexReader
from hicache_core.transfer.pairs import Numbers, SpacePairs, page_pairs
from hicache_core.transfer.ticket import Ticket

Move = Callable[..., Ticket]
Hold = Callable[[PageAllocator, Int64Array], None]
Sides = Mapping[str, tuple[Any, Any]]
"""Host and device indices of each index space."""
_NONE: Sides = {}
_SIDES: dict[str, type[HostTable] | type[KernelTable]] = {
    "host": HostTable,
    "host_kernel": KernelTable,
    "device": KernelTable,
}


@frozen(kw_only=True)
class ControllerConfig:
    """What an operator chooses.

    Args:
        io_backend: ``kernel`` or ``direct``.
        layout: name of the host layout.
        host_pages: host pages of the anchor's index space, shared by the pools that ride on it.
        other_host_pages: host pages of each index space that is not the anchor's.
        first_layer: first model layer of this pipeline stage; layer ids are those of the whole model.
        layer_count: layers of the stage; loads have a completion mark for each. 0 takes those up to the
            highest that a pool names.
        ring_bytes: budget of the staging ring of a device.
        memory: how host memory is obtained, populated and registered.
    """

    io_backend: str
    layout: str
    host_pages: int = field(validator=whole(1))
    other_host_pages: Mapping[str, int] = field(factory=dict)
    first_layer: int = field(default=0, validator=whole(0))
    layer_count: int = field(default=0, validator=whole(0))
    ring_bytes: int = field(default=DEFAULT_RING_BYTES, validator=whole(0))
    memory: MemoryOptions = field(factory=MemoryOptions, validator=v.instance_of(MemoryOptions))


class Controller:
    """Owns the host pools of one device and moves pages between them and the device.

    Args:
        config: the operator's choices.
        device_pools: the declarations and the device rows, anchor included.
        runtime: the runtime of the device.
        registry: the plugins that own the families.
        device: ordinal of the device.
        ledger: the books of the process, where host memory and staging are booked; None for new ones.

    Raises:
        IncompatibleError: the combination cannot work; carries every reason.
        BufferMismatchError: device tensors are not what their declaration says.
        HostMemoryError: host memory was refused; nothing is left behind.
        OverBudgetError: a budget of the ledger does not hold it; nothing is left behind.
    """

    def __init__(
        self,
        config: ControllerConfig,
        device_pools: Sequence[DevicePool],
        runtime: DeviceRuntime,
        registry: PluginRegistry,
        *,
        device: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        self.config = config
        self.ledger = Ledger() if ledger is None else ledger
        self.runtime = runtime
        self._registry = registry
        self._indices = IndexReader()
        self.plan: Plan = solve(
            Query(
                platform=runtime.platform,
                io_backend=config.io_backend,
                layout=config.layout,
                pools=[
                    Member(
                        spec=pool.spec, capabilities=registry.capabilities(pool.spec, runtime.platform)
                    )
                    for pool in device_pools
                ],
            ),
            who="controller",
        )
        for pool in device_pools:
            check_device_pool(pool)
        check_apart(device_pools)
        host_pages = _host_pages(config, device_pools)
        page_bytes = [pool.spec.page_bytes for pool in device_pools if pool.spec.page_bytes]
        groups = load_groups(_layers(config, device_pools), sum(page_bytes) // max(len(page_bytes), 1))
        self.engine = Engine(runtime, device, groups, config.ring_bytes, self.ledger)
        self.group = self._make_group(device_pools, host_pages, device)
        self._anchor_space = self.group.anchor_space
        self.device_pages = _device_pages(device_pools)
        self.engine.attach([pool.ways for pool in self.group.pools if pool.ways is not None])

    def _make_group(
        self, device_pools: Sequence[DevicePool], host_pages: Mapping[str, int], device: int
    ) -> HostGroup:
        layout, memory = layout_named(self.config.layout), self.config.memory
        brought = None if memory.allocator in BUILT_IN else self._registry.host_allocator(memory.allocator)
        made: list[HostPool] = []
        try:
            for device_pool in device_pools:
                pool = HostPool(
                    device_pool,
                    layout,
                    host_pages[device_pool.spec.index_space.name],
                    self.runtime,
                    memory=memory,
                    allocator=brought,
                    ledger=self.ledger,
                )
                made.append(pool)
                self._bind(pool, device)
            return HostGroup(made)
        except BaseException as error:
            destroy_after(error, reversed(made), who="controller")
            self.engine.ring.release()
            raise

    def _bind(self, pool: HostPool, device: int) -> None:
        spec, plan = pool.spec, self.plan.pools.get(pool.spec.pool)
        if plan is None or not spec.layer_count:
            return
        tables = self._registry.ask(
            spec.family,
            "hicache_build_pointer_table",
            spec=spec,
            buffers=pool.pool_buffers(),
            device=device,
        )
        if tables is None:
            tables = build_pointer_tables(spec, pool.pool_buffers(), device)
        self._check_tables(pool, tables, device)
        pool.bind(tables, plan, self.engine.ring, device)
        if plan.staged:
            writer = self._registry.ask(spec.family, "hicache_staged_write_back", pool=pool, device=device)
            if writer is not None and not callable(getattr(writer, "submit", None)):
                raise PluginError(
                    who=self._registry.owner(spec.family).title,
                    got=f"{writer!r} as the writer of pool '{spec.pool}'",
                    expected="an object with submit(pairs, layers, stream), or None",
                    remedy="Correct hicache_staged_write_back.",
                )
            if writer is not None and pool.ways is not None:
                pool.ways = evolve(pool.ways, backup=writer)

    def _check_tables(self, pool: HostPool, tables: Any, device: int) -> None:
        """Refuse tables of other rows or another device; where they point is their plugin's affair."""
        if not isinstance(tables, tuple | list) or len(tables) != len(pool.buffers):
            raise self._bad_tables(pool, repr(tables), f"{len(pool.buffers)} BufferTables, one per buffer")
        for table, buffer in zip(tables, pool.buffers, strict=True):
            rows = (buffer.grid.layers, buffer.grid.page_rows, buffer.grid.row_bytes)
            if getattr(table, "per_layer", None) is not buffer.spec.per_layer:
                got = f"per_layer = {getattr(table, 'per_layer', None)!r} of {buffer.spec.name}"
                raise self._bad_tables(pool, got, f"{buffer.spec.per_layer}, as declared")
            for side, kind in _SIDES.items():
                found = getattr(table, side, None)
                if not isinstance(found, kind) or not found.covers(rows, device):
                    expected = f"a {kind.__name__} of {rows} (layers, rows, bytes) for device {device}"
                    raise self._bad_tables(pool, f"{side} = {found!r}", expected)

    def _bad_tables(self, pool: HostPool, got: str, expected: str) -> PluginError:
        return PluginError(
            who=self._registry.owner(pool.spec.family).title,
            got=f"{got} as pointer tables of pool '{pool.spec.pool}'",
            expected=expected,
            remedy="Correct hicache_build_pointer_table.",
        )

    @property
    def index_synchronisations(self) -> int:
        """Index tensors that :meth:`backup` and :meth:`load` copied from an accelerator; each waited once."""
        return self._indices.synchronisations

    def backup(
        self,
        host_slots: Any,
        device_slots: Any,
        *,
        others: Sides = _NONE,
        after: Event | None = None,
        numbers: Numbers = pages_of,
    ) -> Ticket:
        """Copy pages from device to host: of the pools of the anchor's index space, and of other spaces.

        The slots are read before the call returns; the caller's arrays may then change. A tensor of an
        accelerator is copied to the CPU first, at one synchronisation. The device pages must
        not be written until the ticket is acknowledged; till then the host pages are neither read by a load,
        written by another backup nor given back.

        Args:
            host_slots: int64[n], CPU, whole host pages that are allocated, each at most once.
            device_slots: int64[n], CPU, whole device pages, paired with the host slots.
            others: for each other index space that takes part, its host slots and device slots.
            after: what wrote the device pages; None for all work that the current stream has so far.
            numbers: what the indices are: :func:`~hicache_core.memory.slots.pages_of` where they are slots,
                :func:`~hicache_core.memory.slots.page_numbers` where they are page numbers, which are fewer
                to check.

        Returns:
            A ticket; zero slots give one that is done.

        Raises:
            IndicesError: the slots are not what they must be; nothing has moved.
            SlotError: a host page is not allocated, or a transfer that is not acknowledged uses it.
            UnknownNameError: the group has no such index space.
            TransferError: the runtime refused a submission; nothing counts as moved.
        """
        pairs = self._pairs(host_slots, device_slots, others, numbers, who="backup", host_is_target=True)
        return self._submit(self.engine.backup, pairs, PageAllocator.hold_to_write, after)

    def load(
        self,
        host_slots: Any,
        device_slots: Any,
        *,
        others: Sides = _NONE,
        after: Event | None = None,
        numbers: Numbers = pages_of,
    ) -> Ticket:
        """Copy pages from host to device, layer by layer, of the anchor's index space and of other spaces.

        The slots are read before the call returns; the caller's arrays may then change. A tensor of an
        accelerator is copied to the CPU first, at one synchronisation. Until the ticket is
        acknowledged the host pages are neither written by a backup nor given back; other loads may read them.
        A reader of model layer l waits for ``ticket.mark(l)``.

        Args:
            host_slots: int64[n], CPU, whole host pages that are allocated.
            device_slots: int64[n], CPU, whole device pages, paired with the host slots, each at most once.
            others: for each other index space that takes part, its host slots and device slots.
            after: who still reads the device pages; None for all work that the current stream has so far.
            numbers: what the indices are, as for :meth:`backup`.

        Returns:
            A ticket with a mark per model layer; zero slots give one that is done.

        Raises:
            IndicesError: the slots are not what they must be; nothing has moved.
            SlotError: a host page is not allocated, or a backup that is not acknowledged writes it.
            UnknownNameError: the group has no such index space.
            TransferError: the runtime refused a submission; nothing counts as moved.
        """
        pairs = self._pairs(host_slots, device_slots, others, numbers, who="load", host_is_target=False)
        return self._submit(self.engine.load, pairs, PageAllocator.hold_to_read, after)

    def _pairs(
        self, host: Any, device: Any, others: Sides, numbers: Numbers, *, who: str, host_is_target: bool
    ) -> SpacePairs:
        """The page pairs of each space; all are checked before any page is held."""
        sides = {self._anchor_space: (host, device)}
        if others:
            _check_others(others, self._anchor_space, who)
            sides.update(others)
        pairs = {}
        for name, (host_side, device_side) in sides.items():
            allocator = self.group.allocator(name)
            pairs[name] = page_pairs(
                self._indices.on_cpu(host_side),
                self._indices.on_cpu(device_side),
                allocator.space,
                host_pages=allocator.pages,
                device_pages=self.device_pages[name],
                who=who,
                host_is_target=host_is_target,
                numbers=numbers,
            )
        return pairs

    def _submit(self, move: Move, pairs: SpacePairs, hold: Hold, after: Event | None) -> Ticket:
        held: list[tuple[PageAllocator, Int64Array]] = []
        release = functools.partial(_release, held)
        try:
            for name, mine in pairs.items():
                allocator = self.group.allocators[name]
                hold(allocator, mine.host_pages)
                held.append((allocator, mine.host_pages))
            return move(pairs, after=after, on_acknowledged=release)
        except BaseException:
            release()
            raise

    def close(self) -> None:
        """Wait for all that was submitted, then release the host memory; a second call does nothing.

        Raises:
            UnregisterError: some could not be unregistered and stays mapped; the rest is released.
        """
        self.engine.close()
        self.group.destroy()


def _check_others(others: Any, anchor_space: str, who: str) -> None:
    """Refuse what is not a pair of sides for each other index space, and the anchor's named among them."""
    bad = others if not isinstance(others, Mapping) else None
    if bad is None:
        bad = next((name for name, sides in others.items() if not _is_pair(sides)), None)
    if bad is not None or anchor_space in others:
        raise PairingError(
            who=who,
            got=f"others with '{anchor_space}', the anchor's" if bad is None else f"others {bad!r}",
            expected="host indices and device indices, two sides, for each index space beside the anchor's",
            remedy="Give the anchor's indices as the first two arguments, and pairs in others.",
        )


def _is_pair(sides: Any) -> bool:
    return isinstance(sides, tuple | list) and len(sides) == 2


def _release(held: Sequence[tuple[PageAllocator, Int64Array]]) -> None:
    for allocator, pages in held:
        allocator.release(pages)


def _layers(config: ControllerConfig, device_pools: Sequence[DevicePool]) -> range:
    """The model layers of the stage; SpecError where a pool has one before it."""
    first = config.first_layer
    stop = first + config.layer_count
    for pool in device_pools:
        ids = pool.spec.layer_ids
        if ids and ids[0] < first:
            raise SpecError(
                who=f"pool '{pool.spec.pool}' ({pool.spec.family})",
                got=f"model layer {ids[0]}",
                expected=f"layers from {first} on, where this stage starts",
                remedy="Give layer ids of the whole model, and the stage's own pools.",
            )
        stop = max(stop, ids[-1] + 1 if ids else 0)
    return range(first, stop)


def _device_pages(device_pools: Sequence[DevicePool]) -> dict[str, int]:
    """Pages of each index space that every pool of it has on the device."""
    counts: dict[str, list[int]] = {pool.spec.index_space.name: [] for pool in device_pools}
    for pool in device_pools:
        if pool.pages is not None:
            counts[pool.spec.index_space.name].append(pool.pages)
    return {name: min(mine, default=0) for name, mine in counts.items()}


def _host_pages(config: ControllerConfig, device_pools: Sequence[DevicePool]) -> dict[str, int]:
    """Host pages of each index space; SpecError where a space has no figure, or a figure no space."""
    anchor = next(pool.spec.index_space.name for pool in device_pools if pool.spec.anchor)
    pages = {**config.other_host_pages, anchor: config.host_pages}
    spaces = {pool.spec.index_space.name for pool in device_pools}
    if set(pages) != spaces or anchor in config.other_host_pages:
        raise SpecError(
            who="controller",
            got=f"host pages for index spaces {', '.join(sorted(config.other_host_pages)) or 'none'} beside "
            f"'{anchor}'",
            expected=f"{', '.join(sorted(spaces - {anchor})) or 'none'}, as the pools have",
            remedy="Give other_host_pages for each index space that is not the anchor's.",
        )
    for name, count in config.other_host_pages.items():
        if type(count) is not int or count < 1:
            raise SpecError(
                who="controller",
                got=f"{count!r} host pages for index space '{name}'",
                expected="a whole number of at least 1",
                remedy="Correct other_host_pages.",
            )
    return pages
