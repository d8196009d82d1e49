"""Slots of groups that hold a window, state slots, or both: all or nothing over the index spaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.errors import SlotError
from hicache_core.memory.slots import Int64Array
from hicache_core.spec import PoolSpec
from hicache_core.testing.rigs import Rig
from tests.cross.variants import SERVED, VARIANTS, hybrid_of_all, opened, specs_of

HYBRIDS = {
    "window and rings": lambda: specs_of("deepseek-v4-pro", "cuda_v4", 1),
    "states": lambda: specs_of("jamba-v0.1", "bf16", 1),
    "window, rings and states": hybrid_of_all,
}
# In the order in which the spaces are asked: the anchor's first, then by name.
SPACES = {
    "window and rings": ["full", "swa"],
    "states": ["full", "state"],
    "window, rings and states": ["full", "state", "swa"],
}
PAGES = 3
SHORT = [(hybrid, space) for hybrid, spaces in SPACES.items() for space in spaces]
STREAMS = range(3)
"""Numbers of the simulator's streams: the caller's, backups and loads."""


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig[SimRuntime]]:
    """A rig of a hybrid with three host pages in each space; transfers stay pending until waited for."""
    specs: list[PoolSpec] = HYBRIDS[request.getfixturevalue("hybrid")]()
    others = {spec.index_space.name: PAGES for spec in specs if spec.index_space.name != "full"}
    with opened(
        specs,
        "rocm-mi355x",
        SERVED[0],
        host_pages=PAGES,
        other_host_pages=others,
        faults=Faults(slow_streams=STREAMS),
    ) as made:
        yield made


def free_pages(rig: Rig[SimRuntime]) -> dict[str, int]:
    """Free pages of each index space."""
    return {
        name: allocator.free_slots // allocator.space.page_slots
        for name, allocator in rig.controller.group.allocators.items()
    }


def demand(rig: Rig[SimRuntime], **pages: int) -> dict[str, int]:
    """Slots of some pages of each space, two where nothing is said, not in the order of the group."""
    wanted = {name: pages.get(name, 2) for name in sorted(rig.controller.group.allocators, reverse=True)}
    return {name: count * rig.page_slots(name) for name, count in wanted.items() if count}


class Reclaim:
    """Gives one space pages back when it is asked, and keeps who asked for how many."""

    def __init__(self, rig: Rig[SimRuntime], owned: dict[str, Int64Array], pages: int) -> None:
        self._rig = rig
        self._owned = owned
        self._pages = pages
        self.asked: list[tuple[str, int]] = []

    def __call__(self, space: str, missing: int) -> None:
        size = self._rig.page_slots(space)
        self.asked.append((space, missing // size))
        assert missing % size == 0
        if self._pages:
            self._rig.controller.group.free({space: self._owned[space][: self._pages * size]})


def own_all(rig: Rig[SimRuntime]) -> dict[str, Int64Array]:
    """Take every page of every space."""
    owned = rig.controller.group.allocate(demand(rig, **dict.fromkeys(free_pages(rig), PAGES)))
    assert owned is not None
    return owned


@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_each_short_space_is_reclaimed_once_in_order(hybrid: str, rig: Rig[SimRuntime]) -> None:
    """I7: anchor first, then by name; what reclaiming frees is taken at the one retry."""
    reclaim = Reclaim(rig, own_all(rig), 2)
    got = rig.controller.group.allocate(demand(rig), reclaim=reclaim)
    assert reclaim.asked == [(space, 2) for space in SPACES[hybrid]]
    assert got is not None
    assert {space: len(slots) // rig.page_slots(space) for space, slots in got.items()} == dict.fromkeys(
        SPACES[hybrid], 2
    )
    assert free_pages(rig) == dict.fromkeys(SPACES[hybrid], 0)


@pytest.mark.parametrize("freed", [0, 1])
@pytest.mark.parametrize(("hybrid", "space"), SHORT)
def test_a_space_that_stays_short_takes_nothing_from_any(
    hybrid: str, space: str, freed: int, rig: Rig[SimRuntime]
) -> None:
    """I7: after one reclaim of nothing, or too little, counts are as before but for what it freed."""
    group = rig.controller.group
    taken = group.allocate(demand(rig, **{name: PAGES * (name == space) for name in SPACES[hybrid]}))
    assert taken is not None
    before = free_pages(rig)
    assert before == {name: PAGES * (name != space) for name in SPACES[hybrid]}
    reclaim = Reclaim(rig, taken, freed)
    assert group.allocate(demand(rig), reclaim=reclaim) is None
    assert reclaim.asked == [(space, 2)]
    assert free_pages(rig) == {**before, space: freed}


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(("hybrid", "space"), SHORT)
def test_a_reclaim_that_raises_leaves_every_count(
    hybrid: str, space: str, error: type[BaseException], rig: Rig[SimRuntime]
) -> None:
    """I7: what was taken of the spaces before it is given back, and the error goes on."""

    def reclaim(name: str, missing: int) -> None:
        raise error

    before = free_pages(rig)
    with pytest.raises(error):
        rig.controller.group.allocate(demand(rig, **{space: PAGES + 1}), reclaim=reclaim)
    assert free_pages(rig) == before


@pytest.mark.parametrize(("model", "variant"), VARIANTS)
def test_a_space_has_one_allocator_whatever_rides_on_it(model: str, variant: str) -> None:
    """I5: allocators are those of the pools that own slots; pools that ride on them share the space."""
    entries = {pool.pool: pool for pool in VARIANTS[model, variant].pools}
    with opened(specs_of(model, variant, 1), "cpu-sim", SERVED[0]) as rig:
        group = rig.controller.group
        owners = sorted(pool.index_space for pool in entries.values() if pool.owns_slots)
        assert sorted(group.allocators) == owners
        for space in owners:
            riders = {pool.spec.pool: entries[pool.spec.pool].derive_from for pool in group.pools_of(space)}
            (owner,) = (name for name, source in riders.items() if source is None)
            assert set(riders.values()) <= {None, owner}


@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_pools_that_ride_never_change_an_allocator(hybrid: str, rig: Rig[SimRuntime]) -> None:
    """I5: slots of one space leave the counts of the others, and transfers of all pools leave them all."""
    group = rig.controller.group
    for number, space in enumerate(SPACES[hybrid], start=1):
        assert group.allocate({space: rig.page_slots(space)}) is not None
        assert free_pages(rig) == {name: PAGES - (name in SPACES[hybrid][:number]) for name in SPACES[hybrid]}
    before = free_pages(rig)
    others = {space: rig.sides([(0, 2)], space) for space in SPACES[hybrid][1:]}
    for move in (rig.controller.backup, rig.controller.load):
        ticket = move(*rig.sides([(0, 3)]), others=others)
        assert free_pages(rig) == before
        ticket.wait()
        assert free_pages(rig) == before


@pytest.mark.parametrize(("hybrid", "space"), SHORT)
def test_a_stray_slot_of_one_space_frees_nothing_of_any(
    hybrid: str, space: str, rig: Rig[SimRuntime]
) -> None:
    """I1: whichever space has it; without it all are freed."""
    group = rig.controller.group
    got = group.allocate(demand(rig))
    assert got is not None
    before = free_pages(rig)
    with pytest.raises(SlotError):
        group.free({**got, space: rig.slots([1, 2], space)})
    assert free_pages(rig) == before
    group.free(got)
    assert free_pages(rig) == dict.fromkeys(SPACES[hybrid], PAGES)


@pytest.mark.parametrize(("hybrid", "space"), SHORT)
def test_a_page_that_a_transfer_holds_frees_nothing_of_any(
    hybrid: str, space: str, rig: Rig[SimRuntime]
) -> None:
    """I35: a pending backup of one space keeps the slots of all that are freed with it."""
    group = rig.controller.group
    got = group.allocate(demand(rig))
    assert got is not None
    before = free_pages(rig)
    pairs = {name: rig.sides([(0, 1)] if name == space else [], name) for name in SPACES[hybrid]}
    ticket = rig.controller.backup(*pairs.pop("full"), others=pairs)
    with pytest.raises(SlotError):
        group.free(got)
    assert free_pages(rig) == before
    ticket.wait()
    group.free(got)
    assert free_pages(rig) == dict.fromkeys(SPACES[hybrid], PAGES)
