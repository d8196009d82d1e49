"""A serving engine in small: a cache over the simulator, blocks with marks of their own, and its books."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from attrs import define, frozen

from hicache_core.cache.hierarchy import Admission, HierarchicalCache
from hicache_core.cache.index import Key
from hicache_core.cache.policies import policy_named
from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.base import BatchCopies, StridedCopies
from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.errors import CapacityError, TransferError
from hicache_core.memory.slots import PageAllocator
from hicache_core.spec import platform_named
from hicache_core.testing.stand_ins import pool_spec, registry_of
from tests.cache.marked_rows import LAYERS, Extra, MarkedRows

ROW_BYTES = 16
PAGE_SLOTS = 2
BLOCK_PAGES = 2
BLOCK_BYTES = BLOCK_PAGES * PAGE_SLOTS * LAYERS * ROW_BYTES
FULL = "full"


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


Fault = Callable[[CountingRuntime, int], None]
FAULTS: list[Fault] = [CountingRuntime.fail_copy, CountingRuntime.refuse_copy]


@frozen(kw_only=True)
class State:
    """What may not change where a request is refused: ages and free pages, of each space."""

    device: dict[str, list[Key]]
    host: dict[str, list[Key]]
    free_device_pages: dict[str, int]
    free_host_pages: dict[str, int]
    evictable: dict[str, list[Key]]

    @property
    def unlocked(self) -> bool:
        """Whether every block of every space and tier can be given up."""
        return self.evictable == {name: self.device[name] + self.host[name] for name in self.device}


@define(eq=False)
class Progress:
    """A request that has been admitted, and whether its blocks are resident yet."""

    admission: Admission
    committed: bool = False


class Server:
    """A cache with device rows; each block is filled with marks that are checked whenever it was loaded.

    Args:
        device_blocks, host_blocks: blocks that each tier holds.
        extras: index spaces beside the anchor's.
        pair: io_backend and layout.
        seed: seed of the simulator.
    """

    def __init__(
        self,
        device_blocks: int,
        host_blocks: int,
        *extras: Extra,
        pair: tuple[str, str] = ("direct", "page_first_direct"),
        seed: int = 0,
    ) -> None:
        spec = pool_spec(ROW_BYTES, page_slots=PAGE_SLOTS, layer_ids=range(LAYERS))
        self.runtime = CountingRuntime(platform_named("cpu-sim"), seed=seed)
        self.extras = {extra.space.name: extra for extra in extras}
        self.device_pages = {FULL: device_blocks * BLOCK_PAGES}
        self.host_pages = {FULL: host_blocks * BLOCK_PAGES}
        self.rows = {FULL: MarkedRows([spec], self.runtime, self.device_pages[FULL])}
        spaces = {FULL: spec.index_space}
        for name, extra in self.extras.items():
            self.device_pages[name] = extra.device_blocks * extra.block_pages
            self.host_pages[name] = extra.host_blocks * extra.block_pages
            self.rows[name] = MarkedRows(extra.specs, self.runtime, self.device_pages[name])
            spaces[name] = extra.space
        config = ControllerConfig(
            io_backend=pair[0],
            layout=pair[1],
            host_pages=self.host_pages[FULL],
            other_host_pages={name: self.host_pages[name] for name in self.extras},
            ring_bytes=256,
        )
        pools = [pool for rows in self.rows.values() for pool in rows.pools]
        registry = registry_of([pool.spec for pool in pools])
        self.controller = Controller(config, pools, self.runtime, registry)
        self.devices = {
            name: PageAllocator(space, self.device_pages[name] + 1, reserved=1, who=f"device {name}")
            for name, space in spaces.items()
        }
        self.hosts = {name: self.controller.group.allocator(name) for name in spaces}
        self.cache = HierarchicalCache(
            self.controller, self.devices, BLOCK_PAGES, policy_named("write_through")
        )
        self.progress: list[Progress] = []

    @property
    def state(self) -> State:
        """Both tiers by age, what is free, and what could be given up."""
        tiers = {name: [store.tier for store in self.cache.stores(name)] for name in self.rows}
        return State(
            device={name: list(device) for name, (device, _) in tiers.items()},
            host={name: list(host) for name, (_, host) in tiers.items()},
            free_device_pages={name: one.free_pages for name, one in self.devices.items()},
            free_host_pages={name: one.free_pages for name, one in self.hosts.items()},
            evictable={
                name: [key for tier in both for key in tier.victims(len(tier))]
                for name, both in tiers.items()
            },
        )

    def start(self, keys: Sequence[Key]) -> Progress:
        """Admit a request, wait for its load, check what was loaded and compute the rest."""
        admission = self.cache.admit(keys)
        self.cache.land(admission)
        self.progress.append(Progress(admission))
        full = self.rows[FULL]
        usable = admission.match.device_blocks + admission.match.host_blocks
        there = max(usable, admission.resident_blocks)
        for key, pages in zip(keys[:there], admission.pages[:there], strict=True):
            assert full.holds(key, pages), f"block {key!r} is resident with bytes of another"
        for key, pages in zip(keys[there:], admission.pages[there:], strict=True):
            full.fill(key, pages)
        self.check_needed(admission)
        for name, mine in admission.others.items():
            for at, pages in zip(mine.computed.at, mine.computed.pages, strict=True):
                assert at >= usable, "the engine computes nothing before the usable prefix"
                self.rows[name].fill(keys[at], pages)
        self.check_books()
        return self.progress[-1]

    def check_needed(self, admission: Admission) -> None:
        """What a request needs of other spaces is on the device, with the right bytes."""
        keys = admission.keys
        usable = admission.match.device_blocks + admission.match.host_blocks
        for name, extra in self.extras.items():
            device = self.cache.stores(name)[0].tier
            loaded = admission.others[name].loaded
            found = dict(zip(loaded.at, loaded.pages, strict=True))
            for at in range(usable)[-extra.last_blocks :]:
                pages = found[at] if at in found else device.pages(keys[at])
                assert self.rows[name].holds(keys[at], pages), f"{name} of {keys[at]!r} is another's"

    def commit(self, one: Progress) -> bool:
        """Make the blocks of a request resident; whether its backup was accepted."""
        # Until here the engine has read what the request needs.
        self.check_needed(one.admission)
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

    def go_on(self, one: Progress) -> None:
        """The next step of a request in progress."""
        if one.committed:
            self.settle(one)
        else:
            self.commit(one)

    def finish(self) -> None:
        """End all requests in progress."""
        while self.progress:
            self.go_on(self.progress[0])

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
        """Every page of every space and tier is free, of a resident block, or of a request, once."""
        for name, rows in self.rows.items():
            device, host = (store.tier for store in self.cache.stores(name))
            _check_owned(
                [*map(device.pages, device), *self._device_pages_of_requests(name)],
                self.devices[name],
                self.device_pages[name],
            )
            _check_owned(
                [*map(host.pages, host), *self._host_pages_of_requests(name)],
                self.hosts[name],
                self.host_pages[name],
            )
            for key in device:
                assert rows.holds(key, device.pages(key)), f"{name} of {key!r} is another's"
            anchors = self.cache.stores(FULL)
            assert set(device) <= set(anchors[0].tier)
            assert set(host) <= set(anchors[1].tier)

    def _device_pages_of_requests(self, name: str) -> Iterator[np.ndarray]:
        for one in self.progress:
            admission = one.admission
            if one.committed:
                continue
            if name == FULL:
                yield admission.pages[admission.resident_blocks :].ravel()
            else:
                mine = admission.others[name]
                yield from (mine.loaded.pages.ravel(), mine.computed.pages.ravel())

    def _host_pages_of_requests(self, name: str) -> Iterator[np.ndarray]:
        for one in self.progress:
            admission = one.admission
            if admission.backup is None:
                continue
            placed = admission.backed_up if name == FULL else admission.others[name].backed_up
            device = self.cache.stores(name)[0].tier
            assert all(admission.keys[at] in device for at in placed.at), "a backup reads pages given up"
            yield placed.pages.ravel()


def _check_owned(owned: list[np.ndarray], allocator: PageAllocator, pages: int) -> None:
    numbers = np.concatenate([np.empty(0, dtype=np.int64), *owned])
    assert np.unique(numbers).size == numbers.size
    assert numbers.size + allocator.free_pages == pages
    assert allocator.owns(numbers)


@contextmanager
def serving(device_blocks: int, host_blocks: int, *extras: Extra, **options: Any) -> Iterator[Server]:
    """A server, closed at the end; no registration is left then."""
    server = Server(device_blocks, host_blocks, *extras, **options)
    try:
        yield server
    finally:
        server.controller.close()
    assert server.runtime.memory.registrations == {}


def prefixes(path: Sequence[Any]) -> list[Key]:
    """The blocks of a request, named by the whole prefix."""
    return [tuple(path[: i + 1]) for i in range(len(path))]
