"""The storage side of a host pool: where a page lies for zero-copy engines, and pages as flat bytes.

A flat page holds every buffer in the order of the declaration, each in the order of the host layout::

    layer_first        layers pieces of page_rows * row_bytes, layer after layer
    page_first         one piece: the rows, the layers of each
    page_first_direct  one piece: the layers, the rows of each

A piece is a copy unit, which no registration cuts, so an address is never carried into the next registration.
All addresses are CPU addresses. Nothing here waits for a transfer: the caller holds the pages that it names.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from attrs import frozen

from hicache_core.errors import HostMemoryError, IndexRangeError, IndexTypeError, PairingError
from hicache_core.memory.flat import Bytes, flat_bytes
from hicache_core.memory.host import HostBuffer
from hicache_core.memory.slots import int64_array
from hicache_core.memory.tables import HostTable, Int64Array, host_table
from hicache_core.spec import Layout, PoolSpec, page_format

ALIGNED_WITHOUT_BYTES = 1 << 62
"""What a pool without bytes is aligned to: the largest power of two of an int64."""

_BATCH_BYTES = 1 << 20
_SHOWN = 8


@frozen(kw_only=True, eq=False)
class PagePieces:
    """Where some pages lie; piece j of page i is ``nbytes[i, j]`` bytes of the host at ``addresses[i, j]``.

    Args:
        addresses: int64[n, pieces], CPU addresses, the pieces in the order of a flat page.
        nbytes: int64[n, pieces], their lengths.
    """

    addresses: Int64Array
    nbytes: Int64Array


class BufferSegment(NamedTuple):
    """One registration of a buffer: its name, CPU address and length in bytes."""

    buffer: str
    address: int
    nbytes: int


@frozen(kw_only=True, eq=False)
class _Part:
    """One buffer's share of a flat page: ``pieces`` runs of ``piece_bytes``, each of ``layers`` layers."""

    buffer: HostBuffer
    table: HostTable
    columns: slice
    pieces: int
    piece_bytes: int
    layers: int

    def rows(self) -> Bytes:
        """All pages as a view of the buffer: uint8[pages, pieces, piece_bytes]."""
        grid, strides = self.buffer.grid, self.buffer.strides
        return np.ndarray(
            (grid.pages, self.pieces, self.piece_bytes),
            dtype=np.uint8,
            buffer=self.buffer.memory.view,
            strides=(strides.page, strides.layer * self.layers, 1),
        )

    def share(self, flat: Bytes) -> Bytes:
        """The bytes of this buffer in flat pages: uint8[..., pieces, piece_bytes], a view."""
        return flat[..., self.columns].reshape(*flat.shape[:-1], self.pieces, self.piece_bytes)

    def addresses(self, pages: Int64Array) -> Int64Array:
        """The CPU address of each piece: int64[n, pieces]."""
        groups = self.table.groups_of(pages)
        offsets = self.table.page_offsets(pages, groups)
        return self.table.bases[groups, :: self.layers] + offsets[:, None]


def _parts(buffers: Sequence[HostBuffer]) -> tuple[_Part, ...]:
    made: list[_Part] = []
    start = 0
    for b in buffers:
        if not b.grid.layers:
            continue
        unit = b.strides.copy_unit
        nbytes = b.grid.layers * b.grid.page_rows * b.grid.row_bytes
        made.append(
            _Part(
                buffer=b,
                table=host_table(b.memory.segments, b.grid, b.strides),
                columns=slice(start, start + nbytes),
                pieces=nbytes // unit,
                piece_bytes=unit,
                layers=b.grid.layers * unit // nbytes,
            )
        )
        start += nbytes
    return tuple(made)


class PageStorage:
    """The pages of one host pool, for storage engines and for disaggregation.

    A pool without bytes answers everything: zero pieces, empty pages, no segments.

    Args:
        spec: the pool's declaration.
        layout: its host layout.
        pages: its host pages.
        buffers: its host buffers, in the order of the declaration.

    Raises (any call that touches the pages):
        HostMemoryError: the pool was destroyed.
    """

    def __init__(self, spec: PoolSpec, layout: Layout, pages: int, buffers: Sequence[HostBuffer]) -> None:
        self._who = f"storage of pool '{spec.pool}' ({spec.family})"
        self._pages = pages
        self._parts = _parts(buffers)
        self.page_bytes = spec.page_bytes
        """Bytes of a flat page."""
        self.page_format = page_format(spec, layout)
        """What flat pages follow from, for a :class:`~hicache_core.spec.StorageKey`."""

    def page_pieces(self, pages: Any) -> PagePieces:
        """Where every byte of some pages lies, all buffers of each.

        Args:
            pages: int64[n], CPU, page numbers in any order; a page may occur twice.

        Raises:
            IndexTypeError, IndexRangeError: these are not pages of the pool.
        """
        parts = self._live_parts()
        listed = self._listed(pages)
        sizes = [part.piece_bytes for part in parts for _ in range(part.pieces)]
        addresses = [np.empty((listed.size, 0), dtype=np.int64), *(part.addresses(listed) for part in parts)]
        return PagePieces(
            addresses=np.concatenate(addresses, axis=1),
            nbytes=np.tile(np.array(sizes, dtype=np.int64), (listed.size, 1)),
        )

    def get_page(self, page: int, out: Any = None) -> Bytes:
        """A page as flat bytes: uint8[page_bytes], a copy.

        Args:
            page: page number.
            out: where the bytes go: a writable contiguous uint8[page_bytes] on the CPU (numpy, torch or a
                bytes-like object), at any alignment; a new array where absent.

        Returns:
            The new array, or ``out`` as an array over the same memory.

        Raises:
            IndexTypeError, IndexRangeError: this is no page of the pool.
            PageTypeError, PageSizeError: ``out`` cannot take it; nothing was written.
        """
        parts = self._live_parts()
        number = self._number(page)
        flat = self._target(out, (self.page_bytes,))
        for part in parts:
            part.share(flat)[...] = part.rows()[number]
        return flat

    def set_page(self, page: int, data: Any) -> None:
        """Overwrite a page with flat bytes; no other byte of the pool changes.

        Args:
            page: page number.
            data: contiguous uint8[page_bytes] on the CPU (numpy, torch or a bytes-like object), at any
                alignment.

        Raises:
            IndexTypeError, IndexRangeError: this is no page of the pool.
            PageTypeError, PageSizeError: ``data`` is no flat page; nothing was written.
        """
        parts = self._live_parts()
        number = self._number(page)
        flat = flat_bytes(data, (self.page_bytes,), self._who)
        for part in parts:
            part.rows()[number] = part.share(flat)

    def get_pages(self, pages: Any, out: Any = None) -> Bytes:
        """Some pages as flat bytes: uint8[n, page_bytes], copies; beside them about 1 MiB or a page is used.

        Args:
            pages: int64[n], CPU, page numbers in any order; a page may occur twice.
            out: as for :meth:`get_page`, uint8[n, page_bytes] or the same bytes in one dimension.

        Returns:
            uint8[n, page_bytes], new or over the memory of ``out``.

        Raises:
            IndexTypeError, IndexRangeError: these are not pages of the pool.
            PageTypeError, PageSizeError: ``out`` cannot take them; nothing was written.
        """
        parts = self._live_parts()
        listed = self._listed(pages)
        flat = self._target(out, (listed.size, self.page_bytes))
        for part in parts:
            rows, share = part.rows(), part.share(flat)
            # A gather passes through memory of its own; a piece of it at a time stays in the cache.
            step = max(_BATCH_BYTES // (part.pieces * part.piece_bytes), 1)
            for first in range(0, listed.size, step):
                share[first : first + step] = rows[listed[first : first + step]]
        return flat

    def set_pages(self, pages: Any, data: Any) -> None:
        """Overwrite some pages with flat bytes; no other byte of the pool changes.

        Args:
            pages: int64[n], CPU, distinct page numbers in any order.
            data: as for :meth:`set_page`, uint8[n, page_bytes] or the same bytes in one dimension.

        Raises:
            IndexTypeError, IndexRangeError: these are not pages of the pool.
            PairingError: a page occurs twice.
            PageTypeError, PageSizeError: ``data`` does not hold these pages; nothing was written.
        """
        parts = self._live_parts()
        listed = self._listed(pages)
        if np.unique(listed).size != listed.size:
            raise PairingError(
                who=self._who,
                got=f"{listed.size} pages of which {np.unique(listed).size} are distinct, as destinations",
                expected="each destination once",
                remedy="Remove the duplicates.",
            )
        flat = flat_bytes(data, (listed.size, self.page_bytes), self._who)
        for part in parts:
            part.rows()[listed] = part.share(flat)

    def empty_page(self) -> Bytes:
        """A flat page of zeros, new: uint8[page_bytes]."""
        return np.zeros(self.page_bytes, dtype=np.uint8)

    def contiguous_buffers(self) -> tuple[BufferSegment, ...]:
        """The mapped host memory of the pool, for registration with an engine: every byte exactly once."""
        return tuple(
            BufferSegment(part.buffer.spec.name, segment.host.start, segment.host.nbytes)
            for part in self._live_parts()
            for segment in part.buffer.memory.segments
        )

    def stride_alignment(self) -> int:
        """The largest power of two that divides the address of every row of every page, in bytes.

        ALIGNED_WITHOUT_BYTES for a pool without bytes: the least over several pools is theirs.
        """
        common = ALIGNED_WITHOUT_BYTES
        for part in self._live_parts():
            strides = part.buffer.strides
            starts = [segment.host.start for segment in part.buffer.memory.segments]
            if starts:
                common = math.gcd(common, *starts, strides.page, strides.layer, strides.row)
        return common

    def _live_parts(self) -> tuple[_Part, ...]:
        if any(part.buffer.memory.view.size != part.buffer.grid.nbytes for part in self._parts):
            raise HostMemoryError(
                who=self._who,
                got="pages of a pool that was destroyed",
                expected="host memory",
                remedy="Finish with the pages before the controller is closed.",
            )
        return self._parts

    def _number(self, page: int) -> int:
        try:
            number = operator.index(page)
        except TypeError:
            raise IndexTypeError(
                who=self._who,
                got=f"page {page!r}",
                expected="a whole number",
                remedy="Give one page number, or several to the calls for many pages.",
            ) from None
        if not 0 <= number < self._pages:
            raise self._outside([number])
        return number

    def _listed(self, pages: Any) -> Int64Array:
        listed = int64_array(pages, self._who)
        outside = listed[(listed < 0) | (listed >= self._pages)]
        if outside.size:
            raise self._outside(outside[:_SHOWN].tolist())
        return listed

    def _outside(self, pages: list[int]) -> IndexRangeError:
        return IndexRangeError(
            who=self._who,
            got=f"pages {pages}",
            expected=f"pages from 0 to {self._pages - 1}",
            remedy="Give pages that this pool has.",
        )

    def _target(self, out: Any, shape: tuple[int, ...]) -> Bytes:
        if out is None:
            return np.empty(shape, dtype=np.uint8)
        return flat_bytes(out, shape, self._who, writable=True)
