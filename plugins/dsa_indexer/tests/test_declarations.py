"""Index pages of DSA, against figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_core.errors import SpecError
from hicache_core.hookspecs import API_VERSION
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import (
    PLATFORMS,
    IndexSpace,
    PoolGeometry,
    PoolSpec,
    RowUnit,
    default_capabilities,
)
from hicache_dsa_indexer import plugin

PUBLISHED = {"index_head_dim": 128, "quant_block": 128}
LAYER_IDS = (0, 1, 5)


@pytest.fixture
def registry() -> PluginRegistry:
    """A registry with this plugin alone."""
    registry = PluginRegistry()
    registry.register(plugin, name="dsa_indexer", distribution="hicache-dsa-indexer test")
    return registry


def _spec(
    registry: PluginRegistry,
    params: dict[str, Any],
    *,
    page_slots: int = 64,
    anchor: bool = False,
    layer_ids: tuple[int, ...] = LAYER_IDS,
) -> PoolSpec:
    geometry = PoolGeometry(
        pool="indexer",
        family="dsa_indexer",
        index_space=IndexSpace(name="full", page_slots=page_slots),
        layer_ids=layer_ids,
        params=params,
        anchor=anchor,
    )
    return registry.spec(geometry)


@pytest.mark.parametrize(
    ("page_slots", "dim", "block", "row_bytes"),
    [
        # 64 x (128 + 4)
        (64, 128, 128, 8_448),
        (128, 128, 128, 16_896),
        (1, 128, 128, 132),
        # two scales a key: 64 x (128 + 8)
        (64, 128, 64, 8_704),
        # 64 x (256 + 8)
        (64, 256, 128, 16_896),
        # 16 x (64 + 4)
        (16, 64, 64, 1_088),
    ],
)
def test_row_bytes_of_an_index_page(
    registry: PluginRegistry, page_slots: int, dim: int, block: int, row_bytes: int
) -> None:
    """A byte per element of each key, then four bytes per quant block of each key."""
    spec = _spec(registry, {"index_head_dim": dim, "quant_block": block}, page_slots=page_slots)
    assert [(buffer.name, buffer.row_bytes) for buffer in spec.buffers] == [("index_k", row_bytes)]


@pytest.mark.parametrize("anchor", [False, True])
def test_a_row_is_a_page(registry: PluginRegistry, anchor: bool) -> None:
    """One row per page and layer, in the layers and the space that were given, as anchor or not."""
    spec = _spec(registry, PUBLISHED, anchor=anchor)
    assert (spec.row_unit, spec.page_rows, spec.page_bytes) == (RowUnit.PAGE, 1, 3 * 8_448)
    assert (spec.pool, spec.family, spec.layer_ids) == ("indexer", "dsa_indexer", LAYER_IDS)
    assert (spec.anchor, spec.index_space) == (anchor, IndexSpace(name="full", page_slots=64))


def test_a_pool_in_which_no_layer_has_an_indexer_has_no_bytes(registry: PluginRegistry) -> None:
    """Its row is declared, and there is none of it."""
    spec = _spec(registry, PUBLISHED, layer_ids=())
    assert (spec.buffers[0].row_bytes, spec.layer_count, spec.page_bytes) == (8_448, 0, 0)


@pytest.mark.parametrize(
    ("params", "got"),
    [
        ({"quant_block": 128}, "index_head_dim=None"),
        ({"index_head_dim": 128}, "quant_block=None"),
        ({**PUBLISHED, "index_head_dim": 0}, "index_head_dim=0"),
        ({**PUBLISHED, "index_head_dim": "128"}, "index_head_dim='128'"),
        ({**PUBLISHED, "quant_block": -128}, "quant_block=-128"),
        ({**PUBLISHED, "quant_block": 128.0}, "quant_block=128.0"),
        # quant blocks that do not fill a key
        ({**PUBLISHED, "quant_block": 96}, "quant blocks of 96"),
        ({**PUBLISHED, "quant_block": 256}, "quant blocks of 256"),
        ({**PUBLISHED, "index_head_dim": 192}, "index_head_dim=192"),
    ],
    ids=str,
)
def test_a_figure_that_is_missing_or_wrong_is_refused(
    registry: PluginRegistry, params: dict[str, Any], got: str
) -> None:
    """The error names pool, family, figure and value."""
    with pytest.raises(SpecError) as caught:
        _spec(registry, params)
    error = caught.value
    assert (error.code, error.who) == ("spec", "pool 'indexer' (dsa_indexer)")
    assert got in error.got
    assert error.expected
    assert error.remedy


@pytest.mark.parametrize("platform", PLATFORMS)
def test_index_pages_move_as_a_whole_and_can_be_staged(registry: PluginRegistry, platform: str) -> None:
    """Backups are a staged write-back wherever that is asked for; single tokens are not copied."""
    can = default_capabilities(_spec(registry, PUBLISHED), PLATFORMS[platform])
    assert can.staged_write_back
    assert can.token_granular.code == "no-spans"


def test_the_plugin_brings_its_family_for_this_api(registry: PluginRegistry) -> None:
    """One family, a range that holds the core's version, and a line."""
    (family,) = registry.families.values()
    lowest, highest = family.api
    assert lowest <= API_VERSION <= highest
    assert (family.name, set(family.geometry)) == ("dsa_indexer", set(PUBLISHED))
    assert family.description


def test_the_plugin_leaves_movement_to_the_core(registry: PluginRegistry) -> None:
    """It declares rows, and no more."""
    (registered,) = registry.plugins
    assert set(registered.hooks) == {"hicache_pool_families", "hicache_pool_spec"}
