"""The engine's door: checks at construction, then backup and load with tickets."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hicache_core import construction
from hicache_core.binding import Binder
from hicache_core.compat import Plan, solve
from hicache_core.construction import ControllerConfig
from hicache_core.device.base import DeviceRuntime, Event
from hicache_core.device_pool import DevicePool, check_apart, check_device_pool
from hicache_core.errors import PairingError
from hicache_core.events import DecisionLog, note_pool
from hicache_core.group import HostGroup
from hicache_core.memory.agreement import Ranks, together
from hicache_core.memory.allocation import BUILT_IN
from hicache_core.memory.host import destroy_after
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.process import process_ledger
from hicache_core.memory.slots import Int64Array, PageAllocator, pages_of
from hicache_core.plugins import PluginRegistry
from hicache_core.pool import HostPool
from hicache_core.probe import probe_pool
from hicache_core.sidecar import sidecar_steps
from hicache_core.spec import Capabilities, layout_named
from hicache_core.transfer.engine import Engine, closed_error, load_groups
from hicache_core.transfer.index_cache import IndexReader
from hicache_core.transfer.pairs import Numbers, SpacePairs, page_pairs
from hicache_core.transfer.ticket import Ticket

__all__ = ["Controller", "ControllerConfig"]

Move = Callable[..., Ticket]
Hold = Callable[[PageAllocator, Int64Array], None]
Sides = Mapping[str, tuple[Any, Any]]
"""Host and device indices of each index space."""
_NONE: Sides = {}


class Controller:
    """Owns the host pools of one device and moves pages between them and the device.

    Args:
        config: the operator's choices.
        device_pools: the declarations and the device rows, anchor included.
        runtime: the runtime of the device.
        registry: the plugins that own the families.
        device: ordinal of the device.
        ledger: the books where host memory and staging are booked; None for those of the process, whose
            budget is what the machine allows.
        rank_group: ranks of torch.distributed that must have equal capacities and succeed or fail together,
            each of which makes a controller; None for all where it is initialised.

    Raises:
        IncompatibleError: the combination cannot work; carries every reason.
        BufferMismatchError: device tensors are not what their declaration says.
        HostMemoryError: host memory was refused; nothing is left behind.
        OverBudgetError: a budget of the ledger does not hold it; nothing is left behind.
        ProbeError: a pool does not move as it was declared and planned; nothing is left behind.
        RankError: a rank failed, or does not answer; nothing is left behind on any.
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
        rank_group: Any = None,
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.device = device
        self.decisions = DecisionLog()
        self._registry = registry
        self._rank_group = rank_group
        self._indices = IndexReader()
        self._joining = threading.Lock()
        self._submitting = threading.Lock()
        with self._together(f"host pools {config.name}") as ranks:
            device_pools = construction.checked_pools(device_pools)
            self.ledger = process_ledger() if ledger is None else ledger
            self.plan: Plan = solve(
                construction.query(config, device_pools, {}, runtime.platform, registry), who="controller"
            )
            for pool in device_pools:
                check_device_pool(pool)
            check_apart(device_pools)
            self.layers = construction.stage_layers(config, device_pools)
            self.device_pages = construction.device_pages(device_pools)
            own = construction.host_pages(config, device_pools)
            host_pages = construction.agreed_pages(own, device_pools, ranks, self.decisions)
            groups = load_groups(self.layers, construction.mean_page_bytes(device_pools))
            self.engine = Engine(runtime, device, groups, config.ring_bytes, self.ledger)
            named = config.memory.allocator
            self._allocator = None if named in BUILT_IN else registry.host_allocator(named)
            self._binder = Binder(registry, runtime, self.engine.ring, device)
            self.group = self._built(device_pools, host_pages, ranks)
        self._anchor_space = self.group.anchor_space
        self._attach()
        if runtime.kernels is None:
            self.decisions.record("no-kernels", runtime.kernels_reason)
        for made in self.group.pools:
            self._note(made)

    def _together(self, who: str) -> AbstractContextManager[Ranks]:
        """Something that all ranks of the group do or none; this rank is alone where they need not agree."""
        return together(self._rank_group, timeout_s=self.config.agree_timeout_s, who=who)

    def _built(
        self, device_pools: Sequence[DevicePool], host_pages: Mapping[str, int], ranks: Ranks
    ) -> HostGroup:
        """The group, bound and proved, on every rank; where anything fails nothing is left on any."""
        pools: list[HostPool] = []
        try:
            for device_pool in device_pools:
                pools.append(self._make(device_pool, host_pages[device_pool.spec.index_space.name]))
                self._binder.bind(pools[-1], self.plan)
            group = HostGroup(pools)
            for made in pools:
                self._prove(made)
            ranks.commit()
        except BaseException as error:
            destroy_after(error, reversed(pools), who="controller")
            self.engine.ring.release()
            raise
        return group

    def _make(self, device_pool: DevicePool, pages: int) -> HostPool:
        return HostPool(
            device_pool,
            layout_named(self.config.layout),
            pages,
            self.runtime,
            memory=self.config.memory,
            allocator=self._allocator,
            ledger=self.ledger,
        )

    def _attach(self) -> None:
        """Let the pools of the group move from now on."""
        ways = [pool.ways for pool in self.group.pools if pool.ways is not None]
        self.engine.attach(self.engine.lanes(ways))

    def _prove(self, pool: HostPool) -> None:
        """Move pages of a pool that is bound through its own ways, unless that is switched off."""
        if not self.config.probe:
            self.decisions.record("probe-off", "the start-up probe is switched off", pool=pool.spec.pool)
            return
        nbytes = probe_pool(pool, self.engine, self.runtime, self.device)
        reason = f"{nbytes} bytes there and back as planned"
        self.decisions.record("probe-passed", reason, pool=pool.spec.pool)

    def _note(self, pool: HostPool) -> None:
        """Keep what was decided about a pool that is now in the group."""
        plan = self.plan.pools.get(pool.spec.pool)
        note_pool(self.decisions, pool, plan, self.device_pages[pool.spec.index_space.name])

    def register_sidecar(self, device_pool: DevicePool, *, host_pages: int | None = None) -> None:
        """Take a pool into the group, all or nothing.

        The steps: validate, allocate, register, bind its tables, probe, agree, publish. On several
        ranks each registers it, and it joins on all or on none. Transfers go on meanwhile; those that are
        submitted after the call move it too. Host pages that are handed out lack the pool's part: they are
        refused to a load until a backup has written them.

        Args:
            device_pool: its declaration and device rows, which nobody uses before the call returns.
            host_pages: its host pages; None for as many as its index space has. A pool that brings an index
                space needs a figure.

        Raises:
            SpecError: it is no DevicePool.
            SidecarError: a step failed; names it, with the error of the step as its cause. The group is what
                it was and serves on.
        """
        (device_pool,) = construction.checked_pools([device_pool])
        who = f"sidecar {device_pool.spec.pool} {self.config.name}"
        with (
            self._joining,
            sidecar_steps(device_pool.spec, self.decisions) as enter,
            self._together(who) as ranks,
        ):
            enter("validate")
            plan, pages = self._validate(device_pool, host_pages)
            enter("allocate")
            pool = self._make(device_pool, pages)
            ring_was_made = self.engine.ring.made
            try:
                enter("tables")
                self._binder.bind(pool, plan)
                enter("probe")
                self._prove(pool)
                enter("agree")
                ranks.commit()
                enter("publish")
                self._publish(pool, plan)
            except BaseException as error:
                destroy_after(error, [pool], who="register_sidecar")
                if self.engine.closed or not ring_was_made:
                    self.engine.drain()
                    self.engine.ring.release()
                raise

    def _validate(self, device_pool: DevicePool, host_pages: int | None) -> tuple[Plan, int]:
        """The plan of the group with a sidecar, and the sidecar's host pages; nothing has changed."""
        if self.engine.closed:
            raise closed_error("register_sidecar")
        present = [pool.device_pool for pool in self.group.pools]
        space = device_pool.spec.index_space.name
        known = self.group.allocators.get(space)
        asked = known.pages if known is not None and host_pages is None else host_pages
        pages = construction.checked_page_count(space, asked)
        counts = {pool.spec.pool: pool.pages for pool in self.group.pools}
        counts.setdefault(device_pool.spec.pool, pages)
        query = construction.query(
            self.config, [*present, device_pool], counts, self.runtime.platform, self._registry
        )
        plan = solve(query, who="register_sidecar")
        construction.check_joining(device_pool, present, self.layers, self.device_pages.get(space, 0))
        for layer in itertools.chain.from_iterable(device_pool.layers.values()):
            self.runtime.device_range(layer, self.device)
        return plan, pages

    def _publish(self, pool: HostPool, plan: Plan) -> None:
        """Let a pool take part; no transfer is between its holds and its submission meanwhile."""
        space = pool.spec.index_space.name
        with self._submitting:
            if self.engine.closed:
                raise closed_error("register_sidecar")
            self.device_pages.setdefault(space, pool.device_pool.pages or 0)
            self.group.admit(pool)
            self.plan = plan
            self._attach()
        self._note(pool)
        self.decisions.record("sidecar-joined", f"rides on index space '{space}'", pool=pool.spec.pool)

    def capabilities(self, pool: HostPool) -> Capabilities:
        """What a pool of the group can do: as its family declares, less what its memory does not allow."""
        declared = self._registry.capabilities(pool.spec, self.runtime.platform)
        return declared.over_pageable(pool.pageable) if pool.pageable else declared

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
            with self._submitting:
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
        with self._submitting:
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
