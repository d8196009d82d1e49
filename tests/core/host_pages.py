"""Host pools of every kind of row, and the flat bytes and addresses that their pages must have."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterator

import numpy as np

from hicache_core.device.sim import SimRuntime
from hicache_core.device_pool import DevicePool
from hicache_core.memory.options import MemoryOptions
from hicache_core.pool import HostPool
from hicache_core.spec import BufferSpec, IndexSpace, PoolSpec, RowUnit, layout_named, platform_named
from hicache_core.testing.oracle import Bytes, HostShape, distinct_bytes, host_offset
from hicache_core.testing.rigs import host_shape
from hicache_core.testing.stand_ins import pool_spec

SLOT_ROWS = PoolSpec(
    pool="kv",
    family="rows",
    index_space=IndexSpace(name="full", page_slots=1),
    row_unit=RowUnit.SLOT,
    layer_ids=(0, 2, 5),
    buffers=[
        BufferSpec(name="temporal", row_bytes=192),
        BufferSpec(name="conv_0", row_bytes=80),
        BufferSpec(name="side", row_bytes=48, per_layer=False),
    ],
    anchor=True,
)
ROWS = {
    "page rows": pool_spec(1728, unit=RowUnit.PAGE),
    "token rows": pool_spec(48, page_slots=4),
    "k and v": pool_spec(384, 256, page_slots=4),
    "slots": SLOT_ROWS,
    "one layer": pool_spec(24, page_slots=4, layer_ids=(3,)),
    "odd bytes": pool_spec(17, page_slots=2),
}
WITHOUT_BYTES = {"no buffers": pool_spec(), "no layers": pool_spec(64, layer_ids=())}

# The axes inside a page from the slowest to the fastest, and how many runs of bytes a page of L layers is.
_AXES = {
    "layer_first": ("layer", "row"),
    "page_first": ("row", "layer"),
    "page_first_direct": ("layer", "row"),
}
_IN_ONE_PIECE = {"layer_first": False, "page_first": True, "page_first_direct": True}


def cut_pages(spec: PoolSpec, layout: str) -> int:
    """Host pages of which each buffer with layers needs three registrations of the least size."""
    least = [1]
    for buffer in spec.buffers:
        layers = spec.layers_of(buffer)
        page_bytes = layers * spec.page_rows * buffer.row_bytes
        unit = page_bytes if _IN_ONE_PIECE[layout] else spec.page_rows * buffer.row_bytes
        least.append(-(-5 * math.lcm(unit, mmap.PAGESIZE) // (2 * max(page_bytes, 1))))
    return max(least)


def host_pool(
    spec: PoolSpec, layout: str, *, pages: int, limit: int = 1 << 36, platform: str = "rocm-mi355x"
) -> HostPool:
    """A pool of host rows alone, every byte of it distinct; aliases are not the CPU addresses."""
    runtime = SimRuntime(platform_named(platform))
    device = DevicePool(spec=spec)
    pool = HostPool(
        device, layout_named(layout), pages, runtime, memory=MemoryOptions(max_registration_bytes=limit)
    )
    for b in pool.buffers:
        b.memory.view[...] = distinct_bytes("host", b.spec.name, nbytes=b.memory.view.size)
    return pool


def host_copy(pool: HostPool) -> list[Bytes]:
    """The bytes of each buffer, copied."""
    return [b.memory.view.copy() for b in pool.buffers]


def page_rows(layout: str, shape: HostShape) -> Iterator[tuple[int, int]]:
    """(layer, row) of each row of a page of one buffer, as they follow one another in a flat page."""
    extent = {"layer": shape.layers, "row": shape.page_rows}
    slow, fast = _AXES[layout]
    for one, other in itertools.product(range(extent[slow]), range(extent[fast])):
        at = {slow: one, fast: other}
        yield at["layer"], at["row"]


def row_offsets(layout: str, shape: HostShape, page: int) -> list[int]:
    """Where each row of a page lies in its buffer, in the order of a flat page."""
    return [
        host_offset(layout, shape, page=page, layer=layer, row=row) for layer, row in page_rows(layout, shape)
    ]


def flat_page(pool: HostPool, layout: str, hosts: list[Bytes], page: int) -> Bytes:
    """The flat bytes of a page, row by row from the bytes of the buffers."""
    rows = [np.empty(0, dtype=np.uint8)]
    for buffer, host in zip(pool.spec.buffers, hosts, strict=True):
        shape = host_shape(pool, buffer)
        rows += [host[at : at + shape.row_bytes] for at in row_offsets(layout, shape, page)]
    return np.concatenate(rows)


def write_flat_page(pool: HostPool, layout: str, hosts: list[Bytes], page: int, flat: Bytes) -> None:
    """Write flat bytes into the bytes of the buffers, row by row."""
    start = 0
    for buffer, host in zip(pool.spec.buffers, hosts, strict=True):
        shape = host_shape(pool, buffer)
        for at in row_offsets(layout, shape, page):
            host[at : at + shape.row_bytes] = flat[start : start + shape.row_bytes]
            start += shape.row_bytes
    assert start == flat.size


def page_runs(pool: HostPool, layout: str, page: int) -> list[tuple[str, int, int]]:
    """(buffer, offset in the buffer, bytes) of each run of a page, in the order of a flat page."""
    runs = []
    for buffer in pool.spec.buffers:
        shape = host_shape(pool, buffer)
        rows = shape.page_rows
        layers, run_rows = (1, rows * shape.layers) if _IN_ONE_PIECE[layout] else (shape.layers, rows)
        for layer in range(layers if shape.layers else 0):
            at = host_offset(layout, shape, page=page, layer=layer, row=0)
            runs.append((buffer.name, at, run_rows * shape.row_bytes))
    return runs


def pages_at_cuts(pool: HostPool) -> list[int]:
    """The first and the last page, and the pages on either side of every end of a registration."""
    chosen = {0, pool.pages - 1}
    for b in pool.buffers:
        for segment in b.memory.segments:
            page = (segment.offset % max(b.strides.layer, b.strides.page * b.grid.pages)) // b.strides.page
            chosen |= {page - 1, page, page + 1}
    return sorted(page for page in chosen if 0 <= page < pool.pages)
