"""Rows of state slots, against figures worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from hicache_core.errors import SpecError
from hicache_core.hookspecs import API_VERSION
from hicache_core.models import PoolEntry, load_model, model_names
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import (
    PLATFORMS,
    IndexSpace,
    PoolGeometry,
    PoolSpec,
    RowUnit,
    Verdict,
    default_capabilities,
    platform_named,
)
from hicache_mamba import plugin

STATES = {
    "temporal_shape": [32, 128, 128],
    "temporal_dtype": "bfloat16",
    "conv_shapes": [[6144, 3]],
    "conv_dtype": "bfloat16",
}
SIDE_STATES = {"positions": 64, "scales": 4}


@pytest.fixture
def registry() -> PluginRegistry:
    """A registry with this plugin alone."""
    registry = PluginRegistry()
    registry.register(plugin, name="mamba", distribution="hicache-mamba test")
    return registry


def _geometry(
    params: dict[str, Any], *, layer_ids: Iterable[int] = (0, 1, 4), page_slots: int = 1
) -> PoolGeometry:
    return PoolGeometry(
        pool="states",
        family="mamba",
        index_space=IndexSpace(name="state", page_slots=page_slots),
        layer_ids=layer_ids,
        params=params,
    )


def _rows(spec: PoolSpec) -> list[tuple[str, int]]:
    return [(b.name, b.row_bytes) for b in spec.buffers]


def _entries() -> Iterator[tuple[str, PoolEntry]]:
    """Every pool of the family in the shipped models, by ``model/variant``."""
    for model in map(load_model, model_names()):
        for variant in model.variants.values():
            for entry in variant.pools:
                if entry.family == "mamba":
                    yield f"{model.id}/{variant.name}", entry


ENTRIES = dict(_entries())


@pytest.mark.parametrize(
    ("temporal", "dtype", "conv", "rows"),
    [
        # 32 x 128 x 128 x 2 and 6,144 x 3 x 2
        ([32, 128, 128], "bfloat16", [6144, 3], [("temporal", 1_048_576), ("conv_0", 36_864)]),
        # 32 x 128 x 256 x 4 and 5,120 x 3 x 2
        ([32, 128, 256], "float32", [5120, 3], [("temporal", 4_194_304), ("conv_0", 30_720)]),
        # 8,192 x 1 x 16 x 4 and 8,192 x 3 x 2
        ([8192, 1, 16], "float32", [8192, 3], [("temporal", 524_288), ("conv_0", 49_152)]),
        # 32 x 128 x 128 x 4 and 3 x 12,288 x 2
        ([32, 128, 128], "float32", [3, 12288], [("temporal", 2_097_152), ("conv_0", 73_728)]),
    ],
)
def test_a_row_is_a_shape_times_its_element(
    registry: PluginRegistry, temporal: list[int], dtype: str, conv: list[int], rows: list[tuple[str, int]]
) -> None:
    """The recurrent state first; the two may differ in element type."""
    params = {**STATES, "temporal_shape": temporal, "temporal_dtype": dtype, "conv_shapes": [conv]}
    assert _rows(registry.spec(_geometry(params))) == rows


@pytest.mark.parametrize(
    ("place", "row_bytes"),
    [
        ("qwen3.5-397b-a17b/tp2_fp8kv_bf16state_mtp1", 1_085_440),
        ("qwen3.5-397b-a17b/bf16", 4_268_032),
        ("falcon-h1-34b/bf16", 4_225_024),
        ("jamba-v0.1/bf16", 573_440),
        ("kimi-linear-48b-a3b/bf16", 2_170_880),
        ("nemotron-h-8b/bf16", 4_255_744),
        ("nemotron-3-nano-30b-a3b/bf16", 2_134_016),
    ],
)
def test_published_figures(registry: PluginRegistry, place: str, row_bytes: int) -> None:
    """Bytes of one layer of a slot, as they were published."""
    spec = registry.spec(ENTRIES[place].geometry(1))
    assert sum(b.row_bytes for b in spec.buffers) == row_bytes


@pytest.mark.parametrize("place", ENTRIES)
def test_every_shipped_pool_has_the_row_bytes_of_its_file(registry: PluginRegistry, place: str) -> None:
    """What is declared is what the model file was checked with, in the file's layers."""
    entry = ENTRIES[place]
    spec = registry.spec(entry.geometry(1))
    assert sum(b.row_bytes for b in spec.buffers) == entry.row_bytes
    assert spec.layer_ids == entry.layer_ids


def test_a_slot_of_the_published_run(registry: PluginRegistry) -> None:
    """45 layers x 1,085,440 bytes."""
    spec = registry.spec(ENTRIES["qwen3.5-397b-a17b/tp2_fp8kv_bf16state_mtp1"].geometry(1))
    assert (spec.layer_count, spec.page_bytes) == (45, 48_844_800)


def test_convolutions_are_numbered_and_share_an_element_type(registry: PluginRegistry) -> None:
    """Three states of 16 x 3, 8 x 4 and 24 elements of 4 bytes, in the order that was given."""
    params = {**STATES, "conv_shapes": [[16, 3], [8, 4], [24]], "conv_dtype": "float32"}
    spec = registry.spec(_geometry(params))
    assert _rows(spec)[1:] == [("conv_0", 192), ("conv_1", 128), ("conv_2", 96)]


@pytest.mark.parametrize("shape", [[], [0], [32, 0, 128]])
def test_a_conv_only_model_has_no_temporal_buffer(registry: PluginRegistry, shape: list[int]) -> None:
    """An empty recurrent state is nothing, and needs no element type."""
    params = {"temporal_shape": shape, "conv_shapes": [[6144, 3]], "conv_dtype": "bfloat16"}
    assert _rows(registry.spec(_geometry(params))) == [("conv_0", 36_864)]


def test_side_states_come_last_and_count_once_a_slot(registry: PluginRegistry) -> None:
    """3 layers x 1,085,440 and once 64 + 4."""
    spec = registry.spec(_geometry({**STATES, "side_states": SIDE_STATES}))
    assert [(b.name, b.per_layer) for b in spec.buffers] == [
        ("temporal", True),
        ("conv_0", True),
        ("positions", False),
        ("scales", False),
    ]
    assert _rows(spec)[2:] == [("positions", 64), ("scales", 4)]
    assert spec.page_bytes == 3 * 1_085_440 + 64 + 4


def test_draft_layers_are_layers_at_the_end(registry: PluginRegistry) -> None:
    """Two of them after the 45 of the target: as many more rows of the same bytes."""
    entry = ENTRIES["qwen3.5-397b-a17b/tp2_fp8kv_bf16state_mtp1"]
    layers = (*entry.layer_ids, 60, 61)
    spec = registry.spec(_geometry(dict(entry.params), layer_ids=layers))
    assert (spec.layer_ids, spec.page_bytes) == (layers, 47 * 1_085_440)


def test_a_row_is_a_slot(registry: PluginRegistry) -> None:
    """One row per slot and layer, in the layers and the space that were given."""
    spec = registry.spec(_geometry(STATES))
    assert (spec.row_unit, spec.page_rows) == (RowUnit.SLOT, 1)
    assert (spec.pool, spec.family, spec.anchor, spec.layer_ids) == ("states", "mamba", False, (0, 1, 4))
    assert spec.index_space == IndexSpace(name="state", page_slots=1)


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("temporal_shape", None),
        ("temporal_shape", 32),
        ("temporal_shape", "128"),
        ("temporal_shape", [32, -1]),
        ("temporal_shape", [32, 1.5]),
        ("temporal_shape", [True, 32]),
        ("temporal_dtype", None),
        ("temporal_dtype", "int3"),
        ("conv_shapes", None),
        ("conv_shapes", []),
        ("conv_shapes", [6144, 3]),
        ("conv_shapes", [[6144, 3], []]),
        ("conv_shapes", [[6144, 0]]),
        ("conv_shapes", [[6144, "3"]]),
        ("conv_dtype", None),
        ("conv_dtype", ["bfloat16"]),
        ("side_states", None),
        ("side_states", ["positions"]),
        ("side_states", {"positions": 0}),
        ("side_states", {"positions": [4, 4]}),
    ],
)
def test_a_figure_that_is_missing_or_wrong_is_refused(
    registry: PluginRegistry, figure: str, value: object
) -> None:
    """The error names pool, family, figure and value."""
    with pytest.raises(SpecError) as caught:
        registry.spec(_geometry({**STATES, figure: value}))
    error = caught.value
    assert (error.code, error.who) == ("spec", "pool 'states' (mamba)")
    assert error.got == f"geometry {figure}={value!r}"
    assert error.expected
    assert figure in error.remedy


@pytest.mark.parametrize("name", ["temporal", "conv_0", ""])
def test_a_side_state_has_a_name_of_its_own(registry: PluginRegistry, name: str) -> None:
    """Neither that of another buffer nor none."""
    with pytest.raises(SpecError) as caught:
        registry.spec(_geometry({**STATES, "side_states": {name: 64}}))
    assert caught.value.code == "spec"


def test_pages_of_more_than_one_slot_are_refused(registry: PluginRegistry) -> None:
    """A slot is a whole checkpoint."""
    with pytest.raises(SpecError) as caught:
        registry.spec(_geometry(STATES, page_slots=16))
    assert (caught.value.code, caught.value.who) == ("spec", "pool 'states' (mamba)")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_capabilities_are_the_core_s_but_for_the_pairs(registry: PluginRegistry, platform: str) -> None:
    """No layer_first; all else as the core works it out."""
    spec = registry.spec(_geometry(STATES))
    declares = registry.capabilities(spec, platform_named(platform))
    assert declares.served_pairs.value == {("kernel", "page_first"), ("direct", "page_first_direct")}
    default = default_capabilities(spec, platform_named(platform))
    assert declares.amended({"served_pairs": default.served_pairs}) == default
    assert declares.staged_write_back


def test_a_row_that_cannot_be_staged_is_named(registry: PluginRegistry) -> None:
    """A convolution state of 5 x 3 elements has 30 bytes."""
    spec = registry.spec(_geometry({**STATES, "conv_shapes": [[5, 3]]}))
    declares = registry.capabilities(spec, platform_named("cuda"))
    for capability in (declares.staged_write_back, declares.kernel_rows):
        assert (capability.verdict, capability.code) == (Verdict.UNSUPPORTED, "row-alignment")
        assert "conv_0=30" in capability.text
        assert "temporal" not in capability.text


def test_the_plugin_brings_its_family_for_this_api(registry: PluginRegistry) -> None:
    """One family, a range that holds the core's version, a line, and every figure in its schema."""
    (family,) = registry.families.values()
    lowest, highest = family.api
    assert lowest <= API_VERSION <= highest
    assert family.name == "mamba"
    assert family.description
    assert set(family.geometry) == {*STATES, "side_states"}


def test_the_plugin_leaves_movement_to_the_core(registry: PluginRegistry) -> None:
    """It declares rows and pairs, and no more."""
    (registered,) = registry.plugins
    assert set(registered.hooks) == {
        "hicache_pool_families",
        "hicache_pool_spec",
        "hicache_declare_capabilities",
    }
