"""A group of host pools: an anchor, the pools that ride on its slots, and pools with slots of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hicache_core.compat import Violation
from hicache_core.errors import IncompatibleError, UnknownNameError
from hicache_core.memory.host import destroy_all
from hicache_core.memory.links import PageLinks
from hicache_core.memory.slots import Int64Array, PageAllocator
from hicache_core.pool import HostPool

Reclaim = Callable[[str, int], None]


class HostGroup:
    """Host pools that stand for the same cached tokens.

    Each index space has one allocator; the pools of the space share its slots and never allocate. ``links``
    say which pages of each other space belong to the anchor's, for engines that keep no such table.

    Args:
        pools: the pools, exactly one of them the anchor.

    Raises:
        IncompatibleError: pools of one space that have different numbers of pages.
    """

    def __init__(self, pools: Sequence[HostPool]) -> None:
        self.pools = tuple(pools)
        self.anchor = next(pool for pool in pools if pool.spec.anchor)
        self.allocators: dict[str, PageAllocator] = {}
        owners = sorted(pools, key=lambda pool: not pool.spec.anchor)
        for pool in owners:
            space = pool.spec.index_space
            known = self.allocators.get(space.name)
            if known is None:
                self.allocators[space.name] = PageAllocator(
                    space, pool.pages, who=f"host slots of '{space.name}'"
                )
            elif known.pages > pool.pages:
                raise _too_few_pages(pool, known.pages)
        anchor = self.allocators[self.anchor_space]
        self.links = {
            name: PageLinks(anchor, other) for name, other in self.allocators.items() if other is not anchor
        }

    @property
    def anchor_space(self) -> str:
        """Name of the anchor's index space."""
        return self.anchor.spec.index_space.name

    def pools_of(self, space: str) -> tuple[HostPool, ...]:
        """The pools whose rows the slots of a space name."""
        return tuple(pool for pool in self.pools if pool.spec.index_space.name == space)

    def allocator(self, space: str) -> PageAllocator:
        """The allocator of a space; raises UnknownNameError where the group has no such space."""
        try:
            return self.allocators[space]
        except KeyError:
            raise UnknownNameError(
                who="host group",
                got=f"index space '{space}'",
                expected=f"one of {', '.join(self.allocators)}",
                remedy="Name a space of this group.",
            ) from None

    def allocate(
        self, demand: Mapping[str, int], *, reclaim: Reclaim | None = None
    ) -> dict[str, Int64Array] | None:
        """Slots of several spaces, all or nothing: the anchor's first, then the others in name order.

        Args:
            demand: slots wanted of each space, a positive multiple of its page.
            reclaim: asked once per space that is short, with its name and the missing slots; may free some.

        Returns:
            The slots of each space (int64[n]), or None where one stayed short; every space is then as before.

        Raises:
            SlotError: a demand is not whole pages; every space is as before, whatever raised.
        """
        got: dict[str, Int64Array] = {}
        order = sorted(demand, key=lambda name: (name != self.anchor_space, name))
        try:
            for name in order:
                slots = self._allocate_one(name, demand[name], reclaim)
                if slots is None:
                    self.free(got)
                    return None
                got[name] = slots
        except BaseException:
            self.free(got)
            raise
        return got

    def _allocate_one(self, name: str, slots: int, reclaim: Reclaim | None) -> Int64Array | None:
        allocator = self.allocator(name)
        got = allocator.allocate(slots)
        if got is None and reclaim is not None:
            reclaim(name, slots - allocator.free_slots)
            got = allocator.allocate(slots)
        return got

    def free(self, slots: Mapping[str, Int64Array]) -> None:
        """Give the slots of each space back, all or nothing; what is linked to the anchor's goes with it.

        Raises:
            SlotError: one is not owned or still held; nothing changed in any space.
        """
        pages = {name: self.allocator(name).pages_of(mine) for name, mine in slots.items()}
        anchor = pages.get(self.anchor_space)
        if anchor is not None:
            self.allocators[self.anchor_space].check_returnable(anchor)
            for name, links in self.links.items():
                linked, named = links.pages(anchor), pages.get(name, anchor[:0])
                pages[name] = np.concatenate([named, np.setdiff1d(linked[linked >= 0], named)])
        for name, mine in pages.items():
            self.allocator(name).check_returnable(mine)
        for name, mine in pages.items():
            self.allocator(name).give_back(mine)
            if name in self.links:
                self.links[name].unlink(mine)

    def admit(self, pool: HostPool) -> None:
        """Take in a pool that is bound and proved; it rides on the slots of its space, or brings a space.

        Pages that are handed out lack its part: they can be loaded again once a backup has written them.
        """
        space = pool.spec.index_space
        known = self.allocators.get(space.name)
        if known is None:
            other = PageAllocator(space, pool.pages, who=f"host slots of '{space.name}'")
            links = PageLinks(self.allocators[self.anchor_space], other)
            # New mappings, since other threads walk over these; no link is seen before its allocator.
            self.allocators = {**self.allocators, space.name: other}
            self.links = {**self.links, space.name: links}
        else:
            known.mark_incomplete()
        self.pools = (*self.pools, pool)

    def usable_pages(self, anchor_pages: Int64Array) -> int:
        """How many leading pages of a prefix can be restored: those of which every index space has its part.

        Args:
            anchor_pages: int64[n], the anchor's pages of the prefix, root first.
        """
        usable = np.logical_and.accumulate(self.allocators[self.anchor_space].complete(anchor_pages))
        for links in self.links.values():
            usable &= links.restorable(anchor_pages)
        return int(np.flatnonzero(usable)[-1]) + 1 if usable.any() else 0

    def destroy(self) -> None:
        """Unregister and release all host memory; a second call does nothing.

        Raises:
            UnregisterError: some could not be unregistered and stays mapped; the rest is released.
        """
        destroy_all(reversed(self.pools), who="host group")


def _too_few_pages(pool: HostPool, source_pages: int) -> IncompatibleError:
    violation = Violation(
        rule="R6",
        code="derived-pages",
        pool=pool.spec.pool,
        got=f"{pool.pages} host pages",
        expected=f"at least {source_pages}, as the pool whose slots it rides on",
        remedy="Give it as many pages.",
    )
    return IncompatibleError(who="host group", violations=[violation], remedy=violation.remedy)
