"""Kernels of the simulator: vectorised, blind to all but tables, page numbers and visible memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_core.device.base import GatherUnits, MoveRows
from hicache_core.device.sim.memory import SimMemory, Unseen
from hicache_core.device.sim.streams import SimStream
from hicache_core.memory.tables import Int64Array, KernelTable

_SLICE_BYTES = 4096
"""From this row size on, one slice a page is faster than one gather of all."""

Rows = npt.NDArray[Any]


class SimKernels:
    """The kernels of simulated devices.

    Args:
        memory: the machine's memory.
        submit: queues a launch on a stream.
    """

    def __init__(self, memory: SimMemory, submit: Callable[[SimStream, Callable[[], None]], None]) -> None:
        self._memory = memory
        self._submit = submit

    def gather_units(self, launch: GatherUnits, stream: SimStream) -> None:
        """Queue the relayout kernel; page numbers are read when it runs."""
        self._submit(stream, lambda: self._gather(launch, stream.device))

    def move_rows(self, launch: MoveRows, stream: SimStream) -> None:
        """Queue the row kernel; page numbers are read when it runs."""
        self._submit(stream, lambda: self._move(launch, stream.device))

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

    def _rows(
        self, table: KernelTable, group: int, layer: int, pages: Int64Array, device: int, who: str
    ) -> Rows:
        """The rows from the lowest to the highest of ``pages``: bytes[pages, page_rows, row_bytes]."""
        grid = table.grid
        lowest, highest = int(pages.min()), int(pages.max())
        start = int(table.bases[group, layer]) + (lowest - int(table.first_pages[group])) * table.page_stride
        last = (highest - lowest) * table.page_stride + (grid.page_rows - 1) * table.row_stride
        data = self._see(start, last + grid.row_bytes, device, who)
        return np.ndarray(
            (highest - lowest + 1, grid.page_rows, grid.row_bytes),
            dtype=np.uint8,
            buffer=data,
            strides=(table.page_stride, table.row_stride, 1),
        )

    def _see(self, start: int, nbytes: int, device: int, who: str) -> npt.NDArray[np.uint8]:
        try:
            return self._memory.kernel_spaces[device].bytes_at(start, nbytes)
        except Unseen as unseen:
            raise self._memory.fault(unseen, device, f"kernel {who}") from None


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
