"""What may be given as flat bytes, what is refused, and that a refusal has written nothing."""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hicache_core.errors import (
    HiCacheError,
    IndexRangeError,
    IndexTypeError,
    PageSizeError,
    PageTypeError,
    PairingError,
)
from hicache_core.pool import HostPool
from hicache_core.testing.oracle import Bytes, distinct_bytes, first_difference
from tests.core.host_pages import ROWS, host_copy, host_pool

SPEC = ROWS["slots"]
SIZE = SPEC.page_bytes
PAGES = 4
Holder = Callable[[Bytes], Any]


@pytest.fixture
def pool() -> Iterator[HostPool]:
    """Four slots of three buffers."""
    made = host_pool(SPEC, "page_first", pages=PAGES)
    yield made
    made.destroy()


def _mapped(flat: Bytes) -> mmap.mmap:
    mapping = mmap.mmap(-1, max(flat.size, 1))
    mapping[: flat.size] = flat.tobytes()
    return mapping


def _shifted(flat: Bytes) -> np.ndarray:
    """The same bytes, starting one byte after a multiple of 64."""
    memory = np.empty(flat.size + 128, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + 1
    memory[start : start + flat.size] = flat.ravel()
    return memory[start : start + flat.size]


WRITABLE: dict[str, Holder] = {
    "array": lambda flat: flat.copy(),
    "tensor": lambda flat: torch.from_numpy(flat.copy()),
    "bytearray": lambda flat: bytearray(flat.tobytes()),
    "memoryview": lambda flat: memoryview(bytearray(flat.tobytes())),
    "array.array": lambda flat: array.array("B", flat.tobytes()),
    "mapping": _mapped,
    "ctypes": lambda flat: (ctypes.c_uint8 * flat.size).from_buffer_copy(flat.tobytes()),
    "odd start": _shifted,
    "tensor at odd start": lambda flat: torch.from_numpy(_shifted(flat)),
}
READ_ONLY: dict[str, Holder] = {
    "bytes": lambda flat: flat.tobytes(),
    "read-only array": lambda flat: np.frombuffer(flat.tobytes(), dtype=np.uint8),
}


def _page(*labels: object) -> Bytes:
    return distinct_bytes(*labels, nbytes=SIZE)


@pytest.mark.parametrize("holder", [*WRITABLE, *READ_ONLY])
def test_data_may_be_held_by_anything_that_holds_bytes(pool: HostPool, holder: str) -> None:
    """Arrays, tensors and bytes-like objects, at any alignment, for one page and for several."""
    hold = {**WRITABLE, **READ_ONLY}[holder]
    one, two = _page("one"), distinct_bytes("two", nbytes=2 * SIZE)
    pool.storage.set_page(2, hold(one))
    assert first_difference(pool.storage.get_page(2), one) == ""
    pool.storage.set_pages(np.array([3, 1]), hold(two))
    assert first_difference(pool.storage.get_pages(np.array([3, 1])).ravel(), two) == ""


@pytest.mark.parametrize("holder", WRITABLE)
def test_out_may_be_held_by_anything_that_holds_bytes(pool: HostPool, holder: str) -> None:
    """The bytes are in the caller's memory, and the array that comes back is over it."""
    one = WRITABLE[holder](np.zeros(SIZE, dtype=np.uint8))
    back = pool.storage.get_page(2, one)
    assert np.shares_memory(back, np.asarray(memoryview(one) if not torch.is_tensor(one) else one.numpy()))
    assert bytes(back) == pool.storage.get_page(2).tobytes()
    two = WRITABLE[holder](np.zeros(2 * SIZE, dtype=np.uint8))
    both = pool.storage.get_pages(np.array([3, 1]), two)
    assert both.shape == (2, SIZE)
    assert np.shares_memory(both, np.asarray(memoryview(two) if not torch.is_tensor(two) else two.numpy()))
    assert first_difference(both, pool.storage.get_pages(np.array([3, 1]))) == ""


@pytest.mark.parametrize("holder", READ_ONLY)
def test_read_only_memory_is_no_target(pool: HostPool, holder: str) -> None:
    """Bytes that Python takes for constant stay what they are."""
    with pytest.raises(PageTypeError):
        pool.storage.get_page(0, READ_ONLY[holder](_page("kept")))
    with pytest.raises(PageTypeError):
        pool.storage.get_pages(np.array([0]), READ_ONLY[holder](_page("kept")))


BAD_DATA: dict[str, tuple[Callable[[], Any], type[HiCacheError]]] = {
    "a byte short": (lambda: _page()[:-1], PageSizeError),
    "a byte long": (lambda: distinct_bytes(nbytes=SIZE + 1), PageSizeError),
    "nothing": (lambda: b"", PageSizeError),
    "two dimensions": (lambda: _page().reshape(2, -1), PageSizeError),
    "a short tensor": (lambda: torch.zeros(SIZE - 1, dtype=torch.uint8), PageSizeError),
    "int8": (lambda: _page().view(np.int8), PageTypeError),
    "float32": (lambda: np.zeros(SIZE, dtype=np.float32), PageTypeError),
    "booleans": (lambda: np.zeros(SIZE, dtype=np.bool_), PageTypeError),
    "a tensor of int8": (lambda: torch.zeros(SIZE, dtype=torch.int8), PageTypeError),
    "a tensor of bfloat16": (lambda: torch.zeros(SIZE, dtype=torch.bfloat16), PageTypeError),
    "a view of words": (lambda: memoryview(array.array("I", [0] * SIZE)), PageTypeError),
    "every second byte": (lambda: distinct_bytes(nbytes=2 * SIZE)[::2], PageTypeError),
    "bytes backwards": (lambda: _page()[::-1], PageTypeError),
    "one byte expanded": (lambda: torch.zeros(1, dtype=torch.uint8).expand(SIZE), PageTypeError),
    "a tensor elsewhere": (lambda: torch.zeros(SIZE, dtype=torch.uint8, device="meta"), PageTypeError),
    "a sparse tensor": (lambda: torch.zeros(SIZE, dtype=torch.uint8).to_sparse(), PageTypeError),
    "a list": (lambda: [0] * SIZE, PageTypeError),
    "text": (lambda: "0" * SIZE, PageTypeError),
    "None": (lambda: None, PageTypeError),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_other_data_is_refused_and_nothing_is_written(pool: HostPool, case: str) -> None:
    """No buffer of the page has changed, the first one included."""
    make, error = BAD_DATA[case]
    before = host_copy(pool)
    for call in (
        lambda: pool.storage.set_page(1, make()),
        lambda: pool.storage.set_pages(np.array([1]), make()),
    ):
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
    assert all(np.array_equal(*pair) for pair in zip(host_copy(pool), before, strict=True))


@pytest.mark.parametrize("case", sorted(BAD_DATA.keys() - {"None"}))
def test_other_memory_is_refused_as_a_target(pool: HostPool, case: str) -> None:
    """Where a page cannot be stored from, it cannot be fetched to."""
    make, error = BAD_DATA[case]
    for call in (
        lambda: pool.storage.get_page(1, make()),
        lambda: pool.storage.get_pages(np.array([1]), make()),
    ):
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error


def test_a_refused_target_is_as_it_was(pool: HostPool) -> None:
    """Not even the bytes that would have fitted are written."""
    out = _page()[:-1].copy()
    kept = out.copy()
    with pytest.raises(PageSizeError) as caught:
        pool.storage.get_page(1, out)
    assert (caught.value.nbytes, caught.value.expected_bytes) == (SIZE - 1, SIZE)
    assert np.array_equal(out, kept)


def test_pages_side_by_side_are_not_taken_for_pages_in_turn(pool: HostPool) -> None:
    """As many bytes in another shape are other data."""
    with pytest.raises(PageSizeError):
        pool.storage.set_pages(np.array([0, 1]), np.zeros((SIZE, 2), dtype=np.uint8))


@pytest.mark.parametrize("page", [-1, PAGES, 1 << 70])
def test_a_page_that_the_pool_has_not_is_refused(pool: HostPool, page: int) -> None:
    """A negative number does not count from the end."""
    before = host_copy(pool)
    for call in (lambda: pool.storage.get_page(page), lambda: pool.storage.set_page(page, _page())):
        with pytest.raises(IndexRangeError):
            call()
    assert all(np.array_equal(*pair) for pair in zip(host_copy(pool), before, strict=True))


@pytest.mark.parametrize("page", [-1, PAGES, -(1 << 63), (1 << 63) - 1])
def test_one_page_out_of_range_refuses_them_all(pool: HostPool, page: int) -> None:
    """The pages before it in the list are neither read nor written."""
    pages = np.array([0, page])
    before = host_copy(pool)
    for call in (
        lambda: pool.storage.page_pieces(pages),
        lambda: pool.storage.get_pages(pages),
        lambda: pool.storage.set_pages(pages, bytes(2 * SIZE)),
    ):
        with pytest.raises(IndexRangeError):
            call()
    assert all(np.array_equal(*pair) for pair in zip(host_copy(pool), before, strict=True))


@pytest.mark.parametrize(
    "pages",
    [[0, 1], np.array([0, 1], dtype=np.int32), np.array([[0, 1]]), np.array(0), torch.tensor([0.0, 1.0])],
    ids=["list", "int32", "two dimensions", "no dimension", "floats"],
)
def test_pages_are_listed_as_int64(pool: HostPool, pages: Any) -> None:
    """Public calls take one kind of list."""
    for call in (
        lambda: pool.storage.page_pieces(pages),
        lambda: pool.storage.get_pages(pages),
        lambda: pool.storage.set_pages(pages, bytes(2 * SIZE)),
    ):
        with pytest.raises(IndexTypeError):
            call()


@pytest.mark.parametrize("page", [1.0, "1", None, [1]])
def test_one_page_is_a_whole_number(pool: HostPool, page: Any) -> None:
    """What only looks like a number is refused; numpy's whole numbers are welcome."""
    for call in (lambda: pool.storage.get_page(page), lambda: pool.storage.set_page(page, _page())):
        with pytest.raises(IndexTypeError):
            call()
    kept = pool.storage.get_page(1)
    assert np.array_equal(pool.storage.get_page(np.int64(1)), kept)  # type: ignore[arg-type]


def test_a_page_twice_as_a_destination_is_refused(pool: HostPool) -> None:
    """Which data it should have is not for the core to guess."""
    before = host_copy(pool)
    with pytest.raises(PairingError):
        pool.storage.set_pages(np.array([2, 0, 2]), bytes(3 * SIZE))
    assert all(np.array_equal(*pair) for pair in zip(host_copy(pool), before, strict=True))
