"""Every byte of both sides after a backup and a load, for each pool and each served combination."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import IncompatibleError
from hicache_core.plugins import PluginRegistry, load_plugins
from hicache_core.spec import IndexSpace, PoolGeometry, PoolSpec, Verdict, platform_named
from hicache_core.testing.rigs import Rig

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
    "scales of 32 and 16 bytes": (
        "mha",
        {
            "kv_heads": 8,
            "k_head_dim": 32,
            "v_head_dim": 16,
            "dtype": "int8",
            "k_scale_bytes": 32,
            "v_scale_bytes": 16,
        },
    ),
    "keys with scales": (
        "k_only",
        {"kv_heads": 1, "k_head_dim": 128, "dtype": "float8_e4m3fn", "k_scale_bytes": 16},
    ),
}
UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "keys and values": (
        "mha",
        {
            "kv_heads": 1,
            "k_head_dim": 128,
            "dtype": "float8_e4m3fn",
            "k_scale_bytes": 4,
            "v_scale_bytes": 4,
        },
    ),
    "keys alone": ("k_only", {"kv_heads": 1, "k_head_dim": 128, "dtype": "int8", "k_scale_bytes": 4}),
}
DIRECT_PAIRS = tuple(pair for pair in PAIRS if pair[0] == "direct")
DRAFTED = {"kv_heads": 1, "k_head_dim": 256, "dtype": "float8_e4m3fn"}
DRAFTED_LAYERS = (*range(3, 60, 4), 60)
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


def _config(pair: tuple[str, str]) -> ControllerConfig:
    return ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=HOST_PAGES, ring_bytes=100_000)


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("pool", POOLS)
def test_pages_go_out_and_come_back(
    registry: PluginRegistry, pool: str, platform: str, pair: tuple[str, str]
) -> None:
    """Rows, guards and untouched pages equal the oracle."""
    spec = declared(registry, "rows", *POOLS[pool], anchor=True, layer_ids=[0, 3, 4])
    with Rig([spec], _config(pair), SimRuntime(platform_named(platform)), registry=registry) as rig:
        rig.there_and_back()


@pytest.mark.parametrize("pair", DIRECT_PAIRS, ids=" + ".join)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("pool", UNEVEN)
def test_scale_rows_of_four_bytes_move_by_copies(
    registry: PluginRegistry, pool: str, platform: str, pair: tuple[str, str]
) -> None:
    """A copy has no rule about the multiple of a row."""
    spec = declared(registry, "rows", *UNEVEN[pool], anchor=True, layer_ids=[0, 3, 4])
    with Rig([spec], _config(pair), SimRuntime(platform_named(platform)), registry=registry) as rig:
        rig.there_and_back()


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("pool", UNEVEN)
def test_scale_rows_of_four_bytes_are_not_moved_by_a_kernel(
    registry: PluginRegistry, pool: str, platform: str
) -> None:
    """The pool says that it is neither staged nor moved by a kernel, naming the scales."""
    spec = declared(registry, "rows", *UNEVEN[pool], anchor=True, layer_ids=[0, 3, 4])
    declares = registry.capabilities(spec, platform_named(platform))
    for capability in (declares.staged_write_back, declares.kernel_rows):
        assert (capability.verdict, capability.code) == (Verdict.UNSUPPORTED, "row-alignment")
        assert "k_scale=4" in capability.text
        assert "k=" not in capability.text
    assert declares.strided_copy


@pytest.mark.parametrize(
    ("platform", "rule"),
    [
        ("cpu-sim", "R5-no-way"),
        ("cuda-wsl2", "R5-no-way"),
        ("rocm-mi355x", "R2-staged-write-back"),
    ],
)
def test_a_kernel_is_refused_for_scale_rows_of_four_bytes(
    registry: PluginRegistry, platform: str, rule: str
) -> None:
    """At construction, with the pool and the rule that it breaks."""
    spec = declared(registry, "rows", *UNEVEN["keys and values"], anchor=True, layer_ids=[0])
    with pytest.raises(IncompatibleError) as caught:
        Rig([spec], _config(PAIRS[0]), SimRuntime(platform_named(platform)), registry=registry)
    assert caught.value.code == "incompatible"
    assert [(v.id, v.pool) for v in caught.value.violations] == [(rule, "rows")]


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_draft_layers_move_with_the_layers_of_the_target(
    registry: PluginRegistry, platform: str, pair: tuple[str, str]
) -> None:
    """15 layers of a model of 60, and a draft layer after them."""
    spec = declared(registry, "rows", "mha", DRAFTED, anchor=True, layer_ids=DRAFTED_LAYERS)
    with Rig([spec], _config(pair), SimRuntime(platform_named(platform)), registry=registry) as rig:
        rig.there_and_back()


def test_draft_layers_count_and_have_a_mark(registry: PluginRegistry) -> None:
    """A page of 16 slots x 16 layers x 512 bytes; the draft layer has landed when its mark has passed."""
    spec = declared(registry, "rows", "mha", DRAFTED, anchor=True, layer_ids=DRAFTED_LAYERS)
    with Rig([spec], _config(PAIRS[0]), SimRuntime(platform_named("rocm-mi355x")), registry=registry) as rig:
        (host,) = rig.allocate(1)
        backup = rig.controller.backup(rig.slots([host]), rig.slots([3]))
        backup.wait()
        assert backup.nbytes == 16 * 16 * 512
        rows = rig.device_rows["rows"]
        expected = [rows[name].tensors[-1][48:64].clone() for name in ("k", "v")]
        rig.poison_device()
        load = rig.controller.load(rig.slots([host]), rig.slots([5]))
        load.mark(60).synchronize()
        for name, saved in zip(("k", "v"), expected, strict=True):
            assert rows[name].tensors[-1][80:96].equal(saved)
        load.wait()
