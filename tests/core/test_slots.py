"""Slots of one space: one owner each, a guard on every change, and a model of sets."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache_core.errors import (
    IndicesError,
    PageContractError,
    SlotError,
)
from hicache_core.memory.slots import PageAllocator, slots_of
from hicache_core.spec import IndexSpace
from hicache_core.testing.rigs import Rig

P = 4
MakeRig = Callable[..., Rig]


def _allocator(pages: int = 6, *, page_slots: int = P, reserved: int = 0) -> PageAllocator:
    space = IndexSpace(name="full", page_slots=page_slots)
    return PageAllocator(space, pages, who="test", reserved=reserved)


def _slots(*pages: int) -> np.ndarray:
    return slots_of(np.array(pages, dtype=np.int64), P)


def _refused_unchanged(allocator: PageAllocator, slots: object, error: type[Exception]) -> Exception:
    """Freeing is refused with ``error``, and the next allocations are those of an untouched allocator."""
    before = allocator.free_slots
    with pytest.raises(error) as caught:
        allocator.free(slots)
    assert allocator.free_slots == before
    return caught.value


def test_free_twice_in_two_calls_is_refused() -> None:
    """I1: the second call names the slot and changes nothing."""
    allocator = _allocator()
    slots = allocator.allocate(2 * P)
    assert slots is not None
    allocator.free(slots)
    error = _refused_unchanged(allocator, slots[P:], SlotError)
    assert isinstance(error, SlotError)
    assert error.code == "slot"
    assert error.slots == (P,)


def test_free_twice_in_one_call_is_refused() -> None:
    """I1: nothing of such a call is taken back; the slots can still be freed once."""
    allocator = _allocator()
    slots = allocator.allocate(2 * P)
    assert slots is not None
    error = _refused_unchanged(allocator, np.concatenate((slots, slots[:P])), SlotError)
    assert isinstance(error, SlotError)
    assert error.slots == (0,)
    allocator.free(slots)
    assert allocator.free_pages == 6


@pytest.mark.parametrize("page", [-1, 6, 1 << 40])
def test_free_out_of_range_is_refused(page: int) -> None:
    """I1: either way out of range; the owned page of the same call stays owned."""
    allocator = _allocator()
    slots = allocator.allocate(P)
    assert slots is not None
    error = _refused_unchanged(allocator, np.concatenate((slots, _slots(page))), IndicesError)
    assert str(page * P) in str(error)
    allocator.free(slots)


@pytest.mark.parametrize("page", [-1, 6])
def test_giving_back_a_page_out_of_range_is_refused(page: int) -> None:
    """I1: the door of page numbers has the guard too; a negative number never counts from the end."""
    allocator = _allocator()
    allocator.allocate(6 * P)
    with pytest.raises(SlotError) as caught:
        allocator.give_back(np.array([0, page]))
    assert caught.value.slots == (page * P,)
    assert allocator.free_pages == 0


def test_free_of_slots_that_nobody_owns_is_refused() -> None:
    """I1: one stray page refuses the whole call."""
    allocator = _allocator()
    slots = allocator.allocate(P)
    assert slots is not None
    error = _refused_unchanged(allocator, np.concatenate((slots, _slots(3))), SlotError)
    assert isinstance(error, SlotError)
    assert error.slots == (3 * P,)
    allocator.free(slots)


def test_free_of_a_part_of_a_page_is_refused() -> None:
    """I1: a page has one owner, so it is given back whole."""
    allocator = _allocator()
    slots = allocator.allocate(P)
    assert slots is not None
    _refused_unchanged(allocator, slots[: P - 1], PageContractError)
    _refused_unchanged(allocator, slots[::-1].copy(), PageContractError)


def test_reserved_pages_are_never_handed_out() -> None:
    """I1: a padding page at the start has no owner and cannot be freed."""
    allocator = _allocator(reserved=1)
    slots = allocator.allocate(5 * P)
    assert slots is not None
    assert slots.min() == P
    assert allocator.allocate(P) is None
    _refused_unchanged(allocator, _slots(0), SlotError)


@pytest.mark.parametrize("count", [0, -P, 1, P - 1, P + 1, 7 * P + 1])
def test_allocating_a_partial_page_is_refused(count: int) -> None:
    """I2: what is no positive multiple of the page is refused, never rounded, whether or not it would fit."""
    allocator = _allocator()
    with pytest.raises(SlotError) as caught:
        allocator.allocate(count)
    assert caught.value.code == "slot"
    assert allocator.free_pages == 6


def test_allocation_is_exact_or_none() -> None:
    """I2: as many slots as asked, in whole pages, or None with nothing taken."""
    allocator = _allocator()
    slots = allocator.allocate(4 * P)
    assert slots is not None
    assert slots.dtype == np.int64
    assert slots.tolist() == list(range(4 * P))
    assert allocator.allocate(3 * P) is None
    assert allocator.free_pages == 2
    assert allocator.allocate(2 * P) is not None
    assert allocator.allocate(P) is None


@pytest.mark.parametrize("pages", [0, 6])
def test_freeing_nothing_is_nothing(pages: int) -> None:
    """I3: no count changes and the next allocation is the same, in an empty space too."""
    allocator = _allocator(pages)
    allocator.free(np.empty(0, dtype=np.int64))
    allocator.free(torch.empty(0, dtype=torch.int64))
    allocator.give_back(np.empty(0, dtype=np.int64))
    assert allocator.free_pages == pages
    if pages:
        got = allocator.allocate(P)
        assert got is not None
        assert got[0] == 0


def test_clear_leaves_the_initial_state() -> None:
    """I4: the order of the next allocations included, however the ring had turned."""
    allocator = _allocator()
    first = allocator.allocate(4 * P)
    assert first is not None
    allocator.free(first[2 * P :])
    allocator.allocate(3 * P)
    allocator.clear()
    assert allocator.free_pages == 6
    _refused_unchanged(allocator, first, SlotError)
    again = allocator.allocate(6 * P)
    assert again is not None
    assert again.tolist() == list(range(6 * P))


def test_clear_is_refused_while_a_transfer_holds_a_page() -> None:
    """I4, I35: pages that move are not handed to somebody else."""
    allocator = _allocator()
    pages = allocator.allocate_pages(2)
    assert pages is not None
    allocator.hold_to_write(pages[:1])
    with pytest.raises(SlotError):
        allocator.clear()
    assert allocator.free_pages == 4
    allocator.release(pages[:1])
    allocator.clear()
    assert allocator.free_pages == 6


def test_held_pages_cannot_be_freed() -> None:
    """I35: two transfers may hold one page; it can be freed after the second has ended."""
    allocator = _allocator()
    pages = allocator.allocate_pages(2)
    assert pages is not None
    allocator.hold_to_read(pages)
    allocator.hold_to_read(pages[1:])
    allocator.release(pages)
    error = _refused_unchanged(allocator, _slots(0, 1), SlotError)
    assert isinstance(error, SlotError)
    assert error.slots == (P,)
    allocator.release(pages[1:])
    allocator.free(_slots(0, 1))


def test_a_page_has_many_readers_or_one_writer() -> None:
    """I35: what a transfer writes nobody else reads or writes, and what is read nobody writes."""
    allocator = _allocator()
    pages = allocator.allocate_pages(3)
    assert pages is not None
    allocator.hold_to_read(pages[:2])
    for write in (pages, pages[1:]):
        with pytest.raises(SlotError) as caught:
            allocator.hold_to_write(write)
        assert 1 * P in caught.value.slots
        assert 2 * P not in caught.value.slots
    allocator.hold_to_write(pages[2:])
    for hold in (allocator.hold_to_read, allocator.hold_to_write):
        with pytest.raises(SlotError) as caught:
            hold(pages[2:])
        assert caught.value.slots == (2 * P,)
        with pytest.raises(SlotError) as caught:
            hold(np.array([2, 4]))
        assert caught.value.slots == (4 * P,)
    allocator.release(pages[:2])
    allocator.release(pages[2:])
    allocator.hold_to_write(pages)
    allocator.release(pages)
    allocator.give_back(pages)


def test_cost_of_free_follows_what_is_freed() -> None:
    """I6: taking and giving back 64 slots of 6,600,000 needs less than 64 KiB, not a copy of the list."""
    allocator = _allocator(6_600_000, page_slots=1)
    tracemalloc.start()
    try:
        slots = allocator.allocate(64)
        allocator.free(slots)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10
    assert allocator.free_slots == 6_600_000


class _Model(RuleBasedStateMachine):
    """The allocator against sets of pages."""

    @initialize(pages=st.integers(1, 9), reserved=st.integers(0, 2))
    def start(self, pages: int, reserved: int) -> None:
        """A space of some pages, all free but the reserved."""
        self.allocator = _allocator(pages, reserved=reserved)
        self.pages = pages
        self.all = set(range(min(reserved, pages), pages))
        self.used: set[int] = set()

    @rule(count=st.integers(-1, 10))
    def allocate(self, count: int) -> None:
        """Exactly the pages asked for, none of them owned, or None."""
        if count < 1:
            with pytest.raises(SlotError):
                self.allocator.allocate(count * P)
            return
        got = self.allocator.allocate(count * P)
        if count > len(self.all) - len(self.used):
            assert got is None
            return
        assert got is not None
        pages = set((got[::P] // P).tolist())
        assert len(pages) == count
        assert pages <= self.all - self.used
        assert got.tolist() == slots_of(got[::P] // P, P).tolist()
        self.used |= pages

    @rule(pages=st.lists(st.integers(-1, 10), max_size=4))
    def free(self, pages: list[int]) -> None:
        """Refused unless every page is owned and named once."""
        right = len(set(pages)) == len(pages) and set(pages) <= self.used
        if right:
            self.allocator.free(_slots(*pages))
            self.used -= set(pages)
        else:
            with pytest.raises((SlotError, IndicesError)):
                self.allocator.free(_slots(*pages))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free_owned(self, data: st.DataObject) -> None:
        """Owned pages in any order."""
        pages = data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True))
        self.free(pages)

    @rule()
    def clear(self) -> None:
        """All pages are free again."""
        self.allocator.clear()
        self.used = set()

    @invariant()
    def counts_agree(self) -> None:
        """The count is what the sets say."""
        if hasattr(self, "all"):
            assert self.allocator.free_pages == len(self.all) - len(self.used)


TestAllocatorAgainstSets = _Model.TestCase
