"""Every byte of both sides after a backup and after a load, against the oracle, over a covering selection.

Each served (platform, io_backend, layout) meets each row and each page size. How the device rows lie, the
ring, the segments and the page lists are drawn from a seed; a test proves that every pair of values occurs.
"""

from __future__ import annotations

import itertools
import math
import mmap
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from attrs import asdict, frozen

import hicache_dsv4_paged.plugin
import hicache_mha_mla.plugin
from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import IncompatibleError
from hicache_core.memory.options import MemoryOptions
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import IndexSpace, PoolGeometry, PoolSpec, RowUnit, platform_named
from hicache_core.testing.oracle import PagePair
from hicache_core.testing.rigs import DeviceOptions, Rig, differences
from hicache_core.testing.stand_ins import pool_spec

PLATFORMS = ("cpu-sim", "cuda", "cuda-wsl2", "rocm", "rocm-mi355x")
PAIRS = (
    ("kernel", "layer_first"),
    ("kernel", "page_first"),
    ("direct", "layer_first"),
    ("direct", "page_first_direct"),
)
REFUSED = {(platform, ("kernel", "layer_first")) for platform in ("rocm", "rocm-mi355x")}
PAGE_SLOTS = (1, 16, 64, 256)


def _latent(row_format: str) -> tuple[str, dict[str, Any]]:
    return "mla", {"latent_dim": 512, "rope_dim": 64, "row_format": row_format}


def _keys(elements: int) -> tuple[str, dict[str, Any]]:
    return "k_only", {"kv_heads": 1, "k_head_dim": elements, "dtype": "bfloat16"}


def _page_row(row_bytes: int) -> tuple[str, dict[str, Any]]:
    return "dsv4_paged", {"value_bytes": row_bytes}


ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mha 384+256": ("mha", {"kv_heads": 1, "k_head_dim": 192, "v_head_dim": 128, "dtype": "bfloat16"}),
    "mla 576": _latent("fp8"),
    "mla 656": _latent("fp8_scaled"),
    "mla 1152": _latent("bf16"),
    "k_only 16": _keys(8),
    "k_only 48": _keys(24),
    "k_only 1024": _keys(512),
    **{f"dsv4_paged {n}": _page_row(n) for n in (37_440, 1_728, 2_048, 65_536, 8_448)},
}
DTYPES = ("uint8", "bfloat16", "float8_e4m3fn", "float32")
RINGS = ("below_row", "one_row", "one_row_short", "below_page", "ample")
SEGMENTS = (1, 3)
PAGES = ("none", "first", "last", "contiguous", "out_of_order", "all")
GAPS = (0, 40)


@frozen(kw_only=True)
class Case:
    """One combination."""

    platform: str
    pair: tuple[str, str]
    rows: str
    page_slots: int
    ring: str
    segments: int
    pages: str
    gap_bytes: int
    dtype: str
    slab: bool
    grouped: bool
    seed: int


def _cases() -> Iterator[Case]:
    served = [(p, pair) for p, pair in itertools.product(PLATFORMS, PAIRS) if (p, pair) not in REFUSED]
    for seed, ((platform, pair), rows, page_slots) in enumerate(itertools.product(served, ROWS, PAGE_SLOTS)):
        draw = random.Random(seed)
        yield Case(
            platform=platform,
            pair=pair,
            rows=rows,
            page_slots=page_slots,
            ring=draw.choice(RINGS),
            segments=draw.choice(SEGMENTS),
            pages=draw.choice(PAGES),
            gap_bytes=draw.choice(GAPS),
            dtype=draw.choice(DTYPES),
            slab=draw.random() < 0.5,
            grouped=draw.random() < 0.5,
            seed=seed,
        )


CASES = tuple(_cases())


def _registry() -> PluginRegistry:
    registry = PluginRegistry()
    registry.register(hicache_mha_mla.plugin, name="mha_mla")
    registry.register(hicache_dsv4_paged.plugin, name="dsv4_paged")
    return registry


REGISTRY = _registry()


def _spec(case: Case) -> PoolSpec:
    family, params = ROWS[case.rows]
    if family == "dsv4_paged":
        params = {**params, "compress_ratio": case.page_slots}
    space = IndexSpace(name="full", page_slots=case.page_slots)
    layers = (1, 4) if case.page_slots == 256 else (1, 4, 5)
    geometry = PoolGeometry(
        pool="kv", family=family, index_space=space, layer_ids=layers, params=params, anchor=True
    )
    return REGISTRY.spec(geometry)


def _ring_bytes(case: Case, spec: PoolSpec, transfer_pages: int) -> int:
    rows = [b.row_bytes for b in spec.buffers]
    units = spec.page_rows * spec.layer_count
    sizes = {
        "below_row": min(rows) - 1,
        "one_row": max(rows),
        "one_row_short": max(transfer_pages * units - 1, 1) * max(rows),
        "below_page": units * max(rows) - 1,
        "ample": 8 << 20,
    }
    return sizes[case.ring]


def _host_pages(spec: PoolSpec, layout: str, segments: int, least: int) -> tuple[int, int]:
    """Host pages and the largest registration that give the widest buffer ``segments`` registrations."""
    if segments == 1:
        return least, 1 << 36
    layers = 1 if layout == "layer_first" else spec.layer_count
    units = [b.row_bytes * spec.page_rows * layers for b in spec.buffers]
    cuts = [math.lcm(unit, mmap.PAGESIZE) for unit in units]
    page_bytes = [b.row_bytes * spec.page_rows * spec.layer_count for b in spec.buffers]
    enough = [-(-5 * cut // (2 * page)) for cut, page in zip(cuts, page_bytes, strict=True)]
    pages = max(least, *enough)
    limit = max(-(-pages * max(page_bytes) // segments), *cuts)
    return pages, limit


def _page_pairs(kind: str, host_pages: int, device_pages: int, seed: int) -> list[PagePair]:
    draw = random.Random(seed)
    middle = max(0, min(host_pages // 2 - device_pages // 2, host_pages - device_pages + 1))
    run = min(device_pages - 1, host_pages - middle)
    lists: dict[str, Iterable[PagePair]] = {
        "none": [],
        "first": [(0, 0)],
        "last": [(host_pages - 1, device_pages - 1)],
        "contiguous": [(middle + i, 1 + i) for i in range(run)],
        "out_of_order": zip(
            draw.sample(range(host_pages), device_pages - 1),
            draw.sample(range(device_pages), device_pages - 1),
            strict=True,
        ),
        "all": [(i * host_pages // device_pages, i) for i in range(device_pages)],
    }
    return list(lists[kind])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.seed}-{case.platform}-{case.rows}")
def test_every_byte_arrives_and_no_other_changes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """I14, I15, I17, I19, I31: backup and load move the rows of the listed pages and nothing else."""
    if case.grouped:
        monkeypatch.setattr("hicache_core.transfer.engine._BYTES_WORTH_A_CALL", 1)
    spec = _spec(case)
    device_pages = 5 if case.page_slots == 256 else 8
    host_pages, limit = _host_pages(spec, case.pair[1], case.segments, device_pages)
    pairs = _page_pairs(case.pages, host_pages, device_pages, case.seed)
    config = ControllerConfig(
        io_backend=case.pair[0],
        layout=case.pair[1],
        host_pages=host_pages,
        ring_bytes=_ring_bytes(case, spec, len(pairs)),
        memory=MemoryOptions(max_registration_bytes=limit),
    )
    options = DeviceOptions(
        pages=device_pages,
        gap_bytes=case.gap_bytes,
        dtype=getattr(torch, case.dtype),
        slab=case.slab,
    )
    runtime = SimRuntime(platform_named(case.platform), seed=case.seed)
    with Rig([spec], config, runtime, options=options, registry=REGISTRY) as rig:
        counts = [len(b.memory.segments) for b in rig.controller.group.anchor.buffers]
        assert max(counts) >= case.segments
        assert sorted(rig.allocate(host_pages)) == list(range(host_pages))
        assert_backup_is_right(rig, pairs)
        assert_load_is_right(rig, pairs)


def assert_backup_is_right(rig: Rig, pairs: list[PagePair]) -> None:
    """Back up over poison; every byte of both sides is what the oracle says."""
    rig.poison_host()
    before = rig.snapshot()
    host, device = rig.slots(h for h, _ in pairs), rig.slots(d for _, d in pairs)
    rig.controller.backup(host, device).wait()
    assert differences(rig.snapshot(), rig.after_backup(before, pairs)) == []


def assert_load_is_right(rig: Rig, pairs: list[PagePair]) -> None:
    """Load over poison; every byte of both sides is what the oracle says."""
    rig.fill_host()
    rig.poison_device()
    before = rig.snapshot()
    host, device = rig.slots(h for h, _ in pairs), rig.slots(d for _, d in pairs)
    rig.controller.load(host, device).wait()
    assert differences(rig.snapshot(), rig.after_load(before, pairs)) == []


def test_selection_covers_every_pair_of_values() -> None:
    """The draw leaves out no pair of values of two parameters, and has 864 combinations."""
    assert len(CASES) == 18 * len(ROWS) * len(PAGE_SLOTS) == 864
    tables = [{k: v for k, v in asdict(case).items() if k != "seed"} for case in CASES]
    values = {name: {table[name] for table in tables} for name in tables[0]}
    assert values["ring"] == set(RINGS)
    assert values["pages"] == set(PAGES)
    for one, other in itertools.combinations(values, 2):
        wanted = set(itertools.product(values[one], values[other]))
        if {one, other} == {"platform", "pair"}:
            wanted -= REFUSED
        assert wanted == {(table[one], table[other]) for table in tables}, (one, other)


# (platform, pair, row bytes) that are refused, with the rules that say so; all others are served.
ODD_ROWS_REFUSED = {
    **{(p, pair, 17): {"R5-no-way"} for p in ("cpu-sim", "cuda", "cuda-wsl2") for pair in PAIRS[:2]},
    **{(p, PAIRS[1], n): {"R2-staged-write-back"} for p in ("rocm", "rocm-mi355x") for n in (17, 24)},
    **{(p, PAIRS[0], 17): {"R3-not-opted-in", "R5-no-way"} for p in ("rocm", "rocm-mi355x")},
    **{(p, PAIRS[0], 24): {"R3-not-opted-in"} for p in ("rocm", "rocm-mi355x")},
}


@pytest.mark.parametrize("row_bytes", [17, 24])
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_rows_of_odd_sizes_are_served_or_refused(
    platform: str, pair: tuple[str, str], row_bytes: int
) -> None:
    """Staged write-back needs 16, kernels need 8; what is served is right to the last byte."""
    config = ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=6, ring_bytes=100)
    spec = pool_spec(row_bytes, page_slots=4)
    runtime = SimRuntime(platform_named(platform), seed=row_bytes)
    rules = ODD_ROWS_REFUSED.get((platform, pair, row_bytes))
    if rules:
        with pytest.raises(IncompatibleError) as caught:
            Rig([spec], config, runtime)
        assert {getattr(violation, "id", None) for violation in caught.value.violations} == rules
        assert not runtime.memory.registrations
        return
    with Rig([spec], config, runtime, options=DeviceOptions(pages=6, gap_bytes=3)) as rig:
        rig.allocate(6)
        pairs = [(4, 1), (0, 5), (1, 0)]
        assert_backup_is_right(rig, pairs)
        assert_load_is_right(rig, pairs)


def _mixed_group() -> list[PoolSpec]:
    return [
        pool_spec(page_slots=4, layer_ids=(), pool="names"),
        pool_spec(48, 32, page_slots=4, layer_ids=(0, 3), pool="tokens", anchor=False),
        pool_spec(1728, page_slots=4, layer_ids=(2, 3, 7), unit=RowUnit.PAGE, pool="paged", anchor=False),
        pool_spec(64, page_slots=4, layer_ids=(), pool="no_layers", anchor=False),
    ]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
@pytest.mark.parametrize("platform", ["cpu-sim", "cuda-wsl2", "rocm-mi355x"])
def test_pools_that_share_slots_travel_together(platform: str, pair: tuple[str, str]) -> None:
    """I15, I16, I21: one call moves all pools, of any unit and any layers; empty parts are legal."""
    if (platform, pair) in REFUSED:
        pair = ("direct", pair[1])
    config = ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=9, ring_bytes=1800)
    with Rig(_mixed_group(), config, SimRuntime(platform_named(platform))) as rig:
        rig.allocate(9)
        pairs = [(8, 0), (2, 3), (3, 4), (4, 5), (0, 11)]
        assert_backup_is_right(rig, pairs)
        assert_load_is_right(rig, pairs)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_one_host_page_fills_several_device_pages(pair: tuple[str, str]) -> None:
    """Only destinations have to be distinct: a shared prefix is loaded twice from one copy."""
    config = ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=4)
    with Rig([pool_spec(48)], config, SimRuntime()) as rig:
        rig.allocate(4)
        assert_load_is_right(rig, [(1, 5), (2, 6), (1, 7), (1, 0)])


@pytest.mark.parametrize("unit", list(RowUnit))
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_rows_of_every_unit_travel(pair: tuple[str, str], unit: RowUnit) -> None:
    """Token rows, page rows and slot rows take one engine, a single layer and a single row included."""
    slots = 1 if unit is RowUnit.SLOT else 4
    config = ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=5, ring_bytes=70)
    for layers in ((0,), (0, 1)):
        with Rig(
            [pool_spec(16, 64, page_slots=slots, layer_ids=layers, unit=unit)], config, SimRuntime()
        ) as rig:
            rig.allocate(5)
            pairs = [(4, 2), (1, 7), (2, 8)]
            assert_backup_is_right(rig, pairs)
            assert_load_is_right(rig, pairs)
