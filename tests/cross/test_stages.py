"""Stages of a pipeline, and device rows that lie apart: hybrids with sparse layer ids."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attrs import evolve, frozen

from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.errors import SpecError, UnknownNameError
from hicache_core.spec import PoolSpec
from hicache_core.testing.rigs import Rig, Snapshot, differences
from tests.cross.variants import (
    SERVED,
    VARIANTS,
    declared,
    filled,
    go_out_and_come_back,
    hybrid_of_all,
    moved_bytes,
    opened,
    page_slots_of,
    specs_of,
)

LOAD_STREAM = 2
"""Number of the simulator's stream for loads."""


@frozen(kw_only=True)
class Stage:
    """Some layers of a model.

    Args:
        model, variant: whose layers.
        first, count: the first model layer, and how many.
        layer_ids: model layers that each pool has in the stage.
        stops: the layers of the stage that loads move together end before these.
    """

    model: str
    variant: str
    first: int
    count: int
    layer_ids: dict[str, tuple[int, ...]]
    stops: tuple[int, ...]

    def specs(self) -> list[PoolSpec]:
        """What the plugins declare for the layers of the stage."""
        chosen = VARIANTS[self.model, self.variant]
        entries = [evolve(pool, layer_ids=self.layer_ids.get(pool.pool, ())) for pool in chosen.pools]
        return declared(entries, page_slots_of(chosen))


_EVEN, _ODD = tuple(range(20, 32, 2)), tuple(range(21, 32, 2))
STAGES = {
    # No pool has layer 20, 22, 24 or 27: experts alone.
    "states": Stage(
        model="nemotron-3-nano-30b-a3b",
        variant="bf16",
        first=20,
        count=8,
        layer_ids={"kv": (26,), "mamba": (21, 23, 25)},
        stops=(21, 22, 28),
    ),
    "window": Stage(
        model="gpt-oss-120b",
        variant="bf16",
        first=20,
        count=12,
        layer_ids={"kv": _ODD, "swa": _EVEN},
        stops=(21, 23, 32),
    ),
    "window and rings": Stage(
        model="deepseek-v4-flash",
        variant="cuda_v4",
        first=20,
        count=12,
        layer_ids={
            "swa": tuple(range(20, 32)),
            **dict.fromkeys(("c4", "c4_indexer", "c4_state", "c4_indexer_state"), _EVEN),
            "c128": _ODD,
        },
        stops=(21, 23, 32),
    ),
}
PLATFORM_PAIRS = [
    ("cpu-sim", SERVED[0]),
    ("cuda-wsl2", SERVED[0]),
    ("rocm-mi355x", SERVED[0]),
    ("rocm-mi355x", SERVED[3]),
]
OUT = [(1, 3), (0, 2), (2, 0)]
BACK = [(0, 1), (1, 5), (2, 2)]
OTHER_OUT = [(1, 0), (0, 2)]
OTHER_BACK = [(0, 1), (1, 3)]


def spread(specs: list[PoolSpec], pairs: list[tuple[int, int]], others: list[tuple[int, int]]) -> dict:
    """The pages of each index space: ``pairs`` of the anchor's, ``others`` of the rest."""
    return {spec.index_space.name: pairs if spec.index_space.name == "full" else others for spec in specs}


def opened_stage(
    stage: Stage, platform: str, pair: tuple[str, str], faults: Faults | None = None
) -> Rig[SimRuntime]:
    """A rig of the stage's pools that knows where the stage lies in its model."""
    return opened(
        stage.specs(), platform, pair, faults=faults, first_layer=stage.first, layer_count=stage.count
    )


def landed(rig: Rig[SimRuntime], loaded: Snapshot) -> set[tuple[str, str, int]]:
    """Pool, buffer and model layer of the device rows that are what they are after the load."""
    found = set()
    for pool, buffers in rig.device_rows.items():
        (ids,) = (p.spec.layer_ids for p in rig.controller.group.pools if p.spec.pool == pool)
        for buffer, rows in buffers.items():
            for layer, got, expected in zip(ids, rows.copied(), loaded["device", pool, buffer], strict=True):
                if np.array_equal(got, expected):
                    found.add((pool, buffer, layer))
    return found


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_layers_of_a_stage_are_those_of_its_model(stage: Stage) -> None:
    """The lists above are what the model file says of these layers."""
    of_model = {pool.pool: pool.layer_ids for pool in VARIANTS[stage.model, stage.variant].pools}
    inside = range(stage.first, stage.first + stage.count)
    assert {pool: tuple(i for i in ids if i in inside) for pool, ids in of_model.items() if ids} == (
        stage.layer_ids
    )


@pytest.mark.parametrize(("platform", "pair"), PLATFORM_PAIRS)
@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_stage_goes_out_and_comes_back(stage: Stage, platform: str, pair: tuple[str, str]) -> None:
    """I21: sparse layers of several pools, with ids that start at the stage, move to the byte."""
    specs = stage.specs()
    with opened_stage(stage, platform, pair) as rig:
        out, back = spread(specs, OUT, OTHER_OUT), spread(specs, BACK, OTHER_BACK)
        moved = go_out_and_come_back(rig, filled(rig), out, back)
        assert moved == (moved_bytes(specs, out),) * 2


@pytest.mark.parametrize(("platform", "pair"), PLATFORM_PAIRS)
@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_mark_of_a_stage_is_for_its_model_layer(
    stage: Stage, platform: str, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I21, I37: at a layer's mark all pools have it, and those of later groups have nothing of theirs yet."""
    monkeypatch.setattr("hicache_core.transfer.engine._BYTES_WORTH_A_CALL", 1)
    faults = Faults(slow_streams={LOAD_STREAM})
    with opened_stage(stage, platform, pair, faults=faults) as rig:
        filled(rig)
        rig.poison_device()
        pairs = spread(stage.specs(), BACK, OTHER_BACK)
        others = {name: mine for name, mine in pairs.items() if name != "full"}
        loaded = rig.after_load(rig.snapshot(), pairs["full"], others)
        sides = {name: rig.sides(mine, name) for name, mine in pairs.items()}
        ticket = rig.controller.load(*sides.pop("full"), others=sides)
        rows = {(s.pool, b.name, layer) for s in stage.specs() for b in s.buffers for layer in s.layer_ids}
        for layer in range(stage.first, stage.first + stage.count):
            ticket.mark(layer).synchronize()
            stop = next(stop for stop in stage.stops if layer < stop)
            assert landed(rig, loaded) == {row for row in rows if row[2] < stop}, layer
        for layer in (0, stage.first - 1, stage.first + stage.count):
            with pytest.raises(UnknownNameError):
                ticket.mark(layer)
        ticket.wait()
        assert differences(rig.snapshot(), loaded) == []


@pytest.mark.parametrize("pool", ["kv", "swa"])
def test_a_stage_refuses_a_pool_with_a_layer_before_it(pool: str) -> None:
    """Layer ids counted from the stage's start would move other layers than the model means."""
    stage = STAGES["window"]
    shifted = {**stage.layer_ids, pool: tuple(layer - stage.first for layer in stage.layer_ids[pool])}
    with pytest.raises(SpecError) as caught:
        opened_stage(evolve(stage, layer_ids=shifted), "cpu-sim", SERVED[0])
    assert f"'{pool}'" in caught.value.who


HYBRIDS = {
    "window": lambda: specs_of("gpt-oss-120b", "bf16"),
    "states": lambda: specs_of("jamba-v0.1", "bf16"),
    "window, rings and states": hybrid_of_all,
}
LYING = [
    pytest.param(gap, slab, id=f"gap {gap}, {'one slab' if slab else 'one by one'}")
    for gap, slab in itertools.product((0, 64), (False, True))
]


@pytest.mark.parametrize(("gap_bytes", "slab"), LYING)
@pytest.mark.parametrize(("platform", "pair"), PLATFORM_PAIRS)
@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_rows_come_back_however_they_lie(
    hybrid: str, platform: str, pair: tuple[str, str], gap_bytes: int, slab: bool
) -> None:
    """Rows with gaps that nothing touches, layers cut from one allocation or each with its own."""
    specs = HYBRIDS[hybrid]()
    options = {"gap_bytes": gap_bytes, "slab": slab}
    with opened(specs, platform, pair, options=options) as rig:
        rows = rig.device_rows["swa" if "swa" in rig.device_rows else "mamba"]
        first = next(iter(rows.values()))
        assert first.tensors[0].stride(0) - first.tensors[0].shape[1] == gap_bytes
        out, back = spread(specs, OUT, OTHER_OUT), spread(specs, BACK, OTHER_BACK)
        moved = go_out_and_come_back(rig, filled(rig), out, back)
        assert moved == (moved_bytes(specs, out),) * 2
