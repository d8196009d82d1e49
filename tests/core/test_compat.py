"""The solver: what is served, which rule refuses what is not, and every reason at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve

from hicache_core.compat import Member, Path, Query, solve, violations
from hicache_core.construction import ControllerConfig
from hicache_core.errors import IncompatibleError
from hicache_core.spec import (
    IO_BACKENDS,
    LAYOUTS,
    PLATFORMS,
    SERVED_PAIRS,
    IndexPlace,
    PoolSpec,
    default_capabilities,
    platform_named,
    supported,
    unsupported,
)
from hicache_core.testing.stand_ins import pool_spec

# Typed by hand from the rules of compatibility, not from the solver. One line a platform; columns:
#   kernel+layer_first  kernel+page_first  kernel+page_first_direct
#   direct+layer_first  direct+page_first  direct+page_first_direct
# "yes", or the rules that refuse.
COLUMNS = [(backend, layout) for backend in IO_BACKENDS for layout in LAYOUTS]
PAIR, STAGED, LAYER_FIRST, NO_WAY = (
    "R1-served-pair",
    "R2-staged-write-back",
    "R3-not-opted-in",
    "R5-no-way",
)
NO_KERNEL = "R9-no-kernel"
ALIGNED = {
    "cpu-sim": ["yes", "yes", PAIR, "yes", PAIR, "yes"],
    "cuda": ["yes", "yes", PAIR, "yes", PAIR, "yes"],
    "cuda-wsl2": ["yes", "yes", PAIR, "yes", PAIR, "yes"],
    "rocm": [LAYER_FIRST, "yes", PAIR, "yes", PAIR, "yes"],
    "rocm-mi355x": [LAYER_FIRST, "yes", PAIR, "yes", PAIR, "yes"],
    "npu": [NO_KERNEL, "yes", PAIR, "yes", PAIR, "yes"],
    "musa": [NO_KERNEL, "yes", PAIR, "yes", PAIR, "yes"],
    "xpu": [NO_KERNEL, "yes", PAIR, "yes", PAIR, "yes"],
}
# Rows of 24 bytes: a multiple of 8, so kernels move them; not of 16, so staged write-back does not.
ROWS_OF_24 = {
    "cpu-sim": ["yes", "yes", PAIR, "yes", PAIR, "yes"],
    "cuda": ["yes", "yes", PAIR, "yes", PAIR, "yes"],
    "cuda-wsl2": ["yes", "yes", PAIR, "yes", PAIR, "yes"],
    "rocm": [LAYER_FIRST, STAGED, PAIR, "yes", PAIR, "yes"],
    "rocm-mi355x": [LAYER_FIRST, STAGED, PAIR, "yes", PAIR, "yes"],
    "npu": [NO_KERNEL, NO_KERNEL, PAIR, "yes", PAIR, "yes"],
    "musa": [NO_KERNEL, NO_KERNEL, PAIR, "yes", PAIR, "yes"],
    "xpu": [NO_KERNEL, NO_KERNEL, PAIR, "yes", PAIR, "yes"],
}
EXPECTED = [
    (row_bytes, platform, *column, outcome)
    for row_bytes, table in ((48, ALIGNED), (24, ROWS_OF_24))
    for platform, outcomes in table.items()
    for column, outcome in zip(COLUMNS, outcomes, strict=True)
]


def _query(
    platform: str,
    backend: str,
    layout: str,
    *specs: PoolSpec,
    variant: Sequence[str] | None = None,
    **can: Any,
) -> Query:
    facts = platform_named(platform)
    chosen = specs or (pool_spec(48),)
    return Query(
        platform=facts,
        io_backend=backend,
        layout=layout,
        pools=[
            Member(spec=spec, capabilities=default_capabilities(spec, facts).amended(can)) for spec in chosen
        ],
        variant_platforms=None if variant is None else tuple(variant),
    )


def _rules(query: Query) -> list[str]:
    return [violation.id for violation in violations(query)]


@pytest.mark.parametrize(("row_bytes", "platform", "backend", "layout", "outcome"), EXPECTED)
def test_combinations_come_out_as_the_rules_say(
    row_bytes: int, platform: str, backend: str, layout: str, outcome: str
) -> None:
    """Eight platforms, two backends, three layouts, for rows of 48 and of 24 bytes."""
    query = _query(platform, backend, layout, pool_spec(row_bytes))
    assert _rules(query) == ([] if outcome == "yes" else [outcome])
    if outcome == "yes":
        assert set(solve(query).pools) == {"kv"}
    else:
        with pytest.raises(IncompatibleError):
            solve(query)


def test_the_table_is_complete() -> None:
    """A platform, backend or layout that is added has to be put in the tables."""
    assert len(EXPECTED) == 2 * 8 * 2 * 3
    assert set(ALIGNED) == set(ROWS_OF_24) == set(PLATFORMS)
    assert {"kernel", "direct"} == set(IO_BACKENDS)
    assert {"layer_first", "page_first", "page_first_direct"} == set(LAYOUTS)


WAYS = [
    ("cpu-sim", "kernel", "page_first", 48, (Path.STAGED, Path.KERNEL, True)),
    ("cuda", "kernel", "page_first", 48, (Path.COPIES, Path.COPIES, True)),
    ("cuda", "kernel", "page_first", 24, (Path.KERNEL, Path.COPIES, False)),
    ("cpu-sim", "kernel", "page_first", 24, (Path.KERNEL, Path.KERNEL, False)),
    ("rocm", "kernel", "page_first", 48, (Path.STAGED, Path.COPIES, True)),
    ("rocm-mi355x", "kernel", "page_first", 48, (Path.STAGED, Path.COPIES, True)),
    ("npu", "kernel", "page_first", 48, (Path.COPIES, Path.COPIES, True)),
    ("cuda", "kernel", "layer_first", 48, (Path.KERNEL, Path.KERNEL, False)),
    ("cuda", "direct", "layer_first", 48, (Path.COPIES, Path.COPIES, False)),
    ("rocm", "direct", "layer_first", 48, (Path.COPIES, Path.COPIES, False)),
    ("xpu", "direct", "page_first_direct", 17, (Path.COPIES, Path.COPIES, False)),
]


@pytest.mark.parametrize(("platform", "backend", "layout", "row_bytes", "way"), WAYS)
def test_ways_are_chosen_by_facts(
    platform: str, backend: str, layout: str, row_bytes: int, way: tuple[Path, Path, bool]
) -> None:
    """I43: staged where it is declared; page_first loads on ROCm go by runtime copies."""
    plan = solve(_query(platform, backend, layout, pool_spec(row_bytes)))
    assert (plan.platform, plan.io_backend, plan.layout) == (platform, backend, layout)
    chosen = plan.pools["kv"]
    assert (chosen.backup, chosen.load, chosen.staged) == way


@pytest.mark.parametrize("platform", PLATFORMS)
def test_direct_never_takes_a_kernel(platform: str) -> None:
    """Whatever the platform has."""
    for backend, layout in sorted(SERVED_PAIRS):
        if backend == "direct":
            chosen = solve(_query(platform, backend, layout)).pools["kv"]
            assert {chosen.backup, chosen.load} == {Path.COPIES}


def test_rocm_serves_layer_first_under_direct_only() -> None:
    """R3: the nearest pairs that work are named in the remedy."""
    assert _rules(_query("rocm", "direct", "layer_first")) == []
    (refused,) = violations(_query("rocm", "kernel", "layer_first"))
    assert refused.id == LAYER_FIRST
    assert "direct + layer_first" in refused.remedy
    assert "kernel + page_first" in refused.remedy


@pytest.mark.parametrize(
    ("backend", "layout", "remedy"),
    [
        ("kernel", "page_first_direct", "kernel + "),
        ("direct", "page_first", "direct + "),
        ("dma", "page_first", "kernel + page_first"),
        ("kernel", "token_first", "kernel + page_first"),
    ],
)
def test_a_pair_that_is_not_served_names_one_that_is(backend: str, layout: str, remedy: str) -> None:
    """R1: also for names that do not exist; nothing is rewritten."""
    (refused,) = violations(_query("cuda", backend, layout))
    assert refused.id == PAIR
    assert refused.pool == ""
    assert remedy in refused.remedy
    assert backend in refused.got
    assert layout in refused.got


def test_a_family_may_serve_fewer_pairs() -> None:
    """R1: the pool is named, with the pairs that it serves."""
    query = _query(
        "cuda", "direct", "layer_first", served_pairs=supported(frozenset({("kernel", "page_first")}))
    )
    (refused,) = violations(query)
    assert (refused.id, refused.pool) == (PAIR, "kv")
    assert "kernel + page_first" in refused.expected


def test_a_pool_without_staged_write_back_blocks_rocm_and_says_why() -> None:
    """R2, I44: the reason is the one that the pool declared, its code included."""
    lacking = unsupported("own-kernel", "its rows are swizzled", "Use direct.")
    query = _query("rocm", "kernel", "page_first", staged_write_back=lacking)
    (refused,) = violations(query)
    assert (refused.id, refused.pool) == (STAGED, "kv")
    assert "own-kernel: its rows are swizzled" in refused.expected
    assert refused.remedy == "Use direct."
    assert _rules(_query("cuda", "kernel", "page_first", staged_write_back=lacking)) == []


def test_a_pool_without_index_routing_is_not_staged() -> None:
    """R2, I44: its host indices go to the device, where no copy of the host can read them."""
    lacking = unsupported("group-wide", "its writer reads indices of the device", "Use direct.")
    plan = solve(_query("cuda", "kernel", "page_first", per_pool_backup_indices=lacking)).pools["kv"]
    assert (plan.backup, plan.staged, plan.backup_host_indices) == (Path.KERNEL, False, IndexPlace.DEVICE)
    (refused,) = violations(_query("rocm", "kernel", "page_first", per_pool_backup_indices=lacking))
    assert (refused.id, refused.pool) == (STAGED, "kv")
    assert "group-wide: its writer reads indices of the device" in refused.expected


@pytest.mark.parametrize(
    ("platform", "backend", "layout", "backup", "load"),
    [
        ("cpu-sim", "kernel", "page_first", IndexPlace.CPU, IndexPlace.DEVICE),
        ("cuda", "kernel", "page_first", IndexPlace.CPU, IndexPlace.CPU),
        ("rocm", "kernel", "page_first", IndexPlace.CPU, IndexPlace.CPU),
        ("cuda", "kernel", "layer_first", IndexPlace.DEVICE, IndexPlace.DEVICE),
        ("cuda", "direct", "layer_first", IndexPlace.CPU, IndexPlace.CPU),
        ("cuda", "direct", "page_first_direct", IndexPlace.CPU, IndexPlace.CPU),
    ],
)
def test_a_plan_says_where_host_indices_are_read(
    platform: str, backend: str, layout: str, backup: IndexPlace, load: IndexPlace
) -> None:
    """I25: by direction; on the CPU for all that the host issues, on the device for a kernel."""
    plan = solve(_query(platform, backend, layout)).pools["kv"]
    assert (plan.backup_host_indices, plan.load_host_indices) == (backup, load)


def test_each_pool_is_judged_by_itself() -> None:
    """R2, I44: one pool that is not staged does not make another unstaged."""
    specs = pool_spec(48), pool_spec(24, pool="odd", anchor=False)
    assert [(v.id, v.pool) for v in violations(_query("rocm", "kernel", "page_first", *specs))] == [
        (STAGED, "odd")
    ]
    plan = solve(_query("cuda", "kernel", "page_first", *specs))
    assert {name: pool.staged for name, pool in plan.pools.items()} == {"kv": True, "odd": False}


def test_a_pool_without_bytes_never_blocks() -> None:
    """I45: a logical anchor has no rows, so nothing of it has to be served, and it has no plan."""
    specs = pool_spec(layer_ids=(), pool="names"), pool_spec(48, anchor=False)
    for platform in PLATFORMS:
        for backend, layout in sorted(SERVED_PAIRS):
            alone = _rules(_query(platform, backend, layout))
            query = _query(platform, backend, layout, *specs)
            assert _rules(query) == alone
            if not alone:
                assert set(solve(query).pools) == {"kv"}
    none = _query("rocm", "kernel", "page_first", specs[0], served_pairs=supported(frozenset()))
    assert _rules(none) == []


def test_one_page_size_an_index_space() -> None:
    """R6: the pool that differs from the ones before it is named."""
    specs = pool_spec(48, page_slots=4), pool_spec(48, page_slots=8, pool="side", anchor=False)
    (refused,) = violations(_query("cuda", "direct", "layer_first", *specs))
    assert (refused.id, refused.pool) == ("R6-page-size", "side")


@pytest.mark.parametrize("anchors", [(), ("a", "b"), ("a", "b", "c")])
def test_a_group_has_exactly_one_anchor(anchors: tuple[str, ...]) -> None:
    """R6: none, and more than one, are refused; the names are listed."""
    specs = [pool_spec(48, pool=name, anchor=name in anchors) for name in ("a", "b", "c")]
    (refused,) = violations(_query("cuda", "direct", "layer_first", *specs))
    assert refused.id == "R6-anchor"
    assert all(f"'{name}'" in refused.got for name in anchors)


def test_a_pool_name_is_given_once() -> None:
    """R6: plans are by name."""
    specs = pool_spec(48), pool_spec(48, anchor=False)
    assert _rules(_query("cuda", "direct", "layer_first", *specs)) == ["R6-pool-name"]


def test_a_variant_lists_its_platforms() -> None:
    """R7: a variant that does not exist on the platform is refused; None asks nothing."""
    assert _rules(_query("cuda", "direct", "layer_first", variant=["cuda", "rocm"])) == []
    (refused,) = violations(_query("npu", "direct", "layer_first", variant=["cuda", "rocm"]))
    assert refused.id == "R7-variant-platform"
    assert "cuda, rocm" in refused.got
    assert _rules(_query("npu", "direct", "layer_first", variant=[])) == ["R7-variant-platform"]


def test_every_violation_is_listed_at_once() -> None:
    """An operator sees all that has to change, in one error, each with its remedy."""
    specs = [
        pool_spec(17, pool="a"),
        pool_spec(48, pool="b", page_slots=8),
        pool_spec(17, pool="b", anchor=False),
    ]
    query = _query("rocm", "kernel", "layer_first", *specs, variant=["cuda"])
    with pytest.raises(IncompatibleError) as caught:
        solve(query, who="test")
    assert caught.value.code == "incompatible"
    assert caught.value.who == "test"
    found = caught.value.violations
    assert found == violations(query)
    assert sorted((v.id, v.pool) for v in violations(query)) == [
        (LAYER_FIRST, ""),
        (NO_WAY, "a"),
        (NO_WAY, "b"),
        ("R6-anchor", ""),
        ("R6-page-size", "b"),
        ("R6-pool-name", "b"),
        ("R7-variant-platform", ""),
    ]
    for violation in violations(query):
        assert violation.remedy in caught.value.remedy
        assert f"[{violation.id}]" in str(caught.value)


def test_a_pair_that_is_not_served_hides_no_other_rule_of_the_group() -> None:
    """Rules that do not depend on the pair are still told."""
    specs = pool_spec(17, pool="a"), pool_spec(48, pool="b", page_slots=8)
    found = _rules(_query("rocm", "direct", "page_first", *specs, variant=["cuda"]))
    assert sorted(found) == [PAIR, "R6-anchor", "R6-page-size", "R7-variant-platform"]


@pytest.mark.parametrize(
    ("backend", "layout", "told"),
    [("kernel", "layer_first", 0), ("kernel", "page_first", 1), ("direct", "layer_first", 1)],
)
def test_copies_that_take_the_alias_are_a_choice_where_there_are_copies(
    backend: str, layout: str, told: int
) -> None:
    """On WSL2 one kind of copy refuses the CPU address; a plan of kernels alone makes no copy."""
    choices = solve(_query("cuda-wsl2", backend, layout)).pools["kv"].choices
    assert [choice.code for choice in choices].count("copies-take-alias") == told


@pytest.mark.parametrize("option", ["allow_kernel_layer_first", "probe"])
def test_options_that_open_a_door_are_true_or_false(option: str) -> None:
    """A string such as "no" would count as yes."""
    wrong: dict[str, Any] = {option: "no"}
    with pytest.raises(TypeError):
        evolve(_query("rocm", "kernel", "layer_first"), **wrong)
    with pytest.raises(TypeError):
        ControllerConfig(io_backend="kernel", layout="layer_first", host_pages=1, **wrong)
