"""Threads: transfers of several at once, and one ticket in several hands."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from attrs import evolve

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.testing.rigs import DeviceOptions, Rig
from hicache_core.testing.stand_ins import pool_spec
from hicache_core.transfer.ticket import Ticket

THREADS, ROUNDS, PAGES = 4, 25, 3
CONFIG = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=THREADS * PAGES)


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_all(work: Callable[[int], None]) -> None:
    """Run ``work`` in each thread; the first failure is raised here."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.usefixtures("many_switches")
def test_transfers_of_several_threads_move_their_own_bytes() -> None:
    """Each thread backs up and loads pages of its own, over and over; every round trip is right."""
    spec = pool_spec(64, page_slots=4, layer_ids=range(3))
    options = DeviceOptions(pages=2 * THREADS * PAGES)
    with Rig([spec], CONFIG, SimRuntime(), options=options) as rig:
        tensors = rig.device_rows["kv"]["b0"].tensors

        def work(number: int) -> None:
            pages = list(range(number * PAGES, (number + 1) * PAGES))
            back = [page + THREADS * PAGES for page in pages]
            for _ in range(ROUNDS):
                host = rig.allocate(PAGES)
                rig.controller.backup(rig.slots(host), rig.slots(pages)).wait()
                rig.controller.load(rig.slots(host), rig.slots(back)).wait()
                for layer in tensors:
                    rows = layer.numpy().reshape(-1, 4 * 64)
                    assert np.array_equal(rows[back], rows[pages])
                    rows[back] = 0xEE
                rig.controller.group.free({"full": rig.slots(host)})

        run_all(work)
        assert rig.controller.group.allocators["full"].free_pages == THREADS * PAGES


class _Gate:
    """An event that passes when it is told to."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()


def test_poll_does_not_wait_for_a_thread_that_waits() -> None:
    """A scheduler that polls goes on while another thread is in wait()."""
    gate = _Gate()
    ticket = Ticket("load", 1, [gate], {0: 0}, lambda: None)
    waiter = threading.Thread(target=ticket.wait)
    waiter.start()
    time.sleep(0.05)
    assert not ticket.poll()
    gate.passed.set()
    waiter.join()
    assert ticket.poll()


def test_nobody_hears_of_the_end_before_the_pages_are_released() -> None:
    """The second of two that wait returns after the acknowledgement, not during it."""
    released: list[int] = []

    def release() -> None:
        time.sleep(0.1)
        released.append(1)

    gate = _Gate()
    gate.passed.set()
    ticket = Ticket("load", 1, [gate], {0: 0}, release)
    first = threading.Thread(target=ticket.wait)
    first.start()
    time.sleep(0.02)
    ticket.wait()
    assert released == [1]
    first.join()


@pytest.mark.usefixtures("many_switches")
def test_the_simulator_registers_while_others_copy() -> None:
    """No copy sees a half-made list of regions, and no region is lost."""
    spec = pool_spec(64, page_slots=4, layer_ids=range(3))
    with Rig([spec], CONFIG, SimRuntime(), options=DeviceOptions(pages=THREADS * PAGES)) as rig:
        space = rig.runtime.memory.kernel_spaces[0]
        known = len(space.regions)
        rows = rig.device_rows["kv"]["b0"].memory[0]
        starts, sizes = np.array([rows.data_ptr()]), np.array([16])

        def work(number: int) -> None:
            for _ in range(20 * ROUNDS):
                if number % 2:
                    assert len(space.resolve(starts, sizes)) == 1
                else:
                    region = space.regions[0]
                    low = evolve(region, start=64 + number * region.data.size)
                    space.add(low)
                    space.remove(low)

        run_all(work)
        assert len(space.regions) == known
