"""The cache of an engine: a prefix index over the device and the host, with loads and backups.

A request goes through four steps, in order: :meth:`HierarchicalCache.admit` matches its blocks, finds device
pages for the others and starts the load; :meth:`land` waits for the load; the engine computes what is left;
:meth:`commit` makes the blocks resident and starts backups; :meth:`settle` acknowledges them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from attrs import define, field

from hicache_core.cache.index import Key, Match, PrefixIndex, Tier
from hicache_core.cache.policies import Policy
from hicache_core.cache.store import SecondSpace, Store
from hicache_core.controller import Controller
from hicache_core.errors import CapacityError, TransferError
from hicache_core.memory.slots import Int64Array, PageAllocator, page_numbers
from hicache_core.spec import retention
from hicache_core.transfer.ticket import Ticket


def _no_pages() -> Int64Array:
    return np.empty((0, 1), dtype=np.int64)


@define(kw_only=True, eq=False)
class Placed:
    """Pages of some blocks of a request: row i belongs to the block at position ``at[i]``."""

    at: list[int] = field(factory=list)
    pages: Int64Array = field(factory=_no_pages)


@define(kw_only=True, eq=False)
class SpaceAdmission:
    """What a request does in an index space beside the anchor's.

    Args:
        used: keys that may not be given up meanwhile.
        kept: positions of the blocks whose pages outlive the request.
        loaded: blocks that come from the host.
        computed: blocks that the engine computes and keeps.
        backed_up: blocks in the backup, with their host pages, once committed.
    """

    used: list[Key] = field(factory=list)
    kept: list[int] = field(factory=list)
    loaded: Placed = field(factory=Placed)
    computed: Placed = field(factory=Placed)
    backed_up: Placed = field(factory=Placed)


@define(kw_only=True, eq=False)
class Admission:
    """A request in progress.

    Args:
        keys: its blocks, root first.
        match: what of it can be used: resident, and with what every index space needs of it.
        cut_blocks: resident blocks after these that lack what another index space needs of them.
        resident_blocks: leading blocks on the device, usable or not; their pages stay where they are.
        pages: int64[blocks, block_pages], the device pages of its blocks.
        load: the ticket of its load.
        others: what it does in each other index space.
        backup: the ticket of its backup, once committed.
        backed_up: blocks in that backup, with their host pages.
        dropped: for each index space, blocks that should have been backed up and were not.
    """

    keys: Sequence[Key]
    match: Match
    cut_blocks: int
    resident_blocks: int
    pages: Int64Array
    load: Ticket
    others: dict[str, SpaceAdmission]
    backup: Ticket | None = None
    backed_up: Placed = field(factory=Placed)
    dropped: Counter[str] = field(factory=Counter)

    @property
    def dropped_blocks(self) -> int:
        """Blocks that should have been backed up and were not, over all index spaces."""
        return self.dropped.total()


class HierarchicalCache:
    """Blocks of tokens on the device, with a second tier on the host.

    Args:
        controller: owns the host pools.
        device_pages: hands out the pages of the device pools, for each index space.
        block_pages: pages of one block in the anchor's index space.
        policy: when blocks are backed up.
    """

    def __init__(
        self,
        controller: Controller,
        device_pages: Mapping[str, PageAllocator],
        block_pages: int,
        policy: Policy,
    ) -> None:
        self.index = PrefixIndex()
        self._controller = controller
        self._policy = policy
        group = controller.group
        self._anchor = group.anchor_space
        self.device = Store(self.index.device, device_pages[self._anchor], block_pages)
        self.host = Store(self.index.host, group.allocator(self._anchor), block_pages)
        block_slots = block_pages * group.allocator(self._anchor).space.page_slots
        self.others: dict[str, SecondSpace] = {}
        self._locks: dict[str, Counter[Key]] = {}
        for name, host_pages in group.allocators.items():
            if name != self._anchor:
                self._add_space(name, device_pages[name], host_pages, block_slots)

    def _add_space(
        self, name: str, device_pages: PageAllocator, host_pages: PageAllocator, block_slots: int
    ) -> None:
        kept = retention(host_pages.space, block_slots)
        locks = self._locks[name] = Counter()
        space = self.others[name] = SecondSpace(
            name=name,
            retention=kept,
            device=Store(Tier(locks), device_pages, kept.block_pages),
            host=Store(Tier(locks), host_pages, kept.block_pages),
        )
        self.device.riders.append(space.device)
        self.host.riders.append(space.host)

    def admit(self, keys: Sequence[Key], complete_blocks: int | None = None) -> Admission:
        """Match a request, give it device pages and start to load what the host has.

        Of other index spaces the request keeps what a longer one will need: of the prefix of its complete
        blocks, and of a resident prefix that could not be used, since it computes through its end.

        Args:
            keys: its blocks, root first, each once.
            complete_blocks: leading blocks that no longer request will fill up; None for all.

        Raises:
            CapacityError: it has more blocks than the device can free; nothing has changed.
            TransferError: the load was refused; nothing has changed but what was given up for room.
        """
        found = self.index.match(keys)
        match = self._usable(keys, found)
        resident = found.device_blocks
        missing = len(keys) - resident
        self.index.lock(keys)
        fresh = self.device.room(missing, at_least=missing)
        if len(fresh) < missing:
            self.index.unlock(keys)
            raise CapacityError(
                who="cache",
                got=f"a request of {len(keys)} blocks",
                expected=f"at most {len(self.index.device) + self.device.free_blocks}",
                remedy="Give the device more blocks, or split the request.",
            )
        there = [self.index.device.pages(key) for key in keys[:resident]]
        pages = np.concatenate([*there, fresh.ravel()]).reshape(-1, self.device.block_pages)
        usable = match.device_blocks + match.host_blocks
        longest = resident + found.host_blocks
        ends = (longest, len(keys) if complete_blocks is None else complete_blocks)
        others: dict[str, SpaceAdmission] = {}
        try:
            for name, space in self.others.items():
                others[name] = self._admit_in(space, keys, usable, ends)
            load = self._load(keys, pages, range(match.device_blocks, usable), others)
        except BaseException:
            self.device.give_back(fresh)
            for name, mine in others.items():
                for placed in (mine.loaded, mine.computed):
                    self.others[name].device.give_back(placed.pages)
            self._unlock(keys, others)
            raise
        return Admission(
            keys=keys,
            match=match,
            cut_blocks=longest - usable,
            resident_blocks=resident,
            pages=pages,
            load=load,
            others=others,
        )

    def stores(self, space: str) -> tuple[Store, Store]:
        """The blocks of an index space on the device and on the host."""
        if space == self._anchor:
            return self.device, self.host
        return self.others[space].device, self.others[space].host

    def _usable(self, keys: Sequence[Key], found: Match, *, host: bool = True) -> Match:
        """The longest part of a match of which every other index space has what it needs."""
        longest = found.device_blocks + found.host_blocks
        usable = next(
            blocks
            for blocks in range(longest, -1, -1)
            if all(space.restorable(keys, blocks, host=host) for space in self.others.values())
        )
        device = min(found.device_blocks, usable)
        return Match(device_blocks=device, host_blocks=usable - device)

    def _admit_in(
        self, space: SecondSpace, keys: Sequence[Key], usable: int, ends: Iterable[int]
    ) -> SpaceAdmission:
        """Give a request device pages of another index space, for what it loads and what it computes.

        Args:
            space: the space.
            keys: the blocks of the request.
            usable: leading blocks that are not computed.
            ends: lengths of the prefixes for which it keeps what they need.
        """
        device, needed = space.device, space.retention.needed(usable)
        kept = sorted({at for end in ends for at in space.retention.needed(end)})
        load = [at for at in needed if keys[at] not in device.tier]
        room = device.spare_blocks(keys[at] for at in needed) - len(load)
        later = [at for at in kept if at >= usable]
        # Where room is short, the end of the request is worth more than its start.
        later = later[max(len(later) - room, 0) :]
        compute = [at for at in later if keys[at] not in device.tier]
        mine = SpaceAdmission(kept=kept)
        self._use(space.name, mine, (keys[at] for at in (*needed, *later)))
        pages = device.room(len(load) + len(compute))
        mine.loaded = Placed(at=load, pages=pages[: len(load)])
        mine.computed = Placed(at=compute, pages=pages[len(load) :])
        return mine

    def _use(self, space: str, mine: SpaceAdmission, keys: Iterable[Key]) -> None:
        """Keep blocks of another index space from being given up until the request ends."""
        added = list(keys)
        self._locks[space].update(added)
        mine.used.extend(added)

    def _load(
        self, keys: Sequence[Key], pages: Int64Array, loaded: range, others: Mapping[str, SpaceAdmission]
    ) -> Ticket:
        return self._controller.load(
            _pages_of(self.index.host, (keys[at] for at in loaded)),
            pages[loaded.start : loaded.stop].ravel(),
            others={
                name: (
                    _pages_of(self.others[name].host.tier, (keys[at] for at in mine.loaded.at)),
                    mine.loaded.pages.ravel(),
                )
                for name, mine in others.items()
            },
            numbers=page_numbers,
        )

    def land(self, admission: Admission) -> None:
        """Wait for the load; where it failed, nothing of it is a hit and the error is in its ticket."""
        try:
            admission.load.wait()
        except TransferError:
            keys = admission.keys
            on_device = Match(device_blocks=admission.match.device_blocks, host_blocks=0)
            admission.match = self._usable(keys, on_device, host=False)
            usable = admission.match.device_blocks
            for name, mine in admission.others.items():
                needed = self.others[name].retention.needed(usable)
                self._use(name, mine, (keys[at] for at in needed))
                first = sum(at < usable or at not in mine.kept for at in mine.loaded.at)
                self.others[name].device.give_back(mine.loaded.pages[:first])
                mine.computed = Placed(
                    at=mine.loaded.at[first:] + mine.computed.at,
                    pages=np.concatenate([mine.loaded.pages[first:], mine.computed.pages]),
                )
                mine.loaded = Placed()

    def commit(self, admission: Admission) -> None:
        """Make all blocks resident on the device and start the backups that the policy wants.

        Blocks for which the host has no room are dropped from the backup and counted: the last ones first, as
        a prefix is worth nothing without its start; in other index spaces the first ones, as it is its end
        that a prefix needs there.
        Where another request made a block resident meanwhile, its pages take the place of the admission's.

        Raises:
            TransferError: the backup was refused; the blocks are resident on the device and count as dropped.
        """
        keys = admission.keys
        for position, key in enumerate(keys[admission.resident_blocks :], admission.resident_blocks):
            self.device.keep(key, admission.pages[position])
            admission.pages[position] = self.index.device.pages(key)
        for name, mine in admission.others.items():
            for placed in (mine.loaded, mine.computed):
                for at, pages in zip(placed.at, placed.pages, strict=True):
                    self.others[name].device.keep(keys[at], pages)
        admission.backed_up = self._host_room(
            admission, self._anchor, self.host, self._policy.to_back_up(keys, self.index.host)
        )
        for name, mine in admission.others.items():
            mine.backed_up = self._host_room(
                admission, name, self.others[name].host, self._wanted(admission, self.others[name])
            )
            # The backup reads their device pages.
            self._use(name, mine, (keys[at] for at in mine.backed_up.at))
        if admission.backed_up.at or any(mine.backed_up.at for mine in admission.others.values()):
            try:
                admission.backup = self._back_up(admission)
            except BaseException:
                self._drop_backup(admission)
                raise

    def _wanted(self, admission: Admission, space: SecondSpace) -> list[int]:
        """Positions of the blocks whose pages of another index space go to the host, beside the anchor's."""
        keys, going = admission.keys, set(admission.backed_up.at)
        kept = admission.others[space.name].kept
        return [
            at
            for at in self._policy.to_back_up(keys, space.host.tier)
            if at in kept and keys[at] in space.device.tier and (at in going or keys[at] in self.index.host)
        ]

    def _host_room(self, admission: Admission, name: str, host: Store, wanted: list[int]) -> Placed:
        pages = host.room(len(wanted))
        short = len(wanted) - len(pages)
        admission.dropped[name] += short
        first = 0 if name == self._anchor else short
        return Placed(at=wanted[first : first + len(pages)], pages=pages)

    def _back_up(self, admission: Admission) -> Ticket:
        keys, out = admission.keys, admission.backed_up
        return self._controller.backup(
            out.pages.ravel(),
            admission.pages[out.at].ravel(),
            others={
                name: (
                    mine.backed_up.pages.ravel(),
                    _pages_of(self.others[name].device.tier, (keys[at] for at in mine.backed_up.at)),
                )
                for name, mine in admission.others.items()
            },
            numbers=page_numbers,
        )

    def settle(self, admission: Admission) -> None:
        """Wait for the backups; a failed one is no backup: its host pages are given back."""
        keys = admission.keys
        if admission.backup is not None:
            try:
                admission.backup.wait()
            except TransferError:
                self._drop_backup(admission)
            else:
                _keep(self.host, keys, admission.backed_up)
                for name, mine in admission.others.items():
                    _keep(self.others[name].host, keys, mine.backed_up)
        self.index.touch(keys)
        for space in self.others.values():
            # The other way round: the end of a request is what a longer one needs.
            space.device.tier.touch(keys[::-1])
            space.host.tier.touch(keys[::-1])
        self._unlock(keys, admission.others)

    def _drop_backup(self, admission: Admission) -> None:
        """Give the host pages of a backup that failed back, and count its blocks as dropped."""
        self.host.give_back(admission.backed_up.pages)
        admission.dropped[self._anchor] += len(admission.backed_up.at)
        admission.backed_up = Placed()
        for name, mine in admission.others.items():
            self.others[name].host.give_back(mine.backed_up.pages)
            admission.dropped[name] += len(mine.backed_up.at)
            mine.backed_up = Placed()

    def _unlock(self, keys: Sequence[Key], others: Mapping[str, SpaceAdmission]) -> None:
        self.index.unlock(keys)
        for name, mine in others.items():
            self._locks[name] -= Counter(mine.used)


def _pages_of(tier: Tier, keys: Iterable[Key]) -> Int64Array:
    """The pages of some resident blocks: int64[n]."""
    return np.concatenate([np.empty(0, dtype=np.int64), *(tier.pages(key).ravel() for key in keys)])


def _keep(store: Store, keys: Sequence[Key], placed: Placed) -> None:
    for at, pages in zip(placed.at, placed.pages, strict=True):
        store.keep(keys[at], pages)
