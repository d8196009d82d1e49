"""Links between index spaces: partners of pages, what goes with a page, and which prefix can be restored."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import IndicesError, PairingError, SlotError
from hicache_core.group import HostGroup
from hicache_core.memory.links import PageLinks
from hicache_core.memory.slots import PageAllocator
from hicache_core.spec import IndexSpace, Reuse, RowUnit, platform_named
from hicache_core.testing.rigs import Rig
from hicache_core.testing.stand_ins import pool_spec

FULL = IndexSpace(name="full", page_slots=4)
SWA = IndexSpace(name="swa", page_slots=4, reuse=Reuse.TRAILING_PAGES, window_slots=6)
STATE = IndexSpace(name="state", page_slots=1, reuse=Reuse.LEAF)
PAGES = 8


def pages(*numbers: int) -> np.ndarray:
    """Page numbers."""
    return np.array(numbers, dtype=np.int64)


def linked(space: IndexSpace, taken: int = PAGES) -> PageLinks:
    """Links between two spaces of eight pages, of which the first few are handed out."""
    allocators = [PageAllocator(one, PAGES, who=one.name) for one in (FULL, space)]
    for allocator in allocators:
        assert allocator.allocate_pages(taken) is not None
    return PageLinks(*allocators)


def test_slots_are_translated_page_by_page() -> None:
    """A slot has its place in the partner of its page; slots of pages without one are -1."""
    links = linked(SWA)
    links.link(pages(2, 5), pages(7, 0))
    assert links.pages(pages(5, 2, 3)).tolist() == [0, 7, -1]
    assert links.slots(np.array([8, 11, 20, 23, 12])).tolist() == [28, 31, 0, 3, -1]


def test_a_checkpoint_has_one_slot_for_its_page() -> None:
    """Every slot of a page leads to the one checkpoint that was taken at its end."""
    links = linked(STATE)
    links.link(pages(2), pages(6))
    assert links.slots(np.array([8, 11, 12])).tolist() == [6, 6, -1]


def test_parted_pages_have_no_partner() -> None:
    """A window is given up alone: its partner stays, and both can be linked again."""
    links = linked(SWA)
    links.link(pages(2, 5), pages(7, 0))
    links.unlink(pages(7, 3))
    assert links.pages(pages(2, 5)).tolist() == [-1, 0]
    links.link(pages(2), pages(7))


@pytest.mark.parametrize(
    ("anchor", "other"),
    [
        (pages(1, 2), pages(3)),
        (pages(1, 1), pages(3, 4)),
        (pages(1, 2), pages(3, 3)),
        (pages(0, 2), pages(3, 4)),
        (pages(1, 2), pages(3, 5)),
    ],
    ids=["lengths", "anchor twice", "other twice", "anchor linked", "other linked"],
)
def test_a_page_has_one_partner(anchor: np.ndarray, other: np.ndarray) -> None:
    """What would give a page a second partner is refused, and nothing changes."""
    links = linked(SWA)
    links.link(pages(0), pages(5))
    with pytest.raises(PairingError):
        links.link(anchor, other)
    assert links.pages(np.arange(PAGES)).tolist() == [5] + [-1] * (PAGES - 1)


@pytest.mark.parametrize(("anchor", "other"), [(4, 0), (0, 4)])
def test_pages_that_nobody_owns_are_not_linked(anchor: int, other: int) -> None:
    """I1: a page that is free has no partner."""
    links = linked(SWA, taken=4)
    with pytest.raises(SlotError):
        links.link(pages(anchor), pages(other))


@pytest.mark.parametrize("stray", [-1, PAGES])
def test_pages_that_do_not_exist_are_refused(stray: int) -> None:
    """I23: out of range either way, wherever a page is given; a link of the last page stays."""
    links = linked(SWA)
    links.link(pages(PAGES - 1), pages(PAGES - 1))
    for ask in (links.pages, links.restorable, links.unlink, lambda page: links.slots(page * 4)):
        with pytest.raises(IndicesError):
            ask(pages(stray))
    for sides in ((pages(stray), pages(0)), (pages(0), pages(stray)), ([0], pages(0))):
        with pytest.raises(IndicesError):
            links.link(*sides)
    assert links.pages(pages(PAGES - 1)).tolist() == [PAGES - 1]


@pytest.mark.parametrize(("space", "window"), [(SWA, 2), (STATE, 1)], ids=["window", "checkpoint"])
def test_what_a_prefix_needs_is_its_end(space: IndexSpace, window: int) -> None:
    """I40: a prefix can be restored where the pages that its end needs are all linked, or all that it has."""
    draw = random.Random(3)
    for _ in range(200):
        links = linked(space)
        prefix = draw.sample(range(PAGES), draw.randint(1, PAGES))
        there = [page for page in prefix if draw.random() < 0.6]
        links.link(pages(*there), pages(*draw.sample(range(PAGES), len(there))))
        expected = [
            all(page in there for page in prefix[max(end - window, 0) : end])
            for end in range(1, len(prefix) + 1)
        ]
        assert links.restorable(pages(*prefix)).tolist() == expected


@pytest.fixture
def rig() -> Rig[SimRuntime]:
    """A group of an anchor, a window and a state."""
    specs = [
        pool_spec(16, space=FULL),
        pool_spec(32, pool="window", space=SWA, anchor=False),
        pool_spec(48, pool="state", space=STATE, unit=RowUnit.SLOT, anchor=False),
    ]
    config = ControllerConfig(
        io_backend="direct",
        layout="page_first_direct",
        host_pages=6,
        other_host_pages={"swa": 5, "state": 2},
    )
    return Rig(specs, config, SimRuntime(platform_named("cpu-sim")))


def counts(group: HostGroup) -> dict[str, int]:
    """Free pages of each space."""
    return {name: allocator.free_pages for name, allocator in group.allocators.items()}


def test_the_usable_prefix_is_what_every_space_can_restore(rig: Rig[SimRuntime]) -> None:
    """I40: five pages, windows of the third to the fifth, a checkpoint at the fourth: four are usable."""
    with rig:
        group = rig.controller.group
        full, swa, state = pages(*rig.allocate(5)), rig.allocate(3, "swa"), rig.allocate(1, "state")
        assert group.usable_pages(full) == 0
        group.links["swa"].link(full[2:], pages(*swa))
        group.links["state"].link(full[3:4], pages(*state))
        assert group.usable_pages(full) == 4
        assert group.usable_pages(full[:3]) == 0
        assert group.usable_pages(full[:0]) == 0


def test_linked_pages_go_with_the_anchors(rig: Rig[SimRuntime]) -> None:
    """What a page is worth nothing without goes when it goes; named as well, it goes once."""
    with rig:
        group = rig.controller.group
        before = counts(group)
        full, swa, state = pages(*rig.allocate(3)), rig.allocate(2, "swa"), rig.allocate(1, "state")
        group.links["swa"].link(full[1:], pages(*swa))
        group.links["state"].link(full[2:], pages(*state))
        group.free({"full": rig.slots(full[:2]), "swa": rig.slots(swa[:1], "swa")})
        assert counts(group) == {"full": 5, "swa": 4, "state": 1}
        group.free({"full": rig.slots(full[2:])})
        assert counts(group) == before
        assert group.links["swa"].pages(full).tolist() == [-1, -1, -1]


def test_nothing_goes_where_a_linked_page_is_held(rig: Rig[SimRuntime]) -> None:
    """I7: a window that a transfer holds keeps its anchor's page as well."""
    with rig:
        group = rig.controller.group
        full, swa = rig.allocate(1), rig.allocate(1, "swa")
        group.links["swa"].link(pages(*full), pages(*swa))
        ticket = rig.controller.backup(*rig.sides([]), others={"swa": rig.sides([(swa[0], 1)], "swa")})
        before = counts(group)
        with pytest.raises(SlotError):
            group.free({"full": rig.slots(full)})
        assert counts(group) == before
        assert group.links["swa"].pages(pages(*full)).tolist() == swa
        ticket.wait()
        group.free({"full": rig.slots(full)})
