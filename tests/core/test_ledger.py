"""The ledger: booked before it is allocated, booked as much as is mapped, and released when it is freed."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import pytest

from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.errors import (
    BookedBytes,
    CapacityError,
    OverBudgetError,
    RegisteredTwiceError,
    RegistrationError,
)
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.host import HostMemory
from hicache_core.memory.ledger import Entry, Kind, Ledger
from hicache_core.memory.options import MemoryOptions
from hicache_core.testing.rigs import Rig
from hicache_core.testing.stand_ins import pool_spec
from tests.core.host_mappings import our_bytes, our_mappings

PAGE = mmap.PAGESIZE
GROUP = [
    pool_spec(48, 32, pool="kv"),
    pool_spec(4096, pool="second", anchor=False),
    pool_spec(16, 16, pool="third", anchor=False),
]
RING = 4096


def _config(**more: object) -> ControllerConfig:
    chosen = {"io_backend": "kernel", "layout": "page_first", "host_pages": 40, "ring_bytes": RING, **more}
    return ControllerConfig(**chosen)  # type: ignore[arg-type]


def _controller(ledger: Ledger, runtime: SimRuntime | None = None, **more: object) -> Controller:
    """A controller over the device rows of a rig whose own host memory is gone."""
    rig = Rig(GROUP, _config(), runtime or SimRuntime())
    pools = [pool.device_pool for pool in rig.controller.group.pools]
    rig.controller.close()
    registry = rig.controller._registry
    return Controller(_config(**more), pools, rig.runtime, registry, ledger=ledger)


def test_a_booking_counts_until_it_is_released_and_once() -> None:
    """Each kind has a total of its own; releasing twice changes nothing."""
    ledger = Ledger()
    first = ledger.book("a", 10)
    second = ledger.book("b", 5, Kind.STAGING)
    assert (ledger.total(), ledger.total(Kind.STAGING)) == (10, 5)
    assert ledger.snapshot() == (
        Entry(who="a", kind=Kind.HOST, nbytes=10),
        Entry(who="b", kind=Kind.STAGING, nbytes=5),
    )
    first.release()
    first.release()
    second.release()
    assert (ledger.total(), ledger.total(Kind.STAGING), ledger.snapshot()) == (0, 0, ())


@pytest.mark.parametrize("kind", Kind)
def test_over_budget_names_by_how_much_and_who_holds_the_rest(kind: Kind) -> None:
    """A budget may be used up to its last byte; the other kind is not concerned."""
    ledger = Ledger(100, staging_budget_bytes=100)
    ledger.book("a", 60, kind)
    (other,) = set(Kind) - {kind}
    ledger.book("elsewhere", 100, other)
    with pytest.raises(CapacityError) as caught:
        ledger.book("b", 47, kind)
    error = caught.value
    assert isinstance(error, OverBudgetError)
    assert (error.code, error.who, error.nbytes) == ("over-budget", "b", 47)
    assert (error.missing_bytes, error.budget_bytes) == (7, 100)
    assert error.booked == (BookedBytes(who="a", nbytes=60),)
    assert error.remedy
    assert ledger.total(kind) == 60
    ledger.book("b", 40, kind)
    assert ledger.total(kind) == 100


def test_threads_do_not_book_more_than_the_budget() -> None:
    """Eight threads ask for 200 bytes each of a budget of 1,000: exactly 1,000 are booked."""
    ledger, refused, start = Ledger(1000), [], threading.Barrier(8)

    def book() -> None:
        start.wait()
        for _ in range(200):
            try:
                ledger.book("thread", 1)
            except OverBudgetError:
                refused.append(1)

    threads = [threading.Thread(target=book) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (ledger.total(), len(ledger.snapshot()), len(refused)) == (1000, 1000, 600)


def test_two_bookings_of_the_same_bytes_are_refused() -> None:
    """I29: an allocator that gives the same memory twice is found out before the runtime is asked."""
    ledger = Ledger()
    whole = HostRange(start=1 << 20, nbytes=4 * PAGE)
    first, second = ledger.book("a", whole.nbytes), ledger.book("b", PAGE)
    first.place(whole)
    for start in (whole.start, whole.start + 3 * PAGE):
        with pytest.raises(RegisteredTwiceError) as caught:
            second.place(HostRange(start=start, nbytes=2 * PAGE))
        assert (caught.value.who, caught.value.start, caught.value.nbytes) == ("b", start, 2 * PAGE)
    second.place(HostRange(start=whole.start + whole.nbytes, nbytes=PAGE))
    first.release()
    ledger.book("c", whole.nbytes).place(whole)


@pytest.mark.parametrize("allocator", ["anonymous", "memfd"])
@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 100 * PAGE, (2 << 20) + 8, 5 << 20])
def test_bytes_booked_are_bytes_mapped_and_resident(nbytes: int, allocator: str) -> None:
    """I9: what the ledger has equals what the kernel lists, to the byte, and all of it is present."""
    before, ledger = our_bytes(), Ledger()
    memory = HostMemory(
        nbytes, 1, SimRuntime(), who="test", options=MemoryOptions(allocator=allocator), ledger=ledger
    )
    assert ledger.total() == our_bytes() - before == memory.facts.mapped_bytes
    assert 0 <= ledger.total() - nbytes < PAGE
    (mapping,) = (m for m in our_mappings() if m.start <= memory.range.start < m.end)
    assert mapping.resident == mapping.size
    memory.destroy()
    assert our_bytes() == before
    assert ledger.total() == 0


def test_a_controller_books_every_pool_and_its_ring() -> None:
    """I9: host bytes as the kernel lists them; the ring, which a staged plan needs, as device staging."""
    before, ledger = our_bytes(), Ledger()
    controller = _controller(ledger)
    assert ledger.total() == our_bytes() - before
    buffers = sum(len(pool.buffers) for pool in controller.group.pools)
    assert 0 <= ledger.total() - sum(pool.nbytes for pool in controller.group.pools) < buffers * PAGE
    kinds = [entry.kind for entry in ledger.snapshot()]
    assert (kinds.count(Kind.HOST), kinds.count(Kind.STAGING)) == (buffers, 1)
    assert ledger.total(Kind.STAGING) == RING
    controller.close()
    assert ledger.snapshot() == ()
    assert our_bytes() == before


def test_a_plan_without_staging_books_no_ring() -> None:
    """I43: direct copies stage nothing."""
    ledger = Ledger(staging_budget_bytes=0)
    controller = _controller(ledger, io_backend="direct", layout="page_first_direct")
    assert ledger.total(Kind.STAGING) == 0
    controller.close()


def _no_budget() -> tuple[Ledger, SimRuntime, type[Exception]]:
    return Ledger(40 * 4 * 3 * 80 + 3 * PAGE), SimRuntime(), OverBudgetError


def _no_staging() -> tuple[Ledger, SimRuntime, type[Exception]]:
    return Ledger(staging_budget_bytes=RING - 1), SimRuntime(), OverBudgetError


def _no_registration() -> tuple[Ledger, SimRuntime, type[Exception]]:
    # The rig registers five buffers first.
    return Ledger(), SimRuntime(faults=Faults(refuse_registration_at=9)), RegistrationError


@pytest.mark.parametrize("make", [_no_budget, _no_staging, _no_registration])
def test_a_controller_that_fails_books_nothing(
    make: Callable[[], tuple[Ledger, SimRuntime, type[Exception]]],
) -> None:
    """I9, I27: whichever step is refused, the ledger and the address space are what they were."""
    before = our_bytes()
    ledger, runtime, cause = make()
    with pytest.raises(cause) as caught:
        _controller(ledger, runtime)
    del caught
    assert ledger.snapshot() == ()
    assert our_bytes() == before
    assert not runtime.memory.registrations


def test_one_ledger_splits_one_total_over_several_controllers() -> None:
    """I9: the second controller gets what the first has left, not the same again."""
    first = Ledger()
    controller = _controller(first)
    ledger = Ledger(first.total() * 3 // 2)
    controller.close()
    controller = _controller(ledger)
    with pytest.raises(OverBudgetError):
        _controller(ledger)
    controller.close()
    _controller(ledger).close()
    assert ledger.snapshot() == ()
