"""R6 and R7, what a group and its variant must be; what is told, and advised, where much is wrong at once."""

from __future__ import annotations

import itertools

import pytest
from attrs import evolve

from hicache_core.compat import Outcome, Query, answer, nearest, solve, violations
from hicache_core.errors import IncompatibleError
from hicache_core.spec import PLATFORMS, IndexSpace, Reuse, supported
from tests.core.compat_queries import FULL, NO, Asked, ids, pool, query

DIRECT = ("cuda", "direct", "layer_first")
WIDE = IndexSpace(name="full", page_slots=8)
LEAF = IndexSpace(name="full", page_slots=4, reuse=Reuse.LEAF)
WINDOW = IndexSpace(name="full", page_slots=4, reuse=Reuse.TRAILING_PAGES, window_slots=8)


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (FULL, []),
        (WIDE, [("R6-page-size", "side")]),
        (LEAF, [("R6-space", "side")]),
        (WINDOW, [("R6-space", "side")]),
        (evolve(WIDE, name="other"), []),
        (evolve(LEAF, name="other"), []),
    ],
)
def test_pools_of_a_space_agree_on_it(space: IndexSpace, told: list[tuple[str, str]]) -> None:
    """R6: page size, rule of reuse and window; another space is another matter."""
    assert ids(query(*DIRECT, pool(48), pool(48, name="side", space=space))) == told


def test_every_pool_that_differs_from_the_first_of_its_space_is_named() -> None:
    """R6: a pool that agrees with another wrong one is wrong as well."""
    others = [("a", WIDE), ("b", WIDE), ("c", LEAF), ("d", FULL)]
    sides = [pool(48, name=name, space=space) for name, space in others]
    wrong = [("R6-page-size", "a"), ("R6-page-size", "b"), ("R6-space", "c")]
    assert ids(query(*DIRECT, pool(48), *sides)) == wrong


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_derived_pools_are_held_to_the_anchor_wherever_it_stands(order: tuple[int, ...]) -> None:
    """R6: as many pages as the anchor, or more; none is as few as one can have."""
    group = [evolve(pool(48, name=name), host_pages=n) for name, n in (("kv", 5), ("a", 5), ("b", 9))]
    assert ids(query(*DIRECT, *(group[i] for i in order))) == []
    for pages in (0, 4):
        fewer = [*group[:1], evolve(group[1], host_pages=pages), group[2]]
        assert ids(query(*DIRECT, *(fewer[i] for i in order))) == [("R6-derived-pages", "a")]


def test_pages_of_another_space_are_compared_within_it() -> None:
    """R6: a window may be smaller than what the anchor has, and its riders may not be smaller than it."""
    space = IndexSpace(name="swa", page_slots=4)
    sizes = (("swa", 3), ("on_it", 3), ("short", 2))
    group = [evolve(pool(48, name=name, space=space), host_pages=n) for name, n in sizes]
    asked = query(*DIRECT, evolve(pool(48), host_pages=9), *group)
    assert ids(asked) == [("R6-derived-pages", "short")]


def test_a_name_is_told_once_however_often_it_is_there() -> None:
    """R6: each name that is there more than once."""
    names = ["a", "kv", "a", "b", "b", "a"]
    group = [pool(48, name=name) for name in names]
    assert ids(query(*DIRECT, *group)) == [("R6-pool-name", "a"), ("R6-pool-name", "b")]


def test_a_required_pool_that_is_missing_is_told_with_its_reason() -> None:
    """R6: the remedy is why it may be missing; a pool without bytes is there."""
    required = {"kv": "never", "swa": "Turn the window on.", "state": "Give it slots."}
    asked = query(*DIRECT, pool(), pool(48, name="swa"), required=required)
    (missing,) = violations(asked)
    assert (missing.id, missing.pool, missing.remedy) == ("R6-required-pool", "state", "Give it slots.")


def test_a_group_of_nothing_lacks_its_anchor() -> None:
    """R6: and breaks no other rule of a group."""
    assert ids(query(*DIRECT)) == [("R6-anchor", "")]


@pytest.mark.parametrize(("own", "of"), [("cuda", ""), ("mine", "cuda"), ("cuda", "rocm"), ("mine", "")])
def test_a_platform_has_the_variants_of_the_one_that_it_names(own: str, of: str) -> None:
    """R7: its own name, or that of the platform whose variants exist on it too."""
    facts = evolve(PLATFORMS["cuda"], name=own, variants_of=of)
    asked = query(facts, "direct", "layer_first", pool(48), variant_platforms=("cuda", "npu"))
    assert ids(asked) == ([] if "cuda" in (own, of) else [("R7-variant-platform", "")])
    assert ids(evolve(asked, variant_platforms=None)) == []


def _all_wrong() -> Query:
    group: list[Asked] = [
        pool(48, name="pairs", served_pairs=supported(frozenset({("direct", "layer_first")}))),
        pool(48, name="unstaged", staged_write_back=NO),
        pool(48, name="stuck", strided_copy=NO),
        evolve(pool(48, name="rows"), device_row_bytes={"b0": 64}),
        pool(48, name="wide", space=WIDE),
        pool(48, name="leaf", space=LEAF),
        pool(48, name="twice"),
        pool(48, name="twice"),
    ]
    pages = [evolve(one, host_pages=pages) for pages, one in enumerate(group[::-1], start=1)]
    required, platforms = {"gone": "Bring it back."}, ("cuda",)
    return query("rocm", "kernel", "page_first", *pages[::-1], required=required, variant_platforms=platforms)


def test_all_that_is_wrong_is_told_at_once() -> None:
    """Each rule of a group, its variant and its pair, with the pool; what the error carries is the same."""
    asked = _all_wrong()
    sides = ["unstaged", "stuck", "rows", "wide", "leaf", "twice", "twice"]
    assert ids(asked) == sorted(
        [
            ("R1-served-pair", "pairs"),
            ("R2-staged-write-back", "unstaged"),
            ("R5-no-way", "stuck"),
            ("R5-row-bytes", "rows"),
            ("R6-anchor", ""),
            *(("R6-derived-pages", name) for name in sides),
            ("R6-page-size", "wide"),
            ("R6-pool-name", "twice"),
            ("R6-required-pool", "gone"),
            ("R6-space", "leaf"),
            ("R7-variant-platform", ""),
        ]
    )
    with pytest.raises(IncompatibleError) as caught:
        solve(asked)
    assert caught.value.violations == violations(asked)
    assert all(violation.remedy for violation in violations(asked))


def test_nothing_is_advised_where_no_pair_helps() -> None:
    """What is wrong with a group is wrong under every pair."""
    assert nearest(_all_wrong()) is None
    assert answer(_all_wrong()).nearest is None


def test_an_option_is_advised_where_nothing_else_works() -> None:
    """R3: the last resort, since it needs a proof; and not without the probe that gives it."""
    pairs = supported(frozenset({("kernel", "layer_first")}))
    asked = query("rocm", "kernel", "layer_first", pool(48, served_pairs=pairs))
    found = nearest(asked)
    assert found is not None
    assert (found.io_backend, found.layout) == ("kernel", "layer_first")
    assert found.allow_kernel_layer_first
    assert answer(evolve(asked, allow_kernel_layer_first=True)).outcome is Outcome.IF_PROBED
    assert nearest(evolve(asked, probe=False)) is None
