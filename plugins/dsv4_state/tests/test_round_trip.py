"""Every byte of both sides after a backup and a load, for each kind of ring and each served combination."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.device_pool import DevicePool, paged_view
from hicache_core.plugins import PluginRegistry, load_plugins
from hicache_core.spec import IndexSpace, PoolGeometry, PoolSpec, platform_named
from hicache_core.testing.oracle import POISON
from hicache_core.testing.rigs import Rig

PLATFORMS = ("cpu-sim", "cuda-wsl2", "rocm-mi355x")
PAIRS = (("kernel", "page_first"), ("direct", "layer_first"), ("direct", "page_first_direct"))
POOLS: dict[str, dict[str, Any]] = {
    "C4": {"ring_slots": 8, "slot_bytes": 8_192},
    "C4 indexer": {"ring_slots": 8, "slot_bytes": 2_048},
    "C4 indexer with speculation": {"ring_slots": [16, 16, 16], "slot_bytes": [2_048, 2_048, 2_048]},
}
PAGE_SLOTS = 256
HOST_PAGES = 8


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    """The installed plugins, found by their entry points."""
    return load_plugins(required=["dsv4_state"])


def declared(
    registry: PluginRegistry,
    params: dict[str, Any],
    *,
    pool: str = "rings",
    anchor: bool = True,
    layer_ids: Iterable[int] = (0, 3, 4),
) -> PoolSpec:
    """The declaration of a pool of rings."""
    geometry = PoolGeometry(
        pool=pool,
        family="dsv4_state",
        index_space=IndexSpace(name="full", page_slots=PAGE_SLOTS),
        layer_ids=layer_ids,
        params=params,
        anchor=anchor,
    )
    return registry.spec(geometry)


def config_of(pair: tuple[str, str]) -> ControllerConfig:
    """The operator's choices."""
    return ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=HOST_PAGES, ring_bytes=100_000)


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("pool", POOLS)
def test_rings_go_out_and_come_back(
    registry: PluginRegistry, pool: str, platform: str, pair: tuple[str, str]
) -> None:
    """Rows, guards and untouched pages equal the oracle."""
    spec = declared(registry, POOLS[pool])
    with Rig([spec], config_of(pair), SimRuntime(platform_named(platform)), registry=registry) as rig:
        rig.there_and_back()


def test_rings_of_both_kinds_travel_together(registry: PluginRegistry) -> None:
    """States of C4 and of its indexer, in the same pages."""
    specs = [
        declared(registry, POOLS["C4"]),
        declared(registry, POOLS["C4 indexer"], pool="indexer", anchor=False, layer_ids=[3]),
    ]
    runtime = SimRuntime(platform_named("rocm-mi355x"))
    with Rig(specs, config_of(("kernel", "page_first")), runtime, registry=registry) as rig:
        rig.there_and_back()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("platform", ["rocm", "rocm-mi355x"])
def test_backups_are_staged_where_no_kernel_may_store_to_host_memory(
    registry: PluginRegistry, platform: str, pool: str
) -> None:
    """Under kernel + page_first, whether aliases equal host addresses or lie apart."""
    spec = declared(registry, POOLS[pool])
    runtime = SimRuntime(platform_named(platform))
    with Rig([spec], config_of(("kernel", "page_first")), runtime, registry=registry) as rig:
        assert rig.controller.plan.pools["rings"].staged is True


def test_a_state_tensor_with_its_sentinel_row_makes_page_rows(registry: PluginRegistry) -> None:
    """4 x 8 + 8 + 1 rows, up to a multiple of 4: 5 page rows, and 4 rows that nothing touches."""
    runtime = SimRuntime(platform_named("rocm-mi355x"))
    spec = declared(registry, POOLS["C4"], layer_ids=[2])
    memory = runtime.allocate(44 * 8_192, 0).view(44, 8_192)
    memory.fill_(POISON)
    states = paged_view(memory.view(torch.float32), 8)
    pool = DevicePool(spec=spec, layers={"state": [states]})
    controller = Controller(config_of(("kernel", "page_first")), [pool], runtime, registry)
    assert controller.device_pages["full"] == 5
    slots = controller.group.allocate({"full": 5 * PAGE_SLOTS})
    assert slots is not None
    controller.group.anchor.buffers[0].memory.view.fill(1)
    controller.load(slots["full"], torch.arange(5 * PAGE_SLOTS)).wait()
    assert bool((memory[:40] == 1).all())
    assert bool((memory[40:] == POISON).all())
    controller.close()
