"""Slots of one index space: who owns which page, with a guard on every change."""

from __future__ import annotations

import functools
import threading
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hicache_core.errors import IndexRangeError, IndexTypeError, PageContractError, SlotError
from hicache_core.spec.pool import IndexSpace

Int64Array = npt.NDArray[np.int64]
_SHOWN = 8
_FREE = -1
_WRITTEN = 1 << 30


def int64_array(slots: Any, who: str) -> Int64Array:
    """Indices as int64[n] on the CPU, without a copy where they are that already.

    Accepts numpy arrays and CPU tensors; raises IndexTypeError for another dtype, shape or device.
    """
    if hasattr(slots, "numpy") and hasattr(slots, "device"):
        if slots.device.type != "cpu":
            raise _type_error(who, f"a tensor on {slots.device}")
        slots = slots.detach().numpy()
    if not isinstance(slots, np.ndarray) or slots.dtype != np.int64 or slots.ndim != 1:
        got = f"{slots.dtype}{list(slots.shape)}" if isinstance(slots, np.ndarray) else type(slots).__name__
        raise _type_error(who, got)
    return slots


def _type_error(who: str, got: str) -> IndexTypeError:
    return IndexTypeError(
        who=who,
        got=f"indices that are {got}",
        expected="int64[n], one-dimensional, on the CPU",
        remedy="Convert once: a tensor by .to('cpu', torch.int64), a list by numpy.array(it, numpy.int64).",
    )


def pages_of(slots: Any, space: IndexSpace, pages: int, who: str) -> Int64Array:
    """The page numbers that ``slots`` list page by page: int64[len(slots) / page_slots].

    Args:
        slots: int64[n], whole pages in any order, the slots of each page ascending by one.
        space: their index space.
        pages: pages that exist.
        who: who asks, for errors.

    Raises:
        IndexTypeError, PageContractError, IndexRangeError: nothing has been changed.
    """
    listed = int64_array(slots, who)
    size = space.page_slots
    if listed.size % size:
        raise _contract_error(who, space, f"{listed.size} slots")
    numbers: Int64Array = listed[::size] // size
    if not listed.size:
        return numbers
    if _some_outside(numbers, pages):
        outside = listed[::size][(numbers < 0) | (numbers >= pages)]
        got = f"slots {outside[:_SHOWN].tolist()}"
        raise _range_error(who, space, got, f"slots from 0 to {pages * size - 1}")
    if size > 1 and not _steps_by_one(listed, numbers, size):
        table = listed.reshape(-1, size)
        bad = table[(table != slots_of(numbers, size).reshape(-1, size)).any(axis=1)][0]
        raise _contract_error(who, space, f"the run {bad[:_SHOWN].tolist()}{'...' if size > _SHOWN else ''}")
    return numbers


def page_numbers(numbers: Any, space: IndexSpace, pages: int, who: str) -> Int64Array:
    """Page numbers as int64[n], a copy; the arguments and errors of :func:`pages_of`, which takes slots."""
    listed = int64_array(numbers, who).copy()
    if listed.size and _some_outside(listed, pages):
        outside = listed[(listed < 0) | (listed >= pages)]
        raise _range_error(who, space, f"pages {outside[:_SHOWN].tolist()}", f"pages from 0 to {pages - 1}")
    return listed


def _some_outside(numbers: Int64Array, pages: int) -> bool:
    """Whether a number is negative or too large; as unsigned ones, negative numbers are too large as well."""
    return int(np.maximum.reduce(numbers.view(np.uint64))) >= pages


def _range_error(who: str, space: IndexSpace, got: str, expected: str) -> IndexRangeError:
    return IndexRangeError(
        who=who,
        got=got,
        expected=f"{expected} of index space '{space.name}'",
        remedy="Give what this pool handed out.",
    )


def _steps_by_one(listed: Int64Array, numbers: Int64Array, size: int) -> bool:
    """Whether each run of ``size`` slots is page ``numbers[i]``.

    ``size`` integers that ascend and of which the first and the last lie in one page are that page: one
    comparison of neighbours is enough.
    """
    right = np.empty(listed.size, dtype=np.bool_)
    np.greater(listed[1:], listed[:-1], out=right[:-1])
    right[size - 1 :: size] = listed[size - 1 :: size] // size == numbers
    return all_true(right)


def all_true(flags: npt.NDArray[np.bool_]) -> bool:
    """Whether every flag is set; counting them costs a third of ``flags.all()``."""
    return int(np.count_nonzero(flags)) == flags.size


def _contract_error(who: str, space: IndexSpace, got: str) -> PageContractError:
    return PageContractError(
        who=who,
        got=got,
        expected=f"whole pages of {space.page_slots} slots, each starting at a multiple and stepping by one",
        remedy="Transfer whole pages.",
    )


@functools.lru_cache(maxsize=64)
def _within(page_slots: int) -> Int64Array:
    run = np.arange(page_slots, dtype=np.int64)
    run.setflags(write=False)
    return run


def slots_of(pages: Int64Array, page_slots: int) -> Int64Array:
    """The slots of ``pages``, page by page: int64[n * page_slots]."""
    return ((pages * page_slots)[:, None] + _within(page_slots)).ravel()


class PageAllocator:
    """Hands out the pages of an index space and takes them back.

    The free list is a ring, first in first out, so that pages handed out together tend to be neighbours; the
    cost of a call follows the pages it names, not the pool.

    Args:
        space: the index space.
        pages: pages that exist, numbers 0 to pages - 1.
        reserved: pages at the start that are never handed out.
        who: name for errors.
    """

    def __init__(self, space: IndexSpace, pages: int, *, who: str, reserved: int = 0) -> None:
        self.space = space
        self.pages = pages
        self._who = who
        self._reserved = reserved
        self._ring = np.empty(max(pages - reserved, 0), dtype=np.int64)
        # Of each page: FREE, 0 (owned), the number of transfers that read it, or WRITTEN.
        self._state = np.zeros(pages, dtype=np.int32)
        self._lock = threading.RLock()
        self._incomplete: npt.NDArray[np.bool_] | None = None
        self.clear()

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out."""
        return self._count

    @property
    def free_slots(self) -> int:
        """Slots that can be handed out."""
        return self._count * self.space.page_slots

    def clear(self) -> None:
        """Back to the initial state; SlotError where a transfer still holds a page."""
        with self._lock:
            held = np.flatnonzero(self._state > 0)
            if held.size:
                raise self._held_error(held)
            self._ring[:] = np.arange(self._reserved, self._reserved + self._ring.size)
            self._head = 0
            self._count = self._ring.size
            self._state[:] = _FREE
            self._incomplete = None

    def mark_incomplete(self) -> None:
        """From now on the pages that are handed out lack a part, until they are written or given back."""
        with self._lock:
            owned = self._state != _FREE
            if self._incomplete is not None:
                owned |= self._incomplete
            self._incomplete = owned if owned.any() else None

    def complete(self, pages: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether each page (int64[n]) has all its parts: bool[n]."""
        with self._lock:
            if self._incomplete is None:
                return np.ones(pages.size, dtype=np.bool_)
            return ~self._incomplete[pages]

    def _completed(self, pages: Int64Array) -> None:
        if self._incomplete is not None:
            self._incomplete[pages] = False

    def allocate_pages(self, count: int) -> Int64Array | None:
        """``count`` page numbers (int64[count]), or None where fewer are free; SlotError for count < 1."""
        if type(count) is not int or count < 1:
            raise self._error(f"{count!r} pages", "a positive number of whole pages", ())
        with self._lock:
            if count > self._count:
                return None
            pages = self._ring.take(range(self._head, self._head + count), mode="wrap")
            self._head = (self._head + count) % self._ring.size
            self._count -= count
            self._state[pages] = 0
            return pages

    def allocate(self, slots: int) -> Int64Array | None:
        """``slots`` slot numbers of whole pages (int64[slots]), or None where fewer are free.

        Raises:
            SlotError: ``slots`` is not a positive multiple of the page; it is never rounded.
        """
        size = self.space.page_slots
        if type(slots) is not int or slots < 1 or slots % size:
            raise self._error(f"{slots!r} slots", f"a positive multiple of {size}", ())
        numbers = self.allocate_pages(slots // size)
        return None if numbers is None else slots_of(numbers, self.space.page_slots)

    def free(self, slots: Any) -> None:
        """Take back the slots of whole pages; see :meth:`give_back`."""
        self.give_back(self.pages_of(slots))

    def pages_of(self, slots: Any) -> Int64Array:
        """The page numbers that whole pages of slots list; IndicesError where they do not."""
        return pages_of(slots, self.space, self.pages, self._who)

    def give_back(self, pages: Int64Array) -> None:
        """Take back page numbers (int64[n]); freeing nothing is nothing.

        Raises:
            SlotError: a page out of range, not handed out, named twice, or held; nothing changed.
        """
        if not pages.size:
            return
        with self._lock:
            self.check_returnable(pages)
            self._state[pages] = _FREE
            self._completed(pages)
            tail = self._head + self._count
            self._ring.put(range(tail, tail + pages.size), pages, mode="wrap")
            self._count += pages.size

    def check_returnable(self, pages: Int64Array) -> None:
        """Raise what :meth:`give_back` would raise for these page numbers."""
        if not pages.size:
            return
        if pages.min() < 0 or pages.max() >= self.pages:
            outside = pages[(pages < 0) | (pages >= self.pages)]
            raise self._error(f"pages {self._shown(outside)}", f"pages 0 to {self.pages - 1}", outside)
        state = self._state[pages]
        if (state == _FREE).any():
            raise self._stray_error(pages[state == _FREE])
        if np.unique(pages).size != pages.size:
            values, counts = np.unique(pages, return_counts=True)
            twice = values[counts > 1]
            raise self._error(f"pages {self._shown(twice)} twice in one call", "each page once", twice)
        if state.any():
            raise self._held_error(pages[state > 0])

    def owns(self, pages: Int64Array) -> bool:
        """Whether every one of the pages is handed out."""
        return not (self._state[pages] == _FREE).any()

    def hold_to_read(self, pages: Int64Array) -> None:
        """Keep pages from being written or given back while a transfer reads them; others may read as well.

        Raises:
            SlotError: a page is not handed out, lacks a part, or a transfer writes it; nothing changed.
        """
        with self._lock:
            if self._incomplete is not None and self._incomplete[pages].any():
                lacking = pages[self._incomplete[pages]]
                raise self._error(
                    f"pages {self._shown(lacking)} from before a pool joined", "pages with all parts", lacking
                )
            state = self._state[pages]
            # As unsigned numbers, free pages lie above written ones.
            if state.size and np.maximum.reduce(state.view(np.uint32)) >= _WRITTEN:
                self._refuse(pages, (state == _FREE) | (state == _WRITTEN))
            self._state[pages] = state + 1

    def hold_to_write(self, pages: Int64Array) -> None:
        """Keep distinct pages from being read, written or given back while a transfer writes them.

        Raises:
            SlotError: a page is not handed out, or a transfer reads or writes it; nothing changed.
        """
        with self._lock:
            state = self._state[pages]
            if np.count_nonzero(state):
                self._refuse(pages, state != 0)
            self._state[pages] = _WRITTEN
            self._completed(pages)

    def release(self, pages: Int64Array) -> None:
        """End one hold of each page."""
        with self._lock:
            state = self._state[pages]
            self._state[pages] = np.where(state == _WRITTEN, 0, state - 1)

    def _refuse(self, pages: Int64Array, bad: npt.NDArray[np.bool_]) -> NoReturn:
        stray = pages[bad & (self._state[pages] == _FREE)]
        raise self._stray_error(stray) if stray.size else self._held_error(pages[bad])

    def _stray_error(self, stray: Int64Array) -> SlotError:
        return self._error(f"pages {self._shown(stray)} that nobody owns", "allocated pages", stray)

    def _held_error(self, held: Int64Array) -> SlotError:
        return self._error(
            f"pages {self._shown(held)} that a transfer holds",
            "pages whose transfers are acknowledged, by the wait or the poll of their tickets",
            held,
        )

    def _shown(self, pages: Int64Array) -> str:
        more = "..." if pages.size > _SHOWN else ""
        return f"{pages[:_SHOWN].tolist()}{more}"

    def _error(self, got: str, expected: str, pages: Any) -> SlotError:
        slots = [int(page) * self.space.page_slots for page in pages]
        return SlotError(
            who=self._who,
            got=got,
            expected=expected,
            remedy=f"Nothing was changed; {self.free_slots} slots are free.",
            slots=slots,
        )
