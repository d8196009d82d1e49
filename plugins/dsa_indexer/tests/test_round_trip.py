"""Every byte of both sides after a backup and a load, for each page and each served combination."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.plugins import PluginRegistry, load_plugins
from hicache_core.spec import IndexSpace, PoolGeometry, PoolSpec, platform_named
from hicache_core.testing.rigs import Rig

PLATFORMS = ("cpu-sim", "cuda-wsl2", "rocm-mi355x")
PAIRS = (("kernel", "page_first"), ("direct", "layer_first"), ("direct", "page_first_direct"))
# Slots of a page, elements of a key, elements of a quant block.
PAGES: dict[str, tuple[int, int, int]] = {
    "64 tokens": (64, 128, 128),
    "128 tokens": (128, 128, 128),
    "two scales a key": (64, 128, 64),
}
HOST_PAGES = 8


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    """The installed plugins, found by their entry points."""
    return load_plugins(required=["dsa_indexer"])


def declared(
    registry: PluginRegistry, page: str, *, pool: str, anchor: bool, layer_ids: Iterable[int]
) -> PoolSpec:
    """The declaration of a pool of index pages."""
    page_slots, dim, block = PAGES[page]
    geometry = PoolGeometry(
        pool=pool,
        family="dsa_indexer",
        index_space=IndexSpace(name="full", page_slots=page_slots),
        layer_ids=layer_ids,
        params={"index_head_dim": dim, "quant_block": block},
        anchor=anchor,
    )
    return registry.spec(geometry)


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("page", PAGES)
def test_index_pages_go_out_and_come_back(
    registry: PluginRegistry, page: str, platform: str, pair: tuple[str, str]
) -> None:
    """Rows, guards and untouched pages equal the oracle."""
    spec = declared(registry, page, pool="indexer", anchor=True, layer_ids=[0, 3, 4])
    config = ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=HOST_PAGES, ring_bytes=100_000)
    with Rig([spec], config, SimRuntime(platform_named(platform)), registry=registry) as rig:
        rig.there_and_back()


@pytest.mark.parametrize("platform", ["rocm", "rocm-mi355x"])
def test_backups_are_staged_where_no_kernel_may_store_to_host_memory(
    registry: PluginRegistry, platform: str
) -> None:
    """Under kernel + page_first, whether aliases equal host addresses or lie apart."""
    spec = declared(registry, "64 tokens", pool="indexer", anchor=True, layer_ids=[0])
    config = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=HOST_PAGES)
    with Rig([spec], config, SimRuntime(platform_named(platform)), registry=registry) as rig:
        assert rig.controller.plan.pools["indexer"].staged is True
