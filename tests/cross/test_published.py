"""Figures and runs that were published, reproduced from what the plugins declare."""

from __future__ import annotations

import pytest

from hicache_core.device.base import GatherUnits, Kernels
from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.streams import SimStream
from hicache_core.testing.rigs import Rig
from tests.cross.variants import (
    SERVED,
    VARIANTS,
    declared,
    filled,
    go_out_and_come_back,
    opened,
    page_slots_of,
    specs_of,
)

KERNEL_PAGE_FIRST = SERVED[0]
V4 = ("deepseek-v4-pro", "deepseek-v4-flash")
ROW_BYTES = {
    "rocm_unified_bf16": {"c4": 65_536, "c4_indexer": 8_448, "c128": 2_048},
    "cuda_v4": {
        "c4": 37_440,
        "c4_indexer": 8_448,
        "c128": 1_728,
        "swa": 149_760,
        "c4_state": 65_536,
        "c4_indexer_state": 16_384,
    },
}
STATE_RINGS = {"c4_state": 65_536, "c4_indexer_state": 16_384}

QWEN = ("qwen3.5-397b-a17b", "tp2_fp8kv_bf16state_mtp1")
QWEN_BYTES_TO_HOST = 98_738_176
"""Bytes device to host of the run on MI355X: 128 KV tokens and 2 Mamba slots of a rank."""


@pytest.mark.parametrize("variant", ROW_BYTES)
@pytest.mark.parametrize("model", V4)
def test_rows_of_deepseek_v4_have_the_published_bytes(model: str, variant: str) -> None:
    """One row per page of 256 slots in every pool that holds bytes, and no pool beside them."""
    chosen = VARIANTS[model, variant]
    specs = declared(chosen.pools, page_slots_of(chosen))
    rows = {spec.pool: [buffer.row_bytes for buffer in spec.buffers] for spec in specs}
    assert rows == {"kv": [], **{pool: [nbytes] for pool, nbytes in ROW_BYTES[variant].items()}}
    assert {(spec.index_space.page_slots, spec.page_rows) for spec in specs} == {(256, 1)}


class _Watched:
    """The relayout kernel of a simulator, and the row bytes of what it was given; no other kernel."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.relaid: list[int] = []

    def gather_units(self, launch: GatherUnits, stream: SimStream) -> None:
        """Relay rows out."""
        self.relaid.append(launch.source.grid.row_bytes)
        self._kernels.gather_units(launch, stream)


def _watched(rig: Rig[SimRuntime], monkeypatch: pytest.MonkeyPatch) -> _Watched:
    """Stand between the ways of a rig and the kernels of its runtime."""
    assert rig.runtime.kernels is not None
    watched = _Watched(rig.runtime.kernels)
    for pool in rig.controller.group.pools:
        for way in (pool.ways.backup, pool.ways.load) if pool.ways else ():
            if hasattr(way, "_kernels"):
                monkeypatch.setattr(way, "_kernels", watched)
    return watched


@pytest.mark.parametrize("model", V4)
def test_state_rings_are_staged_where_aliases_differ(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of 65,536 and 16,384 bytes are relaid out row for row and carried over by copies, to the byte."""
    specs = specs_of(model, "cuda_v4")
    with opened(specs, "rocm-mi355x", KERNEL_PAGE_FIRST) as rig:
        plans = rig.controller.plan.pools
        assert {pool: plans[pool].staged for pool in STATE_RINGS} == dict.fromkeys(STATE_RINGS, True)
        before = filled(rig)
        watched = _watched(rig, monkeypatch)
        out = {"full": [], "swa": [(2, 3), (0, 1)]}
        back = {"full": [], "swa": [(0, 2), (2, 0)]}
        layers, pages = 2, 2
        assert (
            go_out_and_come_back(rig, before, out, back)
            == (pages * layers * (149_760 + sum(STATE_RINGS.values())),) * 2
        )
        assert sorted(watched.relaid) == [16_384, 65_536, 149_760]


def test_the_run_of_qwen3_5_moves_its_published_bytes() -> None:
    """128 KV tokens and 2 state slots in one backup: 98,738,176 bytes, the draft layer's among them.

    The host has room for just these pages, so that all its bytes are bytes of the run.
    """
    chosen = VARIANTS[QWEN]
    specs = declared(chosen.pools, page_slots_of(chosen))
    layers = {spec.pool: (len(spec.layer_ids), spec.layer_ids[-1]) for spec in specs}
    assert layers == {"kv": (16, 60), "mamba": (45, 58)}
    out = {
        "full": list(zip(range(8), (3, 9, 10, 0, 15, 6, 1, 12), strict=True)),
        "state": [(0, 0), (1, 2)],
    }
    back = {
        "full": list(zip(range(8), (2, 4, 5, 7, 8, 11, 13, 14), strict=True)),
        "state": [(0, 1), (1, 0)],
    }
    with opened(
        specs,
        "rocm-mi355x",
        KERNEL_PAGE_FIRST,
        host_pages=8,
        other_host_pages={"state": 2},
        options={"pages": 16, "other_pages": {"state": 3}, "guard_pages": 0},
    ) as rig:
        assert len(rig.slots(host for host, _ in out["full"])) == 128
        before = filled(rig)
        assert sum(data.size for (side, _, _), data in before.items() if side == "host") == QWEN_BYTES_TO_HOST
        assert go_out_and_come_back(rig, before, out, back) == (QWEN_BYTES_TO_HOST, QWEN_BYTES_TO_HOST)
