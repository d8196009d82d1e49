"""Rows for tests of kernels: registrations far apart, guarded and poisoned, and where each byte is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hicache_core.memory.addresses import Provenance
from hicache_core.memory.tables import KernelTable
from hicache_core.spec.layout import RowGrid

Bytes = npt.NDArray[np.uint8]
GUARD_BYTES = 64
POISON = 0xEE


class Rows:
    """One side of a buffer, in an allocation per registration.

    Args:
        shape: layers, rows of a page, bytes of a row.
        pages: pages of each registration.
        row_gap, page_gap: bytes that belong to nobody after each row and after each page.
        layers_inside: whether a row of all layers lies together, as in page_first; else layer by layer.
        shift: bytes by which every address misses a multiple of 64.
        seed: of the content; None poisons it.
        provenance, device: of the table.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        pages: Sequence[int],
        *,
        row_gap: int = 0,
        page_gap: int = 0,
        layers_inside: bool = False,
        shift: int = 0,
        seed: int | None = None,
        provenance: Provenance = Provenance.DEVICE_MEMORY,
        device: int = 0,
    ) -> None:
        self.layers, self.page_rows, self.row_bytes = shape
        self.pages = pages
        span = self.row_bytes + row_gap
        self._row_stride = span * self.layers if layers_inside else span
        self._page_stride = self._row_stride * self.page_rows + page_gap
        draw = np.random.default_rng(seed)
        self.parts: list[Bytes] = []
        bases, firsts = [], [0]
        for count in pages:
            run = self._page_stride * count
            total = GUARD_BYTES * 2 + run * (1 if layers_inside else self.layers)
            # Larger than wanted, so that it starts at a multiple of 64.
            room = np.full(total + 128, POISON, dtype=np.uint8)
            start = -room.ctypes.data % 64 + shift
            part = room[start : start + total]
            if seed is not None:
                part[...] = draw.integers(0, 256, total, dtype=np.uint8)
            self.parts.append(part)
            step = span if layers_inside else run
            bases.append([part.ctypes.data + GUARD_BYTES + step * layer for layer in range(self.layers)])
            firsts.append(firsts[-1] + count)
        self._firsts = firsts[:-1]
        self._bases = bases
        self.table = KernelTable(
            bases=bases,
            homes=[[home] * self.layers for home in range(len(pages))],
            first_pages=self._firsts,
            grid=RowGrid(
                pages=sum(pages), layers=self.layers, page_rows=self.page_rows, row_bytes=self.row_bytes
            ),
            page_stride=self._page_stride,
            row_stride=self._row_stride,
            device=device,
            provenance=provenance,
        )

    def row(self, page: int, layer: int, row: int, parts: Sequence[Bytes] | None = None) -> Bytes:
        """The bytes of a row, in what the side holds now or in a copy of it."""
        for number, count in enumerate(self.pages):
            if page < count:
                part = (parts or self.parts)[number]
                start = self._bases[number][layer] - self.parts[number].ctypes.data
                start += page * self._page_stride + row * self._row_stride
                return part[start : start + self.row_bytes]
            page -= count
        raise IndexError(page)

    def copy(self) -> list[Bytes]:
        """What the side holds, guards and gaps included."""
        return [part.copy() for part in self.parts]

    def holds(self, expected: Sequence[Bytes]) -> bool:
        """Whether every byte is as expected."""
        return all(np.array_equal(one, other) for one, other in zip(self.parts, expected, strict=True))
