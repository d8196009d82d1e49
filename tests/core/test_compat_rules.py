"""The rules of compatibility one by one: which pool breaks which, and what stands beside it."""

from __future__ import annotations

import pytest
from attrs import evolve

from hicache_core.compat import Outcome, answer, solve, violations
from hicache_core.spec import (
    PLATFORMS,
    Capability,
    CopyKind,
    IndexPlace,
    IndexSpace,
    PointerDomain,
    supported,
    unsupported,
)
from tests.core.compat_queries import NO, ids, pool, query


def test_a_backup_that_is_not_staged_does_not_hide_a_load_without_a_way() -> None:
    """R2 and R5: loads of page_first on ROCm go by copies, whatever becomes of the backup."""
    both = pool(48, staged_write_back=NO, strided_copy=NO)
    asked = query("rocm", "kernel", "page_first", both)
    assert ids(asked) == [("R2-staged-write-back", "kv"), ("R5-no-way", "kv")]
    assert ids(query("rocm", "kernel", "page_first", pool(48, strided_copy=NO))) == [("R5-no-way", "kv")]
    staged_only = query("rocm", "kernel", "page_first", pool(48, staged_write_back=NO))
    assert ids(staged_only) == [("R2-staged-write-back", "kv")]


@pytest.mark.parametrize("unasked", ["kv", "swa"])
def test_pools_that_ride_on_one_whose_pages_are_not_asked_are_not_compared(unasked: str) -> None:
    """R6: two that ride on the same pool owe each other nothing."""
    space = IndexSpace(name="full" if unasked == "kv" else "swa", page_slots=4)
    source = pool(48, name=unasked, space=space)
    riders = [evolve(pool(48, name=f"on_it_{n}", space=space), host_pages=n) for n in (5, 3)]
    anchor = [] if unasked == "kv" else [evolve(pool(48), host_pages=9)]
    assert ids(query("cuda", "direct", "layer_first", *anchor, source, *riders)) == []
    fixed = query("cuda", "direct", "layer_first", *anchor, evolve(source, host_pages=4), *riders)
    assert ids(fixed) == [("R6-derived-pages", "on_it_3")]


@pytest.mark.parametrize(
    ("device", "wrong"),
    [
        ({"b0": 48, "b1": 24}, 0),
        ({"b0": 48}, 0),
        ({}, 0),
        ({"b0": 24, "b1": 24}, 1),
        ({"b0": 24, "b1": 48}, 2),
        ({"b0": 48, "b1": 24, "b2": 24}, 1),
        ({"k": 48}, 1),
    ],
)
def test_device_rows_are_those_of_the_host_buffer_by_buffer(device: dict[str, int], wrong: int) -> None:
    """R5: keys and values may differ, sides may not; a buffer that the pool lacks is no row of it."""
    asked = evolve(pool(48, 24), device_row_bytes=device)
    assert ids(query("cuda", "direct", "layer_first", asked)) == [("R5-row-bytes", "kv")] * wrong
    assert ids(query("cuda", "direct", "page_first", asked)) == [
        ("R1-served-pair", ""),
        *[("R5-row-bytes", "kv")] * wrong,
    ]


ROCM = ["rocm", "rocm-mi355x"]
OWN_KERNEL = unsupported("own-kernel", "its rows are swizzled", "Use direct.")
GROUP_WIDE = unsupported("group-wide", "its writer reads indices of the device", "Give it a writer.")
ON_DEVICE = supported(frozenset((way, "kernel", IndexPlace.DEVICE) for way in ("backup", "load")))


@pytest.mark.parametrize("platform", ROCM)
def test_rocm_names_the_pools_that_are_not_staged_each_with_its_reason(platform: str) -> None:
    """R2: those and no others; a flag of the pool, its index routing, where its indices lie, or its rows."""
    group = [
        pool(48),
        pool(64, name="swizzled", staged_write_back=OWN_KERNEL),
        pool(64, name="routed", per_pool_backup_indices=GROUP_WIDE),
        pool(64, name="good"),
        pool(24, name="odd"),
    ]
    asked = query(platform, "kernel", "page_first", *group)
    assert ids(asked) == [("R2-staged-write-back", name) for name in ("odd", "routed", "swizzled")]
    told = {violation.pool: (violation.expected, violation.remedy) for violation in violations(asked)}
    for name, reason in (("swizzled", OWN_KERNEL), ("routed", GROUP_WIDE)):
        assert f"{reason.code}: {reason.text}" in told[name][0]
        assert told[name][1] == reason.remedy
    assert "row-alignment" in told["odd"][0]
    served = [one for one in group if one.spec.pool in ("kv", "good")]
    assert all(plan.staged for plan in solve(query(platform, "kernel", "page_first", *served)).pools.values())


@pytest.mark.parametrize("platform", ROCM)
def test_rocm_stages_no_pool_that_takes_its_indices_on_the_device_alone(platform: str) -> None:
    """R2 for the backup, R5 for the load, whose copies read indices on the CPU as well."""
    asked = query(
        platform, "kernel", "page_first", pool(48), pool(48, name="side", host_index_device=ON_DEVICE)
    )
    assert ids(asked) == [("R2-staged-write-back", "side"), ("R5-no-way", "side")]


@pytest.mark.parametrize("platform", ROCM)
def test_kernel_and_layer_first_is_served_on_request_with_a_proof_of_each_pool(platform: str) -> None:
    """R3: refused, a yes that the probe must prove, or refused again without the probe."""
    group = [pool(), pool(48, name="a"), pool(24, name="b")]
    assert ids(query(platform, "kernel", "layer_first", *group)) == [("R3-not-opted-in", "")]
    assert ids(query(platform, "kernel", "layer_first", *group, probe=False)) == [("R3-not-opted-in", "")]
    allowed = query(platform, "kernel", "layer_first", *group, allow_kernel_layer_first=True)
    found = answer(allowed)
    assert found.outcome is Outcome.IF_PROBED
    assert found.plan is not None
    proofs = found.plan.conditions
    assert [(proof.rule, proof.code) for proof in proofs] == [("R3", "kernel-sees-host-rows")] * 2
    assert [name for name in ("kv", "a", "b") for proof in proofs if f"'{name}'" in proof.text] == ["a", "b"]
    assert ids(evolve(allowed, probe=False)) == [("R3-probe-off", "")]


@pytest.mark.parametrize("platform", ROCM)
@pytest.mark.parametrize("probe", [False, True])
def test_what_rocm_asks_of_layer_first_it_asks_of_kernels_alone(platform: str, probe: bool) -> None:
    """R3: direct + layer_first is not concerned, whatever the tables hold; neither is CUDA."""
    group = [pool(48), pool(24, name="b", kernel_pointer_domain=supported(PointerDomain.CPU))]
    direct = answer(query(platform, "direct", "layer_first", *group, probe=probe))
    cuda = answer(query("cuda", "kernel", "layer_first", *group, probe=probe))
    for found in (direct, cuda):
        assert found.outcome is Outcome.YES
        assert found.plan is not None
        assert found.plan.conditions == ()


OUTSIDE = [supported(PointerDomain.CPU), supported(PointerDomain.RAW), NO]


@pytest.mark.parametrize("platform", ROCM)
@pytest.mark.parametrize("domain", OUTSIDE)
@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("probe", [False, True])
def test_tables_without_device_addresses_are_refused_whatever_is_allowed(
    platform: str, domain: Capability, allowed: bool, probe: bool
) -> None:
    """R3, and R4 where an alias differs: the pool is named; the other reasons of R3 stand beside it."""
    group = [pool(48), pool(48, name="side", kernel_pointer_domain=domain)]
    asked = query(platform, "kernel", "layer_first", *group, allow_kernel_layer_first=allowed, probe=probe)
    policy = [("R3-not-opted-in", "")] if not allowed else [("R3-probe-off", "")] if not probe else []
    alias = [("R4-pointer-domain", "side")] if platform == "rocm-mi355x" else []
    assert ids(asked) == sorted([("R3-cpu-pointers", "side"), *policy, *alias])


PAIRS = [
    ("kernel", "layer_first"),
    ("kernel", "page_first"),
    ("direct", "layer_first"),
    ("direct", "page_first_direct"),
]
# Pairs under which something needs the device's address of registered memory, which is not the CPU's there.
NEEDS_ALIAS = {
    "cpu-sim": [],
    "cuda": [],
    "cuda-wsl2": PAIRS,
    "rocm": [],
    "rocm-mi355x": [("kernel", "layer_first")],
}


@pytest.mark.parametrize("domain", OUTSIDE)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("platform", NEEDS_ALIAS)
def test_aliases_that_differ_rule_out_cpu_addresses_where_one_is_read(
    platform: str, pair: tuple[str, str], domain: Capability
) -> None:
    """R4: kernels, and copies of a kind that takes the alias alone; copies that take CPU addresses go on."""
    group = [pool(48), pool(48, name="side", kernel_pointer_domain=domain)]
    asked = query(platform, *pair, *group, allow_kernel_layer_first=True)
    refused = [("R4-pointer-domain", "side")] if pair in NEEDS_ALIAS[platform] else []
    assert [found for found in ids(asked) if found[0].startswith("R4")] == refused
    assert not [found for found in ids(query(platform, *pair, *group[:1])) if found[0].startswith("R4")]


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [
        (set(CopyKind), False),
        ({CopyKind.TWO_D, CopyKind.BATCH}, False),
        ({CopyKind.ONE_D, CopyKind.TWO_D}, True),
        ({CopyKind.ONE_D, CopyKind.BATCH}, True),
        (set(), True),
    ],
)
def test_each_kind_of_copy_that_carries_rows_is_asked(accepted: set[CopyKind], refused: bool) -> None:
    """R4: strided and batch copies carry rows; a plain one does not."""
    facts = evolve(PLATFORMS["rocm-mi355x"], copy_accepts_host_address=accepted)
    side = pool(48, kernel_pointer_domain=supported(PointerDomain.CPU))
    for pair in PAIRS[1:]:
        assert ids(query(facts, *pair, side)) == [("R4-pointer-domain", "kv")] * refused
        assert ids(query(facts, *pair, pool(48))) == []


@pytest.mark.parametrize("platform", ["npu", "musa", "xpu"])
def test_a_platform_without_kernels_says_so_of_each_pool(platform: str) -> None:
    """R9: under a pair that only a kernel serves, or where rows cannot be staged."""
    group = [pool(), pool(48, name="a"), pool(24, name="b")]
    told = "R9-no-kernel"
    assert ids(query(platform, "kernel", "layer_first", *group)) == [(told, "a"), (told, "b")]
    assert ids(query(platform, "kernel", "page_first", *group)) == [(told, "b")]
    for pair in PAIRS[2:]:
        assert ids(query(platform, *pair, *group)) == []


@pytest.mark.parametrize("platform", ["npu", "musa", "xpu"])
def test_where_nothing_is_registered_tables_hold_raw_addresses(platform: str) -> None:
    """R9: with kernels of a third party, device-domain tables have nothing to hold; copies do not care."""
    facts = evolve(PLATFORMS[platform], has_kernels=True)
    wrong = pool(48, name="wrong", kernel_pointer_domain=supported(PointerDomain.DEVICE))
    group = [pool(48), wrong]
    assert ids(query(facts, "kernel", "layer_first", *group)) == [("R9-nothing-registered", "wrong")]
    assert ids(query(facts, "kernel", "layer_first", pool(48))) == []
    for pair in PAIRS[2:]:
        assert ids(query(facts, *pair, *group)) == []


def test_a_pool_without_a_way_says_what_it_lacks() -> None:
    """R5: the reason and remedy are the pool's own; copies may be missing too, or indices elsewhere."""
    lacking = unsupported("for-tests", "its kernel is not built", "Build it.")
    asked = query("cuda", "kernel", "layer_first", pool(48, kernel_rows=lacking))
    (refused,) = violations(asked)
    assert (refused.id, refused.pool, refused.remedy) == ("R5-no-way", "kv", lacking.remedy)
    assert lacking.text in refused.expected
    nowhere = supported(frozenset[tuple[str, str, IndexPlace]]())
    for pair in PAIRS:
        assert ids(query("cuda", *pair, pool(48, host_index_device=nowhere))) == [("R5-no-way", "kv")]
    for pair in PAIRS[2:]:
        assert ids(query("cuda", *pair, pool(48, strided_copy=NO))) == [("R5-no-way", "kv")]
