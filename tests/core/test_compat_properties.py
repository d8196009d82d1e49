"""What holds of any group: of 1 to 12 pools with any capabilities, on any facts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_core.compat import Outcome, Path, PoolPlan, Query, answer, solve, violations
from hicache_core.errors import IncompatibleError
from hicache_core.spec import (
    PLATFORMS,
    SERVED_PAIRS,
    Alias,
    Capabilities,
    Capability,
    CopyKind,
    IndexPlace,
    IndexSpace,
    Platform,
    PointerDomain,
    default_capabilities,
    not_applicable,
    supported,
)
from hicache_core.testing.stand_ins import pool_spec
from tests.core.compat_queries import NO, Asked, ids, query

PLACES = [
    (way, io_backend, place)
    for way in ("backup", "load")
    for io_backend in ("kernel", "direct")
    for place in IndexPlace
]
SPACES = [
    IndexSpace(name="full", page_slots=4),
    IndexSpace(name="full", page_slots=8),
    IndexSpace(name="other", page_slots=4),
]
NONE = not_applicable("for tests")

often = settings(max_examples=60, deadline=None)
VALUES: Mapping[str, st.SearchStrategy[object]] = {
    "staged_write_back": st.none(),
    "per_pool_backup_indices": st.none(),
    "kernel_rows": st.none(),
    "strided_copy": st.none(),
    "kernel_pointer_domain": st.sampled_from(PointerDomain),
    "host_index_device": st.frozensets(st.sampled_from(PLACES)),
    "served_pairs": st.frozensets(st.sampled_from(sorted(SERVED_PAIRS))),
}
"""The capabilities that the solver reads, and what each can amount to."""

capabilities = st.fixed_dictionaries(
    {},
    optional={
        name: st.one_of(st.builds(supported, value), st.sampled_from([NO, NONE]))
        for name, value in VALUES.items()
    },
)


@st.composite
def groups(draw: st.DrawFn, *, sane: bool) -> list[Asked]:
    """1 to 12 pools; where ``sane``, of one anchor, a name each, agreeing spaces, and no pages asked."""
    made: list[Asked] = []
    for number in range(draw(st.integers(1, 12))):
        name = f"p{number}" if sane else draw(st.sampled_from(["p", "q", f"p{number}"]))
        spec = pool_spec(
            *draw(st.lists(st.sampled_from([16, 48, 64, 24] if sane else [48, 24, 17]), max_size=3)),
            pool=name,
            anchor=number == 0 if sane else draw(st.booleans()),
            space=draw(st.sampled_from(SPACES[1:] if sane else SPACES)),
        )
        # Most pools are the core's default, or no group of twelve would ever work.
        asked = Asked(spec=spec, can=draw(capabilities) if draw(st.integers(0, 5)) == 5 else {})
        if not sane:
            asked = evolve(
                asked,
                host_pages=draw(st.none() | st.integers(0, 3)),
                device_row_bytes=draw(st.dictionaries(st.sampled_from(["b0", "b1"]), st.integers(0, 64))),
            )
        made.append(asked)
    return made


shipped = st.sampled_from(list(PLATFORMS.values()))
"""The facts of the platforms that the core has."""
any_facts = shipped | st.builds(
    Platform,
    name=st.just("mine"),
    vendor=st.just("mine"),
    alias=st.sampled_from(Alias),
    copy_accepts_host_address=st.frozensets(st.sampled_from(CopyKind)),
    relays_out_backups=st.booleans(),
    kernel_loads_page_first=st.booleans(),
    kernel_layer_first=st.booleans(),
    staged_required=st.booleans(),
    has_kernels=st.booleans(),
    variants_of=st.sampled_from(["", "cuda"]),
)
"""These, or those of a platform that a plugin brings."""


@st.composite
def queries(draw: st.DrawFn, *, sane: bool = False, facts: st.SearchStrategy[Platform] = any_facts) -> Query:
    """Anything that can be asked; where ``sane``, a served pair and a sane group."""
    pair = draw(st.sampled_from(sorted(SERVED_PAIRS)))
    more: dict[str, Any] = {}
    if not sane:
        names = st.sampled_from(["kernel", "direct", "layer_first", "page_first", "page_first_direct", ""])
        pair = draw(st.just(pair) | st.tuples(names, names))
        more = {
            "variant_platforms": draw(st.none() | st.just(("cuda", "rocm")) | st.just(())),
            "required": draw(st.dictionaries(st.sampled_from(["p", "p0", "z"]), st.text(max_size=3))),
        }
    return query(
        draw(facts),
        *pair,
        *draw(groups(sane=sane)),
        allow_kernel_layer_first=draw(st.booleans()),
        probe=draw(st.booleans()),
        ring_bytes=draw(st.sampled_from([0, 20, 1 << 20])),
        **more,
    )


@often
@given(st.one_of(queries(), queries(sane=True)))
def test_a_query_is_answered_and_never_fails_otherwise(asked: Query) -> None:
    """Yes where no rule is broken, an IncompatibleError with every reason where one is, and nothing else."""
    found, solved = violations(asked), answer(asked)
    assert (solved.outcome is not Outcome.NO) == (not found) == (solved.plan is not None)
    assert solved.violations == found
    assert (solved.outcome is Outcome.IF_PROBED) == bool(solved.plan and solved.plan.conditions)
    if not found:
        assert solve(asked) == solved.plan
        return
    with pytest.raises(IncompatibleError) as refused:
        solve(asked)
    assert refused.value.violations == found
    assert refused.value.nearest == solved.nearest


def _used(direction: str, path: Path, facts: Platform, can: Capabilities, io_backend: str) -> None:
    """A path that is taken is one that the platform and the pool have."""
    places = can.host_index_device.value
    assert isinstance(places, frozenset)
    assert (direction, io_backend, path.host_indices) in places
    needed = {
        Path.STAGED: facts.has_kernels and facts.relays_out_backups,
        Path.COPIES: bool(can.strided_copy),
        Path.KERNEL: facts.has_kernels and bool(can.kernel_rows),
    }
    assert needed[path]
    assert io_backend == "kernel" or path is Path.COPIES


def _staged(plan: PoolPlan, facts: Platform, can: Capabilities) -> None:
    """Where a pool is staged it says so, and no kernel stores to host memory; a pool that must be, is."""
    if plan.staged:
        assert can.staged_write_back
        assert can.per_pool_backup_indices
        assert plan.backup is not Path.KERNEL
    assert plan.load is not Path.STAGED
    assert (plan.staging_bytes > 0) == (plan.backup is Path.STAGED)


@often
@given(queries(sane=True))
def test_a_plan_uses_what_the_platform_and_each_pool_have(asked: Query) -> None:
    """Paths, places of indices, staging and addresses, pool by pool."""
    plan = answer(asked).plan
    if plan is None:
        return
    members = {member.spec.pool: member for member in asked.pools if member.spec.buffers}
    assert set(plan.pools) == set(members)
    for name, own in plan.pools.items():
        facts, can = asked.platform, members[name].capabilities
        assert isinstance(can.served_pairs.value, frozenset)
        assert asked.pair in can.served_pairs.value
        _used("backup", own.backup, facts, can, asked.io_backend)
        _used("load", own.load, facts, can, asked.io_backend)
        _staged(own, facts, can)
        assert own.staged or asked.pair != ("kernel", "page_first") or not facts.staged_required
        by_kernel = Path.KERNEL in (own.backup, own.load)
        if by_kernel and facts.alias is Alias.DISTINCT:
            assert own.pointer_domain is PointerDomain.DEVICE
        if by_kernel and facts.alias is Alias.NONE:
            assert own.pointer_domain is not PointerDomain.DEVICE
    unproven = asked.pair == ("kernel", "layer_first") and not asked.platform.kernel_layer_first
    assert len(plan.conditions) == (len(members) if unproven else 0)


FIRST_DECIDES = {"R6-page-size", "R6-space", "R6-derived-pages"}
"""What is right is what the first pool of a space says, so that another order tells of other pools."""


@often
@given(queries(), st.randoms(use_true_random=False))
def test_the_order_of_pools_decides_nothing_else(asked: Query, rng: random.Random) -> None:
    """Nor whether the pools of a space agree; only which of them are told to differ."""
    shuffled = evolve(asked, pools=rng.sample(asked.pools, len(asked.pools)))
    both = [ids(one) for one in (asked, shuffled)]
    plain, moved = ([found for found in told if found[0] not in FIRST_DECIDES] for told in both)
    assert plain == moved
    differ, still = ({found[0] for found in told} & {"R6-page-size", "R6-space"} != set() for told in both)
    assert differ == still


def _more(asked: Query, number: int, name: str) -> Query:
    """The query with one capability of one pool supported, as the core's default is for aligned rows."""
    facts, pools = asked.platform, list(asked.pools)
    better: Capability = getattr(default_capabilities(pool_spec(64), PLATFORMS["cuda"]), name)
    if name == "kernel_pointer_domain":
        better = default_capabilities(pool_spec(64), facts).kernel_pointer_domain
    able = pools[number].capabilities
    if not getattr(able, name):
        pools[number] = evolve(pools[number], capabilities=able.amended({name: better}))
    return evolve(asked, pools=pools)


@often
@given(queries(sane=True, facts=shipped), st.sampled_from(sorted(VALUES)))
def test_a_pool_that_can_more_makes_no_group_fail(asked: Query, name: str) -> None:
    """On the facts of the core: what a pool gains adds paths, and takes no other's place but a better one."""
    told = {pool for _, pool in ids(asked)}
    for number, member in enumerate(asked.pools):
        refused = {pool for _, pool in ids(_more(asked, number, name))}
        assert member.spec.pool in told or member.spec.pool not in refused


def _distance(asked: Query, other: tuple[bool, str, str]) -> tuple[int, int, int]:
    """Options stay if they can, then the backend, then whether layers or pages come first."""
    option, io_backend, layout = other
    first = {"layer_first": "layer", "page_first": "page", "page_first_direct": "page"}
    return (
        int(option and not asked.allow_kernel_layer_first),
        int(io_backend != asked.io_backend),
        int(first[layout] != first.get(asked.layout)),
    )


def _instead(asked: Query, other: tuple[bool, str, str]) -> Query:
    return evolve(asked, allow_kernel_layer_first=other[0], io_backend=other[1], layout=other[2])


@often
@given(queries(sane=True), st.sampled_from(["layer_first", "page_first", "page_first_direct"]))
def test_no_combination_that_works_is_nearer_than_the_nearest(asked: Query, layout: str) -> None:
    """It works; what is nearer does not; and where none is told, none of all works."""
    asked = evolve(asked, layout=layout)
    solved = answer(asked)
    on_request = not asked.platform.kernel_layer_first
    every = [
        (on_request and (io_backend, layout) == ("kernel", "layer_first"), io_backend, layout)
        for io_backend in ("kernel", "direct")
        for layout in ("layer_first", "page_first", "page_first_direct")
    ]
    works = [other for other in every if not violations(_instead(asked, other))]
    if solved.outcome is not Outcome.NO or not works:
        assert solved.nearest is None
        return
    assert solved.nearest is not None
    near = solved.nearest
    told = (near.allow_kernel_layer_first, near.io_backend, near.layout)
    assert told in works
    assert solve(_instead(asked, told)).pools.keys() == {m.spec.pool for m in asked.pools if m.spec.buffers}
    assert _distance(asked, told) == min(_distance(asked, other) for other in works)
