"""Room for blocks: the resident blocks of one index space in one tier, and the pages they lie in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from attrs import field, frozen

from hicache_core.cache.index import Key, Tier
from hicache_core.memory.slots import Int64Array, PageAllocator
from hicache_core.spec import Retention


class Store:
    """The blocks of one index space that one tier holds.

    Args:
        tier: which blocks are resident, oldest first.
        allocator: hands out their pages.
        block_pages: pages of one block in this space.
    """

    def __init__(self, tier: Tier, allocator: PageAllocator, block_pages: int) -> None:
        self.tier = tier
        self.allocator = allocator
        self.block_pages = block_pages
        self.riders: list[Store] = []
        """Stores of other spaces whose blocks are worth nothing without this one's."""

    @property
    def free_blocks(self) -> int:
        """Blocks for which pages are free."""
        return self.allocator.free_pages // self.block_pages

    def spare_blocks(self, beside: Iterable[Key]) -> int:
        """Blocks for which room can be made without giving up those in ``beside`` or what requests use."""
        return self.free_blocks + self.tier.unused(beside)

    def room(self, blocks: int, at_least: int = 0) -> Int64Array:
        """Pages for ``blocks`` blocks, or for as many as fit: int64[n, block_pages].

        The oldest blocks that no request uses are given up for it. Where that are fewer than ``at_least``,
        there are none and nothing is given up.
        """
        free = self.free_blocks
        victims = self.tier.victims(blocks - free)
        count = min(blocks, free + len(victims))
        if count < at_least:
            count, victims = 0, []
        self.drop(victims)
        pages = self.allocator.allocate_pages(count * self.block_pages) if count else None
        return (np.empty(0, dtype=np.int64) if pages is None else pages).reshape(-1, self.block_pages)

    def drop(self, keys: Sequence[Key]) -> None:
        """Give up those of some blocks that are resident, and what rides on them."""
        freed = self.tier.evict([key for key in keys if key in self.tier])
        if freed:
            # In ascending order, so that pages handed out together are neighbours again.
            self.allocator.give_back(np.sort(np.concatenate(freed)))
        for rider in self.riders:
            rider.drop(keys)

    def keep(self, key: Key, pages: Int64Array) -> None:
        """Make a block resident; where it is already, its pages stand and these are given back."""
        if key in self.tier:
            self.give_back(pages)
        else:
            self.tier.insert(key, pages)

    def give_back(self, pages: Int64Array) -> None:
        """Take back pages that no resident block has."""
        self.allocator.give_back(pages.ravel())


@frozen(kw_only=True, eq=False)
class SecondSpace:
    """An index space beside the anchor's: its blocks may come and go alone.

    Args:
        name: name of the space.
        retention: what blocks keep of it.
        device, host: its resident blocks.
    """

    name: str
    retention: Retention
    device: Store = field()
    host: Store = field()

    def restorable(self, keys: Sequence[Key], blocks: int, *, host: bool = True) -> bool:
        """Whether a request can have what the first ``blocks`` of ``keys`` need.

        It is resident, on the host as well if asked, and what is not on the device has room there.
        """
        needed = [keys[at] for at in self.retention.needed(blocks)]
        absent = [key for key in needed if key not in self.device.tier]
        if not all(host and key in self.host.tier for key in absent):
            return False
        return not absent or len(absent) <= self.device.spare_blocks(needed)
