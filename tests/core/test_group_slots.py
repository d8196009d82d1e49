"""Slots of a group: one allocator a space, all or nothing over the spaces."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hicache_core.device.sim import SimRuntime
from hicache_core.device_pool import DevicePool
from hicache_core.errors import IncompatibleError, SlotError, UnknownNameError
from hicache_core.group import HostGroup
from hicache_core.memory.slots import slots_of
from hicache_core.pool import HostPool
from hicache_core.spec import BufferSpec, IndexSpace, PoolSpec, RowUnit, layout_named
from hicache_core.testing.rigs import Rig

P = 4
MakeRig = Callable[..., Rig]


def _space(name: str, page_slots: int = P) -> IndexSpace:
    return IndexSpace(name=name, page_slots=page_slots)


def _pool(name: str, space: IndexSpace, pages: int, runtime: SimRuntime, *, anchor: bool = False) -> HostPool:
    spec = PoolSpec(
        pool=name,
        family="rows",
        index_space=space,
        row_unit=RowUnit.TOKEN,
        layer_ids=(0,),
        buffers=(BufferSpec(name="b", row_bytes=16),),
        anchor=anchor,
    )
    rows = torch.zeros((4, 16), dtype=torch.uint8)
    return HostPool(DevicePool(spec=spec, layers={"b": [rows]}), layout_named("page_first"), pages, runtime)


def _group() -> HostGroup:
    """The anchor and a derived pool in space ``main`` (8 pages), pools of spaces ``a`` (4) and ``z`` (2)."""
    runtime = SimRuntime()
    main = _space("main")
    return HostGroup(
        [
            _pool("zs", _space("z", 1), 2, runtime),
            _pool("derived", main, 8, runtime),
            _pool("as", _space("a", 2), 4, runtime),
            _pool("kv", main, 8, runtime, anchor=True),
        ]
    )


def _free(group: HostGroup) -> dict[str, int]:
    return {name: allocator.free_slots for name, allocator in group.allocators.items()}


FREE = {"main": 8 * P, "a": 8, "z": 2}


def test_derived_pools_never_allocate() -> None:
    """I5: the pools of one space share one allocator; statistics know spaces, not pools."""
    group = _group()
    assert _free(group) == FREE
    assert {pool.spec.pool for pool in group.pools_of("main")} == {"kv", "derived"}
    assert not hasattr(group.pools_of("main")[0], "allocate")
    got = group.allocate({"main": 2 * P})
    assert got is not None
    assert set(got) == {"main"}
    assert _free(group) == {**FREE, "main": 6 * P}


def test_a_derived_pool_has_its_sources_pages() -> None:
    """I5: a pool that rides on the anchor's slots has at least as many."""
    runtime = SimRuntime()
    pools = [_pool("kv", _space("main"), 8, runtime, anchor=True), _pool("d", _space("main"), 7, runtime)]
    with pytest.raises(IncompatibleError) as caught:
        HostGroup(pools)
    assert [v.id for v in caught.value.violations if hasattr(v, "id")] == ["R6-derived-pages"]


def test_group_allocation_goes_anchor_first_then_by_name() -> None:
    """I7: every rank asks in one order, whatever the order of the demand or of the pools."""
    group = _group()
    asked: list[tuple[str, int]] = []

    def reclaim(space: str, missing: int) -> None:
        asked.append((space, missing))
        allocator = group.allocator(space)
        allocator.free(slots_of(np.arange(allocator.pages), allocator.space.page_slots))

    for name, allocator in group.allocators.items():
        assert allocator.allocate(FREE[name]) is not None
    got = group.allocate({"z": 1, "a": 4, "main": 2 * P}, reclaim=reclaim)
    assert asked == [("main", 2 * P), ("a", 4), ("z", 1)]
    assert got is not None
    assert {name: len(slots) for name, slots in got.items()} == {"main": 2 * P, "a": 4, "z": 1}


def test_group_allocation_that_is_short_takes_nothing() -> None:
    """I7: the last space is short by one slot; all counts are as before."""
    group = _group()
    assert group.allocate({"main": 2 * P, "a": 4, "z": 3}) is None
    assert _free(group) == FREE


def _raise_on(space: str) -> Callable[[str, int], None]:
    def reclaim(name: str, missing: int) -> None:
        if name == space:
            raise KeyboardInterrupt

    return reclaim


@pytest.mark.parametrize("space", ["main", "a", "z"])
def test_group_allocation_is_undone_when_reclaiming_raises(space: str) -> None:
    """I7: whichever step raises, and whatever it raises, every free count is as before."""
    group = _group()
    demand = {"main": P, "a": 2, "z": 1, space: FREE[space] + group.allocator(space).space.page_slots}
    with pytest.raises(KeyboardInterrupt):
        group.allocate(demand, reclaim=_raise_on(space))
    assert _free(group) == FREE


@pytest.mark.parametrize(
    ("demand", "error"),
    [
        ({"main": P, "a": 3}, SlotError),
        ({"main": P, "a": 0}, SlotError),
        ({"main": P, "b": 2}, UnknownNameError),
    ],
)
def test_group_allocation_is_undone_when_a_demand_is_refused(
    demand: dict[str, int], error: type[Exception]
) -> None:
    """I7: a demand that is not whole pages, or of a space that is not there, takes nothing."""
    group = _group()
    with pytest.raises(error):
        group.allocate(demand)
    assert _free(group) == FREE


def test_group_free_is_all_or_nothing() -> None:
    """I1: a stray slot of one space leaves the slots of the others owned."""
    group = _group()
    got = group.allocate({"main": P, "a": 2})
    assert got is not None
    before = _free(group)
    with pytest.raises(SlotError):
        group.free({"main": got["main"], "a": got["a"] + 2})
    assert _free(group) == before
    group.free(got)
    assert _free(group) == FREE


def test_pages_of_a_running_transfer_cannot_be_freed(make_rig: MakeRig) -> None:
    """I35: neither a backup nor a load lets go of its host pages before it is acknowledged."""
    rig = make_rig()
    group = rig.controller.group
    host = rig.slots(rig.allocate(2))
    for move in (rig.controller.backup, rig.controller.load):
        ticket = move(host, rig.slots([3, 5]))
        with pytest.raises(SlotError):
            group.free({"full": host})
        ticket.wait()
    group.free({"full": host})
