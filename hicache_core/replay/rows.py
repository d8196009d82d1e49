"""The device rows of a replay, their content, and the final look at every byte of both tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hicache_core.device.base import DeviceRuntime
from hicache_core.device_pool import DevicePool
from hicache_core.memory.host import HostBuffer
from hicache_core.pool import HostPool
from hicache_core.replay.content import Int64Array, LayerContent, Uint64Array, page_pattern
from hicache_core.spec import PoolSpec

POISON = 0xA5
_CHUNK_BYTES = 16 << 20


class PageLog:
    """What was written last to each page of a tier.

    Args:
        pages: pages of the tier.
    """

    def __init__(self, pages: int) -> None:
        self._keys: Uint64Array = np.zeros(pages, dtype=np.uint64)
        self._written = np.zeros(pages, dtype=np.bool_)
        self._unknown = np.zeros(pages, dtype=np.bool_)

    def write(self, pages: Int64Array, keys: Uint64Array) -> None:
        """Note that pages were written with the content of ``keys``."""
        self._keys[pages] = keys
        self._written[pages] = True

    def keep_only(self, pages: Int64Array) -> None:
        """Expect nothing any more of other pages: a failed transfer may have written parts of some."""
        others = np.ones_like(self._written)
        others[pages] = False
        self._unknown |= others

    @property
    def written(self) -> Int64Array:
        """Pages that were written at least once."""
        return np.flatnonzero(self._written & ~self._unknown)

    @property
    def untouched(self) -> Int64Array:
        """Pages that must still hold the poison."""
        return np.flatnonzero(~self._written & ~self._unknown)

    def keys(self, pages: Int64Array) -> Uint64Array:
        """The keys of their content."""
        return self._keys[pages]


class ReplayRows:
    """Device rows of the pools of one index space, poisoned at first.

    Args:
        model: id of the model.
        specs: the declarations of the pools.
        runtime: where the rows are allocated.
        pages: pages of the device tier, guards included.
        device: ordinal of the device.
    """

    def __init__(
        self, model: str, specs: Sequence[PoolSpec], runtime: DeviceRuntime, pages: int, device: int = 0
    ) -> None:
        self.device_pools: list[DevicePool] = []
        self.page_bytes = sum(spec.page_bytes for spec in specs)
        self._contents: list[tuple[torch.Tensor, LayerContent]] = []
        self._by_name: dict[tuple[str, str], list[LayerContent]] = {}
        for spec in specs:
            layers = {}
            for buffer in spec.buffers:
                page_bytes = buffer.row_bytes * spec.page_rows
                series = spec.layers_of(buffer)
                slab = runtime.allocate(series * pages * page_bytes, device)
                slab.fill_(POISON)
                rows = slab.view(series, pages * spec.page_rows, buffer.row_bytes)
                pattern = page_pattern(page_bytes, slab.device)
                contents = [
                    LayerContent(model, spec.pool, buffer.name, layer, page_bytes, pattern)
                    for layer in spec.layer_ids[:series]
                ]
                layers[buffer.name] = list(rows.unbind(0))
                self._contents.extend(zip(layers[buffer.name], contents, strict=True))
                self._by_name[spec.pool, buffer.name] = contents
            self.device_pools.append(DevicePool(spec=spec, layers=layers))

    @property
    def nbytes(self) -> int:
        """Bytes of all device rows."""
        return sum(layer.numel() for layer, _ in self._contents)

    def compute(self, pages: Int64Array, keys: Uint64Array) -> None:
        """Write the content of some pages, as a model's forward pass would."""
        for layer, content in self._contents:
            content.fill(layer, pages, keys)

    def wrong_bytes(self, pages: Int64Array, keys: Uint64Array) -> int:
        """Bytes of some device pages that are not what they should be, all pools and layers."""
        return sum(content.wrong_bytes(layer, pages, keys) for layer, content in self._contents)

    def sweep_device(self, log: PageLog) -> int:
        """Wrong bytes on the device: written pages against their content, the others against the poison."""
        wrong = self.wrong_bytes(log.written, log.keys(log.written))
        for layer, content in self._contents:
            pages = content.by_page(layer)
            for some in _chunks(log.untouched, pages.shape[1]):
                found = pages.index_select(0, torch.from_numpy(some).to(layer.device))
                wrong += int(torch.count_nonzero(found != POISON))
        return wrong

    def sweep_host(self, pools: Sequence[HostPool], log: PageLog) -> int:
        """Wrong bytes of all host memory, as :meth:`sweep_device`."""
        wrong = 0
        for pool in pools:
            for buffer in pool.buffers:
                contents = self._by_name[pool.spec.pool, buffer.spec.name]
                for rows, content in zip(_host_layers(buffer), contents, strict=True):
                    wrong += content.wrong_bytes_of(rows, log.written, log.keys(log.written))
                    for some in _chunks(log.untouched, rows[0].size):
                        wrong += int(np.count_nonzero(rows[some] != POISON))
        return wrong


def _chunks(pages: Int64Array, page_bytes: int) -> Iterator[Int64Array]:
    """The pages in runs of a few megabytes."""
    step = max(_CHUNK_BYTES // page_bytes, 1)
    for first in range(0, len(pages), step):
        yield pages[first : first + step]


def poison_host(pools: Sequence[HostPool]) -> None:
    """Fill all host memory with the poison."""
    for pool in pools:
        for buffer in pool.buffers:
            buffer.memory.view.fill(POISON)


def _host_layers(buffer: HostBuffer) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    """For each layer, its host rows in place: uint8[pages, page_rows, row_bytes]."""
    grid, strides = buffer.grid, buffer.strides
    for layer in range(grid.layers):
        yield np.ndarray(
            (grid.pages, grid.page_rows, grid.row_bytes),
            dtype=np.uint8,
            buffer=buffer.memory.view,
            offset=layer * strides.layer,
            strides=(strides.page, strides.row, 1),
        )
