"""Every byte of both sides after a backup and a load, for each pool and each served combination."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.plugins import PluginRegistry, load_plugins
from hicache_core.spec import IndexSpace, PoolGeometry, PoolSpec, platform_named
from hicache_core.testing.rigs import Rig, differences

PLATFORMS = ("cpu-sim", "cuda-wsl2", "rocm-mi355x")
PAIRS = (("kernel", "page_first"), ("direct", "layer_first"), ("direct", "page_first_direct"))
POOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "keys of 192 and values of 128": (
        "mha",
        {"kv_heads": 2, "k_head_dim": 192, "v_head_dim": 128, "dtype": "bfloat16"},
    ),
    "latent rows of 1152 bytes": ("mla", {"latent_dim": 512, "rope_dim": 64, "row_format": "bf16"}),
    "latent rows of 656 bytes": ("mla", {"latent_dim": 512, "rope_dim": 64, "row_format": "fp8_scaled"}),
    "keys alone": ("k_only", {"kv_heads": 1, "k_head_dim": 128, "dtype": "bfloat16"}),
}
PAGE_SLOTS = 16
HOST_PAGES = 8


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    """The installed plugins, found by their entry points."""
    return load_plugins(required=["mha_mla"])


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


def there_and_back(rig: Rig) -> None:
    """Back four pages up, poison the device, load them into other pages; the oracle knows every byte."""
    host = rig.allocate(4)
    rig.fill_host()
    pairs = list(zip(host, [3, 4, 7, 1], strict=True))
    expected = rig.after_backup(rig.snapshot(), pairs)
    rig.controller.backup(rig.slots(host), rig.slots(page for _, page in pairs)).wait()
    assert not differences(rig.snapshot(), expected)
    rig.poison_device()
    pairs = list(zip(host, [0, 8, 2, 11], strict=True))
    expected = rig.after_load(rig.snapshot(), pairs)
    rig.controller.load(rig.slots(host), rig.slots(page for _, page in pairs)).wait()
    assert not differences(rig.snapshot(), expected)


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
        there_and_back(rig)
