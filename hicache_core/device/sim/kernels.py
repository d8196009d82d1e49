"""Kernels of the simulator: vectorised, blind to all but tables, numbers and visible memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_core.device.base import GatherUnits, HostStores, MoveRows, MoveTokens
from hicache_core.device.sim.memory import SimMemory, Unseen
from hicache_core.device.sim.streams import SimStream
from hicache_core.errors import DeviceFault
from hicache_core.memory.tables import Int64Array, KernelTable
from hicache_core.spec.pool import Span

_SLICE_BYTES = 4096
"""From this row size on, one slice a page is faster than one gather of all."""

Rows = npt.NDArray[Any]


class SimKernels:
    """The kernels of simulated devices.

    Args:
        memory: the machine's memory.
        submit: queues a launch on a stream.

    Attributes:
        host_stores: launches so far that store to host memory.
    """

    def __init__(self, memory: SimMemory, submit: Callable[[SimStream, Callable[[], None]], None]) -> None:
        self._memory = memory
        self._submit = submit
        self._stores = HostStores()

    @property
    def host_stores(self) -> int:
        """See :class:`~hicache_core.device.base.Kernels`; counted as they are queued."""
        return self._stores.count

    def gather_units(self, launch: GatherUnits, stream: SimStream) -> None:
        """Queue the relayout kernel; page numbers are read when it runs."""
        if launch.units:
            self._stores.note(launch.target)
        self._submit(stream, lambda: self._gather(launch, stream.device))

    def move_rows(self, launch: MoveRows, stream: SimStream) -> None:
        """Queue the row kernel; page numbers are read when it runs."""
        if len(launch.target_pages) and launch.layers:
            self._stores.note(launch.target)
        self._submit(stream, lambda: self._move(launch, stream.device))

    def move_tokens(self, launch: MoveTokens, stream: SimStream) -> None:
        """Queue the token kernel; token numbers are read when it runs, and one that is not there faults."""
        if len(launch.target_tokens) and launch.layers:
            self._stores.note(launch.target)
        self._submit(stream, lambda: self._move_tokens(launch, stream.device))

    def _gather(self, launch: GatherUnits, device: int) -> None:
        grid = launch.source.grid
        pages = launch.pages.numpy()
        units = np.arange(launch.first_unit, launch.first_unit + launch.units, dtype=np.int64)
        rows, layers = np.divmod(units, grid.layers)
        numbers, tokens = np.divmod(rows, grid.page_rows)
        target = self._see(launch.target.start, launch.units * grid.row_bytes, device, "gather_units")
        out = target.reshape(launch.units, grid.row_bytes)
        for layer in range(grid.layers):
            chosen = np.flatnonzero(layers == layer)
            if chosen.size:
                wanted = pages[numbers[chosen]]
                source = self._rows(launch.source, 0, layer, wanted, device, "gather_units")
                lowest = int(wanted.min())
                _gather_rows(out, chosen, source, wanted - lowest, tokens[chosen])

    def _move(self, launch: MoveRows, device: int) -> None:
        target_pages, source_pages = launch.target_pages.numpy(), launch.source_pages.numpy()
        target_groups = launch.target.groups_of(target_pages)
        source_groups = launch.source.groups_of(source_pages)
        for group in {*zip(target_groups.tolist(), source_groups.tolist(), strict=True)}:
            chosen = (target_groups == group[0]) & (source_groups == group[1])
            to, frm = target_pages[chosen], source_pages[chosen]
            for layer in launch.layers:
                target = self._rows(launch.target, group[0], layer, to, device, "move_rows")
                source = self._rows(launch.source, group[1], layer, frm, device, "move_rows")
                _move_pages(target, to - to.min(), source, frm - frm.min())

    def _move_tokens(self, launch: MoveTokens, device: int) -> None:
        target_tokens, source_tokens = launch.target_tokens.numpy(), launch.source_tokens.numpy()
        kept = (target_tokens >= 0) & (source_tokens >= 0)
        to = _located(launch.target, target_tokens[kept], launch, device)
        frm = _located(launch.source, source_tokens[kept], launch, device)
        to_groups, from_groups = launch.target.groups_of(to[0]), launch.source.groups_of(frm[0])
        for group in {*zip(to_groups.tolist(), from_groups.tolist(), strict=True)}:
            chosen = (to_groups == group[0]) & (from_groups == group[1])
            places = to[:, chosen], frm[:, chosen]
            for layer, span in itertools.product(launch.layers, launch.spans):
                shape = launch.row_tokens, span
                target = self._tokens(launch.target, (group[0], layer), shape, places[0][0], device)
                source = self._tokens(launch.source, (group[1], layer), shape, places[1][0], device)
                target, source = _alike(target, source)
                target[_from_lowest(places[0])] = source[_from_lowest(places[1])]

    def _tokens(
        self,
        table: KernelTable,
        where: tuple[int, int],
        shape: tuple[int, Span],
        pages: Int64Array,
        device: int,
    ) -> Rows:
        """A span of each token, as :meth:`_rows`: bytes[pages, page_rows, row_tokens, nbytes]."""
        row_tokens, span = shape
        data, count = self._run(table, *where, pages, device, "move_tokens")
        return np.ndarray(
            (count, table.grid.page_rows, row_tokens, span.nbytes),
            dtype=np.uint8,
            buffer=data,
            offset=span.offset,
            strides=(table.page_stride, table.row_stride, span.stride, 1),
        )

    def _rows(
        self, table: KernelTable, group: int, layer: int, pages: Int64Array, device: int, who: str
    ) -> Rows:
        """The rows from the lowest to the highest of ``pages``: bytes[pages, page_rows, row_bytes]."""
        data, count = self._run(table, group, layer, pages, device, who)
        return np.ndarray(
            (count, table.grid.page_rows, table.grid.row_bytes),
            dtype=np.uint8,
            buffer=data,
            strides=(table.page_stride, table.row_stride, 1),
        )

    def _run(
        self, table: KernelTable, group: int, layer: int, pages: Int64Array, device: int, who: str
    ) -> tuple[npt.NDArray[np.uint8], int]:
        """The bytes from the lowest to the highest of ``pages``, and how many pages that are."""
        grid = table.grid
        lowest, highest = int(pages.min()), int(pages.max())
        start = int(table.bases[group, layer]) + (lowest - int(table.first_pages[group])) * table.page_stride
        last = (highest - lowest) * table.page_stride + (grid.page_rows - 1) * table.row_stride
        return self._see(start, last + grid.row_bytes, device, who), highest - lowest + 1

    def _see(self, start: int, nbytes: int, device: int, who: str) -> npt.NDArray[np.uint8]:
        try:
            return self._memory.kernel_spaces[device].bytes_at(start, nbytes)
        except Unseen as unseen:
            raise self._memory.fault(unseen, device, f"kernel {who}") from None


def _located(table: KernelTable, tokens: Int64Array, launch: MoveTokens, device: int) -> Int64Array:
    """Page, row of the page and token of the row of each token: int64[3, n]."""
    grid = table.grid
    numbers, within = np.divmod(tokens, launch.row_tokens)
    pages, rows = np.divmod(numbers, grid.page_rows)
    outside = np.flatnonzero(pages >= grid.pages)
    if outside.size:
        page, row = pages[outside[:1]], int(rows[outside[0]])
        groups = table.groups_of(page)
        inside = int(table.page_offsets(page, groups)[0]) + row * table.row_stride
        count = grid.pages * grid.page_rows * launch.row_tokens
        raise DeviceFault(
            who="kernel move_tokens",
            address=int(table.bases[groups[0], launch.layers.start]) + inside,
            device=device,
            reason=f"token {tokens[outside[0]]} is not one of the {count} tokens there",
            remedy="Give tokens that both sides have, or a negative number to skip a pair.",
        )
    return np.stack([pages, rows, within])


def _from_lowest(places: Int64Array) -> tuple[Int64Array, ...]:
    """Indices of the places in a view whose first page is their lowest."""
    return places[0] - places[0].min(), places[1], places[2]


def _words(rows: Rows) -> Rows:
    """The same rows in words of 8 bytes where their size, strides and address allow it."""
    aligned = rows.ctypes.data % 8 == 0 and all(stride % 8 == 0 for stride in rows.strides[:-1])
    return rows.view(np.int64) if aligned and rows.shape[-1] % 8 == 0 else rows


def _alike(target: Rows, source: Rows) -> tuple[Rows, Rows]:
    """Both in words where both can be."""
    target_words, source_words = _words(target), _words(source)
    return (target_words, source_words) if target_words.dtype == source_words.dtype else (target, source)


def _gather_rows(out: Rows, at: Int64Array, source: Rows, pages: Int64Array, tokens: Int64Array) -> None:
    out, source = _alike(out, source)
    if out.shape[-1] * out.itemsize < _SLICE_BYTES:
        out[at] = source[pages, tokens]
        return
    for unit, page, token in zip(at.tolist(), pages.tolist(), tokens.tolist(), strict=True):
        out[unit] = source[page, token]


def _move_pages(target: Rows, to: Int64Array, source: Rows, frm: Int64Array) -> None:
    target, source = _alike(target, source)
    if target.shape[1] * target.shape[2] * target.itemsize < _SLICE_BYTES:
        target[to] = source[frm]
        return
    for t, f in zip(to.tolist(), frm.tolist(), strict=True):
        target[t] = source[f]
