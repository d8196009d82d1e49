"""A serving engine in small: a cache over the simulator, blocks with marks of their own, and its books."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, frozen

from hicache_core.cache.hierarchy import Admission, HierarchicalCache
from hicache_core.cache.index import Key
from hicache_core.cache.policies import policy_named
from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.base import BatchCopies, StridedCopies
from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.device_pool import DevicePool
from hicache_core.errors import CapacityError, TransferError
from hicache_core.memory.slots import PageAllocator
from hicache_core.spec import platform_named
from hicache_core.testing.stand_ins import pool_spec, registry_of

ROW_BYTES = 16
PAGE_SLOTS = 2
BLOCK_PAGES = 2
LAYERS = 2
BLOCK_BYTES = BLOCK_PAGES * PAGE_SLOTS * LAYERS * ROW_BYTES


class CountingRuntime(SimRuntime):
    """A simulator in which the next copy call can be made to fail or to be refused."""

    copies = 0

    def strided_copies(self, copies: StridedCopies, stream: Any) -> None:
        """Count the call, then copy."""
        self.copies += 1
        super().strided_copies(copies, stream)

    def batch_copies(self, copies: BatchCopies, stream: Any) -> None:
        """Count the call, then copy."""
        self.copies += 1
        super().batch_copies(copies, stream)

    def fail_copy(self, ahead: int = 1) -> None:
        """Let the next call, or one further ahead, fail when it runs."""
        self.faults = Faults(fail_copy_at=self.copies + ahead)

    def refuse_copy(self, ahead: int = 1) -> None:
        """Let the next call, or one further ahead, be refused at submission."""
        self.faults = Faults(refuse_copy_at=self.copies + ahead)


@frozen(kw_only=True)
class State:
    """What may not change where a request is refused."""

    device: list[Key]
    host: list[Key]
    free_device_pages: int
    free_host_pages: int
    evictable: list[Key]


@define(eq=False)
class Progress:
    """A request that has been admitted, and whether its blocks are resident yet."""

    admission: Admission
    committed: bool = False


class Server:
    """A cache with device rows; each block is filled with a mark that is checked whenever it was loaded.

    Args:
        device_blocks, host_blocks: blocks that each tier holds.
        pair: io_backend and layout.
        seed: seed of the simulator.
    """

    def __init__(
        self,
        device_blocks: int,
        host_blocks: int,
        *,
        pair: tuple[str, str] = ("direct", "page_first_direct"),
        seed: int = 0,
    ) -> None:
        spec = pool_spec(ROW_BYTES, page_slots=PAGE_SLOTS, layer_ids=range(LAYERS))
        self.runtime = CountingRuntime(platform_named("cpu-sim"), seed=seed)
        self.device_pages = device_blocks * BLOCK_PAGES
        self.host_pages = host_blocks * BLOCK_PAGES
        rows = (self.device_pages + 1) * PAGE_SLOTS
        self.layers = [
            self.runtime.allocate(rows * ROW_BYTES, 0).view(rows, ROW_BYTES).zero_() for _ in range(LAYERS)
        ]
        config = ControllerConfig(
            io_backend=pair[0], layout=pair[1], host_pages=self.host_pages, ring_bytes=256
        )
        pools = [DevicePool(spec=spec, layers={"b0": self.layers})]
        self.controller = Controller(config, pools, self.runtime, registry_of([spec]))
        self.device = PageAllocator(spec.index_space, self.device_pages + 1, reserved=1, who="device")
        self.host = self.controller.group.allocator("full")
        self.cache = HierarchicalCache(
            self.controller, {"full": self.device}, BLOCK_PAGES, policy_named("write_through")
        )
        self.progress: list[Progress] = []

    @property
    def state(self) -> State:
        """Both tiers by age, what is free, and what could be given up."""
        index = self.cache.index
        return State(
            device=list(index.device),
            host=list(index.host),
            free_device_pages=self.device.free_pages,
            free_host_pages=self.host.free_pages,
            evictable=index.device.victims(len(index.device)) + index.host.victims(len(index.host)),
        )

    def start(self, keys: Sequence[Key]) -> Progress:
        """Admit a request, wait for its load, check what was loaded and compute the rest."""
        admission = self.cache.admit(keys)
        self.cache.land(admission)
        match = admission.match
        first = match.device_blocks + match.host_blocks
        for key, pages in zip(keys[:first], admission.pages[:first], strict=True):
            assert self.holds(key, pages), f"block {key!r} is a hit with bytes of another"
        for key, pages in zip(keys[first:], admission.pages[first:], strict=True):
            self._fill(key, pages)
        self.progress.append(Progress(admission))
        self.check_books()
        return self.progress[-1]

    def commit(self, one: Progress) -> bool:
        """Make the blocks of a request resident; whether its backup was accepted."""
        one.committed = True
        try:
            self.cache.commit(one.admission)
        except TransferError:
            return False
        finally:
            self.check_books()
        return True

    def settle(self, one: Progress) -> Admission:
        """End a request."""
        self.cache.settle(one.admission)
        self.progress.remove(one)
        self.check_books()
        return one.admission

    def serve(self, keys: Sequence[Key]) -> Admission:
        """A whole request."""
        one = self.start(keys)
        self.commit(one)
        return self.settle(one)

    def serves(self, keys: Sequence[Key]) -> bool:
        """A whole request, where it is not refused; a refusal for its size may change nothing."""
        before = self.state
        try:
            self.serve(keys)
        except CapacityError:
            assert self.state == before
            return False
        except TransferError:
            self.check_books()
            return False
        return True

    def check_books(self) -> None:
        """Every page of either tier is free, of a resident block, or of a request in progress, once."""
        device = [self.cache.index.device.pages(key) for key in self.cache.index.device]
        host = [self.cache.index.host.pages(key) for key in self.cache.index.host]
        for one in self.progress:
            admission = one.admission
            if not one.committed:
                device.extend(admission.pages[admission.match.device_blocks :])
            elif admission.backup is not None:
                host.extend(admission.backed_up.pages)
        for owned, allocator, pages in (
            (device, self.device, self.device_pages),
            (host, self.host, self.host_pages),
        ):
            numbers = np.concatenate([np.empty(0, dtype=np.int64), *owned])
            assert np.unique(numbers).size == numbers.size
            assert numbers.size + allocator.free_pages == pages
            assert allocator.owns(numbers)
        for key in self.cache.index.device:
            assert self.holds(key, self.cache.index.device.pages(key))

    def holds(self, key: Key, pages: np.ndarray) -> bool:
        """Whether device pages hold the mark of a block in every layer."""
        return all(bool((layer[self._rows(pages)] == _mark(key)).all()) for layer in self.layers)

    def _fill(self, key: Key, pages: np.ndarray) -> None:
        for layer in self.layers:
            layer[self._rows(pages)] = _mark(key)

    def _rows(self, pages: np.ndarray) -> torch.Tensor:
        return torch.from_numpy((pages[:, None] * PAGE_SLOTS + np.arange(PAGE_SLOTS)).ravel())


def _mark(key: Key) -> torch.Tensor:
    """ROW_BYTES bytes that hardly another block has."""
    return torch.tensor(list(zlib.crc32(repr(key).encode()).to_bytes(4, "big")) * 4, dtype=torch.uint8)


def prefixes(path: Sequence[Any]) -> list[Key]:
    """The blocks of a request, named by the whole prefix."""
    return [tuple(path[: i + 1]) for i in range(len(path))]
