"""State rings of DeepSeek-V4, against figures worked out by hand."""

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
    Reuse,
    RowUnit,
    default_capabilities,
)
from hicache_dsv4_state import plugin

C4 = {"ring_slots": 8, "slot_bytes": 8_192}
LAYER_IDS = (2, 4, 6)


@pytest.fixture
def registry() -> PluginRegistry:
    """A registry with this plugin alone."""
    registry = PluginRegistry()
    registry.register(plugin, name="dsv4_state", distribution="hicache-dsv4-state test")
    return registry


def _swa(page_slots: int) -> IndexSpace:
    return IndexSpace(name="swa", page_slots=page_slots, reuse=Reuse.TRAILING_PAGES, window_slots=128)


def _spec(
    registry: PluginRegistry,
    params: dict[str, Any],
    *,
    page_slots: int = 256,
    anchor: bool = False,
    layer_ids: tuple[int, ...] = LAYER_IDS,
) -> PoolSpec:
    geometry = PoolGeometry(
        pool="c4_state",
        family="dsv4_state",
        index_space=_swa(page_slots),
        layer_ids=layer_ids,
        params=params,
        anchor=anchor,
    )
    return registry.spec(geometry)


@pytest.mark.parametrize(
    ("ring_slots", "slot_bytes", "row_bytes"),
    [
        # C4: 2 x 2 x 512 fp32 a slot; its indexer: 2 x 2 x 128
        (8, 8_192, 65_536),
        (8, 2_048, 16_384),
        # with speculation
        (16, 8_192, 131_072),
        (16, 2_048, 32_768),
        # states in bf16
        (8, 4_096, 32_768),
        (8, 1_024, 8_192),
        # a ring of one slot
        (1, 8_192, 8_192),
    ],
)
@pytest.mark.parametrize("form", [lambda figure: figure, lambda figure: [figure] * 3], ids=["one", "list"])
def test_row_bytes_of_a_ring(
    registry: PluginRegistry, ring_slots: int, slot_bytes: int, row_bytes: int, form: Any
) -> None:
    """Slots of the ring times bytes of a slot, each as one number or as the same number for each layer."""
    spec = _spec(registry, {"ring_slots": form(ring_slots), "slot_bytes": form(slot_bytes)})
    assert [(buffer.name, buffer.row_bytes) for buffer in spec.buffers] == [("state", row_bytes)]


@pytest.mark.parametrize(("ring_slots", "page_slots"), [(8, 8), (8, 64), (64, 64), (16, 48)])
def test_any_page_of_whole_rings_is_served(
    registry: PluginRegistry, ring_slots: int, page_slots: int
) -> None:
    """One ring per page, however many slots the page has."""
    spec = _spec(registry, {**C4, "ring_slots": ring_slots}, page_slots=page_slots)
    assert spec.buffers[0].row_bytes == ring_slots * 8_192


@pytest.mark.parametrize("anchor", [False, True])
def test_a_row_is_a_page(registry: PluginRegistry, anchor: bool) -> None:
    """One row per page and layer, in the layers and the space that were given, as anchor or not."""
    spec = _spec(registry, C4, anchor=anchor)
    assert (spec.row_unit, spec.page_rows, spec.page_bytes) == (RowUnit.PAGE, 1, 3 * 65_536)
    assert (spec.pool, spec.family, spec.layer_ids) == ("c4_state", "dsv4_state", LAYER_IDS)
    assert (spec.anchor, spec.index_space) == (anchor, _swa(256))


def test_a_pool_without_layers_is_declared_by_numbers(registry: PluginRegistry) -> None:
    """It has a row and no bytes."""
    spec = _spec(registry, C4, layer_ids=())
    assert (spec.buffers[0].row_bytes, spec.page_bytes) == (65_536, 0)


@pytest.mark.parametrize(
    ("params", "got"),
    [
        ({"slot_bytes": 8_192}, "ring_slots=None"),
        ({"ring_slots": 8}, "slot_bytes=None"),
        ({**C4, "ring_slots": 0}, "ring_slots=0"),
        ({**C4, "slot_bytes": -1}, "slot_bytes=-1"),
        ({**C4, "ring_slots": 8.0}, "ring_slots=8.0"),
        ({**C4, "ring_slots": "8"}, "ring_slots='8'"),
        ({**C4, "ring_slots": True}, "ring_slots=True"),
        # the ring does not divide the page of 256 slots
        ({**C4, "ring_slots": 3}, "ring_slots=3"),
        ({**C4, "ring_slots": 512}, "ring_slots=512"),
        ({**C4, "ring_slots": [12, 12, 12]}, "ring_slots=[12"),
        # layers that differ
        ({**C4, "ring_slots": [8, 8, 16]}, "ring_slots=[8, 8, 16]"),
        ({**C4, "slot_bytes": [8_192, 2_048, 8_192]}, "slot_bytes=[8192, 2048, 8192]"),
        # not one per layer
        ({**C4, "ring_slots": [8, 8]}, "ring_slots=[8, 8]"),
        ({**C4, "slot_bytes": [8_192] * 4}, "slot_bytes=[8192, 8192, 8192, 8192]"),
        ({**C4, "slot_bytes": []}, "slot_bytes=[]"),
        # numbers of a list that are none
        ({**C4, "ring_slots": [8, 8, 0]}, "ring_slots=0"),
        ({**C4, "ring_slots": [8, 8, 8.0]}, "ring_slots=8.0"),
        ({**C4, "ring_slots": [8, 8, None]}, "ring_slots=None"),
        ({**C4, "ring_slots": [[8], [8], [8]]}, "ring_slots=[8]"),
    ],
    ids=str,
)
def test_a_figure_that_is_missing_wrong_or_unequal_is_refused(
    registry: PluginRegistry, params: dict[str, Any], got: str
) -> None:
    """The error names pool, family, figure and value."""
    with pytest.raises(SpecError) as caught:
        _spec(registry, params)
    error = caught.value
    assert (error.code, error.who) == ("spec", "pool 'c4_state' (dsv4_state)")
    assert got in error.got
    assert error.expected
    assert error.remedy


def test_a_list_of_no_layers_gives_no_figure(registry: PluginRegistry) -> None:
    """A pool without layers needs numbers."""
    with pytest.raises(SpecError) as caught:
        _spec(registry, {**C4, "slot_bytes": []}, layer_ids=())
    assert caught.value.code == "spec"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_rings_move_as_whole_pages_and_can_be_staged(registry: PluginRegistry, platform: str) -> None:
    """Backups are a staged write-back wherever that is asked for; single slots have no bytes of their own."""
    can = default_capabilities(_spec(registry, C4), PLATFORMS[platform])
    assert can.staged_write_back
    assert can.token_granular.code == "no-spans"


def test_the_plugin_brings_its_family_for_this_api(registry: PluginRegistry) -> None:
    """One family, a range that holds the core's version, and a line."""
    (family,) = registry.families.values()
    lowest, highest = family.api
    assert lowest <= API_VERSION <= highest
    assert (family.name, set(family.geometry)) == ("dsv4_state", set(C4))
    assert family.description


def test_the_plugin_leaves_movement_to_the_core(registry: PluginRegistry) -> None:
    """It declares rows, and no more."""
    (registered,) = registry.plugins
    assert set(registered.hooks) == {"hicache_pool_families", "hicache_pool_spec"}
