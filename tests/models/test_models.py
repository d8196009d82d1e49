"""The shipped models say what their sources say; the figures here are typed by hand."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from hicache_core.models import PoolEntry, Variant, load_model, model_names
from hicache_core.plugins import PluginRegistry, load_plugins

MODELS = [
    "deepseek-v3",
    "deepseek-v3.2",
    "deepseek-v4-flash",
    "deepseek-v4-pro",
    "falcon-h1-34b",
    "glm-5",
    "gpt-oss-120b",
    "jamba-v0.1",
    "kimi-k2",
    "kimi-linear-48b-a3b",
    "llama-3.1-70b",
    "llama-3.1-8b",
    "minimax-m3",
    "nemotron-3-nano-30b-a3b",
    "nemotron-h-8b",
    "qwen3-30b-a3b",
    "qwen3.5-397b-a17b",
]

V4_LAYERS = {
    "deepseek-v4-pro": {"kv": 0, "swa": 61, "c4": 30, "c128": 31},
    "deepseek-v4-flash": {"kv": 0, "swa": 43, "c4": 21, "c128": 20},
}
V4_STATES = {"c4_state": 65_536, "c4_indexer_state": 16_384}
V4_ROWS = {
    "rocm_unified_bf16": {"kv": 0, "c4": 65_536, "c4_indexer": 8_448, "c128": 2_048},
    "rocm_unified_fp8": {
        "kv": 0,
        "c4": 32_768,
        "c4_rope": 8_192,
        "c4_indexer": 8_448,
        "c128": 1_024,
        "c128_rope": 256,
    },
    "cuda_v4": {"kv": 0, "swa": 149_760, "c4": 37_440, "c4_indexer": 8_448, "c128": 1_728, **V4_STATES},
    "sm100_v41": {"kv": 0, "swa": 135_168, "c4": 33_792, "c4_indexer": 8_448, "c128": 1_536, **V4_STATES},
    "trtllm_uniform_fp8": {
        "kv": 0,
        "swa": 131_072,
        "c4": 32_768,
        "c4_indexer": 8_448,
        "c128": 1_024,
        **V4_STATES,
    },
}
# model, variant -> pool -> layers, row bytes
OTHERS = {
    ("deepseek-v3", "bf16"): {"kv": (61, 1_152)},
    ("deepseek-v3", "fp8_plain"): {"kv": (61, 576)},
    ("deepseek-v3.2", "bf16"): {"kv": (61, 1_152), "indexer": (61, 8_448)},
    ("deepseek-v3.2", "fp8_scaled"): {"kv": (61, 656), "indexer": (61, 8_448)},
    ("kimi-k2", "bf16"): {"kv": (61, 1_152)},
    ("kimi-k2", "fp8_plain"): {"kv": (61, 576)},
    ("glm-5", "bf16"): {"kv": (78, 1_152), "indexer": (78, 8_448)},
    ("glm-5", "fp8_scaled"): {"kv": (78, 656), "indexer": (78, 8_448)},
    ("llama-3.1-8b", "bf16"): {"kv": (32, 2_048 + 2_048)},
    ("llama-3.1-70b", "bf16"): {"kv": (80, 2_048 + 2_048)},
    ("qwen3-30b-a3b", "bf16"): {"kv": (48, 1_024 + 1_024)},
    ("gpt-oss-120b", "bf16"): {"kv": (18, 2_048), "swa": (18, 2_048)},
    ("minimax-m3", "bf16"): {"kv": (60, 2_048), "indexer": (57, 256)},
    ("qwen3.5-397b-a17b", "bf16"): {"kv": (15, 2_048), "mamba": (45, 4_268_032)},
    ("qwen3.5-397b-a17b", "tp2_fp8kv_bf16state_mtp1"): {"kv": (16, 512), "mamba": (45, 1_085_440)},
    ("kimi-linear-48b-a3b", "bf16"): {"kv": (7, 1_152), "mamba": (20, 2_170_880)},
    ("nemotron-3-nano-30b-a3b", "bf16"): {"kv": (6, 1_024), "mamba": (23, 2_134_016)},
    ("nemotron-h-8b", "bf16"): {"kv": (4, 4_096), "mamba": (24, 4_255_744)},
    ("falcon-h1-34b", "bf16"): {"kv": (72, 2_048), "mamba": (72, 4_225_024)},
    ("jamba-v0.1", "bf16"): {"kv": (4, 4_096), "mamba": (28, 573_440)},
}
V4 = {
    (model, variant): {pool: (layers[pool.split("_")[0]], row) for pool, row in rows.items()}
    for model, layers in V4_LAYERS.items()
    for variant, rows in V4_ROWS.items()
}
POOLS = {**OTHERS, **V4}

# Bytes that a trace block of 512 tokens carries in the full index space, all layers.
BLOCK_BYTES = {
    ("deepseek-v4-pro", "rocm_unified_bf16"): 4_566_016,
    ("deepseek-v4-pro", "rocm_unified_fp8"): 3_043_840,
    ("deepseek-v4-pro", "cuda_v4"): 2_860_416,
    ("deepseek-v4-pro", "sm100_v41"): 2_629_632,
    ("deepseek-v4-pro", "trtllm_uniform_fp8"): 2_536_448,
    ("deepseek-v4-flash", "rocm_unified_bf16"): 3_189_248,
    ("deepseek-v4-flash", "rocm_unified_fp8"): 2_126_336,
    ("deepseek-v4-flash", "cuda_v4"): 1_996_416,
    ("deepseek-v4-flash", "sm100_v41"): 1_835_520,
    ("deepseek-v4-flash", "trtllm_uniform_fp8"): 1_772_032,
    ("deepseek-v3", "bf16"): 35_979_264,
    ("deepseek-v3", "fp8_plain"): 17_989_632,
    ("deepseek-v3.2", "bf16"): 40_101_888,
    ("deepseek-v3.2", "fp8_scaled"): 24_610_816,
    ("kimi-k2", "bf16"): 35_979_264,
    ("kimi-k2", "fp8_plain"): 17_989_632,
    ("glm-5", "bf16"): 51_277_824,
    ("glm-5", "fp8_scaled"): 31_469_568,
    ("llama-3.1-8b", "bf16"): 67_108_864,
    ("llama-3.1-70b", "bf16"): 167_772_160,
    ("qwen3-30b-a3b", "bf16"): 50_331_648,
    ("gpt-oss-120b", "bf16"): 18_874_368,
    ("minimax-m3", "bf16"): 70_385_664,
    ("qwen3.5-397b-a17b", "bf16"): 15_728_640,
    ("qwen3.5-397b-a17b", "tp2_fp8kv_bf16state_mtp1"): 4_194_304,
    ("kimi-linear-48b-a3b", "bf16"): 4_128_768,
    ("nemotron-3-nano-30b-a3b", "bf16"): 3_145_728,
    ("nemotron-h-8b", "bf16"): 8_388_608,
    ("falcon-h1-34b", "bf16"): 75_497_472,
    ("jamba-v0.1", "bf16"): 8_388_608,
}
SWA_PAGE_BYTES = {
    ("deepseek-v4-pro", "cuda_v4"): 11_592_960,
    ("deepseek-v4-pro", "sm100_v41"): 10_702_848,
    ("deepseek-v4-pro", "trtllm_uniform_fp8"): 10_452_992,
    ("deepseek-v4-flash", "cuda_v4"): 8_160_000,
    ("deepseek-v4-flash", "sm100_v41"): 7_532_544,
    ("deepseek-v4-flash", "trtllm_uniform_fp8"): 7_356_416,
}
STATE_SLOT_BYTES = {
    ("qwen3.5-397b-a17b", "bf16"): 192_061_440,
    ("qwen3.5-397b-a17b", "tp2_fp8kv_bf16state_mtp1"): 48_844_800,
    ("kimi-linear-48b-a3b", "bf16"): 43_417_600,
    ("nemotron-3-nano-30b-a3b", "bf16"): 49_082_368,
    ("nemotron-h-8b", "bf16"): 102_137_856,
    ("falcon-h1-34b", "bf16"): 304_201_728,
    ("jamba-v0.1", "bf16"): 16_056_320,
}
LAYERS = {
    ("deepseek-v4-pro", "cuda_v4", "c4"): range(2, 61, 2),
    ("deepseek-v4-pro", "cuda_v4", "c128"): (0, *range(1, 60, 2)),
    ("deepseek-v4-pro", "cuda_v4", "swa"): range(61),
    ("deepseek-v4-flash", "cuda_v4", "c4"): range(2, 43, 2),
    ("deepseek-v4-flash", "cuda_v4", "c128"): range(3, 42, 2),
    ("gpt-oss-120b", "bf16", "kv"): range(1, 36, 2),
    ("gpt-oss-120b", "bf16", "swa"): range(0, 36, 2),
    ("minimax-m3", "bf16", "indexer"): range(3, 60),
    ("qwen3.5-397b-a17b", "bf16", "kv"): range(3, 60, 4),
    ("qwen3.5-397b-a17b", "tp2_fp8kv_bf16state_mtp1", "kv"): (*range(3, 60, 4), 60),
    ("kimi-linear-48b-a3b", "bf16", "kv"): (3, 7, 11, 15, 19, 23, 26),
    ("nemotron-3-nano-30b-a3b", "bf16", "kv"): (5, 12, 19, 26, 33, 42),
    ("nemotron-h-8b", "bf16", "kv"): (7, 18, 29, 40),
    ("jamba-v0.1", "bf16", "kv"): (4, 12, 20, 28),
}
LAYER_COUNTS = {
    "deepseek-v3": 61,
    "deepseek-v3.2": 61,
    "deepseek-v4-flash": 43,
    "deepseek-v4-pro": 61,
    "falcon-h1-34b": 72,
    "glm-5": 78,
    "gpt-oss-120b": 36,
    "jamba-v0.1": 32,
    "kimi-k2": 61,
    "kimi-linear-48b-a3b": 27,
    "llama-3.1-70b": 80,
    "llama-3.1-8b": 32,
    "minimax-m3": 60,
    "nemotron-3-nano-30b-a3b": 52,
    "nemotron-h-8b": 52,
    "qwen3-30b-a3b": 48,
    "qwen3.5-397b-a17b": 60,
}
TOKEN_FAMILIES = {"mha", "mla", "k_only"}
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
TRACE_BLOCK_TOKENS = 512


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    """The installed plugins."""
    return load_plugins()


def _variant(model: str, variant: str) -> Variant:
    return load_model(model).variants[variant]


def _pool(model: str, variant: str, pool: str) -> PoolEntry:
    return next(entry for entry in _variant(model, variant).pools if entry.pool == pool)


def _all_layers(entry: PoolEntry) -> int:
    return entry.row_bytes * len(entry.layer_ids)


def test_every_model_is_shipped_under_its_id() -> None:
    """17 models, each in the file of its id, with 30 variants in all."""
    assert list(model_names()) == MODELS
    models = [load_model(name) for name in MODELS]
    assert [model.id for model in models] == MODELS
    assert sum(len(model.variants) for model in models) == 30 == len(POOLS)


@pytest.mark.parametrize(("model", "layers"), LAYER_COUNTS.items())
def test_a_model_has_the_layers_of_its_source(model: str, layers: int) -> None:
    """Layers of the target model, draft layers not counted."""
    assert load_model(model).layer_count == layers


@pytest.mark.parametrize(("model", "variant"), POOLS)
def test_pools_layers_and_row_bytes_are_those_of_the_source(model: str, variant: str) -> None:
    """Every pool of every variant, no more and no fewer."""
    entries = _variant(model, variant).pools
    assert {e.pool: (len(e.layer_ids), e.row_bytes) for e in entries} == POOLS[model, variant]


@pytest.mark.parametrize(("model", "variant", "pool"), LAYERS)
def test_layer_ids_follow_the_rule_of_the_model(model: str, variant: str, pool: str) -> None:
    """Which model layers a pool's own layers are, draft layers after the last target layer."""
    assert _pool(model, variant, pool).layer_ids == tuple(LAYERS[model, variant, pool])


@pytest.mark.parametrize("model", ["kimi-linear-48b-a3b", "qwen3.5-397b-a17b", "jamba-v0.1"])
def test_a_hybrid_layer_is_attention_or_state(model: str) -> None:
    """Where each layer has one kind, the two lists share out all layers."""
    kv, mamba = (_pool(model, "bf16", name).layer_ids for name in ("kv", "mamba"))
    assert sorted(kv + mamba) == list(range(load_model(model).layer_count))


@pytest.mark.parametrize(("model", "variant"), BLOCK_BYTES)
def test_bytes_of_a_trace_block(model: str, variant: str) -> None:
    """512 tokens in the full index space: rows by token or by page, over all layers."""
    chosen = _variant(model, variant)
    page_slots = {g.pool: g.index_space.page_slots for g in chosen.geometries()}
    total = sum(
        _all_layers(entry)
        * TRACE_BLOCK_TOKENS
        // (1 if entry.family in TOKEN_FAMILIES else page_slots[entry.pool])
        for entry in chosen.pools
        if entry.index_space == "full"
    )
    assert total == BLOCK_BYTES[model, variant]


@pytest.mark.parametrize(("model", "variant"), SWA_PAGE_BYTES)
def test_bytes_of_an_swa_page(model: str, variant: str) -> None:
    """One page of the SWA space: its own row and the state rings that ride on it."""
    entries = [e for e in _variant(model, variant).pools if e.index_space == "swa"]
    assert sum(map(_all_layers, entries)) == SWA_PAGE_BYTES[model, variant]


@pytest.mark.parametrize(("model", "variant"), STATE_SLOT_BYTES)
def test_bytes_of_a_state_slot_follow_from_its_shapes(model: str, variant: str) -> None:
    """One checkpoint of all layers, from the shapes and dtypes of the file."""
    entry = _pool(model, variant, "mamba")
    shapes = [(entry.params["temporal_shape"], entry.params["temporal_dtype"])]
    shapes += [(shape, entry.params["conv_dtype"]) for shape in entry.params["conv_shapes"]]
    row = sum(prod(shape) * ELEMENT_BYTES[dtype] for shape, dtype in shapes)
    assert row * len(entry.layer_ids) == STATE_SLOT_BYTES[model, variant]
    assert row == entry.row_bytes


@pytest.mark.parametrize("variant", ["cuda_v4", "sm100_v41", "trtllm_uniform_fp8"])
def test_state_rings_are_slots_of_their_bytes(variant: str) -> None:
    """A ring of 8: 8 x 8,192 and 8 x 2,048 bytes."""
    rings = {e.pool: e.params for e in _variant("deepseek-v4-pro", variant).pools if e.family == "dsv4_state"}
    assert rings == {
        "c4_state": {"ring_slots": 8, "slot_bytes": 8_192},
        "c4_indexer_state": {"ring_slots": 8, "slot_bytes": 2_048},
    }


def test_the_published_run_moves_the_bytes_that_were_counted() -> None:
    """128 KV tokens and 2 state slots of one rank are 98,738,176 bytes."""
    kv, mamba = _variant("qwen3.5-397b-a17b", "tp2_fp8kv_bf16state_mtp1").pools
    assert 128 * _all_layers(kv) + 2 * _all_layers(mamba) == 98_738_176
    assert (kv.draft_layers, mamba.draft_layers) == (1, 0)


@pytest.mark.parametrize(("model", "variant"), POOLS)
def test_a_declaration_has_the_row_bytes_of_the_file(
    model: str, variant: str, registry: PluginRegistry
) -> None:
    """For every family that is installed, what the plugin declares is what the file was checked with."""
    families = {"mha", "mla", "k_only", "dsv4_anchor", "dsv4_paged", "dsv4_state", "dsa_indexer", "mamba"}
    assert families <= set(registry.families)
    chosen = _variant(model, variant)
    for entry, geometry in zip(chosen.pools, chosen.geometries(), strict=True):
        if entry.family in registry.families:
            spec = registry.spec(geometry)
            assert sum(buffer.row_bytes for buffer in spec.buffers) == entry.row_bytes, entry.pool
            assert spec.layer_ids == entry.layer_ids


@pytest.mark.parametrize(
    ("model", "page_bytes"), [("deepseek-v4-pro", 2_283_008), ("deepseek-v4-flash", 1_594_624)]
)
def test_bytes_of_a_unified_page(model: str, page_bytes: int, registry: PluginRegistry) -> None:
    """256 tokens in all pools of the unified bf16 rows, through the declarations."""
    geometries = _variant(model, "rocm_unified_bf16").geometries()
    assert sum(registry.spec(geometry).page_bytes for geometry in geometries) == page_bytes


def _survey() -> Path:
    return Path(__file__).parents[3] / "shared" / "data" / "models.json"


@pytest.mark.skipif(not _survey().exists(), reason="the survey of models is not beside this checkout")
@pytest.mark.parametrize("model", MODELS)
def test_a_model_agrees_with_the_survey(model: str) -> None:
    """Pools, layers, row bytes, owners and platforms, wherever the survey lies beside the checkout."""
    survey = json.loads(_survey().read_text(encoding="utf-8"))["models"]
    assert sorted(survey) == MODELS
    theirs, ours = survey[model], load_model(model)
    assert ours.name == theirs["hf_id"]
    assert list(ours.variants) == list(theirs["layout_variants"])
    for name, variant in theirs["layout_variants"].items():
        assert [p for p in ours.variants[name].platforms if p != "cpu-sim"] == variant["platforms"]
        assert [
            (e.pool, len(e.layer_ids), e.row_bytes, e.anchor, e.derive_from, e.draft_layers)
            for e in ours.variants[name].pools
        ] == [
            (
                pool["name"],
                pool["layers"],
                pool["row_bytes"],
                pool.get("is_anchor", False),
                pool.get("derive_from"),
                pool.get("draft_layers", 0),
            )
            for pool in variant["sub_pools"]
        ]
