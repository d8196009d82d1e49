"""The oracle for models with windows and states: the tiers of tests/lru_twin.py, and plain lists beside them.

A space beside the anchor's keeps pages for the last blocks of two prefixes of a request: of its complete
blocks, and of the resident ones, usable or not. A prefix can be used if its last blocks have theirs, on
either tier, and all of them fit on the device. Such pages go with their block. They also go alone, oldest
first, where the end of a request is newer than its start; but not while the request needs them, or they are
the newest that it keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.lru_twin import Block, TwinTier

ANCHOR = "full"


@dataclass
class TwinSpace:
    """One space: which blocks have pages on each tier, oldest first.

    Args:
        device_blocks, host_blocks: blocks for which each tier has pages.
        last_blocks: a prefix needs the pages of so many of its last blocks.
    """

    device_blocks: int
    host_blocks: int
    last_blocks: int = 1
    device: list[Block] = field(default_factory=list)
    host: list[Block] = field(default_factory=list)

    def restores(self, prefix: Sequence[Block]) -> bool:
        """Whether what a prefix needs is there and fits on the device."""
        end = prefix[-self.last_blocks :]
        return len(end) <= self.device_blocks and all(b in self.device or b in self.host for b in end)

    def keepers(self, blocks: Sequence[Block], *ends: int) -> list[Block]:
        """The blocks that the prefixes of those lengths need."""
        needed = {block for end in ends for block in blocks[max(end - self.last_blocks, 0) : end]}
        return [block for block in blocks if block in needed]

    def fill_device(
        self, blocks: Sequence[Block], usable: int, keepers: list[Block]
    ) -> tuple[int, list[Block]]:
        """Load and compute; how many blocks were loaded, and which may not go while the request runs."""
        end, later = list(blocks[:usable])[-self.last_blocks :], blocks[usable:]
        fresh = [b for b in keepers if b in later]
        stay = end + _newest(fresh, self.device_blocks - len(end))
        loaded = sum(b not in self.device for b in end)
        others = [b for b in self.device if b not in stay]
        self.device = _newest(others, self.device_blocks - len(stay)) + stay
        return loaded, stay

    def fill_host(
        self, keepers: list[Block], stay: list[Block], on_host: Mapping[Block, int]
    ) -> tuple[int, int]:
        """Back up what is kept; how many blocks were, and how many found no room."""
        there = [b for b in keepers if b in self.device and b in on_host]
        wanted = [b for b in there if b not in self.host]
        locked = [b for b in self.host if b in stay]
        kept = _newest(wanted, self.host_blocks - len(locked))
        others = [b for b in self.host if b not in stay]
        self.host = _newest(others, self.host_blocks - len(locked) - len(kept)) + locked + kept
        return len(kept), len(wanted) - len(kept)

    def touch(self, blocks: Sequence[Block]) -> None:
        """Make the pages of a request the newest, those of its last block the newest of all."""
        self.device = [b for b in self.device if b not in blocks] + [b for b in blocks if b in self.device]
        self.host = [b for b in self.host if b not in blocks] + [b for b in blocks if b in self.host]


def _newest(blocks: list[Block], count: int) -> list[Block]:
    return blocks[len(blocks) - min(max(count, 0), len(blocks)) :]


@dataclass
class HybridCounts:
    """What requests did: requests, blocks, and for each space (the anchor's included) blocks that moved."""

    requests: int = 0
    too_large: int = 0
    referenced: int = 0
    device_hits: int = 0
    host_hits: int = 0
    cut: int = 0
    loaded: Counter[str] = field(default_factory=Counter)
    backed_up: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def __iadd__(self, other: HybridCounts) -> HybridCounts:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def loaded_bytes(self, block_bytes: Mapping[str, int]) -> int:
        """Bytes from host to device, if a block has so many in each space."""
        return sum(blocks * block_bytes[name] for name, blocks in self.loaded.items())

    def backed_up_bytes(self, block_bytes: Mapping[str, int]) -> int:
        """Bytes from device to host, if a block has so many in each space."""
        return sum(blocks * block_bytes[name] for name, blocks in self.backed_up.items())


class HybridTwin:
    """Both tiers and all spaces; requests run one after another.

    Args:
        device_blocks, host_blocks: blocks that each tier holds in the anchor's space.
        spaces: the other spaces by name.
    """

    def __init__(self, device_blocks: int, host_blocks: int, spaces: Mapping[str, TwinSpace]) -> None:
        self.device = TwinTier(device_blocks)
        self.host = TwinTier(host_blocks)
        self.spaces = dict(spaces)

    def request(self, blocks: Sequence[Block], complete: int | None = None) -> HybridCounts:
        """Serve one request, root first, of which ``complete`` blocks are full; all where it is None."""
        if len(blocks) > self.device.capacity:
            return HybridCounts(requests=1, too_large=1)
        on_device = self.device.leading(blocks)
        resident = on_device + self.host.leading(blocks[on_device:])
        usable = resident
        while usable and not all(space.restores(blocks[:usable]) for space in self.spaces.values()):
            usable -= 1
        counts = HybridCounts(requests=1, referenced=len(blocks), cut=resident - usable)
        counts.device_hits = min(on_device, usable)
        counts.host_hits = counts.loaded[ANCHOR] = usable - counts.device_hits
        self.device.use(blocks)
        stays: dict[str, list[Block]] = {}
        ends = resident, len(blocks) if complete is None else complete
        keepers = {name: space.keepers(blocks, *ends) for name, space in self.spaces.items()}
        for name, space in self.spaces.items():
            space.device = [b for b in space.device if b in self.device.last_use]
            counts.loaded[name], stays[name] = space.fill_device(blocks, usable, keepers[name])
        new = [b for b in blocks if b not in self.host.last_use]
        self.host.use(blocks)
        counts.backed_up[ANCHOR] = sum(b in self.host.last_use for b in new)
        counts.dropped[ANCHOR] = len(new) - counts.backed_up[ANCHOR]
        for name, space in self.spaces.items():
            space.host = [b for b in space.host if b in self.host.last_use]
            counts.backed_up[name], counts.dropped[name] = space.fill_host(
                keepers[name], stays[name], self.host.last_use
            )
            space.touch(blocks)
        return counts


def hybrid_counts(requests: Iterable[tuple[Sequence[Block], int]], twin: HybridTwin) -> HybridCounts:
    """The counts of a whole stream of (blocks, how many of them its tokens fill)."""
    counts = HybridCounts()
    for blocks, full in requests:
        counts += twin.request(blocks, min(full, len(blocks)))
    return counts
