"""Layers that own no index pages: some of a model, or all of them, beside latent rows of every layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.streams import Scheduler
from hicache_core.device_pool import DevicePool
from hicache_core.errors import BufferMismatchError
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import IndexSpace, PoolGeometry, PoolSpec, platform_named
from hicache_core.testing.rigs import Rig, differences
from hicache_core.testing.stand_ins import pool_spec, registry_of
from hicache_dsa_indexer import plugin

PLATFORMS = ("cpu-sim", "cuda-wsl2", "rocm-mi355x")
PAIRS = (("kernel", "page_first"), ("direct", "layer_first"), ("direct", "page_first_direct"))
PAGE_SLOTS = 64
LAYERS = 4
HOST_PAGES = 6
MLA = pool_spec(1_152, page_slots=PAGE_SLOTS, layer_ids=range(LAYERS))


@pytest.fixture
def registry() -> PluginRegistry:
    """A registry with this plugin and one that owns the latent rows."""
    registry = registry_of([MLA])
    registry.register(plugin, name="dsa_indexer")
    return registry


def _indexer(registry: PluginRegistry, layer_ids: Sequence[int]) -> PoolSpec:
    geometry = PoolGeometry(
        pool="indexer",
        family="dsa_indexer",
        index_space=IndexSpace(name="full", page_slots=PAGE_SLOTS),
        layer_ids=layer_ids,
        params={"index_head_dim": 128, "quant_block": 128},
    )
    return registry.spec(geometry)


def _config(pair: tuple[str, str]) -> ControllerConfig:
    return ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=HOST_PAGES, ring_bytes=100_000)


def there_and_back(rig: Rig) -> int:
    """Move three pages out and into other pages, held against the oracle; the bytes of both tickets."""
    host = rig.allocate(3)
    rig.fill_host()
    pairs = list(zip(host, [3, 4, 7], strict=True))
    expected = rig.after_backup(rig.snapshot(), pairs)
    backup = rig.controller.backup(rig.slots(host), rig.slots([3, 4, 7]))
    backup.wait()
    assert not differences(rig.snapshot(), expected)
    rig.poison_device()
    pairs = list(zip(host, [8, 0, 2], strict=True))
    expected = rig.after_load(rig.snapshot(), pairs)
    load = rig.controller.load(rig.slots(host), rig.slots([8, 0, 2]))
    for layer in range(LAYERS):
        load.mark(layer).synchronize()
    load.wait()
    assert not differences(rig.snapshot(), expected)
    return backup.nbytes + load.nbytes


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("owned", [(0,), (1, 3), ()], ids=["the first", "two between", "none"])
def test_index_pages_follow_the_latent_rows(
    registry: PluginRegistry, owned: tuple[int, ...], platform: str, pair: tuple[str, str]
) -> None:
    """Both pools equal the oracle, every layer has its mark, and only what is owned is counted."""
    indexer = _indexer(registry, owned)
    with Rig([MLA, indexer], _config(pair), SimRuntime(platform_named(platform)), registry=registry) as rig:
        moved = there_and_back(rig)
    assert moved == 2 * 3 * (PAGE_SLOTS * 1_152 * LAYERS + 8_448 * len(owned))


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_pool_without_layers_maps_nothing(
    registry: PluginRegistry, platform: str, pair: tuple[str, str]
) -> None:
    """It has no host memory and no way to move; all registrations are the latent rows'."""
    runtime = SimRuntime(platform_named(platform))
    with Rig([MLA, _indexer(registry, ())], _config(pair), runtime, registry=registry) as rig:
        latent, indexer = rig.controller.group.pools
        assert (indexer.nbytes, indexer.tables, indexer.ways) == (0, (), None)
        assert [buffer.memory.segments for buffer in indexer.buffers] == [()]
        segments = latent.buffers[0].memory.segments
        assert list(runtime.memory.registrations) == [segment.host.start for segment in segments]
    assert not runtime.memory.registrations


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_pool_without_layers_launches_nothing(
    registry: PluginRegistry, platform: str, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many operations are submitted as without it; a pool with one layer adds some."""
    submitted: list[object] = []
    submit = Scheduler.submit

    def counting(self: Scheduler, *operation: object) -> None:
        submitted.append(operation)
        submit(self, *operation)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "submit", counting)
    counts = []
    for others in ([], [_indexer(registry, ())], [_indexer(registry, (0,))]):
        runtime = SimRuntime(platform_named(platform))
        with Rig([MLA, *others], _config(pair), runtime, registry=registry) as rig:
            submitted.clear()
            there_and_back(rig)
            counts.append(len(submitted))
    alone, with_none, with_one = counts
    assert 0 < alone == with_none < with_one


def _controller(
    registry: PluginRegistry, runtime: SimRuntime, spec: PoolSpec, tensors: list[torch.Tensor]
) -> Controller:
    rows = PAGE_SLOTS * 5
    latent = [runtime.allocate(rows * 1_152, 0).view(rows, 1_152) for _ in range(LAYERS)]
    pools = [
        DevicePool(spec=MLA, layers={"b0": latent}),
        DevicePool(spec=spec, layers={"index_k": tensors}),
    ]
    return Controller(_config(("kernel", "page_first")), pools, runtime, registry)


def _tensors(runtime: SimRuntime, owned: Sequence[int]) -> list[torch.Tensor]:
    """One tensor per model layer: 5 pages where the layer owns index rows, else none."""
    slab = runtime.allocate(LAYERS * 5 * 8_448, 0).view(LAYERS, 5, 8_448)
    slab.fill_(0)
    return [slab[layer] if layer in owned else slab[layer][:0] for layer in range(LAYERS)]


def test_an_engine_passes_the_layers_that_own_rows(registry: PluginRegistry) -> None:
    """A tensor per model layer, some of 0 rows: the owned ones are named and passed, and come back."""
    runtime = SimRuntime(platform_named("rocm-mi355x"))
    index_k = _tensors(runtime, (0, 3))
    owned = [layer for layer, rows in enumerate(index_k) if len(rows)]
    spec = _indexer(registry, owned)
    controller = _controller(registry, runtime, spec, [index_k[layer] for layer in owned])
    assert controller.device_pages["full"] == 5
    host = controller.group.allocate({"full": PAGE_SLOTS})
    assert host is not None
    for layer in owned:
        index_k[layer][2] = 10 + layer
    controller.backup(host["full"], np.arange(2 * PAGE_SLOTS, 3 * PAGE_SLOTS)).wait()
    controller.load(host["full"], np.arange(4 * PAGE_SLOTS, 5 * PAGE_SLOTS)).wait()
    assert [bool((index_k[layer][4] == 10 + layer).all()) for layer in owned] == [True, True]
    assert not [layer for layer in owned if index_k[layer][3].any()]
    controller.close()


def test_a_layer_of_no_rows_that_is_passed_is_refused(registry: PluginRegistry) -> None:
    """It has no memory to read or write; the controller is not made, and nothing stays registered."""
    runtime = SimRuntime()
    index_k = _tensors(runtime, (0, 1, 3))
    with pytest.raises(BufferMismatchError) as caught:
        _controller(registry, runtime, _indexer(registry, range(LAYERS)), index_k)
    assert caught.value.code == "buffer-mismatch"
    assert not runtime.memory.registrations
