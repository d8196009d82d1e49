"""Page rows of DeepSeek-V4, against figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_core.errors import SpecError
from hicache_core.hookspecs import API_VERSION
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import (
    PLATFORMS,
    BufferSpec,
    IndexSpace,
    PoolGeometry,
    RowUnit,
    Span,
    default_capabilities,
)
from hicache_dsv4_paged import plugin
from hicache_dsv4_paged.pool import ROW_FORMATS

C4 = {"compress_ratio": 4, "row_format": "v4"}


@pytest.fixture
def registry() -> PluginRegistry:
    """A registry with this plugin alone."""
    registry = PluginRegistry()
    registry.register(plugin, name="dsv4_paged", distribution="hicache-dsv4-paged test")
    return registry


def _geometry(
    params: dict[str, Any], *, family: str = "dsv4_paged", page_slots: int = 256, anchor: bool = False
) -> PoolGeometry:
    return PoolGeometry(
        pool="c4",
        family=family,
        index_space=IndexSpace(name="full", page_slots=page_slots),
        layer_ids=() if anchor else (2, 4, 6),
        params=params,
        anchor=anchor,
    )


def _buffer(registry: PluginRegistry, params: dict[str, Any], page_slots: int = 256) -> BufferSpec:
    (buffer,) = registry.spec(_geometry(params, page_slots=page_slots)).buffers
    assert buffer.name == "kv"
    return buffer


def _row_bytes(registry: PluginRegistry, params: dict[str, Any], page_slots: int = 256) -> int:
    return _buffer(registry, params, page_slots).row_bytes


@pytest.mark.parametrize(
    ("row_format", "ratio", "row_bytes"),
    [
        # slots x 584, up to a multiple of 576: 37,376 -> 65 x 576; 1,168 -> 3 x 576; 149,504 -> 260 x 576
        ("v4", 4, 37_440),
        ("v4", 128, 1_728),
        ("v4", 1, 149_760),
        # slots x 528, up to a multiple of 512: 66 x 512; 1,056 -> 3 x 512; 264 x 512
        ("v41", 4, 33_792),
        ("v41", 128, 1_536),
        ("v41", 1, 135_168),
        # slots x 512 x 2
        ("unified_bf16", 4, 65_536),
        ("unified_bf16", 128, 2_048),
        # slots x 512, and slots x 64 x 2 beside it
        ("unified_fp8", 4, 32_768),
        ("unified_fp8", 128, 1_024),
        ("unified_fp8_rope", 4, 8_192),
        ("unified_fp8_rope", 128, 256),
        # slots x 512
        ("uniform_fp8", 4, 32_768),
        ("uniform_fp8", 128, 1_024),
        ("uniform_fp8", 1, 131_072),
        # 64 x (128 + 4)
        ("index_fp8", 4, 8_448),
    ],
)
def test_row_bytes_of_a_named_format(
    registry: PluginRegistry, row_format: str, ratio: int, row_bytes: int
) -> None:
    """A page of 256 slots holds 256, 64 or 2 compressed slots."""
    assert _row_bytes(registry, {"compress_ratio": ratio, "row_format": row_format}) == row_bytes


@pytest.mark.parametrize(
    ("figures", "row_bytes"),
    [
        # 64 x 24
        ({"value_bytes": 24}, 1_536),
        # 64 x (24 + 2) = 1,664, up to 1,700
        ({"value_bytes": 24, "scale_bytes": 2, "row_align_bytes": 100}, 1_700),
        # a multiple already: no padding
        ({"value_bytes": 24, "scale_bytes": 8, "row_align_bytes": 512}, 2_048),
        # the fused FP4 indexer: 64 x (64 + 4)
        ({"value_bytes": 64, "scale_bytes": 4}, 4_352),
        ({"value_bytes": 64, "scale_bytes": 0}, 4_096),
    ],
)
def test_row_bytes_of_a_format_in_figures(
    registry: PluginRegistry, figures: dict[str, int], row_bytes: int
) -> None:
    """Values, then scales, then padding; scales and padding may be absent."""
    assert _row_bytes(registry, {"compress_ratio": 4, **figures}) == row_bytes


def test_any_ratio_that_divides_the_page_is_served(registry: PluginRegistry) -> None:
    """Ratio 8 in pages of 128: 16 slots x 1,024."""
    params = {"compress_ratio": 8, "row_format": "unified_bf16"}
    assert _row_bytes(registry, params, page_slots=128) == 16_384


def test_single_slots_of_c4_in_v4_rows_have_a_value_and_scales(registry: PluginRegistry) -> None:
    """64 slots: values of 576 bytes from 0, scales of 8 bytes from 64 x 576, up to 64 bytes of padding."""
    buffer = _buffer(registry, C4)
    value, scale = Span(offset=0, stride=576, nbytes=576), Span(offset=36_864, stride=8, nbytes=8)
    assert (buffer.spans, buffer.row_tokens) == ((value, scale), 64)
    assert (value.end(64), scale.end(64)) == (36_864, 37_376)


@pytest.mark.parametrize(
    "params",
    [
        {**C4, "compress_ratio": 128},
        {**C4, "compress_ratio": 1},
        {**C4, "compress_ratio": 2},
        *({**C4, "row_format": name} for name in ROW_FORMATS if name != "v4"),
        {"compress_ratio": 4, "value_bytes": 576, "scale_bytes": 8, "row_align_bytes": 576},
    ],
    ids=str,
)
def test_all_other_rows_move_as_whole_pages(registry: PluginRegistry, params: dict[str, Any]) -> None:
    """C128, SWA and indexer rows, other formats, and figures that only look like ``v4``."""
    buffer = _buffer(registry, params)
    assert (buffer.spans, buffer.row_tokens) == ((), 1)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("ratio", "ranges"), [(4, 2), (128, None)])
def test_token_copies_are_declared_for_c4_alone(
    registry: PluginRegistry, platform: str, ratio: int, ranges: int | None
) -> None:
    """A C4 slot is two ranges of a row; a C128 slot is refused with a reason."""
    spec = registry.spec(_geometry({**C4, "compress_ratio": ratio}))
    can = default_capabilities(spec, PLATFORMS[platform]).token_granular
    assert (can.value, can.code) == (ranges, "" if ranges else "no-spans")


def test_a_row_is_a_page(registry: PluginRegistry) -> None:
    """One row per page and layer, in the layers and the space that were given."""
    spec = registry.spec(_geometry(C4))
    assert (spec.row_unit, spec.page_rows, spec.page_bytes) == (RowUnit.PAGE, 1, 3 * 37_440)
    assert (spec.pool, spec.family, spec.anchor, spec.layer_ids) == ("c4", "dsv4_paged", False, (2, 4, 6))
    assert spec.index_space == IndexSpace(name="full", page_slots=256)


def test_the_anchor_holds_no_bytes(registry: PluginRegistry) -> None:
    """Its slots name pages; there is nothing to move."""
    spec = registry.spec(_geometry({}, family="dsv4_anchor", anchor=True))
    assert (spec.anchor, spec.buffers, spec.layer_ids, spec.page_bytes) == (True, (), (), 0)


@pytest.mark.parametrize(
    ("params", "got"),
    [
        ({"row_format": "v4"}, "compress_ratio=None"),
        ({**C4, "compress_ratio": 0}, "compress_ratio=0"),
        ({**C4, "compress_ratio": 3}, "compress_ratio=3"),
        ({**C4, "compress_ratio": 512}, "compress_ratio=512"),
        ({**C4, "compress_ratio": "4"}, "compress_ratio='4'"),
        ({**C4, "row_format": "v5"}, "row_format='v5'"),
        ({**C4, "row_format": ["v4"]}, "row_format=['v4']"),
        ({"compress_ratio": 4}, "value_bytes=None"),
        ({"compress_ratio": 4, "value_bytes": 0}, "value_bytes=0"),
        ({"compress_ratio": 4, "value_bytes": 8, "scale_bytes": -1}, "scale_bytes=-1"),
        ({"compress_ratio": 4, "value_bytes": 8, "scale_bytes": 1.5}, "scale_bytes=1.5"),
        ({"compress_ratio": 4, "value_bytes": 8, "row_align_bytes": 0}, "row_align_bytes=0"),
    ],
)
def test_a_figure_that_is_missing_or_wrong_is_refused(
    registry: PluginRegistry, params: dict[str, Any], got: str
) -> None:
    """The error names pool, family, figure and value."""
    with pytest.raises(SpecError) as caught:
        registry.spec(_geometry(params))
    error = caught.value
    assert (error.code, error.who) == ("spec", "pool 'c4' (dsv4_paged)")
    assert got in error.got
    assert error.expected
    assert error.remedy


def test_the_plugin_brings_its_families_for_this_api(registry: PluginRegistry) -> None:
    """Two families, a range that holds the core's version, and a line each."""
    assert sorted(registry.families) == ["dsv4_anchor", "dsv4_paged"]
    for family in registry.families.values():
        lowest, highest = family.api
        assert lowest <= API_VERSION <= highest
        assert family.description
    assert set(C4) <= set(registry.families["dsv4_paged"].geometry)


def test_the_plugin_leaves_movement_to_the_core(registry: PluginRegistry) -> None:
    """It declares rows, and no more."""
    (registered,) = registry.plugins
    assert set(registered.hooks) == {"hicache_pool_families", "hicache_pool_spec"}
