"""Every pool of every variant goes out and comes back, under every served pair, on every platform it lists.

The pools of a variant move in one transfer, each by the pages of its own index space; the oracle says every
byte of both sides, rows that nobody named and guards included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import IncompatibleError
from hicache_core.models import Variant
from hicache_core.spec import Alias, PoolSpec, platform_named
from hicache_core.testing.oracle import PagePair
from hicache_core.testing.rigs import DeviceOptions, Rig
from tests.conftest import ROUND_TRIPS
from tests.cross.variants import (
    DEVICE_PAGES,
    HOST_PAGES,
    LARGE_ROW_BYTES,
    OTHER_DEVICE_PAGES,
    OTHER_HOST_PAGES,
    REGISTRY,
    SERVED,
    UNSERVED,
    VARIANTS,
    SpacePairs,
    filled,
    go_out_and_come_back,
    hybrid_of_all,
    moved_bytes,
    opened,
    other_spaces,
    refill,
    specs_of,
)

Pages = tuple[list[PagePair], list[PagePair]]
"""Page pairs of the way out and of the way back; both have the same host pages."""

# In the anchor's index space, and in every other one.
LISTS: dict[str, tuple[Pages, Pages]] = {
    "single": (([(3, 1)], [(3, 4)]), ([(2, 1)], [(2, 3)])),
    "neighbours": (
        ([(1, 2), (2, 3), (3, 4)], [(1, 0), (2, 1), (3, 2)]),
        ([(0, 1), (1, 2)], [(0, 2), (1, 3)]),
    ),
    "out of order": (
        ([(4, 1), (0, 5), (2, 3)], [(2, 4), (4, 0), (0, 2)]),
        ([(2, 0), (0, 3)], [(0, 1), (2, 2)]),
    ),
}
LARGER_THAN_THE_RING: tuple[Pages, Pages] = (
    ([(1, 4), (2, 5), (4, 0), (0, 2)], [(0, 4), (1, 0), (2, 1), (4, 3)]),
    ([(1, 0), (2, 1), (0, 3)], [(0, 0), (2, 3), (1, 2)]),
)
ROCM = ("rocm", "rocm-mi355x")
STAGED = SERVED[0]
STATE_FAMILY = "mamba"


def refusals(variant: Variant, platform: str, pair: tuple[str, str]) -> set[tuple[str, str]]:
    """(rule, pool) of all that is wrong with a pair; nothing where it is served."""
    if pair in UNSERVED:
        return {("R1-served-pair", "")}
    found = set()
    if platform in ROCM and pair == ("kernel", "layer_first"):
        found.add(("R3-not-opted-in", ""))
    if pair[1] == "layer_first":
        found |= {("R1-served-pair", pool.pool) for pool in variant.pools if pool.family == STATE_FAMILY}
    return found


def platforms_of(variant: Variant, *, few: bool) -> list[str]:
    """The platforms of a variant, or ``few``: simulator, the first of equal aliases, all of distinct ones.

    They are few as well where rows are so large that copying them for comparison takes most of a test's time.
    """
    if not few and all(pool.row_bytes < LARGE_ROW_BYTES for pool in variant.pools):
        return list(variant.platforms)
    distinct = [name for name in variant.platforms if platform_named(name).alias is Alias.DISTINCT]
    equal = next(name for name in variant.platforms if name not in (*distinct, "cpu-sim"))
    return ["cpu-sim", equal, *distinct]


def _cases(pairs: Sequence[tuple[str, str]], *, served: bool, few: bool = False) -> list[Any]:
    """Model, variant, platform and pair of every combination that is served, or that is not."""
    found = []
    for (model, name), variant in VARIANTS.items():
        platforms = platforms_of(variant, few=few) if served else variant.platforms
        for platform, pair in itertools.product(platforms, pairs):
            if served is not bool(refusals(variant, platform, pair)):
                title = f"{model}-{name}-{platform}-{'+'.join(pair)}"
                found.append(pytest.param(model, name, platform, pair, id=title))
    return found


def pages_of(specs: Sequence[PoolSpec], pages: tuple[Pages, Pages]) -> tuple[SpacePairs, SpacePairs]:
    """The way out and the way back of each index space."""
    (anchor,) = (spec.index_space.name for spec in specs if spec.anchor)
    others = other_spaces(specs)
    out, back = ({anchor: pages[0][way], **dict.fromkeys(others, pages[1][way])} for way in (0, 1))
    return out, back


def rings_of(specs: Sequence[PoolSpec]) -> list[int]:
    """Budgets of the ring: one page of the largest buffer, one row of each size, and less than any row."""
    buffers = [(spec, buffer) for spec in specs for buffer in spec.buffers]
    rows = sorted({buffer.row_bytes for _, buffer in buffers})
    page = max(b.row_bytes * spec.page_rows * spec.layers_of(b) for spec, b in buffers)
    return [page, *(row for row in rows if row != page), rows[0] - 1]


@pytest.mark.parametrize(("model", "variant", "platform", "pair"), _cases(SERVED, served=True))
def test_a_variant_goes_out_and_comes_back(
    model: str,
    variant: str,
    platform: str,
    pair: tuple[str, str],
    record_property: Callable[[str, object], None],
) -> None:
    """I15, I16: one page, neighbours and a shuffled list, in one rig; tickets count the exact bytes."""
    specs = specs_of(model, variant)
    with opened(specs, platform, pair, ring_bytes=rings_of(specs)[0]) as rig:
        before = filled(rig)
        for pages in LISTS.values():
            refill(rig, before)
            out, back = pages_of(specs, pages)
            assert go_out_and_come_back(rig, before, out, back) == (moved_bytes(specs, out),) * 2
    record_property(ROUND_TRIPS, (f"{model}/{variant}", len(LISTS)))


@pytest.mark.parametrize(("model", "variant", "platform", "pair"), _cases([STAGED], served=True, few=True))
def test_pages_that_do_not_fit_the_ring_go_out_and_come_back(
    model: str,
    variant: str,
    platform: str,
    pair: tuple[str, str],
    record_property: Callable[[str, object], None],
) -> None:
    """I27: some buffers go row by row through the ring, those whose row is larger go around it."""
    specs = specs_of(model, variant)
    out, back = pages_of(specs, LARGER_THAN_THE_RING)
    rings = rings_of(specs)
    for ring_bytes in rings:
        with opened(specs, platform, pair, ring_bytes=ring_bytes) as rig:
            assert moved_bytes(specs, out) > ring_bytes
            go_out_and_come_back(rig, filled(rig), out, back)
    record_property(ROUND_TRIPS, (f"{model}/{variant}", len(rings)))


@pytest.mark.parametrize(("model", "variant", "platform", "pair"), _cases([*SERVED, *UNSERVED], served=False))
def test_a_pair_that_a_variant_cannot_have_is_refused(
    model: str, variant: str, platform: str, pair: tuple[str, str]
) -> None:
    """Nothing is rewritten into a pair that works; every reason is said, and no memory is registered."""
    chosen = VARIANTS[model, variant]
    config = ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=HOST_PAGES)
    runtime = SimRuntime(platform_named(platform))
    with pytest.raises(IncompatibleError) as caught:
        Rig(specs_of(model, variant), config, runtime, options=DeviceOptions(pages=1), registry=REGISTRY)
    said = {(getattr(why, "id", ""), getattr(why, "pool", "")) for why in caught.value.violations}
    assert said == refusals(chosen, platform, pair)
    assert not runtime.memory.registrations


@pytest.mark.parametrize(("model", "variant"), VARIANTS)
def test_every_buffer_meets_rings_of_both_kinds(model: str, variant: str) -> None:
    """For each buffer one ring holds a row but not the pages of the list, and one is smaller than a row."""
    specs = specs_of(model, variant)
    out, _ = pages_of(specs, LARGER_THAN_THE_RING)
    for spec in specs:
        rows = len(out[spec.index_space.name]) * spec.page_rows
        for buffer in spec.buffers:
            listed = rows * spec.layers_of(buffer) * buffer.row_bytes
            assert any(buffer.row_bytes <= ring < listed for ring in rings_of(specs)), buffer
            assert any(ring < buffer.row_bytes for ring in rings_of(specs)), buffer


def test_lists_name_what_they_say() -> None:
    """Neighbours are neighbours on both sides, shuffled pages are not; none comes back to its place."""
    for name, spaces in {**LISTS, "larger": LARGER_THAN_THE_RING}.items():
        limits = ((HOST_PAGES, DEVICE_PAGES), (OTHER_HOST_PAGES, OTHER_DEVICE_PAGES))
        for (out, back), (hosts, devices) in zip(spaces, limits, strict=True):
            assert sorted(host for host, _ in out) == sorted(host for host, _ in back)
            assert not set(out) & set(back)
            assert all(host < hosts and device < devices for host, device in [*out, *back])
            steps = {(b[0] - a[0], b[1] - a[1]) for way in (out, back) for a, b in itertools.pairwise(way)}
            assert {"single": not steps, "neighbours": steps == {(1, 1)}}.get(name, steps - {(1, 1)})


@pytest.mark.parametrize("pair", [pair for pair in SERVED if pair[1] != "layer_first"], ids="+".join)
@pytest.mark.parametrize("platform", ["cpu-sim", "cuda", "rocm-mi355x"])
def test_three_index_spaces_go_out_in_one_transfer(platform: str, pair: tuple[str, str]) -> None:
    """Pools of three plugins, each by the pages of its own space; a space that is left out stays as it is."""
    specs = hybrid_of_all()
    assert {spec.index_space.name for spec in specs} == {"full", "swa", "state"}
    assert {REGISTRY.owner(spec.family).name for spec in specs} == {"dsv4_paged", "dsv4_state", "mamba"}
    with opened(specs, platform, pair) as rig:
        before = filled(rig)
        out, back = pages_of(specs, LISTS["out of order"])
        assert go_out_and_come_back(rig, before, out, back) == (moved_bytes(specs, out),) * 2
        refill(rig, before)
        out, back = {**out, "swa": [(1, 3)]}, {**back, "swa": [(1, 0)]}
        del out["state"], back["state"]
        assert go_out_and_come_back(rig, before, out, back) == (moved_bytes(specs, out),) * 2


def test_models_are_all_here() -> None:
    """17 models with 30 variants, and at least 1,500 round trips of them: no case was lost."""
    assert len({model for model, _ in VARIANTS}) == 17
    assert len(VARIANTS) == 30
    whole, rings = _cases(SERVED, served=True), _cases([STAGED], served=True, few=True)
    trips = len(whole) * len(LISTS) + sum(len(rings_of(specs_of(*case.values[:2]))) for case in rings)
    assert trips >= 1500
