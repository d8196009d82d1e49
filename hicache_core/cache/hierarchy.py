"""The cache of an engine: a prefix index over the device and the host, with loads and backups.

A request goes through four steps, in order: :meth:`HierarchicalCache.admit` matches its blocks, finds device
pages for the others and starts the load; :meth:`land` waits for the load; the engine computes what is left;
:meth:`commit` makes the blocks resident and starts backups; :meth:`settle` acknowledges them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field

from hicache_core.cache.index import Key, Match, PrefixIndex, Tier
from hicache_core.cache.policies import Policy
from hicache_core.controller import Controller
from hicache_core.errors import CapacityError, TransferError
from hicache_core.memory.slots import Int64Array, PageAllocator, slots_of
from hicache_core.transfer.ticket import Ticket


@define(kw_only=True, eq=False)
class Admission:
    """A request in progress.

    Args:
        keys: its blocks, root first.
        match: what was resident when it came.
        pages: int64[blocks, block_pages], the device pages of its blocks.
        load: the ticket of its load.
        backup: the ticket of its backup, once committed.
        backed_up: positions of the blocks in that backup.
        host_pages: int64[n, block_pages], their host pages.
        dropped_blocks: blocks that should have been backed up and were not.
    """

    keys: Sequence[Key]
    match: Match
    pages: Int64Array
    load: Ticket
    backup: Ticket | None = None
    backed_up: list[int] = field(factory=list)
    host_pages: Int64Array = field(factory=lambda: np.empty((0, 1), dtype=np.int64))
    dropped_blocks: int = 0


class HierarchicalCache:
    """Blocks of tokens on the device, with a second tier on the host.

    Args:
        controller: owns the host pools.
        device_pages: hands out the pages of the device pools.
        block_pages: pages of one block.
        policy: when blocks are backed up.
    """

    def __init__(
        self, controller: Controller, device_pages: PageAllocator, block_pages: int, policy: Policy
    ) -> None:
        self.index = PrefixIndex()
        self._controller = controller
        self._device = device_pages
        self._host = controller.group.allocator(controller.group.anchor_space)
        self._block_pages = block_pages
        self._policy = policy

    def admit(self, keys: Sequence[Key]) -> Admission:
        """Match a request, give it device pages and start to load what the host has.

        Args:
            keys: its blocks, root first, each once.

        Raises:
            CapacityError: it has more blocks than the device can free; nothing has changed.
            TransferError: the load was refused; nothing has changed but what was given up for room.
        """
        match = self.index.match(keys)
        missing = len(keys) - match.device_blocks
        self.index.lock(keys)
        fresh = self._room(self.index.device, self._device, missing, at_least=missing)
        if len(fresh) < missing:
            self.index.unlock(keys)
            raise CapacityError(
                who="cache",
                got=f"a request of {len(keys)} blocks",
                expected=f"at most {len(self.index.device) + self._device.free_pages // self._block_pages}",
                remedy="Give the device more blocks, or split the request.",
            )
        resident = [self.index.device.pages(key) for key in keys[: match.device_blocks]]
        pages = np.concatenate([*resident, fresh.ravel()]).reshape(-1, self._block_pages)
        stop = match.device_blocks + match.host_blocks
        hits = [self.index.host.pages(key) for key in keys[match.device_blocks : stop]]
        try:
            load = self._controller.load(
                self._slots(np.concatenate(hits) if hits else np.empty(0, dtype=np.int64)),
                self._slots(pages[match.device_blocks : stop].ravel()),
            )
        except BaseException:
            self._give_back(self._device, fresh)
            self.index.unlock(keys)
            raise
        return Admission(keys=keys, match=match, pages=pages, load=load)

    def land(self, admission: Admission) -> None:
        """Wait for the load; where it failed, nothing of it is a hit and the error is in its ticket."""
        try:
            admission.load.wait()
        except TransferError:
            admission.match = Match(device_blocks=admission.match.device_blocks, host_blocks=0)

    def commit(self, admission: Admission) -> None:
        """Make all blocks resident on the device and start the backups that the policy wants.

        Blocks for which the host has no room are dropped from the backup, the last ones first, and counted.
        Where another request made a block resident meanwhile, its pages take the place of the admission's.

        Raises:
            TransferError: the backup was refused; the blocks are resident on the device and count as dropped.
        """
        keys = admission.keys
        for position, key in enumerate(keys[admission.match.device_blocks :], admission.match.device_blocks):
            if key in self.index.device:
                self._give_back(self._device, admission.pages[position])
                admission.pages[position] = self.index.device.pages(key)
            else:
                self.index.device.insert(key, admission.pages[position])
        wanted = self._policy.to_back_up(keys, self.index.host)
        host_pages = self._room(self.index.host, self._host, len(wanted))
        admission.dropped_blocks = len(wanted) - len(host_pages)
        chosen = wanted[: len(host_pages)]
        if not chosen:
            return
        try:
            admission.backup = self._controller.backup(
                self._slots(host_pages.ravel()), self._slots(admission.pages[chosen].ravel())
            )
        except BaseException:
            self._give_back(self._host, host_pages)
            admission.dropped_blocks = len(wanted)
            raise
        admission.backed_up, admission.host_pages = chosen, host_pages

    def settle(self, admission: Admission) -> None:
        """Wait for the backups; a failed one is no backup: its host pages are given back."""
        if admission.backup is not None:
            try:
                admission.backup.wait()
            except TransferError:
                self._give_back(self._host, admission.host_pages)
                admission.dropped_blocks += len(admission.backed_up)
            else:
                for position, pages in zip(admission.backed_up, admission.host_pages, strict=True):
                    self._keep_on_host(admission.keys[position], pages)
        self.index.touch(admission.keys)
        self.index.unlock(admission.keys)

    def _keep_on_host(self, key: Key, pages: Int64Array) -> None:
        if key in self.index.host:
            # The backup of another request came first.
            self._give_back(self._host, pages)
        else:
            self.index.host.insert(key, pages)

    def _room(self, tier: Tier, allocator: PageAllocator, blocks: int, at_least: int = 0) -> Int64Array:
        """Pages for ``blocks`` blocks, or for as many as fit: int64[n, block_pages].

        Where that are fewer than ``at_least``, there are none and nothing is given up.
        """
        free = allocator.free_pages // self._block_pages
        victims = tier.victims(blocks - free)
        count = min(blocks, free + len(victims))
        if count < at_least:
            count, victims = 0, []
        freed = tier.evict(victims)
        if freed:
            # In ascending order, so that pages handed out together are neighbours again.
            allocator.give_back(np.sort(np.concatenate(freed)))
        pages = allocator.allocate_pages(count * self._block_pages) if count else None
        return (np.empty(0, dtype=np.int64) if pages is None else pages).reshape(-1, self._block_pages)

    def _give_back(self, allocator: PageAllocator, pages: Int64Array) -> None:
        allocator.give_back(pages.ravel())

    def _slots(self, pages: Int64Array) -> Int64Array:
        return slots_of(pages, self._device.space.page_slots)
