"""Rows of the token families, against figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_core.errors import SpecError
from hicache_core.hookspecs import API_VERSION
from hicache_core.models import load_model
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import IndexSpace, PoolGeometry, RowUnit
from hicache_mha_mla import plugin

FAMILIES = ["k_only", "mha", "mla"]
MHA = {"kv_heads": 8, "k_head_dim": 128, "dtype": "bfloat16"}
MLA = {"latent_dim": 512, "rope_dim": 64, "row_format": "bf16"}
K_ONLY = {"kv_heads": 1, "k_head_dim": 128, "dtype": "bfloat16"}
GEOMETRIES = {"mha": MHA, "mla": MLA, "k_only": K_ONLY}


@pytest.fixture
def registry() -> PluginRegistry:
    """A registry with this plugin alone."""
    registry = PluginRegistry()
    registry.register(plugin, name="mha_mla", distribution="hicache-mha-mla test")
    return registry


def _geometry(family: str, params: dict[str, Any], page_slots: int = 16) -> PoolGeometry:
    return PoolGeometry(
        pool="kv",
        family=family,
        index_space=IndexSpace(name="full", page_slots=page_slots),
        layer_ids=(0, 2, 5),
        params=params,
        anchor=True,
    )


def _rows(registry: PluginRegistry, family: str, params: dict[str, Any]) -> list[tuple[str, int]]:
    return [(b.name, b.row_bytes) for b in registry.spec(_geometry(family, params)).buffers]


@pytest.mark.parametrize(
    ("params", "k_bytes", "v_bytes"),
    [
        # 8 heads x 128 elements x 2 bytes
        (MHA, 2_048, 2_048),
        # 4 heads x 128 x 2
        ({**MHA, "kv_heads": 4, "v_head_dim": 128}, 1_024, 1_024),
        # keys of 192 and values of 128: 8 x 192 x 2 and 8 x 128 x 2
        ({**MHA, "k_head_dim": 192, "v_head_dim": 128}, 3_072, 2_048),
        # the same, one head, one byte
        ({"kv_heads": 1, "k_head_dim": 192, "v_head_dim": 128, "dtype": "float8_e4m3fn"}, 192, 128),
        ({"kv_heads": 1, "k_head_dim": 256, "v_head_dim": 256, "dtype": "float8_e5m2"}, 256, 256),
        ({**MHA, "dtype": "float32"}, 4_096, 4_096),
        ({**MHA, "dtype": "float16"}, 2_048, 2_048),
        ({**MHA, "dtype": "uint8"}, 1_024, 1_024),
        ({**MHA, "dtype": "int8"}, 1_024, 1_024),
    ],
)
def test_keys_and_values_are_rows_of_their_own(
    registry: PluginRegistry, params: dict[str, Any], k_bytes: int, v_bytes: int
) -> None:
    """Heads x width x element bytes, keys first; widths may differ."""
    assert _rows(registry, "mha", params) == [("k", k_bytes), ("v", v_bytes)]


@pytest.mark.parametrize(
    ("row_format", "row_bytes"),
    # (512 + 64) x 2; one byte each; 512 + 4 scales x 4 + 64 x 2
    [("bf16", 1_152), ("fp8", 576), ("fp8_scaled", 656)],
)
def test_a_latent_row_holds_latent_scales_and_rotary_part(
    registry: PluginRegistry, row_format: str, row_bytes: int
) -> None:
    """The three formats of a latent of 512 with a rotary part of 64."""
    assert _rows(registry, "mla", {**MLA, "row_format": row_format}) == [("kv", row_bytes)]


def test_a_last_group_that_is_not_full_has_a_scale(registry: PluginRegistry) -> None:
    """130 latent elements are two groups: 130 + 2 x 4 + 8 x 2."""
    params = {"latent_dim": 130, "rope_dim": 8, "row_format": "fp8_scaled"}
    assert _rows(registry, "mla", params) == [("kv", 154)]


def test_keys_alone_are_one_buffer(registry: PluginRegistry) -> None:
    """1 head x 128 x 2 bytes, and no values."""
    assert _rows(registry, "k_only", K_ONLY) == [("k", 256)]


@pytest.mark.parametrize(
    ("family", "scales", "rows"),
    [
        # one fp32 scale per token and head: 8 x 4
        ("mha", {"k_scale_bytes": 32, "v_scale_bytes": 32}, [("k_scale", 32), ("v_scale", 32)]),
        ("mha", {"k_scale_bytes": 4, "v_scale_bytes": 8}, [("k_scale", 4), ("v_scale", 8)]),
        ("mha", {"k_scale_bytes": 4}, [("k_scale", 4)]),
        ("mha", {"v_scale_bytes": 4}, [("v_scale", 4)]),
        ("mha", {"k_scale_bytes": 0, "v_scale_bytes": 0}, []),
        ("k_only", {"k_scale_bytes": 16}, [("k_scale", 16)]),
        ("k_only", {"k_scale_bytes": 0}, []),
    ],
)
def test_scales_of_their_own_are_buffers_after_the_rows(
    registry: PluginRegistry, family: str, scales: dict[str, int], rows: list[tuple[str, int]]
) -> None:
    """Bytes a token, keys first; absent and zero mean none."""
    params = {**GEOMETRIES[family], "dtype": "int8"}
    assert _rows(registry, family, {**params, **scales}) == _rows(registry, family, params) + rows


def test_a_page_counts_its_scales(registry: PluginRegistry) -> None:
    """16 slots x 3 layers x (1,024 + 1,024 + 32 + 32)."""
    params = {**MHA, "dtype": "int8", "k_scale_bytes": 32, "v_scale_bytes": 32}
    assert registry.spec(_geometry("mha", params)).page_bytes == 101_376


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_slots", [1, 64])
def test_a_row_is_a_token(registry: PluginRegistry, family: str, page_slots: int) -> None:
    """A page is as many rows as it has slots, in the layers and the space that were given."""
    spec = registry.spec(_geometry(family, GEOMETRIES[family], page_slots))
    assert (spec.row_unit, spec.page_rows) == (RowUnit.TOKEN, page_slots)
    assert (spec.pool, spec.family, spec.anchor, spec.layer_ids) == ("kv", family, True, (0, 2, 5))
    assert spec.index_space == IndexSpace(name="full", page_slots=page_slots)


def test_a_page_counts_all_layers_of_both_buffers(registry: PluginRegistry) -> None:
    """16 slots x 3 layers x (3,072 + 2,048)."""
    spec = registry.spec(_geometry("mha", {**MHA, "k_head_dim": 192, "v_head_dim": 128}))
    assert spec.page_bytes == 245_760


@pytest.mark.parametrize(
    ("family", "figure", "value"),
    [
        ("mha", "kv_heads", None),
        ("mha", "kv_heads", 0),
        ("mha", "kv_heads", True),
        ("mha", "k_head_dim", "128"),
        ("mha", "v_head_dim", -1),
        ("mha", "dtype", None),
        ("mha", "dtype", "int3"),
        ("mha", "dtype", ["bfloat16"]),
        ("mha", "k_scale_bytes", -4),
        ("mha", "k_scale_bytes", None),
        ("mha", "v_scale_bytes", "4"),
        ("mla", "latent_dim", None),
        ("mla", "rope_dim", 0),
        ("mla", "row_format", "v4"),
        ("mla", "row_format", {}),
        ("k_only", "kv_heads", 1.0),
        ("k_only", "dtype", ""),
        ("k_only", "k_scale_bytes", 1.5),
    ],
)
def test_a_figure_that_is_missing_or_wrong_is_refused(
    registry: PluginRegistry, family: str, figure: str, value: object
) -> None:
    """The error names pool, family, figure and value."""
    with pytest.raises(SpecError) as caught:
        registry.spec(_geometry(family, {**GEOMETRIES[family], figure: value}))
    error = caught.value
    assert (error.code, error.who) == ("spec", f"pool 'kv' ({family})")
    assert error.got == f"geometry {figure}={value!r}"
    assert error.expected
    assert figure in error.remedy


def test_the_draft_layer_of_a_published_run_is_one_of_the_layers(registry: PluginRegistry) -> None:
    """15 attention layers and a draft layer after the last layer of the model, 16 slots x 512 bytes each."""
    model = load_model("qwen3.5-397b-a17b")
    variant = model.variant("tp2_fp8kv_bf16state_mtp1", "rocm-mi355x")
    geometry = next(g for g in variant.geometries() if g.pool == "kv")
    spec = registry.spec(geometry)
    assert spec.layer_ids == (*range(3, 60, 4), model.layer_count)
    assert (spec.layer_count, spec.page_bytes) == (16, 16 * 16 * 512)


def test_the_plugin_brings_its_families_for_this_api(registry: PluginRegistry) -> None:
    """Three families, a range that holds the core's version, a line and a geometry schema each."""
    assert sorted(registry.families) == FAMILIES
    for name, family in registry.families.items():
        lowest, highest = family.api
        assert lowest <= API_VERSION <= highest
        assert family.description
        assert set(GEOMETRIES[name]) <= set(family.geometry)


def test_the_plugin_leaves_movement_to_the_core(registry: PluginRegistry) -> None:
    """It declares rows, and no more."""
    (registered,) = registry.plugins
    assert set(registered.hooks) == {"hicache_pool_families", "hicache_pool_spec"}
