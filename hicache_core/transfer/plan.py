"""From page pairs to copies: boxes over (page, layer, row), dense axes fused, neighbouring pages merged.

A box is a run of bytes repeated over up to two axes::

    for r in range(rows):            # pages or rows that are not dense on both sides
        for l in range(layers):      # layers at equal distances on both sides
            width bytes at  host + r * host_row_pitch + l * host_layer_pitch
                       and  device + r * device_row_pitch + l * device_layer_pitch

What is dense is known when the tables are made; a transfer only finds the runs of neighbouring pages.
"""

from __future__ import annotations

import functools

import numpy as np
from attrs import frozen

from hicache_core.device.base import BatchCopies, Int64Array, StridedCopies
from hicache_core.memory.tables import HostTable, KernelTable
from hicache_core.transfer.pairs import PagePairs


@frozen(kw_only=True, eq=False)
class Boxes:
    """Boxes of equal pitches; see the module.

    Args:
        host, device: int64[n], first address on either side.
        widths: int64[n], bytes of a run.
        rows: int64[n], runs along the row axis.
        layers: runs along the layer axis, the same in all boxes.
        row_pitch, layer_pitch: (host, device) bytes between runs.
    """

    host: Int64Array
    device: Int64Array
    widths: Int64Array
    rows: Int64Array
    layers: int
    row_pitch: tuple[int, int]
    layer_pitch: tuple[int, int]


@frozen(kw_only=True)
class _LayerRun:
    """Layers ``first`` to ``stop - 1`` of a host group: equal distances, one registration on either side."""

    first: int
    stop: int
    host_pitch: int
    device_pitch: int


class Planner:
    """Plans the copies between the host rows and the device rows of one buffer.

    Args:
        host: the host rows, at the addresses that the copies take.
        device: the device rows.
    """

    def __init__(self, host: HostTable | KernelTable, device: KernelTable) -> None:
        self._host = host
        self._device = device
        grid = host.grid
        dense_rows = grid.page_rows == 1 or host.row_stride == device.row_stride == grid.row_bytes
        self._width = grid.row_bytes * (grid.page_rows if dense_rows else 1)
        self._dense_pages = dense_rows and host.page_stride == device.page_stride == self._width
        self._row_axis = 1 if dense_rows else grid.page_rows
        # Rows of neighbouring pages go on at the same pitch: pages and rows are one axis.
        self._page_is_rows = not dense_rows and (
            host.page_stride == grid.page_rows * host.row_stride
            and device.page_stride == grid.page_rows * device.row_stride
        )
        self._merges = self._dense_pages or dense_rows or self._page_is_rows
        per_row = (host.row_stride, device.row_stride)
        self._row_pitch = (host.page_stride, device.page_stride) if dense_rows else per_row

    def boxes(self, pairs: PagePairs, layers: range) -> list[Boxes]:
        """The boxes that move ``layers`` of all pairs; one entry per host group and run of layers."""
        groups = self._host.groups_of(pairs.host_pages)
        host_offsets = self._host.page_offsets(pairs.host_pages, groups)
        device_offsets = pairs.device_pages * self._device.page_stride
        first, counts = self._runs(pairs, groups)
        run_groups = groups[first]
        planned = []
        for group in np.unique(run_groups).tolist():
            mine = run_groups == group
            at, pages = first[mine], counts[mine]
            widths = self._width * (pages if self._dense_pages else np.ones_like(pages))
            rows = np.ones_like(pages) if self._dense_pages else pages * self._row_axis
            for run in self._layer_runs(group, layers.start, layers.stop):
                planned.append(
                    Boxes(
                        host=host_offsets[at] + self._host.bases[group, run.first],
                        device=device_offsets[at] + self._device.bases[0, run.first],
                        widths=widths,
                        rows=rows,
                        layers=run.stop - run.first,
                        row_pitch=self._row_pitch,
                        layer_pitch=(run.host_pitch, run.device_pitch),
                    )
                )
        return planned

    def _runs(self, pairs: PagePairs, groups: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Index of the first pair of each run of neighbouring pages, and how many pages it has."""
        count = len(pairs)
        if not self._merges:
            return np.arange(count), np.ones(count, dtype=np.int64)
        breaks = (np.diff(pairs.host_pages) != 1) | (np.diff(pairs.device_pages) != 1)
        breaks |= np.diff(groups) != 0
        first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        return first, np.diff(np.append(first, count))

    @functools.lru_cache(maxsize=512)  # noqa: B019 - bounded, and a planner lives as long as its pool
    def _layer_runs(self, group: int, start: int, stop: int) -> tuple[_LayerRun, ...]:
        host, device = self._host.bases[group], self._device.bases[0]
        host_homes, device_homes = self._host.homes[group], self._device.homes[0]
        runs: list[_LayerRun] = []
        first = start
        while first < stop:
            end = first + 1
            pitches = (0, 0)
            while end < stop:
                step = int(host[end] - host[end - 1]), int(device[end] - device[end - 1])
                together = host_homes[end] == host_homes[first] and device_homes[end] == device_homes[first]
                if not together or min(step) < self._width or (end > first + 1 and step != pitches):
                    break
                pitches = step
                end += 1
            runs.append(_LayerRun(first=first, stop=end, host_pitch=pitches[0], device_pitch=pitches[1]))
            first = end
        return tuple(runs)


def strided_and_plain(
    boxes: Boxes, *, host_is_target: bool
) -> tuple[StridedCopies | None, BatchCopies | None]:
    """The copies of some boxes: strided ones along the longer axis, plain ones where no axis is left."""
    along_rows = int(boxes.rows.sum()) > boxes.layers * len(boxes.rows)
    if along_rows:
        host, device, widths, heights = _spread_layers(boxes)
        host_pitch, device_pitch = boxes.row_pitch
    else:
        host, device, widths = _spread_rows(boxes)
        heights = np.full(len(host), boxes.layers, dtype=np.int64)
        host_pitch, device_pitch = boxes.layer_pitch
    plain = heights == 1
    strided = None
    if not plain.all():
        tall = ~plain
        strided = _strided(
            host[tall], device[tall], widths[tall], heights[tall], host_pitch, device_pitch, host_is_target
        )
    if not plain.any():
        return strided, None
    host, device = host[plain], device[plain]
    targets, sources = (host, device) if host_is_target else (device, host)
    batch = BatchCopies(
        targets=targets, sources=sources, sizes=widths[plain], host_is_target=host_is_target
    )
    return strided, batch


def _strided(
    host: Int64Array,
    device: Int64Array,
    widths: Int64Array,
    heights: Int64Array,
    host_pitch: int,
    device_pitch: int,
    host_is_target: bool,
) -> StridedCopies:
    sides = ((host, host_pitch), (device, device_pitch))
    (targets, target_pitch), (sources, source_pitch) = sides if host_is_target else sides[::-1]
    return StridedCopies(
        targets=targets,
        sources=sources,
        widths=widths,
        heights=heights,
        target_pitch=target_pitch,
        source_pitch=source_pitch,
        host_is_target=host_is_target,
    )


def _spread_layers(boxes: Boxes) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    layers = np.tile(np.arange(boxes.layers, dtype=np.int64), len(boxes.host))
    return (
        np.repeat(boxes.host, boxes.layers) + layers * boxes.layer_pitch[0],
        np.repeat(boxes.device, boxes.layers) + layers * boxes.layer_pitch[1],
        np.repeat(boxes.widths, boxes.layers),
        np.repeat(boxes.rows, boxes.layers),
    )


def _spread_rows(boxes: Boxes) -> tuple[Int64Array, Int64Array, Int64Array]:
    if int(boxes.rows.sum()) == len(boxes.rows):
        return boxes.host, boxes.device, boxes.widths
    ends = np.cumsum(boxes.rows)
    rows = np.arange(int(ends[-1]), dtype=np.int64) - np.repeat(ends - boxes.rows, boxes.rows)
    return (
        np.repeat(boxes.host, boxes.rows) + rows * boxes.row_pitch[0],
        np.repeat(boxes.device, boxes.rows) + rows * boxes.row_pitch[1],
        np.repeat(boxes.widths, boxes.rows),
    )
