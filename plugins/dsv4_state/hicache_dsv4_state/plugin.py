"""The family of this distribution, as hooks of hicache."""

from __future__ import annotations

from hicache_core.hookspecs import Family, hookimpl
from hicache_core.spec import PoolGeometry, PoolSpec
from hicache_dsv4_state.pool import declare

_RINGS = Family(
    name="dsv4_state",
    api=(1, 1),
    geometry={
        "ring_slots": "slots of a page's ring, or a list of one equal number per layer",
        "slot_bytes": "bytes of one slot of the ring, or a list of one equal number per layer",
    },
    description="One row per page: its ring of compress states.",
)


@hookimpl
def hicache_pool_families() -> tuple[Family, ...]:
    """The rings."""
    return (_RINGS,)


@hookimpl
def hicache_pool_spec(family: str, geometry: PoolGeometry) -> PoolSpec:
    """The declaration of a pool of rings."""
    return declare(geometry)
