"""Every model, row format, pair and platform that should replay does, with the bytes that arithmetic says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from hicache_core.errors import IncompatibleError, SpecError
from hicache_core.replay.setup import ReplayConfig
from tests.hybrid_twin import ANCHOR, TwinSpace
from tests.replay.replays import (
    CHOICES,
    WALK,
    WALK_BLOCKS,
    check_hybrid,
    hybrid_of,
    replaying,
    stream,
    twin_of,
)

LAYERS = 2
PAIRS = [
    ("kernel", "page_first"),
    ("kernel", "layer_first"),
    ("direct", "layer_first"),
    ("direct", "page_first_direct"),
]
UNSERVED = [("kernel", "page_first_direct"), ("direct", "page_first")]
KERNEL_LAYER_FIRST = PAIRS[1]
ALL = ["cpu-sim", "cuda", "cuda-wsl2", "rocm", "rocm-mi355x"]
ROCM = ["rocm", "rocm-mi355x"]

# Slots of a page, and the bytes of one layer of a page: pool, buffer, bytes of a row, rows of a page.
V4_UNIFIED_BF16 = {"c4": 65_536, "c4_indexer": 8_448, "c128": 2_048}
V4_UNIFIED_FP8 = {"c4": 32_768, "c4_rope": 8_192, "c4_indexer": 8_448, "c128": 1_024, "c128_rope": 256}
V4_CUDA = {"c4": 37_440, "c4_indexer": 8_448, "c128": 1_728}
V4_CUDA_SWA = {"swa": 149_760, "c4_state": 65_536, "c4_indexer_state": 16_384}
MODELS = {
    ("llama-3.1-8b", "bf16"): ({"kv": 8 * 128 * 2 + 8 * 128 * 2}, 4, ALL),
    ("qwen3-30b-a3b", "bf16"): ({"kv": 4 * 128 * 2 + 4 * 128 * 2}, 4, ALL),
    ("deepseek-v3", "bf16"): ({"kv": (512 + 64) * 2}, 4, ALL),
    ("deepseek-v3", "fp8_plain"): ({"kv": 512 + 64}, 4, ALL),
    **{
        (f"deepseek-v4-{size}", variant): (rows, 256, platforms)
        for size in ("pro", "flash")
        for variant, rows, platforms in (
            ("rocm_unified_bf16", V4_UNIFIED_BF16, ["cpu-sim", *ROCM]),
            ("rocm_unified_fp8", V4_UNIFIED_FP8, ["cpu-sim", *ROCM]),
            ("cuda_v4", V4_CUDA, ALL),
        )
    },
}
CASES = [
    pytest.param(model, variant, platform, pair, id=f"{model}-{variant}-{platform}-{'-'.join(pair)}")
    for (model, variant), (_, _, platforms) in MODELS.items()
    for platform, pair in itertools.product(platforms, PAIRS)
    if not (platform in ROCM and pair == KERNEL_LAYER_FIRST)
]


def rules(
    model: str, variant: str | None, platform: str, pair: Sequence[str], **choices: object
) -> list[str]:
    """The rules that a refused combination breaks."""
    chosen = {"page_slots": None, "io_backend": pair[0], "layout": pair[1], **choices}
    with (
        pytest.raises(IncompatibleError) as caught,
        replaying(model=model, variant=variant, platform=platform, **chosen),
    ):
        pass
    assert caught.value.remedy
    return sorted({getattr(violation, "id", "") for violation in caught.value.violations})


@pytest.mark.parametrize(("model", "variant", "platform", "pair"), CASES)
def test_model_replays(model: str, variant: str, platform: str, pair: tuple[str, str]) -> None:
    """Both tiers are hit and evict; every byte is right; bytes moved are blocks times exact row bytes."""
    rows, page_slots, _ = MODELS[model, variant]
    page_rows = page_slots if "kv" in rows else 1
    block_pages = 2
    # A window of 128 slots keeps one page of 256, the last one of a block of two.
    swa = V4_CUDA_SWA if variant == "cuda_v4" else {}
    page_bytes = {ANCHOR: page_rows * LAYERS * sum(rows.values()), "swa": LAYERS * sum(swa.values())}
    pages = {ANCHOR: block_pages, "swa": 1}
    device_blocks, host_blocks = WALK_BLOCKS
    requests = stream(*WALK)
    twin = hybrid_of(requests, *WALK_BLOCKS, {"swa": TwinSpace(*WALK_BLOCKS)} if swa else {})
    with replaying(
        model=model,
        variant=variant,
        platform=platform,
        io_backend=pair[0],
        layout=pair[1],
        layers=LAYERS,
        page_slots=4 if page_slots == 4 else None,
        block_tokens=block_pages * page_slots,
    ) as replay:
        report = replay.run(requests)
        assert replay.assembly.variant == variant
        assert {s.pool for s in replay.assembly.specs if s.buffers} == {*rows, *swa}
    check_hybrid(report, twin, {name: pages[name] * page_bytes[name] for name in pages})
    guarded_pages = {name: pages[name] * (device_blocks + host_blocks) + 4 for name in pages}
    assert report.swept_bytes == sum(guarded_pages[name] * page_bytes[name] for name in pages)


def test_walk_hits_and_evicts_on_both_tiers() -> None:
    """The stream of this file is not too easy to prove anything."""
    twin = twin_of(stream(*WALK), *WALK_BLOCKS)
    unique = len({path[: i + 1] for path in WALK for i in range(len(path))})
    assert unique > max(WALK_BLOCKS)
    assert twin.device_hits > 5
    assert twin.host_hits > 5
    # Some blocks were given up by the host and backed up again.
    assert twin.backed_up > unique


@pytest.mark.parametrize("platform", ROCM)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "deepseek-v4-flash"])
def test_kernel_on_layer_first_rows_is_refused_on_rocm(model: str, platform: str) -> None:
    """A kernel would dereference host rows; the solver says so before anything is allocated."""
    assert rules(model, None, platform, KERNEL_LAYER_FIRST) == ["R3-not-opted-in"]


@pytest.mark.parametrize("pair", UNSERVED)
@pytest.mark.parametrize("platform", ALL)
def test_unserved_pair_is_refused_everywhere(platform: str, pair: tuple[str, str]) -> None:
    """Nothing is rewritten into a pair that works."""
    assert rules("qwen3-30b-a3b", None, platform, pair) == ["R1-served-pair"]


def test_variant_is_refused_where_it_does_not_exist() -> None:
    """ROCm's row formats are no CUDA rows, and all that is wrong is said at once."""
    for model in ("deepseek-v4-pro", "deepseek-v4-flash"):
        variant = "rocm_unified_fp8"
        assert rules(model, variant, "cuda", PAIRS[0]) == ["R7-variant-platform"]
        assert rules(model, variant, "cuda", UNSERVED[0]) == ["R1-served-pair", "R7-variant-platform"]
    assert "R7-variant-platform" in rules("llama-3.1-8b", "bf16", "npu", PAIRS[2])


def test_default_variant_is_taken_where_none_is_named() -> None:
    """An operator who names no variant gets the platform's."""
    with replaying(model="deepseek-v4-flash", page_slots=None, block_tokens=256) as replay:
        assert (replay.assembly.model, replay.assembly.variant) == ("deepseek-v4-flash", "cuda_v4")


@pytest.mark.parametrize("layers", [1, 2, 30, 31, 99])
def test_layers_keeps_the_first_of_each_pools_own_list(layers: int) -> None:
    """C4 lies on layers 2, 4, ..., c128 on 0, 1, 3, ...; each keeps its own first ones, at most all."""
    with replaying(model="deepseek-v4-pro", page_slots=None, block_tokens=256, layers=layers) as replay:
        kept = {spec.pool: spec.layer_ids for spec in replay.assembly.specs}
    assert kept["kv"] == ()
    assert kept["c4"] == tuple(range(2, 61, 2))[:layers]
    assert kept["c4_indexer"] == kept["c4"]
    assert kept["c128"] == (0, *range(1, 61, 2))[:layers]


def test_all_layers_of_a_model_replay() -> None:
    """Without --layers nothing is cut: 61 layers have windows, 30 and 31 compressed rows."""
    requests = stream("ab", "ac", "d", "ab")
    choices = {"layers": None, "block_tokens": 256, "device_blocks": 2, "host_blocks": 5}
    with replaying(model="deepseek-v4-pro", page_slots=None, **choices) as replay:
        report = replay.run(requests)
        assert not [said for said in replay.shrunk() if "layers" in said]
    twin = hybrid_of(requests, 2, 5, {"swa": TwinSpace(2, 5)})
    assert twin.host_hits > 0
    block_bytes = {
        ANCHOR: 30 * (37_440 + 8_448) + 31 * 1_728,
        "swa": 61 * 149_760 + 30 * (65_536 + 16_384),
    }
    check_hybrid(report, twin, block_bytes)


def test_page_size_that_the_model_fixes_cannot_be_chosen() -> None:
    """DeepSeek V4 has pages of 256 slots, said once more or not at all."""
    with replaying(model="deepseek-v4-flash", page_slots=256, block_tokens=256):
        pass
    with (
        pytest.raises(SpecError) as caught,
        replaying(model="deepseek-v4-flash", page_slots=128, block_tokens=256),
    ):
        pass
    assert "256" in caught.value.expected


@pytest.mark.parametrize(
    "field",
    [
        "device_blocks",
        "host_blocks",
        "swa_pages",
        "state_slots",
        "page_slots",
        "layers",
        "block_tokens",
        "limit",
    ],
)
def test_choices_below_one_are_refused(field: str) -> None:
    """A tier, page or block of nothing is a mistake, not an empty replay."""
    for value in (0, -1):
        with pytest.raises(SpecError, match=field):
            ReplayConfig(**{**CHOICES, field: value})
