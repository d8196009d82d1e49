"""Which variant a platform gets, how index spaces and layers are resolved, and what each pool rides on."""

from __future__ import annotations

import pytest

from hicache_core.errors import SpecError, UnknownNameError
from hicache_core.models import PoolEntry, Variant, load_model, model_names
from hicache_core.spec import PLATFORMS, Reuse

MODELS = model_names()


def _variant(model: str, variant: str) -> Variant:
    return load_model(model).variants[variant]


def _pool(model: str, variant: str, pool: str) -> PoolEntry:
    return next(entry for entry in _variant(model, variant).pools if entry.pool == pool)


@pytest.mark.parametrize("model", MODELS)
def test_every_platform_gets_the_default_of_its_rows(model: str) -> None:
    """v4 rows for DeepSeek-V4, also on ROCm; bf16 for the rest; the simulator as CUDA."""
    expected = "cuda_v4" if model.startswith("deepseek-v4") else "bf16"
    loaded = load_model(model)
    for platform in ("cuda", "cuda-wsl2", "rocm", "rocm-mi355x", "cpu-sim"):
        chosen = loaded.variant(None, platform)
        assert (chosen.name, platform in chosen.platforms) == (expected, True)


@pytest.mark.parametrize("model", MODELS)
def test_a_simulator_serves_every_variant(model: str) -> None:
    """It has no vendor whose row formats it could lack."""
    for variant in load_model(model).variants.values():
        assert "cpu-sim" in variant.platforms
        assert set(variant.platforms) <= set(PLATFORMS)


def test_vendor_rows_exist_on_their_vendors_alone() -> None:
    """Unified rows on ROCm; v41 and uniform rows on CUDA."""
    variants = load_model("deepseek-v4-pro").variants
    assert variants["rocm_unified_bf16"].platforms == ("rocm", "rocm-mi355x", "cpu-sim")
    assert variants["rocm_unified_fp8"].platforms == ("rocm", "rocm-mi355x", "cpu-sim")
    assert variants["sm100_v41"].platforms == ("cuda", "cpu-sim")
    assert variants["trtllm_uniform_fp8"].platforms == ("cuda", "cpu-sim")


def test_a_platform_without_a_variant_still_gets_one_to_refuse() -> None:
    """The caller checks the platforms, so that the refusal stands beside all others."""
    chosen = load_model("llama-3.1-8b").variant(None, "npu")
    assert chosen.name == "bf16"
    assert "npu" not in chosen.platforms


def test_a_named_variant_wins_over_the_default() -> None:
    """On any platform, listed or not."""
    assert load_model("deepseek-v4-pro").variant("rocm_unified_bf16", "cuda").name == "rocm_unified_bf16"


@pytest.mark.parametrize(("variant", "platform"), [("int3", "cuda"), (None, "abacus")])
def test_an_unknown_variant_or_platform_is_refused(variant: str | None, platform: str) -> None:
    """The names that exist stand in the error."""
    with pytest.raises(UnknownNameError) as caught:
        load_model("deepseek-v3").variant(variant, platform)
    assert caught.value.code == "unknown-name"
    assert ("fp8_plain" if variant else "rocm-mi355x") in caught.value.expected


def test_an_unknown_model_is_refused_with_the_names() -> None:
    """Neither a shipped model nor a file."""
    with pytest.raises(UnknownNameError) as caught:
        load_model("gpt-0")
    assert "'gpt-0'" in caught.value.got
    assert all(name in caught.value.expected for name in MODELS)


def _slots(variant: Variant, page_slots: int | None) -> dict[str, int]:
    return {g.index_space.name: g.index_space.page_slots for g in variant.geometries(page_slots)}


@pytest.mark.parametrize(
    ("model", "variant", "given", "expected"),
    [
        ("deepseek-v4-pro", "cuda_v4", None, {"full": 256, "swa": 256}),
        ("deepseek-v4-pro", "cuda_v4", 256, {"full": 256, "swa": 256}),
        ("gpt-oss-120b", "bf16", None, {"full": 1, "swa": 1}),
        ("gpt-oss-120b", "bf16", 16, {"full": 16, "swa": 16}),
        ("qwen3.5-397b-a17b", "bf16", 64, {"full": 64, "state": 1}),
        ("qwen3.5-397b-a17b", "tp2_fp8kv_bf16state_mtp1", None, {"full": 16, "state": 1}),
        ("deepseek-v3.2", "bf16", None, {"full": 64}),
    ],
)
def test_page_slots_are_the_operators_only_where_the_model_leaves_them_open(
    model: str, variant: str, given: int | None, expected: dict[str, int]
) -> None:
    """A state space keeps pages of one slot, whatever the operator says."""
    assert _slots(_variant(model, variant), given) == expected


@pytest.mark.parametrize(
    ("model", "variant", "page_slots", "layers"),
    [
        ("deepseek-v4-pro", "cuda_v4", 128, None),
        ("qwen3.5-397b-a17b", "tp2_fp8kv_bf16state_mtp1", 1, None),
        ("llama-3.1-8b", "bf16", 0, None),
        ("llama-3.1-8b", "bf16", None, 0),
    ],
)
def test_page_slots_against_the_model_are_refused(
    model: str, variant: str, page_slots: int | None, layers: int | None
) -> None:
    """A page size other than the fixed one, and figures below 1."""
    with pytest.raises(SpecError) as caught:
        _variant(model, variant).geometries(page_slots, layers)
    assert (caught.value.code, caught.value.who) == ("spec", f"{model}/{variant}")


def test_layers_keep_the_first_of_each_pools_own_list() -> None:
    """Two layers of each pool, not the pools of two model layers."""
    geometries = _variant("deepseek-v4-flash", "cuda_v4").geometries(layers=2)
    assert {g.pool: g.layer_ids for g in geometries} == {
        "kv": (),
        "swa": (0, 1),
        "c4": (2, 4),
        "c4_indexer": (2, 4),
        "c4_state": (2, 4),
        "c4_indexer_state": (2, 4),
        "c128": (3, 5),
    }


def test_owners_sources_and_reuse_of_deepseek_v4() -> None:
    """The anchor and SWA own their slots; the rest ride on one of the two."""
    entries = _variant("deepseek-v4-pro", "cuda_v4").pools
    facts = {e.pool: (e.derive_from, e.reuse, e.window_slots) for e in entries}
    every, trailing = Reuse.ALL_PAGES, Reuse.TRAILING_PAGES
    assert facts == {
        "kv": (None, every, None),
        "swa": (None, trailing, 128),
        "c4": ("kv", every, None),
        "c4_indexer": ("kv", every, None),
        "c128": ("kv", every, None),
        "c4_state": ("swa", trailing, 128),
        "c4_indexer_state": ("swa", trailing, 128),
    }


def test_a_state_slot_belongs_to_the_end_of_a_prefix() -> None:
    """Mamba states are reused as leaves and own their slots."""
    entry = _pool("jamba-v0.1", "bf16", "mamba")
    assert (entry.reuse, entry.owns_slots, entry.index_space) == (Reuse.LEAF, True, "state")


@pytest.mark.parametrize("model", MODELS)
def test_every_figure_names_its_source(model: str) -> None:
    """Rows and configuration alike say where they are from."""
    loaded = load_model(model)
    rows = [entry.source for variant in loaded.variants.values() for entry in variant.pools]
    assert all([*rows, *(figure.source for figure in loaded.config.values())])
    assert loaded.config


@pytest.mark.parametrize(
    ("model", "figure"),
    [
        ("deepseek-v4-pro", "index_n_heads"),
        ("kimi-k2", "v_head_dim"),
        ("llama-3.1-8b", "dtype"),
        ("minimax-m3", "page_size"),
        ("qwen3.5-397b-a17b", "mamba_ssm_dtype"),
        ("nemotron-h-8b", "checkpoint_identity"),
    ],
)
def test_uncertain_figures_stay_uncertain(model: str, figure: str) -> None:
    """What was not read for this very checkpoint is not passed off as read."""
    assert load_model(model).config[figure].status == "uncertain"


@pytest.mark.parametrize("model", ["qwen3.5-397b-a17b", "nemotron-h-8b", "jamba-v0.1"])
def test_rows_that_rest_on_an_uncertain_figure_are_uncertain(model: str) -> None:
    """The state dtype of two models, and the identity of a checkpoint."""
    assert _pool(model, "bf16", "mamba").status == "uncertain"
