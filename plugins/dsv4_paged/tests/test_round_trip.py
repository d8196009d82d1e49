"""Every byte of both sides after a backup and a load, for each pool and each served combination."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.plugins import PluginRegistry, load_plugins
from hicache_core.spec import IndexSpace, PoolGeometry, PoolSpec, platform_named
from hicache_core.testing.rigs import Rig

PLATFORMS = ("cpu-sim", "cuda-wsl2", "rocm-mi355x")
PAIRS = (("kernel", "page_first"), ("direct", "layer_first"), ("direct", "page_first_direct"))
POOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "C4 in bf16": ("dsv4_paged", {"compress_ratio": 4, "row_format": "unified_bf16"}),
    "C4 in v4 rows": ("dsv4_paged", {"compress_ratio": 4, "row_format": "v4"}),
    "C128 in v4 rows": ("dsv4_paged", {"compress_ratio": 128, "row_format": "v4"}),
    "indexer keys": ("dsv4_paged", {"compress_ratio": 4, "row_format": "index_fp8"}),
    "rotary rows": ("dsv4_paged", {"compress_ratio": 4, "row_format": "unified_fp8_rope"}),
    "a format of one's own": ("dsv4_paged", {"compress_ratio": 2, "value_bytes": 24, "row_align_bytes": 64}),
}
PAGE_SLOTS = 256
HOST_PAGES = 8


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    """The installed plugins, found by their entry points."""
    return load_plugins(required=["dsv4_paged"])


def declared(
    registry: PluginRegistry,
    pool: str,
    family: str,
    params: dict[str, Any],
    *,
    anchor: bool,
    layer_ids: Iterable[int],
) -> PoolSpec:
    """The declaration of a pool."""
    geometry = PoolGeometry(
        pool=pool,
        family=family,
        index_space=IndexSpace(name="full", page_slots=PAGE_SLOTS),
        layer_ids=layer_ids,
        params=params,
        anchor=anchor,
    )
    return registry.spec(geometry)


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("pool", POOLS)
def test_pages_go_out_and_come_back(
    registry: PluginRegistry, pool: str, platform: str, pair: tuple[str, str]
) -> None:
    """Rows, guards and untouched pages equal the oracle."""
    spec = declared(registry, "rows", *POOLS[pool], anchor=True, layer_ids=[0, 3, 4])
    config = ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=HOST_PAGES, ring_bytes=100_000)
    with Rig([spec], config, SimRuntime(platform_named(platform)), registry=registry) as rig:
        rig.there_and_back()


def test_pools_ride_on_the_pages_of_an_anchor_without_bytes(registry: PluginRegistry) -> None:
    """Two compressed pools move with the slots of a logical anchor that moves nothing itself."""
    anchor = declared(registry, "anchor", "dsv4_anchor", {}, anchor=True, layer_ids=[])
    c4 = declared(registry, "c4", *POOLS["C4 in bf16"], anchor=False, layer_ids=[2, 4])
    c128 = declared(registry, "c128", *POOLS["C128 in v4 rows"], anchor=False, layer_ids=[3])
    runtime = SimRuntime(platform_named("rocm-mi355x"))
    config = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=HOST_PAGES)
    with Rig([anchor, c4, c128], config, runtime, registry=registry) as rig:
        rig.there_and_back()
