"""Every variant of every model that ships replays, with all of its pools."""

from __future__ import annotations

import pytest

from hicache_core.models import load_model, model_names
from hicache_core.spec import PLATFORMS
from tests.replay.replays import replaying, stream

VARIANTS = [(model, variant) for model in model_names() for variant in load_model(model).variants]


def test_there_are_thirty_variants_of_seventeen_models() -> None:
    """What the test below runs over."""
    assert len({model for model, _ in VARIANTS}) == 17
    assert len(VARIANTS) == 30


@pytest.mark.parametrize(("model", "name"), VARIANTS)
def test_variant_replays_with_all_of_its_pools(model: str, name: str) -> None:
    """Requests that hit on both tiers, on the first platform of its own: nothing left out, no wrong byte."""
    variant = load_model(model).variants[name]
    platform = next(p for p in variant.platforms if PLATFORMS[p].vendor != "sim")
    slots = variant.index_spaces["full"]
    with replaying(
        model=model,
        variant=name,
        platform=platform,
        page_slots=None if slots else 16,
        block_tokens=slots or 16,
        device_blocks=4,
        host_blocks=12,
        state_slots=3,
    ) as replay:
        report = replay.run(stream("abc", "xyz", "abcd", "uv", "xyzw", "abcd"))
        assert not replay.assembly.left_out
        assert len(replay.assembly.specs) == len(variant.pools)
    assert (report.mismatches, report.failed_transfers) == (0, 0)
    assert report.hits_host_blocks > 0
    assert report.bytes_host_to_device == report.verified_bytes > 0
