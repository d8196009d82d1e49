"""The family of this distribution, as hooks of hicache."""

from __future__ import annotations

from hicache_core.hookspecs import Family, hookimpl
from hicache_core.spec import PoolGeometry, PoolSpec
from hicache_dsa_indexer.pool import declare

_INDEX_PAGES = Family(
    name="dsa_indexer",
    api=(1, 1),
    geometry={
        "index_head_dim": "elements of an index key, a multiple of quant_block",
        "quant_block": "elements of a key that share one fp32 scale",
    },
    description="One row per page: the e4m3 index keys of all its tokens, then their fp32 scales.",
)


@hookimpl
def hicache_pool_families() -> tuple[Family, ...]:
    """The index pages."""
    return (_INDEX_PAGES,)


@hookimpl
def hicache_pool_spec(family: str, geometry: PoolGeometry) -> PoolSpec:
    """The declaration of a pool of index pages."""
    return declare(geometry)
