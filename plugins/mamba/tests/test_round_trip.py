"""Every byte of both sides after a backup and a load, for each pool and each served combination."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from hicache_core.compat import Path
from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.sim import Faults, SimRuntime
from hicache_core.device_pool import DevicePool
from hicache_core.errors import IncompatibleError
from hicache_core.plugins import PluginRegistry, load_plugins
from hicache_core.spec import IndexSpace, PoolGeometry, PoolSpec, platform_named
from hicache_core.testing.oracle import POISON
from hicache_core.testing.rigs import DeviceOptions, Rig

PLATFORMS = ("cpu-sim", "cuda-wsl2", "rocm-mi355x")
STAGED_PAIR = ("kernel", "page_first")
DIRECT_PAIR = ("direct", "page_first_direct")
PAIRS = (STAGED_PAIR, DIRECT_PAIR)
# A recurrent row of 4 x 16 x 32 x 4 = 8,192 bytes and a convolution row of 96 x 3 x 2 = 576.
STATES: dict[str, Any] = {
    "temporal_shape": [4, 16, 32],
    "temporal_dtype": "float32",
    "conv_shapes": [[96, 3]],
    "conv_dtype": "bfloat16",
}
POOLS: dict[str, dict[str, Any]] = {
    "recurrent and convolution states": STATES,
    "three convolutions": {**STATES, "conv_shapes": [[96, 3], [32, 3], [3, 64]]},
    "convolutions alone": {**STATES, "temporal_shape": [], "conv_shapes": [[96, 3], [32, 3]]},
    "an empty recurrent state": {**STATES, "temporal_shape": [4, 0, 32]},
    "side states": {**STATES, "side_states": {"positions": 64, "tokens": 4_096}},
}
# Convolution rows of 5 x 3 x 2 = 30 bytes, and a side state of 4.
UNEVEN: dict[str, dict[str, Any]] = {
    "convolution": {**STATES, "conv_shapes": [[5, 3]]},
    "side state": {**STATES, "side_states": {"length": 4}},
}
LAYER_IDS = (0, 1, 4)
HOST_SLOTS = 8


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    """The installed plugins, found by their entry points."""
    return load_plugins(required=["mamba"])


def _declared(
    registry: PluginRegistry, params: dict[str, Any], layer_ids: Iterable[int] = LAYER_IDS
) -> PoolSpec:
    geometry = PoolGeometry(
        pool="states",
        family="mamba",
        index_space=IndexSpace(name="full", page_slots=1),
        layer_ids=layer_ids,
        params=params,
        anchor=True,
    )
    return registry.spec(geometry)


def _config(pair: tuple[str, str], ring_bytes: int = 100_000) -> ControllerConfig:
    return ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=HOST_SLOTS, ring_bytes=ring_bytes)


def _runtime(platform: str) -> SimRuntime:
    return SimRuntime(platform_named(platform))


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("pool", POOLS)
def test_slots_go_out_and_come_back(
    registry: PluginRegistry, pool: str, platform: str, pair: tuple[str, str]
) -> None:
    """Rows, guards and untouched slots equal the oracle."""
    spec = _declared(registry, POOLS[pool])
    with Rig([spec], _config(pair), _runtime(platform), registry=registry) as rig:
        rig.there_and_back()


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_draft_layers_move_with_the_layers_of_the_target(
    registry: PluginRegistry, platform: str, pair: tuple[str, str]
) -> None:
    """Three layers of a model of five, and two draft layers after them."""
    spec = _declared(registry, POOLS["side states"], layer_ids=(*LAYER_IDS, 5, 6))
    with Rig([spec], _config(pair), _runtime(platform), registry=registry) as rig:
        rig.there_and_back()


@pytest.mark.parametrize("ring_bytes", [0, 575, 576, 8_191, 8_192])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_rows_larger_than_the_ring_go_around_it(
    registry: PluginRegistry, platform: str, ring_bytes: int
) -> None:
    """A ring for no row, for one row of the small buffer, and for one of the large; staged all the same."""
    config = _config(STAGED_PAIR, ring_bytes)
    with Rig([_declared(registry, STATES)], config, _runtime(platform), registry=registry) as rig:
        plan = rig.controller.plan.pools["states"]
        # CUDA prefers strided copies; a ring for no row at all is not planned with.
        through_ring = ring_bytes >= 576 and platform != "cuda-wsl2"
        assert (plan.staged, plan.backup) == (True, Path.STAGED if through_ring else Path.COPIES)
        assert plan.staging_bytes == (ring_bytes if through_ring else 0)
        rig.there_and_back()


@pytest.mark.parametrize("options", [{}, {"slab": True}, {"slab": True, "gap_bytes": 64}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_device_tensors_keep_their_element_type(
    registry: PluginRegistry, pair: tuple[str, str], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Layers on their own, cut from one allocation, or with gaps between the rows."""
    spec = _declared(registry, POOLS["side states"])
    lying = DeviceOptions(dtype=dtype, **options)
    with Rig([spec], _config(pair), _runtime("rocm-mi355x"), options=lying, registry=registry) as rig:
        rig.there_and_back()


def _engine_tensors(runtime: SimRuntime, slots: int) -> dict[str, torch.Tensor]:
    """The states as an engine holds them: layers x slots x shape, and slots x figures for the side state."""
    layers = len(LAYER_IDS)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "temporal": (torch.float32, (layers, slots, 4, 16, 32)),
        "conv_0": (torch.bfloat16, (layers, slots, 96, 3)),
        "positions": (torch.int64, (slots, 8)),
    }
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name, (dtype, shape) in shapes.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        memory = runtime.allocate(count, 0)
        memory.copy_(torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator))
        made[name] = memory.view(dtype).view(shape)
    return made


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_states_of_two_element_types_come_back_equal(registry: PluginRegistry, pair: tuple[str, str]) -> None:
    """Float32 and bfloat16 states of several axes and an int64 side state, cut along the engine's layers."""
    spec = _declared(registry, {**STATES, "side_states": {"positions": 64}})
    runtime = _runtime("rocm-mi355x")
    tensors = _engine_tensors(runtime, slots=6)
    layers = {name: [tensor] if name == "positions" else list(tensor) for name, tensor in tensors.items()}
    controller = Controller(_config(pair), [DevicePool(spec=spec, layers=layers)], runtime, registry)
    before = {name: tensor.view(torch.uint8).clone() for name, tensor in tensors.items()}
    host = controller.group.allocate({"full": 2})
    assert host is not None
    controller.backup(host["full"], torch.tensor([1, 5])).wait()
    for tensor in tensors.values():
        tensor.zero_()
    controller.load(host["full"], torch.tensor([2, 3])).wait()
    controller.close()
    for name, tensor in tensors.items():
        axis = 0 if name == "positions" else 1
        after = tensor.view(torch.uint8)
        assert after.narrow(axis, 2, 2).equal(before[name].index_select(axis, torch.tensor([1, 5])))
        assert not after.narrow(axis, 0, 2).any()
        assert not after.narrow(axis, 4, 2).any()


def test_side_states_move_once_a_slot(registry: PluginRegistry) -> None:
    """3 layers x (8,192 + 576) bytes, and once 64 + 4,096."""
    spec = _declared(registry, POOLS["side states"])
    with Rig([spec], _config(STAGED_PAIR), _runtime("rocm-mi355x"), registry=registry) as rig:
        host = rig.slots(rig.allocate(2))
        backup = rig.controller.backup(host, rig.slots([3, 9]))
        backup.wait()
        load = rig.controller.load(host, rig.slots([0, 1]))
        load.wait()
        assert backup.nbytes == load.nbytes == 2 * (3 * (8_192 + 576) + 64 + 4_096)


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_side_states_land_with_the_first_layer(registry: PluginRegistry, pair: tuple[str, str]) -> None:
    """A slot of 512 KiB loads in two steps: at the first mark the side state is there, not the last layer."""
    spec = _declared(registry, {**STATES, "side_states": {"tokens": 1 << 19}})
    runtime = SimRuntime(platform_named("rocm-mi355x"), faults=Faults(slow_streams=range(8)))
    with Rig([spec], _config(pair), runtime, registry=registry) as rig:
        host = rig.slots(rig.allocate(2))
        rig.controller.backup(host, rig.slots([3, 9])).wait()
        (tokens,) = rig.device_rows["states"]["tokens"].tensors
        (*_, last) = rig.device_rows["states"]["temporal"].tensors
        saved = tokens[[3, 9]]
        rig.poison_device()
        load = rig.controller.load(host, rig.slots([0, 1]))
        load.mark(LAYER_IDS[0]).synchronize()
        assert tokens[[0, 1]].equal(saved)
        assert (last == POISON).all()
        load.wait()
        assert not (last[[0, 1]] == POISON).all()


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("pool", UNEVEN)
def test_uneven_rows_are_served_by_direct_alone(registry: PluginRegistry, pool: str, platform: str) -> None:
    """Rows of 30 and of 4 bytes move by copies; a kernel is refused for them at construction."""
    spec = _declared(registry, UNEVEN[pool])
    with Rig([spec], _config(DIRECT_PAIR), _runtime(platform), registry=registry) as rig:
        rig.there_and_back()
    with pytest.raises(IncompatibleError) as caught:
        Rig([spec], _config(STAGED_PAIR), _runtime(platform), registry=registry)
    (violation,) = caught.value.violations
    assert violation.id == ("R2-staged-write-back" if platform.startswith("rocm") else "R5-no-way")


@pytest.mark.parametrize("pair", [("kernel", "layer_first"), ("direct", "layer_first")], ids=" + ".join)
def test_layer_first_is_refused(registry: PluginRegistry, pair: tuple[str, str]) -> None:
    """At construction, naming the pool and the pairs that serve it."""
    with pytest.raises(IncompatibleError) as caught:
        Rig([_declared(registry, STATES)], _config(pair), _runtime("cpu-sim"), registry=registry)
    (violation,) = caught.value.violations
    assert (violation.id, violation.pool) == ("R1-served-pair", "states")
    assert all(" + ".join(served) in str(violation) for served in PAIRS)
