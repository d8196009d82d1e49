"""The families of this distribution, as hooks of hicache."""

from __future__ import annotations

from hicache_core.hookspecs import Family, hookimpl
from hicache_core.spec import PoolGeometry, PoolSpec
from hicache_dsv4_paged.pool import declare

_FAMILIES = (
    Family(
        name="dsv4_anchor",
        api=(1, 1),
        geometry={},
        description="Page-aligned token slots without bytes; they name the pages of other pools.",
    ),
    Family(
        name="dsv4_paged",
        api=(1, 1),
        geometry={
            "compress_ratio": "token slots that one compressed slot stands for",
            "row_format": "a named format, or value_bytes, scale_bytes and row_align_bytes",
        },
        description="One row per page: the values of all compressed slots, then their scales, padded.",
    ),
)


@hookimpl
def hicache_pool_families() -> tuple[Family, ...]:
    """The anchor and the paged rows."""
    return _FAMILIES


@hookimpl
def hicache_pool_spec(family: str, geometry: PoolGeometry) -> PoolSpec:
    """The declaration of an anchor or of a pool of paged rows."""
    return declare(family, geometry)
