"""A two-tier LRU of plain dictionaries, written apart from the product, as an oracle for its counts.

A request hits its leading run on the device, then the run on the host that goes on. Then all its blocks are
the newest of both tiers, the leaf as the oldest of them, and each tier gives up its oldest until it fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

Block = Hashable


class TwinTier:
    """One tier: when each block was used last, and a queue of uses of which later ones make earlier void.

    Args:
        capacity: blocks that it holds.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.last_use: dict[Block, int] = {}
        self._uses: deque[tuple[int, Block]] = deque()
        self._clock = 0

    def leading(self, blocks: Sequence[Block]) -> int:
        """Length of the run at the start of ``blocks`` that is resident."""
        for length, block in enumerate(blocks):
            if block not in self.last_use:
                return length
        return len(blocks)

    def use(self, blocks: Sequence[Block]) -> None:
        """Make blocks resident and newest, the last of them oldest, then give up the oldest of all."""
        for block in blocks[::-1]:
            self._clock += 1
            self.last_use[block] = self._clock
            self._uses.append((self._clock, block))
        while len(self.last_use) > self.capacity:
            when, block = self._uses.popleft()
            if self.last_use.get(block) == when:
                del self.last_use[block]

    def oldest_first(self) -> list[Block]:
        """The resident blocks by age."""
        return sorted(self.last_use, key=lambda block: self.last_use[block])


@dataclass
class Counts:
    """What a stream of requests did, in requests and blocks."""

    requests: int = 0
    too_large: int = 0
    referenced: int = 0
    device_hits: int = 0
    host_hits: int = 0
    backed_up: int = 0
    dropped: int = 0


class Twin:
    """Both tiers; requests run one after another.

    Args:
        device_blocks, host_blocks: blocks that each tier holds.
    """

    def __init__(self, device_blocks: int, host_blocks: int) -> None:
        self.device = TwinTier(device_blocks)
        self.host = TwinTier(host_blocks)
        self.counts = Counts()

    def request(self, blocks: Sequence[Block]) -> tuple[int, int]:
        """Serve one request, root first; its hits on the device and on the host."""
        counts = self.counts
        counts.requests += 1
        if len(blocks) > self.device.capacity:
            counts.too_large += 1
            return 0, 0
        on_device = self.device.leading(blocks)
        on_host = self.host.leading(blocks[on_device:])
        new = [block for block in blocks if block not in self.host.last_use]
        self.device.use(blocks)
        self.host.use(blocks)
        kept = sum(block in self.host.last_use for block in new)
        counts.referenced += len(blocks)
        counts.device_hits += on_device
        counts.host_hits += on_host
        counts.backed_up += kept
        counts.dropped += len(new) - kept
        return on_device, on_host


def twin_counts(requests: Iterable[Sequence[Block]], device_blocks: int, host_blocks: int) -> Counts:
    """The counts of a whole stream."""
    twin = Twin(device_blocks, host_blocks)
    for blocks in requests:
        twin.request(blocks)
    return twin.counts
