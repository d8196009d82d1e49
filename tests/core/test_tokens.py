"""Copies of single tokens: every byte of both sides against the oracle, by kernels and by batch copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from hicache_core.controller import ControllerConfig
from hicache_core.device.base import BatchCopies
from hicache_core.device.sim import Faults, SimRuntime
from hicache_core.errors import AddressError, DeviceFault
from hicache_core.memory.options import MemoryOptions
from hicache_core.memory.tables import KernelTable
from hicache_core.spec import BufferSpec, IndexSpace, PoolSpec, RowUnit, Span, platform_named
from hicache_core.testing.rigs import DeviceOptions, Rig, differences
from hicache_core.testing.stand_ins import pool_spec
from hicache_core.transfer.tokens import TokenCopies

LAYERS = (1, 4)
PAIRS = (("direct", "layer_first"), ("kernel", "page_first"), ("direct", "page_first_direct"))
PLATFORMS = ("cpu-sim", "rocm-mi355x", "cuda-wsl2")
VALUE_AND_SCALE = (Span(offset=0, stride=576, nbytes=576), Span(offset=36_864, stride=8, nbytes=8))


def token_rows(page_slots: int) -> PoolSpec:
    """Keys of 64 and values of 48 bytes."""
    return pool_spec(64, 48, page_slots=page_slots, layer_ids=LAYERS)


COMPRESSED = PoolSpec(
    pool="kv",
    family="rows",
    index_space=IndexSpace(name="full", page_slots=256),
    row_unit=RowUnit.PAGE,
    layer_ids=LAYERS,
    buffers=[BufferSpec(name="kv", row_bytes=37_440, spans=VALUE_AND_SCALE, row_tokens=64)],
    anchor=True,
)
ROWS: dict[str, tuple[PoolSpec, int, int]] = {
    # declaration, host pages for more than one registration, device pages
    "1 row": (token_rows(1), 600, 60),
    "16 rows": (token_rows(16), 40, 6),
    "64 rows": (token_rows(64), 12, 3),
    "64 compressed": (COMPRESSED, 70, 3),
}


@contextmanager
def token_rig(
    spec: PoolSpec,
    *,
    pair: tuple[str, str] = PAIRS[0],
    platform: str = "cpu-sim",
    kernels: bool = True,
    pages: tuple[int, int] = (8, 8),
    limit: int = 1 << 36,
    options: DeviceOptions | None = None,
    faults: Faults | None = None,
    **sim: Any,
) -> Iterator[Rig[SimRuntime]]:
    """A rig over a simulator with or without kernels, its host bytes distinct."""
    facts = evolve(platform_named(platform), has_kernels=kernels)
    config = ControllerConfig(
        io_backend=pair[0],
        layout=pair[1],
        host_pages=pages[0],
        memory=MemoryOptions(max_registration_bytes=limit),
    )
    chosen = options or DeviceOptions(pages=pages[1])
    with Rig([spec], config, SimRuntime(facts, faults=faults, **sim), options=chosen) as rig:
        rig.fill_host()
        yield rig


def copies_of(rig: Rig[SimRuntime]) -> TokenCopies:
    """The token copies of the rig's pool."""
    return rig.controller.group.anchor.token_copies()


def sides(pairs: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Host tokens and device tokens, int64[n] each."""
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def token_pairs(copies: TokenCopies, cuts: Sequence[int], seed: int) -> list[tuple[int, int]]:
    """Runs of six over each cut of the host side and elsewhere, single ones, and padding, in any order."""
    draw = random.Random(seed)
    starts = [*range(0, copies.device_tokens - 5, 6)]
    draw.shuffle(starts)
    wanted = [0, copies.host_tokens - 6, *(cut - 3 for cut in cuts)]
    pairs: dict[int, int] = {}
    for start in starts[:12]:
        first = wanted.pop() if wanted else draw.randrange(copies.host_tokens - 6)
        order = draw.sample(range(6), 6) if draw.random() < 0.3 else range(6)
        for i, j in enumerate(order):
            pairs.setdefault(first + i, start + j)
    listed = [*pairs.items(), (-1, 0), (0, -1), (-7, -2), (-1, 1 << 62), (1 << 62, -1)]
    if draw.random() < 0.7:
        draw.shuffle(listed)
    return listed


def moved(
    rig: Rig[SimRuntime], pairs: Sequence[tuple[int, int]], layer: int | None, *, to_host: bool
) -> list[str]:
    """Where the bytes of both sides differ from what is expected after one call."""
    copies = copies_of(rig)
    stream = rig.runtime.new_stream(0)
    before = rig.snapshot()
    move = copies.backup if to_host else copies.load
    move(*sides(pairs), layer, stream)
    rig.runtime.synchronize(stream)
    return differences(rig.snapshot(), rig.after_tokens(before, pairs, layer, to_host=to_host))


def recorded(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """The first argument of every call of a method from now on."""
    calls: list[Any] = []
    original: Callable[..., Any] = getattr(owner, name)

    def record(first: Any, *others: Any) -> Any:
        calls.append(first)
        return original(first, *others)

    monkeypatch.setattr(owner, name, record)
    return calls


def launches(monkeypatch: pytest.MonkeyPatch, rig: Rig[SimRuntime]) -> list[Any]:
    """All that is submitted from now on, for the copy engine or for a kernel."""
    return recorded(monkeypatch, rig.runtime.scheduler, "submit")


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "copies"])
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1])
@pytest.mark.parametrize("rows", ROWS)
def test_listed_tokens_move_and_no_other_byte_changes(
    rows: str, pair: tuple[str, str], platform: str, kernels: bool
) -> None:
    """I26, I31: over several registrations, out of order, with padding, for one layer and for all."""
    spec, host_pages, device_pages = ROWS[rows]
    for seed, layer in enumerate((None, 0, 1)):
        options = DeviceOptions(pages=device_pages, gap_bytes=(0, 40, 0)[seed], slab=seed == 0)
        with token_rig(
            spec,
            pair=pair,
            platform=platform,
            kernels=kernels,
            pages=(host_pages, device_pages),
            limit=4096,
            options=options,
        ) as rig:
            pool = rig.controller.group.anchor
            assert all(len(buffer.memory.segments) > 1 for buffer in pool.buffers)
            copies = copies_of(rig)
            page_tokens = copies.host_tokens // host_pages
            cuts = {page for own in pool.tables for page in own.host.first_pages.tolist()} - {0}
            assert cuts
            pairs = token_pairs(copies, [page * page_tokens for page in sorted(cuts)][:4], seed)
            rig.poison_device()
            assert moved(rig, pairs, layer, to_host=False) == []
            assert moved(rig, pairs[::-1], layer, to_host=True) == []
            rig.poison_host()
            assert moved(rig, pairs, layer, to_host=True) == []


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "copies"])
def test_one_host_token_may_be_loaded_twice(kernels: bool) -> None:
    """A source may be listed as often as one likes."""
    with token_rig(COMPRESSED, kernels=kernels) as rig:
        rig.poison_device()
        assert moved(rig, [(65, 3), (66, 4), (65, 5), (65, 400)], None, to_host=False) == []


def test_tokens_name_compressed_slots_of_a_page_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 3 of page 2 is number 131: its value at 3 * 576, its scale at 64 * 576 + 3 * 8."""
    with token_rig(COMPRESSED, kernels=False) as rig:
        batches = recorded(monkeypatch, rig.runtime, "batch_copies")
        copies_of(rig).load(*sides([(131, 5)]), 1, rig.runtime.new_stream(0))
        (batch,) = batches
        rows = rig.controller.group.anchor.tables[0]
        page = int(rows.host.bases[0, 1]) + 2 * 37_440
        assert batch.sources.tolist() == [page + 3 * 576, page + 64 * 576 + 3 * 8]
        base = int(rows.device.bases[0, 1])
        assert batch.targets.tolist() == [base + 5 * 576, base + 64 * 576 + 5 * 8]
        assert batch.sizes.tolist() == [576, 8]


def sizes_of(batches: Sequence[BatchCopies]) -> list[int]:
    """The sizes of the copies of one batch, in order."""
    (batch,) = batches
    return sorted(batch.sizes.tolist())


@pytest.mark.parametrize(
    ("spec", "pairs", "sizes"),
    [
        (token_rows(16), [(i + 8, i + 24) for i in range(32)], [32 * 48, 32 * 64]),
        (token_rows(16), [(i + 8, 40 - i) for i in range(3)], [48] * 3 + [64] * 3),
        (COMPRESSED, [(64 + i, 128 + i) for i in range(64)], [64 * 8, 64 * 576]),
        (COMPRESSED, [(60 + i, 124 + i) for i in range(8)], [32, 32, 4 * 576, 4 * 576]),
    ],
    ids=["over pages", "backwards", "a whole page", "over page rows"],
)
def test_neighbours_on_both_sides_are_one_copy(
    spec: PoolSpec, pairs: list[tuple[int, int]], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listed in any order; a token that goes the other way, or lies in another row, is a copy of its own."""
    with token_rig(spec, kernels=False) as rig:
        batches = recorded(monkeypatch, rig.runtime, "batch_copies")
        assert moved(rig, random.Random(0).sample(pairs, len(pairs)), 0, to_host=False) == []
        assert sizes_of(batches) == sizes


def test_no_copy_runs_over_the_end_of_a_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """I31: 64 keys of 64 bytes are a registration; neighbours on either side of its end are two copies."""
    spec = pool_spec(64, page_slots=16, layer_ids=[0])
    with token_rig(spec, kernels=False, pages=(16, 8), limit=4096) as rig:
        batches = recorded(monkeypatch, rig.runtime, "batch_copies")
        assert moved(rig, [(60 + i, 20 + i) for i in range(10)], None, to_host=False) == []
        assert sizes_of(batches) == [4 * 64, 6 * 64]


def test_a_kernel_is_launched_once_per_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches over all layers, through aliases and device addresses."""
    with token_rig(token_rows(16)) as rig:
        kernels = rig.runtime.kernels
        assert kernels is not None
        found = recorded(monkeypatch, kernels, "move_tokens")
        copies_of(rig).backup(*sides([(3, 4), (9, 1)]), None, rig.runtime.new_stream(0))
        tables = rig.controller.group.anchor.tables
        assert [(launch.target, launch.source) for launch in found] == [
            (own.host_kernel, own.device) for own in tables
        ]
        assert [launch.layers for launch in found] == [range(2)] * 2


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "copies"])
@pytest.mark.parametrize("pairs", [[], [(-1, 3)], [(3, -1), (-1, -1)]], ids=["none", "one", "two"])
@pytest.mark.parametrize("what", ["load", "backup"])
def test_padding_alone_launches_nothing(
    what: str, pairs: list[tuple[int, int]], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I26: no upload, no copy and no kernel for pairs that are all skipped, nor for none."""
    with token_rig(token_rows(16), kernels=kernels) as rig:
        submitted = launches(monkeypatch, rig)
        getattr(copies_of(rig), what)(*sides(pairs), None, rig.runtime.new_stream(0))
        assert submitted == []


def test_no_uploaded_pairs_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero lengths are seen without a look at the device."""
    with token_rig(token_rows(16)) as rig:
        submitted = launches(monkeypatch, rig)
        nothing = torch.empty(0, dtype=torch.int64)
        copies_of(rig).load_uploaded(nothing, nothing, None, rig.runtime.new_stream(0))
        assert submitted == []


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "copies"])
def test_cpu_indices_are_read_before_the_call_returns(kernels: bool) -> None:
    """The caller's arrays may change while the copies are queued."""
    faults = Faults(slow_streams=[3])
    with token_rig(token_rows(16), kernels=kernels, faults=faults) as rig:
        stream = rig.runtime.new_stream(0)
        assert stream.number == 3
        before = rig.snapshot()
        pairs = [(17, 5), (40, 6), (-1, 7)]
        host, device = (torch.from_numpy(side.copy()) for side in sides(pairs))
        copies_of(rig).load(host, device, None, stream)
        host[:], device[:] = 0, 0
        rig.runtime.synchronize(stream)
        expected = rig.after_tokens(before, pairs, to_host=False)
        assert differences(rig.snapshot(), expected) == []


@pytest.mark.parametrize("to_host", [True, False], ids=["backup", "load"])
@pytest.mark.parametrize("spec", [token_rows(16), COMPRESSED], ids=["token rows", "page rows"])
def test_uploaded_indices_are_read_when_the_kernel_runs(spec: PoolSpec, to_host: bool) -> None:
    """What was written to them after the launch, in time, is what moves; padding is skipped there."""
    with token_rig(spec, platform="rocm-mi355x", faults=Faults(slow_streams=[3])) as rig:
        stream = rig.runtime.new_stream(0)
        current = rig.runtime.current_stream(0)
        old, new = [(1, 2), (3, 4), (5, 6), (7, 8)], [(17, 5), (-1, 9), (40, -3), (41, 100)]
        host, device = (rig.runtime.upload(side, 0, current) for side in sides(old))
        rig.runtime.synchronize(current)
        before = rig.snapshot()
        copies = copies_of(rig)
        move = copies.backup_uploaded if to_host else copies.load_uploaded
        move(host, device, None, stream)
        for tensor, side in zip((host, device), sides(new), strict=True):
            tensor.copy_(torch.from_numpy(side.copy()))
        rig.runtime.synchronize(stream)
        expected = rig.after_tokens(before, new, to_host=to_host)
        assert differences(rig.snapshot(), expected) == []


@pytest.mark.parametrize("pair", [(8 * 16, 0), (0, 8 * 16), (1 << 62, 0)])
def test_an_uploaded_token_that_is_not_there_faults(pair: tuple[int, int]) -> None:
    """On the simulator the stream reports it, and no byte has moved."""
    with token_rig(token_rows(16)) as rig:
        stream = rig.runtime.new_stream(0)
        before = rig.snapshot()
        host, device = (rig.runtime.upload(side, 0, stream) for side in sides([(1, 1), pair]))
        copies_of(rig).load_uploaded(host, device, None, stream)
        with pytest.raises(DeviceFault) as caught:
            rig.runtime.synchronize(stream)
        assert (caught.value.code, caught.value.device) == ("device-fault", 0)
        assert differences(rig.snapshot(), before) == []


def _with_cpu_addresses(table: KernelTable, rig: Rig[SimRuntime]) -> KernelTable:
    return evolve(table, bases=rig.controller.group.anchor.tables[0].host.bases)


@pytest.mark.parametrize("platform", ["rocm-mi355x", "cuda-wsl2"])
def test_a_cpu_address_in_the_table_faults(platform: str) -> None:
    """The mistake that the pointer tables are there for: it is seen, in either direction."""
    with token_rig(pool_spec(64, layer_ids=LAYERS), platform=platform) as rig:
        pool = rig.controller.group.anchor
        wrong = evolve(pool.tables[0], host_kernel=_with_cpu_addresses(pool.tables[0].host_kernel, rig))
        copies = TokenCopies(pool.spec, (wrong,), rig.runtime, 0)
        for move in (copies.load, copies.backup):
            stream = rig.runtime.new_stream(0)
            move(*sides([(1, 2)]), None, stream)
            with pytest.raises(DeviceFault):
                rig.runtime.synchronize(stream)


def test_a_kernel_sees_the_memory_of_its_own_device_alone() -> None:
    """Tables of device 0 on a stream of device 1: a fault, and no byte has moved."""
    with token_rig(token_rows(16), devices=2) as rig:
        stream = rig.runtime.new_stream(1)
        before = rig.snapshot()
        copies_of(rig).load(*sides([(1, 2)]), None, stream)
        with pytest.raises(DeviceFault):
            rig.runtime.synchronize(stream)
        assert differences(rig.snapshot(), before) == []
        with pytest.raises(AddressError):
            rig.controller.group.anchor.token_copies(1)
