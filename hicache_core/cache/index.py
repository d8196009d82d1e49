"""The prefix index: which blocks lie in which tier, and which of them is the oldest.

A block's hash names its whole prefix, so an entry needs no parent: a prefix is resident where a leading run
of its blocks is. Every request touches its leaf first and its root last, so that a child is always older than
its parent and giving up the oldest never cuts a prefix in two.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np
from attrs import frozen

from hicache_core.memory.slots import Int64Array

Key = Hashable
"""Name of a block: its hash, with a namespace where hashes are local."""


class Tier:
    """The blocks of one tier and the pages they lie in, oldest first.

    Args:
        locks: blocks that requests in progress use, shared by the tiers of an index.
    """

    def __init__(self, locks: Counter[Key]) -> None:
        self._locks = locks
        self._pages: OrderedDict[Key, Int64Array] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: Key) -> bool:
        return key in self._pages

    def __iter__(self) -> Iterator[Key]:
        return iter(self._pages)

    def pages(self, key: Key) -> Int64Array:
        """The pages of a resident block."""
        return self._pages[key]

    def leading(self, keys: Sequence[Key], start: int = 0) -> int:
        """How many of ``keys[start:]`` are resident before the first that is not."""
        stop = start
        while stop < len(keys) and keys[stop] in self._pages:
            stop += 1
        return stop - start

    def insert(self, key: Key, pages: Int64Array) -> None:
        """Make a block resident, as the newest."""
        self._pages[key] = pages

    def touch(self, keys: Sequence[Key]) -> None:
        """Make the resident ones of ``keys`` the newest, the last of them the oldest among these."""
        for key in reversed(keys):
            if key in self._pages:
                self._pages.move_to_end(key)

    def resident_pages(self) -> Int64Array:
        """The pages of all resident blocks: int64[n]."""
        return np.concatenate([np.empty(0, dtype=np.int64), *(p.ravel() for p in self._pages.values())])

    def victims(self, count: int) -> list[Key]:
        """The ``count`` oldest blocks that no request uses, or as many as there are."""
        unused = (key for key in self._pages if key not in self._locks)
        return list(itertools.islice(unused, max(count, 0)))

    def unused(self, beside: Iterable[Key]) -> int:
        """How many blocks no request uses, those in ``beside`` not counted."""
        return len(self._pages) - sum(key in self._pages for key in {*self._locks, *beside})

    def evict(self, keys: Sequence[Key]) -> list[Int64Array]:
        """Give up some resident blocks; their pages."""
        return [self._pages.pop(key) for key in keys]


@frozen(kw_only=True)
class Match:
    """The resident part of a prefix.

    Args:
        device_blocks: leading blocks on the device.
        host_blocks: blocks after these that are on the host.
    """

    device_blocks: int
    host_blocks: int


class PrefixIndex:
    """Residency of blocks on device and host."""

    def __init__(self) -> None:
        self._locks: Counter[Key] = Counter()
        self.device = Tier(self._locks)
        self.host = Tier(self._locks)

    def match(self, keys: Sequence[Key]) -> Match:
        """The longest resident prefix: a leading run on the device, and the run on the host that goes on."""
        device = self.device.leading(keys)
        return Match(device_blocks=device, host_blocks=self.host.leading(keys, device))

    def lock(self, keys: Sequence[Key]) -> None:
        """Keep blocks from being given up, in both tiers, until :meth:`unlock`."""
        self._locks.update(keys)

    def unlock(self, keys: Sequence[Key]) -> None:
        """End one :meth:`lock`."""
        for key in keys:
            if self._locks[key] <= 1:
                del self._locks[key]
            else:
                self._locks[key] -= 1

    def touch(self, keys: Sequence[Key]) -> None:
        """Make the blocks of a request the newest of both tiers, leaf oldest."""
        self.device.touch(keys)
        self.host.touch(keys)
