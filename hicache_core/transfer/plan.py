"""From page pairs to copies: boxes over (page, layer, row), dense axes fused, neighbouring pages merged.

A box is a run of bytes repeated over up to two axes::

    for r in range(rows):            # pages or rows that are not dense on both sides
        for l in range(layers):      # layers at equal distances on both sides
            width bytes at  host + r * host_row_pitch + l * host_layer_pitch
                       and  device + r * device_row_pitch + l * device_layer_pitch

What is dense is known when the tables are made; a transfer only finds runs of neighbouring pages. The longer
axis of a box becomes the strided axis of a copy, the other is spread out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from attrs import define, frozen

from hicache_core.device.base import BatchCopies, Int64Array, StridedCopies
from hicache_core.memory.tables import HostTable, KernelTable
from hicache_core.transfer.pairs import PagePairs

Copies = StridedCopies | BatchCopies


@define(kw_only=True, eq=False)
class _Spans:
    """The page runs of one host group: the first two lines of a box, at offsets from its layer's base.

    Args:
        group: the host group.
        host, device: int64[n], bytes from the base of a layer.
        widths: bytes of a run: int64[n], or one number for all.
        rows: int64[n], runs along the row axis; None where each box has one.
    """

    group: int
    host: Int64Array
    device: Int64Array
    widths: Int64Array | int
    rows: Int64Array | None

    def by_group(self, groups: Int64Array) -> Iterator[_Spans]:
        """The runs of each group apart."""
        for group in np.unique(groups).tolist():
            mine = groups == group
            yield _Spans(
                group=group,
                host=self.host[mine],
                device=self.device[mine],
                widths=self.widths if isinstance(self.widths, int) else self.widths[mine],
                rows=None if self.rows is None else self.rows[mine],
            )


@frozen(kw_only=True)
class _LayerRun:
    """Layers of a host group at equal distances, in one registration on either side.

    Args:
        layers: how many.
        host, device: base of the first.
        host_pitch, device_pitch: bytes from one to the next.
    """

    layers: int
    host: int
    device: int
    host_pitch: int
    device_pitch: int


class Planner:
    """Plans the copies between the host rows and the device rows of one buffer.

    Args:
        host: the host rows, at the addresses that the copies take.
        device: the device rows.
        host_is_target: whether the copies write the host rows.
    """

    def __init__(self, host: HostTable | KernelTable, device: KernelTable, *, host_is_target: bool) -> None:
        self._host = host
        self._device = device
        self._host_is_target = host_is_target
        grid = host.grid
        dense_rows = grid.page_rows == 1 or host.row_stride == device.row_stride == grid.row_bytes
        self._width = grid.row_bytes * (grid.page_rows if dense_rows else 1)
        self._dense_pages = dense_rows and host.page_stride == device.page_stride == self._width
        self._page_rows = 1 if dense_rows else grid.page_rows
        # Where rows of neighbouring pages go on at the same pitch, pages and rows are one axis.
        page_is_rows = not dense_rows and (
            host.page_stride == grid.page_rows * host.row_stride
            and device.page_stride == grid.page_rows * device.row_stride
        )
        self._merges = dense_rows or page_is_rows
        per_row = (host.row_stride, device.row_stride)
        self._row_pitch = (host.page_stride, device.page_stride) if dense_rows else per_row

    def copies(self, pairs: PagePairs, layers: range) -> list[Copies]:
        """The copies that move ``layers`` of all pairs."""
        return [
            copies
            for spans in pairs.remembered(self, self._spans)
            for run in self._layer_runs(spans.group, layers.start, layers.stop)
            for copies in self._lowered(spans, run)
        ]

    def _spans(self, pairs: PagePairs) -> list[_Spans]:
        """The runs of neighbouring pages, by host group; they are the same for all layers."""
        groups = None if self._host.one_group else self._host.groups_of(pairs.host_pages)
        host = self._host.page_offsets(pairs.host_pages, groups)
        device = pairs.device_pages * self._device.page_stride
        pages: Int64Array | int = 1
        first = self._first_of_runs(pairs, groups) if self._merges and len(pairs) > 1 else None
        if first is not None:
            pages = np.diff(np.append(first, len(pairs)))
            host, device = host[first], device[first]
            groups = None if groups is None else groups[first]
        if self._dense_pages:
            spans = _Spans(group=0, host=host, device=device, widths=pages * self._width, rows=None)
        else:
            rows = pages * self._page_rows
            each = None if isinstance(rows, int) and rows == 1 else np.broadcast_to(rows, host.shape)
            spans = _Spans(group=0, host=host, device=device, widths=self._width, rows=each)
        return [spans] if groups is None else [*spans.by_group(groups)]

    def _first_of_runs(self, pairs: PagePairs, groups: Int64Array | None) -> Int64Array | None:
        """Index of the first pair of each run of neighbouring pages; None where no two are neighbours."""
        host, device = pairs.host_pages, pairs.device_pages
        joined = device[1:] - device[:-1] == 1
        if np.count_nonzero(joined):
            joined &= host[1:] - host[:-1] == 1
            if groups is not None:
                joined &= groups[1:] == groups[:-1]
        if not np.count_nonzero(joined):
            return None
        return np.concatenate(([0], np.flatnonzero(~joined) + 1))

    @functools.lru_cache(maxsize=512)  # noqa: B019 - bounded, and a planner lives as long as its pool
    def _layer_runs(self, group: int, start: int, stop: int) -> tuple[_LayerRun, ...]:
        host, device = self._host.bases[group].tolist(), self._device.bases[0].tolist()
        host_homes, device_homes = self._host.homes[group], self._device.homes[0]
        runs: list[_LayerRun] = []
        first = start
        while first < stop:
            end = first + 1
            pitches = (0, 0)
            while end < stop:
                step = host[end] - host[end - 1], device[end] - device[end - 1]
                together = host_homes[end] == host_homes[first] and device_homes[end] == device_homes[first]
                if not together or min(step) < self._width or (end > first + 1 and step != pitches):
                    break
                pitches = step
                end += 1
            runs.append(
                _LayerRun(
                    layers=end - first,
                    host=host[first],
                    device=device[first],
                    host_pitch=pitches[0],
                    device_pitch=pitches[1],
                )
            )
            first = end
        return tuple(runs)

    def _lowered(self, spans: _Spans, run: _LayerRun) -> Iterator[Copies]:
        """The copies of the boxes that some spans and layers make."""
        host, device = spans.host + run.host, spans.device + run.device
        layer_pitch = (run.host_pitch, run.device_pitch)
        if spans.rows is None:
            yield self._copies(host, device, spans.widths, run.layers, layer_pitch)
        elif int(spans.rows.sum()) <= run.layers * len(spans.rows):
            host, device = _spread(host, device, spans.rows, self._row_pitch)
            yield self._copies(host, device, spans.widths, run.layers, layer_pitch)
        else:
            layers = np.full(len(host), run.layers, dtype=np.int64)
            host, device = _spread(host, device, layers, layer_pitch)
            heights = np.repeat(spans.rows, run.layers)
            for tall in (heights > 1, heights == 1):
                if tall.any():
                    height = heights[tall] if heights[tall][0] > 1 else 1
                    yield self._copies(host[tall], device[tall], spans.widths, height, self._row_pitch)

    def _copies(
        self,
        host: Int64Array,
        device: Int64Array,
        widths: Int64Array | int,
        heights: Int64Array | int,
        pitch: tuple[int, int],
    ) -> Copies:
        """Strided copies, or plain ones where the height is the number 1."""
        targets, sources = (host, device) if self._host_is_target else (device, host)
        if isinstance(heights, int) and heights == 1:
            sizes = np.full(len(host), widths, dtype=np.int64) if isinstance(widths, int) else widths
            return BatchCopies(
                targets=targets, sources=sources, sizes=sizes, host_is_target=self._host_is_target
            )
        target_pitch, source_pitch = pitch if self._host_is_target else pitch[::-1]
        return StridedCopies(
            targets=targets,
            sources=sources,
            widths=widths,
            heights=heights,
            target_pitch=target_pitch,
            source_pitch=source_pitch,
            host_is_target=self._host_is_target,
        )


def _spread(
    host: Int64Array, device: Int64Array, counts: Int64Array, pitch: tuple[int, int]
) -> tuple[Int64Array, Int64Array]:
    """The addresses of every step of an axis: box i has ``counts[i]`` of them."""
    ends = np.cumsum(counts)
    steps = np.arange(int(ends[-1]), dtype=np.int64) - np.repeat(ends - counts, counts)
    return (
        np.repeat(host, counts) + steps * pitch[0],
        np.repeat(device, counts) + steps * pitch[1],
    )
