"""Groups of several index spaces: pages of each move together or apart, in one transfer, byte by byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import (
    IndicesError,
    PageContractError,
    PairingError,
    SlotError,
    SpecError,
    UnknownNameError,
)
from hicache_core.memory.slots import page_numbers
from hicache_core.spec import IndexSpace, PoolSpec, Reuse, RowUnit, platform_named
from hicache_core.testing.rigs import Rig, differences
from hicache_core.testing.stand_ins import pool_spec

SWA = IndexSpace(name="swa", page_slots=4, reuse=Reuse.TRAILING_PAGES, window_slots=4)
STATE = IndexSpace(name="state", page_slots=1, reuse=Reuse.LEAF)
SERVED = (("kernel", "page_first"), ("direct", "layer_first"), ("direct", "page_first_direct"))
HOST_PAGES = {"swa": 5, "state": 3}


def hybrid(first_layer: int = 0) -> list[PoolSpec]:
    """Token rows that anchor, page rows that ride on them, a window with a ring on its pages, and states."""
    return [
        pool_spec(32, 16, layer_ids=(first_layer, first_layer + 2)),
        pool_spec(48, pool="index", unit=RowUnit.PAGE, layer_ids=(first_layer + 2,), anchor=False),
        pool_spec(
            64, pool="window", unit=RowUnit.PAGE, space=SWA, anchor=False, layer_ids=(first_layer + 1,)
        ),
        pool_spec(80, pool="ring", unit=RowUnit.PAGE, space=SWA, anchor=False, layer_ids=(first_layer + 1,)),
        pool_spec(
            96, 32, pool="state", unit=RowUnit.SLOT, space=STATE, anchor=False, layer_ids=(first_layer + 3,)
        ),
    ]


def opened(
    platform: str, pair: tuple[str, str], *, first_layer: int = 0, ring_bytes: int = 200
) -> Rig[SimRuntime]:
    """A rig of the hybrid group."""
    config = ControllerConfig(
        io_backend=pair[0],
        layout=pair[1],
        host_pages=8,
        other_host_pages=HOST_PAGES,
        ring_bytes=ring_bytes,
        first_layer=first_layer,
    )
    return Rig(hybrid(first_layer), config, SimRuntime(platform_named(platform), seed=5))


@pytest.fixture
def rig() -> Rig[SimRuntime]:
    """A rig of the hybrid group, with one served pair."""
    return opened("rocm-mi355x", SERVED[0])


@pytest.mark.parametrize("pair", SERVED, ids=" + ".join)
@pytest.mark.parametrize("platform", ["cpu-sim", "cuda-wsl2", "rocm-mi355x"])
def test_pages_of_all_spaces_move_in_one_transfer(platform: str, pair: tuple[str, str]) -> None:
    """Each pool moves the pages of its own space, different ones and differently many."""
    with opened(platform, pair) as rig:
        full, swa, state = rig.allocate(3), rig.allocate(2, "swa"), rig.allocate(1, "state")
        rig.fill_host()
        pairs = list(zip(full, [5, 2, 9], strict=True))
        others = {"swa": list(zip(swa, [7, 1], strict=True)), "state": [(state[0], 11)]}
        expected = rig.after_backup(rig.snapshot(), pairs, others)
        sides = {name: rig.sides(mine, name) for name, mine in others.items()}
        ticket = rig.controller.backup(*rig.sides(pairs), others=sides)
        ticket.wait()
        bytes_of = {spec.pool: spec.page_bytes for spec in hybrid()}
        moved = 3 * (bytes_of["kv"] + bytes_of["index"]) + 2 * (bytes_of["window"] + bytes_of["ring"])
        assert ticket.nbytes == moved + bytes_of["state"]
        assert not differences(rig.snapshot(), expected)
        rig.poison_device()
        pairs = list(zip(full, [0, 1, 3], strict=True))
        others = {"swa": [(swa[1], 0), (swa[0], 10)], "state": [(state[0], 4)]}
        expected = rig.after_load(rig.snapshot(), pairs, others)
        sides = {name: rig.sides(mine, name) for name, mine in others.items()}
        rig.controller.load(*rig.sides(pairs), others=sides).wait()
        assert not differences(rig.snapshot(), expected)


def test_one_space_moves_alone(rig: Rig[SimRuntime]) -> None:
    """A window is backed up without any page of the anchor; the anchor's pools are not touched."""
    with rig:
        swa = rig.allocate(2, "swa")
        rig.fill_host()
        others = {"swa": list(zip(swa, [3, 8], strict=True))}
        expected = rig.after_backup(rig.snapshot(), [], others)
        none = np.empty(0, dtype=np.int64)
        rig.controller.backup(none, none, others={"swa": rig.sides(others["swa"], "swa")}).wait()
        assert not differences(rig.snapshot(), expected)


def test_page_numbers_serve_instead_of_slots(rig: Rig[SimRuntime]) -> None:
    """Whoever keeps page numbers gives these; they are checked as slots are."""
    with rig:
        host = rig.allocate(2)
        rig.fill_host()
        pairs = list(zip(host, [6, 4], strict=True))
        expected = rig.after_backup(rig.snapshot(), pairs)
        pages = np.array(host), np.array([6, 4])
        kept = pages[0].copy()
        rig.controller.backup(*pages, numbers=page_numbers).wait()
        assert not differences(rig.snapshot(), expected)
        assert np.array_equal(pages[0], kept)
        for bad in (np.array([-1, 3]), np.array([3, 12])):
            with pytest.raises(IndicesError):
                rig.controller.backup(pages[0], bad, numbers=page_numbers)
        with pytest.raises(IndicesError):
            rig.controller.load(pages[0], np.array([3, 3]), numbers=page_numbers)


def test_a_refused_space_leaves_all_others_free(rig: Rig[SimRuntime]) -> None:
    """I7: one space is wrong or not owned, and no page of another stays held."""
    with rig:
        host, swa = rig.allocate(1), rig.allocate(1, "swa")
        good = rig.sides([(host[0], 1)])
        with pytest.raises(PageContractError):
            rig.controller.backup(
                *good, others={"swa": (rig.slots(swa, "swa")[:3], rig.slots([1], "swa")[:3])}
            )
        stray = next(page for page in range(HOST_PAGES["swa"]) if page not in swa)
        with pytest.raises(SlotError):
            rig.controller.backup(*good, others={"swa": rig.sides([(stray, 1)], "swa")})
        with pytest.raises(UnknownNameError):
            rig.controller.backup(*good, others={"nowhere": good})
        rig.controller.group.free({"full": rig.slots(host), "swa": rig.slots(swa, "swa")})


@pytest.mark.parametrize(
    "others", ["the anchor", {"swa": None}, {"swa": (1, 2, 3)}, {"swa": np.arange(2)}, ["swa"]], ids=repr
)
def test_others_are_pairs_of_sides_for_other_spaces(rig: Rig[SimRuntime], others: Any) -> None:
    """The anchor's pages are never replaced unseen by a second mention, and nothing half given is guessed."""
    with rig:
        host = rig.allocate(2)
        rig.fill_host()
        before = rig.snapshot()
        good = rig.sides([(host[0], 1)])
        given = {"full": rig.sides([(host[1], 2)])} if others == "the anchor" else others
        for move in (rig.controller.backup, rig.controller.load):
            with pytest.raises(PairingError):
                move(*good, others=given)
        assert not differences(rig.snapshot(), before)
        rig.controller.group.free({"full": rig.slots(host)})


def test_pages_of_every_space_are_held_until_the_ticket_is_acknowledged(rig: Rig[SimRuntime]) -> None:
    """I35: a host page of the second space is not given back while it is written."""
    with rig:
        host, swa = rig.allocate(1), rig.allocate(1, "swa")
        ticket = rig.controller.backup(
            *rig.sides([(host[0], 1)]), others={"swa": rig.sides([(swa[0], 2)], "swa")}
        )
        with pytest.raises(SlotError):
            rig.controller.group.free({"swa": rig.slots(swa, "swa")})
        ticket.wait()
        rig.controller.group.free({"swa": rig.slots(swa, "swa")})


def test_layer_ids_are_those_of_the_whole_model(rig: Rig[SimRuntime]) -> None:
    """I21: a stage that starts at layer 40 has marks for its own layers, by their ids in the model."""
    rig.controller.close()
    with opened("cuda", SERVED[1], first_layer=40) as stage:
        host = stage.allocate(1)
        ticket = stage.controller.load(*stage.sides([(host[0], 1)]))
        for layer in range(40, 44):
            ticket.mark(layer).synchronize()
        for layer in (0, 39, 44):
            with pytest.raises(UnknownNameError):
                ticket.mark(layer)
        ticket.wait()


def test_a_pool_before_the_stage_is_refused() -> None:
    """A layer id below the stage's first cannot be the whole model's."""
    config = ControllerConfig(io_backend="direct", layout="layer_first", host_pages=4, first_layer=3)
    with pytest.raises(SpecError):
        Rig([pool_spec(32, layer_ids=(2, 3))], config, SimRuntime(platform_named("cuda")))


@pytest.mark.parametrize(
    "pages",
    [{}, {"swa": 4}, {"swa": 4, "state": 2, "more": 1}, {"swa": 4, "state": 0}, {**HOST_PAGES, "full": 2}],
)
def test_every_other_space_has_its_host_pages(pages: dict[str, int]) -> None:
    """One figure for each index space beside the anchor's, and no other."""
    config = ControllerConfig(io_backend="direct", layout="layer_first", host_pages=4, other_host_pages=pages)
    with pytest.raises(SpecError):
        Rig(hybrid(), config, SimRuntime(platform_named("cuda")))
