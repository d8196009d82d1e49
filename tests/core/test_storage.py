"""Flat pages and page addresses, for every layout and kind of row, against an oracle written apart."""

from __future__ import annotations

import ctypes
import tracemalloc
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from hicache_core.errors import HostMemoryError, IndexRangeError
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.host import HostBuffer, HostMemory
from hicache_core.memory.tables import Segment
from hicache_core.pool import HostPool
from hicache_core.spec import LAYOUTS, RowGrid, RowUnit, layout_named
from hicache_core.storage import ALIGNED_WITHOUT_BYTES, PageStorage
from hicache_core.testing.oracle import distinct_bytes, first_difference
from hicache_core.testing.rigs import host_shape
from hicache_core.testing.stand_ins import pool_spec
from tests.core.host_mappings import flags_at
from tests.core.host_pages import (
    ROWS,
    WITHOUT_BYTES,
    cut_pages,
    flat_page,
    host_copy,
    host_pool,
    page_runs,
    pages_at_cuts,
    row_offsets,
    write_flat_page,
)

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_row = pytest.mark.parametrize("rows", ROWS)


def _numbers(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int64)


def _in_registrations(rows: str, layout: str) -> HostPool:
    """A pool of which every buffer lies in several registrations."""
    pool = host_pool(ROWS[rows], layout, pages=cut_pages(ROWS[rows], layout), limit=1)
    assert min(len(b.memory.segments) for b in pool.buffers) >= 2
    return pool


@every_row
@every_layout
def test_a_flat_page_holds_every_row_of_every_buffer(layout: str, rows: str) -> None:
    """I42: the buffers as declared, each in the order of the host layout, one page or many at once."""
    pool = _in_registrations(rows, layout)
    hosts = host_copy(pool)
    pages = pages_at_cuts(pool)
    expected = [flat_page(pool, layout, hosts, page) for page in pages]
    assert expected[0].size == pool.spec.page_bytes == pool.storage.page_bytes
    for page, flat in zip(pages, expected, strict=True):
        assert first_difference(pool.storage.get_page(page), flat) == ""
    assert first_difference(pool.storage.get_pages(_numbers(*pages)), np.stack(expected)) == ""
    backwards = torch.tensor([*pages[::-1], pages[0]])
    assert first_difference(pool.storage.get_pages(backwards), np.stack([*expected[::-1], expected[0]])) == ""
    pool.destroy()


@every_row
@every_layout
def test_pieces_are_the_flat_page_at_cpu_addresses(layout: str, rows: str) -> None:
    """I42: what stands at the addresses, one piece after another, is the flat page."""
    pool = _in_registrations(rows, layout)
    starts = {b.spec.name: b.memory.range.start for b in pool.buffers}
    pages = pages_at_cuts(pool)[::-1]
    found = pool.storage.page_pieces(_numbers(*pages))
    assert found.addresses.dtype == found.nbytes.dtype == np.int64
    assert found.addresses.shape == found.nbytes.shape
    for page, addresses, sizes in zip(pages, found.addresses.tolist(), found.nbytes.tolist(), strict=True):
        runs = page_runs(pool, layout, page)
        assert addresses == [starts[buffer] + offset for buffer, offset, _ in runs]
        assert sizes == [nbytes for _, _, nbytes in runs]
        read = b"".join(ctypes.string_at(at, n) for at, n in zip(addresses, sizes, strict=True))
        assert read == pool.storage.get_page(page).tobytes()
    pool.destroy()


@every_row
@every_layout
def test_no_piece_reaches_into_the_next_registration(layout: str, rows: str) -> None:
    """I31: each piece lies whole in one registration, and no address is that of an alias."""
    pool = _in_registrations(rows, layout)
    found = pool.storage.page_pieces(np.arange(pool.pages))
    cpu = [segment.host for b in pool.buffers for segment in b.memory.segments]
    aliases = [pool.runtime.alias(seen, 0) for seen in cpu]
    starts, ends = found.addresses.ravel(), (found.addresses + found.nbytes).ravel()
    whole = [(starts >= seen.start) & (ends <= seen.start + seen.nbytes) for seen in cpu]
    assert (np.sum(whole, axis=0) == 1).all()
    assert not any(((starts >= a.start) & (starts < a.start + a.nbytes)).any() for a in aliases)
    pool.destroy()


@every_layout
def test_an_address_follows_its_own_registration(layout: str) -> None:
    """I31: with registrations that lie apart, each address is reckoned from the start of its own."""
    spec = pool_spec(64, page_slots=2, layer_ids=(0, 1))
    grid = RowGrid(pages=8, layers=2, page_rows=2, row_bytes=64)
    strides = layout_named(layout).strides(grid)
    step = grid.nbytes // 4
    bases = [900_000, 100_000, 700_000, 300_000]
    segments = [
        Segment(offset=i * step, host=HostRange(start=base, nbytes=step)) for i, base in enumerate(bases)
    ]
    memory = SimpleNamespace(segments=segments, view=np.empty(grid.nbytes, dtype=np.uint8))
    buffer = HostBuffer(spec=spec.buffers[0], grid=grid, strides=strides, memory=cast("HostMemory", memory))
    storage = PageStorage(spec, layout_named(layout), 8, [buffer])
    pool = host_pool(spec, layout, pages=8)
    found = storage.page_pieces(np.arange(8)).addresses.tolist()
    assert found == [
        [bases[offset // step] + offset % step for _, offset, _ in page_runs(pool, layout, page)]
        for page in range(8)
    ]
    assert storage.stride_alignment() == 32 == min(base & -base for base in bases)
    pool.destroy()


@every_row
@every_layout
def test_a_page_that_is_set_changes_no_other_byte(layout: str, rows: str) -> None:
    """I42: all rows of the page are those of the data, and every other byte is what it was."""
    pool = _in_registrations(rows, layout)
    hosts = host_copy(pool)
    for page in pages_at_cuts(pool):
        flat = distinct_bytes("set", page, nbytes=pool.spec.page_bytes)
        pool.storage.set_page(page, flat)
        write_flat_page(pool, layout, hosts, page, flat)
        for b, expected in zip(pool.buffers, hosts, strict=True):
            assert first_difference(b.memory.view, expected) == ""
        assert first_difference(pool.storage.get_page(page), flat) == ""
    pool.destroy()


@every_row
@every_layout
def test_pages_that_are_set_together_change_no_other_byte(layout: str, rows: str) -> None:
    """Data i goes to page i of the list, in whatever order the list is."""
    pool = _in_registrations(rows, layout)
    hosts = host_copy(pool)
    pages = np.random.default_rng(1).permutation(pages_at_cuts(pool))
    data = distinct_bytes("set", nbytes=len(pages) * pool.spec.page_bytes).reshape(len(pages), -1)
    pool.storage.set_pages(pages, data)
    for page, flat in zip(pages.tolist(), data, strict=True):
        write_flat_page(pool, layout, hosts, page, flat)
    for b, expected in zip(pool.buffers, hosts, strict=True):
        assert first_difference(b.memory.view, expected) == ""
    pool.destroy()


@pytest.mark.parametrize("limit", [1, 1 << 36])
@every_row
@every_layout
def test_the_memory_to_register_is_every_byte_once(layout: str, rows: str, limit: int) -> None:
    """The segments of a buffer follow one another over all of its bytes, and are what was registered."""
    pool = host_pool(ROWS[rows], layout, pages=cut_pages(ROWS[rows], layout), limit=limit)
    found = pool.storage.contiguous_buffers()
    for b in pool.buffers:
        own = [(segment.address, segment.nbytes) for segment in found if segment.buffer == b.spec.name]
        ends = [b.memory.range.start, *(address + nbytes for address, nbytes in own)]
        assert [address for address, _ in own] == ends[:-1]
        assert ends[-1] == b.memory.range.start + host_shape(pool, b.spec).nbytes
    assert sum(segment.nbytes for segment in found) == pool.nbytes
    pool.destroy()


@pytest.mark.parametrize("rows", [*ROWS, "whole sectors"])
@every_layout
def test_alignment_is_that_of_the_least_aligned_row(layout: str, rows: str) -> None:
    """Every row of every page of every buffer starts at a multiple, and not all at one of its double."""
    spec = ROWS[rows] if rows in ROWS else pool_spec(4096, 12288, page_slots=2, unit=RowUnit.PAGE)
    pool = host_pool(spec, layout, pages=9)
    addresses = [
        b.memory.range.start + at
        for b in pool.buffers
        for page in range(9)
        for at in row_offsets(layout, host_shape(pool, b.spec), page)
    ]
    alignment = pool.storage.stride_alignment()
    assert alignment == min(address & -address for address in addresses)
    assert (rows == "whole sectors") == (alignment % 4096 == 0)
    pool.destroy()


@pytest.mark.parametrize("rows", WITHOUT_BYTES)
@every_layout
def test_a_pool_without_bytes_answers_everything(layout: str, rows: str) -> None:
    """I45: zero pieces, empty pages and no segments; its pages still have numbers."""
    pool = host_pool(WITHOUT_BYTES[rows], layout, pages=5)
    storage = pool.storage
    pieces = storage.page_pieces(_numbers(4, 0))
    assert pieces.addresses.shape == pieces.nbytes.shape == (2, 0)
    assert storage.page_bytes == storage.get_page(4).size == storage.empty_page().size == 0
    assert storage.get_pages(_numbers(4, 0)).shape == (2, 0)
    storage.set_page(4, b"")
    storage.set_pages(_numbers(4, 0), np.empty((2, 0), dtype=np.uint8))
    assert storage.contiguous_buffers() == ()
    assert storage.stride_alignment() == ALIGNED_WITHOUT_BYTES == 1 << 62
    assert storage.page_format
    with pytest.raises(IndexRangeError):
        storage.get_page(5)
    pool.destroy()


@pytest.mark.parametrize("rows", [*ROWS, *WITHOUT_BYTES])
@every_layout
def test_no_pages_and_a_pool_of_no_pages_are_legal(layout: str, rows: str) -> None:
    """An empty list has empty answers of the right shape."""
    spec = {**ROWS, **WITHOUT_BYTES}[rows]
    pieces = sum(n > 0 for _, _, n in page_runs(host_pool(spec, layout, pages=1), layout, 0))
    for pages in (0, 3):
        pool = host_pool(spec, layout, pages=pages)
        before = host_copy(pool)
        assert pool.storage.page_pieces(_numbers()).addresses.shape == (0, pieces)
        assert pool.storage.get_pages(_numbers()).shape == (0, spec.page_bytes)
        pool.storage.set_pages(_numbers(), b"")
        assert all(np.array_equal(*pair) for pair in zip(host_copy(pool), before, strict=True))
        assert sum(segment.nbytes for segment in pool.storage.contiguous_buffers()) == pool.nbytes
        pool.destroy()


def test_an_empty_page_is_zeros_of_its_own() -> None:
    """Writing to one changes no other and no page of the pool."""
    pool = host_pool(ROWS["k and v"], "page_first", pages=2)
    before = host_copy(pool)
    page = pool.storage.empty_page()
    assert page.dtype == np.uint8
    assert page.shape == (pool.spec.page_bytes,)
    assert not page.any()
    page[...] = 1
    assert not pool.storage.empty_page().any()
    assert all(np.array_equal(*pair) for pair in zip(host_copy(pool), before, strict=True))
    pool.destroy()


def test_a_page_that_was_read_is_a_copy() -> None:
    """What happens to the pool later does not reach it."""
    pool = host_pool(ROWS["k and v"], "page_first", pages=2)
    one, many = pool.storage.get_page(1), pool.storage.get_pages(_numbers(1))
    kept = one.copy()
    pool.storage.set_page(1, pool.storage.empty_page())
    assert np.array_equal(one, kept)
    assert np.array_equal(many[0], kept)
    pool.destroy()


@every_layout
def test_reading_many_pages_needs_little_memory_of_its_own(layout: str) -> None:
    """Beside the result, 16 MiB out of 48 are read with less than 3 MiB."""
    pool = host_pool(pool_spec(256, page_slots=4, layer_ids=range(4)), layout, pages=3 << 12)
    pages = np.arange(0, pool.pages, 3)
    out = np.empty((pages.size, pool.spec.page_bytes), dtype=np.uint8)
    assert out.nbytes == 16 << 20
    tracemalloc.start()
    try:
        pool.storage.get_pages(pages, out)
        pool.storage.set_pages(pages, out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20
    hosts = host_copy(pool)
    for i in (0, 1, 255, 256, 257, pages.size - 1):
        assert first_difference(out[i], flat_page(pool, layout, hosts, int(pages[i]))) == ""
    pool.destroy()


def test_a_destroyed_pool_hands_out_no_address() -> None:
    """Where its pages were, other memory may be; and its storage keeps no memory mapped."""
    pool = host_pool(ROWS["k and v"], "layer_first", pages=3)
    storage = pool.storage
    flat = storage.get_page(0)
    start = pool.buffers[0].memory.range.start
    assert "dc" in flags_at(start)
    pool.destroy()
    assert "dc" not in flags_at(start)
    for call in (
        lambda: storage.page_pieces(_numbers(0)),
        lambda: storage.get_page(0),
        lambda: storage.get_pages(_numbers(0)),
        lambda: storage.set_page(0, flat),
        lambda: storage.set_pages(_numbers(0), flat),
        storage.contiguous_buffers,
        storage.stride_alignment,
    ):
        with pytest.raises(HostMemoryError):
            call()
