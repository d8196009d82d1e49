"""Device rows of a server's index spaces, in which each page of each block has a mark of its own."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen

from hicache_core.cache.index import Key
from hicache_core.device.sim import SimRuntime
from hicache_core.device_pool import DevicePool
from hicache_core.spec import IndexSpace, PoolSpec, Reuse, RowUnit
from hicache_core.testing.stand_ins import pool_spec
from tests.hybrid_twin import TwinSpace

LAYERS = 2


@frozen(kw_only=True)
class Extra:
    """An index space beside the anchor's, with what its rules come to for blocks of four slots.

    Args:
        specs: its pools.
        block_pages: pages that a block keeps.
        last_blocks: a prefix needs the pages of so many of its last blocks.
        device_blocks, host_blocks: blocks for which each tier has pages.
    """

    specs: Sequence[PoolSpec]
    block_pages: int
    last_blocks: int
    device_blocks: int
    host_blocks: int

    @property
    def space(self) -> IndexSpace:
        """The space that its pools share."""
        return self.specs[0].index_space

    @property
    def twin(self) -> TwinSpace:
        """The same for the twin."""
        return TwinSpace(self.device_blocks, self.host_blocks, self.last_blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all pools and layers."""
        return self.block_pages * sum(spec.page_bytes for spec in self.specs)


def _space(name: str, page_slots: int, reuse: Reuse, window_slots: int | None = None) -> IndexSpace:
    return IndexSpace(name=name, page_slots=page_slots, reuse=reuse, window_slots=window_slots)


def _pools(space: IndexSpace, **rows: tuple[int, RowUnit]) -> list[PoolSpec]:
    return [
        pool_spec(size, pool=name, anchor=False, space=space, layer_ids=range(LAYERS), unit=unit)
        for name, (size, unit) in rows.items()
    ]


def short_window(device_blocks: int, host_blocks: int) -> Extra:
    """A window within one block: of its two pages a block keeps the last; with a ring in the same space."""
    space = _space("window", 2, Reuse.TRAILING_PAGES, window_slots=2)
    pools = _pools(space, swa=(32, RowUnit.TOKEN), ring=(48, RowUnit.PAGE))
    return Extra(
        specs=pools, block_pages=1, last_blocks=1, device_blocks=device_blocks, host_blocks=host_blocks
    )


def long_window(device_blocks: int, host_blocks: int) -> Extra:
    """A window of six slots, which are a block and a half; a block that keeps any keeps both of its pages."""
    space = _space("window", 2, Reuse.TRAILING_PAGES, window_slots=6)
    pools = _pools(space, swa=(32, RowUnit.TOKEN))
    return Extra(
        specs=pools, block_pages=2, last_blocks=2, device_blocks=device_blocks, host_blocks=host_blocks
    )


def states(device_blocks: int, host_blocks: int) -> Extra:
    """Checkpoints, one for the last block of a request."""
    pools = _pools(_space("state", 1, Reuse.LEAF), mamba=(64, RowUnit.SLOT))
    return Extra(
        specs=pools,
        block_pages=1,
        last_blocks=1,
        device_blocks=device_blocks,
        host_blocks=host_blocks,
    )


class MarkedRows:
    """The device rows of one index space.

    Args:
        specs: its pools.
        runtime: where they are allocated.
        pages: usable pages; page 0 stands before them.
    """

    def __init__(self, specs: Sequence[PoolSpec], runtime: SimRuntime, pages: int) -> None:
        self.pools = []
        for spec in specs:
            (buffer,) = spec.buffers
            shape = (pages + 1) * spec.page_rows, buffer.row_bytes
            layers = [
                runtime.allocate(shape[0] * shape[1], 0).view(shape).zero_() for _ in range(spec.layer_count)
            ]
            self.pools.append(DevicePool(spec=spec, layers={buffer.name: layers}))

    def fill(self, key: Key, pages: np.ndarray) -> None:
        """Compute a block."""
        for name, layer in self._layers():
            layer[torch.from_numpy(pages)] = self._marks(name, key, pages, layer)

    def holds(self, key: Key, pages: np.ndarray) -> bool:
        """Whether device pages hold the marks of a block in every pool and layer."""
        return all(
            bool((layer[torch.from_numpy(pages)] == self._marks(name, key, pages, layer)).all())
            for name, layer in self._layers()
        )

    def _layers(self) -> list[tuple[str, torch.Tensor]]:
        """Each layer by pages."""
        return [
            (f"{pool.spec.pool}.{number}", layer.view(-1, pool.spec.page_rows * layer.shape[1]))
            for pool in self.pools
            for number, layer in enumerate(pool.layers[pool.spec.buffers[0].name])
        ]

    @staticmethod
    def _marks(name: str, key: Key, pages: np.ndarray, layer: torch.Tensor) -> torch.Tensor:
        """A row of bytes for each page that hardly another page has."""
        marks = [zlib.crc32(f"{name} {key!r} {place}".encode()) for place in range(len(pages))]
        words = torch.tensor(np.array(marks, dtype=">u4").view(np.uint8).reshape(-1, 4))
        return words.repeat(1, layer.shape[1] // 4)
