"""Plans: how many copies, of which shape, and at which bytes; never a loop over pages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.base import BatchCopies, StridedCopies
from hicache_core.device.sim import SimRuntime
from hicache_core.device_pool import DevicePool
from hicache_core.memory.slots import slots_of
from hicache_core.spec import IndexSpace, RowUnit
from hicache_core.testing.oracle import HostShape, distinct_rows, expected_host_bytes
from hicache_core.testing.rigs import DeviceOptions, Rig
from hicache_core.testing.stand_ins import pool_spec, registry_of
from hicache_core.transfer.pairs import PagePairs, page_pairs
from hicache_core.transfer.plan import Planner

MakeRig = Callable[..., Rig]
Shape = tuple[str, int, int, tuple[int, int]]
"""(kind, width, height, (host pitch, device pitch)) of one copy."""

P = 4
ROW = 48
PAGE = P * ROW
LAYERS = 3
SLAB = DeviceOptions(pages=12, slab=True, guard_pages=0)
DEVICE_LAYER = 12 * PAGE
LAYER_FIRST = ("direct", "layer_first")
PAGE_FIRST = ("kernel", "page_first")
PAGE_FIRST_DIRECT = ("direct", "page_first_direct")


def _pairs(host: Sequence[int], device: Sequence[int]) -> PagePairs:
    return PagePairs(np.array(host, dtype=np.int64), np.array(device, dtype=np.int64))


def _copies(rig: Rig, pairs: PagePairs, layers: range = range(LAYERS)) -> list[Shape]:
    """The copies that carry ``pairs`` over, as shapes; the addresses are proved by the round trips."""
    (tables,) = rig.controller.group.anchor.tables
    shapes: list[Shape] = []
    for copies in Planner(tables.host, tables.device, host_is_target=True).copies(pairs, layers):
        shapes += _shapes(copies)
    return sorted(shapes)


def _shapes(copies: StridedCopies | BatchCopies) -> list[Shape]:
    if isinstance(copies, BatchCopies):
        return [("plain", size, 1, (0, 0)) for size in copies.sizes.tolist()]
    pitches = copies.target_pitch, copies.source_pitch
    return [("strided", width, height, pitches) for _, _, width, height in copies.rows()]


def test_neighbouring_layer_first_pages_of_all_layers_are_one_copy(make_rig: MakeRig) -> None:
    """Rows and pages are dense on both sides: one run of bytes a layer, one strided copy over the layers."""
    rig = make_rig(pair=LAYER_FIRST, options=SLAB)
    pitches = 8 * PAGE, DEVICE_LAYER
    assert _copies(rig, _pairs([2, 3, 4, 5], [7, 8, 9, 10])) == [("strided", 4 * PAGE, LAYERS, pitches)]


def test_a_gap_on_either_side_splits_a_run(make_rig: MakeRig) -> None:
    """Pages are neighbours only where host and device pages both step by one."""
    rig = make_rig(pair=LAYER_FIRST, options=SLAB)
    pitches = 8 * PAGE, DEVICE_LAYER
    runs = [("strided", PAGE, LAYERS, pitches), ("strided", 2 * PAGE, LAYERS, pitches)]
    assert _copies(rig, _pairs([0, 1, 3], [4, 5, 6])) == runs
    assert _copies(rig, _pairs([0, 1, 2], [4, 5, 7])) == runs
    assert _copies(rig, _pairs([0, 1, 2], [6, 5, 4])) == [runs[0]] * 3


def test_one_layer_of_neighbouring_pages_is_one_plain_copy(make_rig: MakeRig) -> None:
    """Nothing is left to stride over."""
    rig = make_rig(pair=LAYER_FIRST, options=SLAB)
    assert _copies(rig, _pairs([2, 3, 4], [7, 8, 9]), range(1, 2)) == [("plain", 3 * PAGE, 1, (0, 0))]


def test_page_first_page_rows_are_one_strided_copy_a_page(make_rig: MakeRig) -> None:
    """Pages that are no neighbours: the rows of all layers of a page, in one copy."""
    rig = make_rig(pool_spec(ROW, unit=RowUnit.PAGE), pair=PAGE_FIRST, options=SLAB)
    shapes = _copies(rig, _pairs([0, 2, 5], [3, 1, 8]))
    assert shapes == [("strided", ROW, LAYERS, (ROW, 12 * ROW))] * 3


def test_page_first_page_rows_of_many_neighbours_go_along_the_pages(make_rig: MakeRig) -> None:
    """More pages than layers: one copy a layer, over the pages."""
    rig = make_rig(pool_spec(ROW, unit=RowUnit.PAGE), pair=PAGE_FIRST, options=SLAB)
    shapes = _copies(rig, _pairs(range(1, 8), range(1, 8)))
    assert shapes == [("strided", ROW, 7, (LAYERS * ROW, ROW))] * LAYERS


def test_page_first_token_rows_go_over_the_ends_of_neighbouring_pages(make_rig: MakeRig) -> None:
    """The rows of a page go on in the next page at the same pitch: one copy a layer for all of them."""
    rig = make_rig(pair=PAGE_FIRST, options=SLAB)
    shapes = _copies(rig, _pairs([2, 3, 4], [6, 7, 8]))
    assert shapes == [("strided", ROW, 3 * P, (LAYERS * ROW, ROW))] * LAYERS


def test_page_first_direct_pages_are_dense_in_a_layer(make_rig: MakeRig) -> None:
    """The rows of a page are one run of bytes; layers and pages remain."""
    rig = make_rig(pair=PAGE_FIRST_DIRECT, options=SLAB)
    assert _copies(rig, _pairs([2], [6])) == [("strided", PAGE, LAYERS, (PAGE, DEVICE_LAYER))]
    many = _copies(rig, _pairs(range(1, 8), range(2, 9)))
    assert many == [("strided", PAGE, 7, (LAYERS * PAGE, PAGE))] * LAYERS


@pytest.mark.parametrize("pair", [LAYER_FIRST, PAGE_FIRST, PAGE_FIRST_DIRECT], ids="+".join)
def test_device_rows_that_lie_apart_are_never_fused(make_rig: MakeRig, pair: tuple[str, str]) -> None:
    """I17: no copy is wider than a row, so no gap is written or read."""
    rig = make_rig(pair=pair, options=DeviceOptions(slab=True, gap_bytes=16))
    shapes = _copies(rig, _pairs([1, 2, 3], [4, 5, 6]))
    assert {width for _, width, _, _ in shapes} == {ROW}
    assert sum(width * height for _, width, height, _ in shapes) == 3 * PAGE * LAYERS
    assert {pitches[1] for *_, pitches in shapes} == {ROW + 16}


@pytest.mark.parametrize("pair", [LAYER_FIRST, PAGE_FIRST_DIRECT], ids="+".join)
def test_layers_of_separate_allocations_are_plain_copies(make_rig: MakeRig, pair: tuple[str, str]) -> None:
    """I31: no copy runs from one allocation to the next, whatever their distance."""
    rig = make_rig(pair=pair, options=DeviceOptions(slab=False))
    assert _copies(rig, _pairs([2], [6])) == [("plain", PAGE, 1, (0, 0))] * LAYERS


def test_a_plan_is_split_where_a_segment_ends(make_rig: MakeRig) -> None:
    """I31: sixteen pages to a registration; a run over three of them is three copies a layer."""
    rig = make_rig(
        pool_spec(256), pair=LAYER_FIRST, host_pages=64, max_registration_bytes=16_384, options=SLAB
    )
    (buffer,) = rig.controller.group.anchor.buffers
    assert {segment.host.nbytes for segment in buffer.memory.segments} == {16_384}
    pairs = _pairs(range(14, 36), range(22))
    widths = sorted(width for _, width, _, _ in _copies(rig, pairs, range(1)))
    assert widths == [2 * 1024, 4 * 1024, 16 * 1024]


def test_layers_in_different_segments_are_not_strided_over(make_rig: MakeRig) -> None:
    """I31: each layer of the host buffer in a registration of its own gives a plain copy each."""
    rig = make_rig(
        pool_spec(256), pair=LAYER_FIRST, host_pages=16, max_registration_bytes=16_384, options=SLAB
    )
    assert len(rig.controller.group.anchor.buffers[0].memory.segments) == LAYERS
    assert _copies(rig, _pairs([3], [5])) == [("plain", 1024, 1, (0, 0))] * LAYERS


def _backup_with_layers_at(offsets: Sequence[int], pages: Sequence[int]) -> list[Shape]:
    """The copies of a backup whose layers lie at page ``offsets`` of one allocation; bytes are checked."""
    spec = pool_spec(ROW, layer_ids=range(len(offsets)))
    runtime = SimRuntime()
    memory = runtime.allocate((max(offsets) + 4) * PAGE, 0).view(-1, ROW)
    memory.numpy()[...] = distinct_rows("slab", rows=len(memory), row_bytes=ROW)
    layers = [memory[at * P : (at + 4) * P] for at in offsets]
    config = ControllerConfig(io_backend="direct", layout="page_first_direct", host_pages=4)
    controller = Controller(
        config, [DevicePool(spec=spec, layers={"b0": layers})], runtime, registry_of([spec])
    )
    (buffer,), (tables,) = controller.group.anchor.buffers, controller.group.anchor.tables
    controller.group.allocate({"full": 4 * P})
    before = buffer.memory.view.copy()
    numbers = np.array(pages, dtype=np.int64)
    controller.backup(slots_of(numbers, P), slots_of(numbers, P)).wait()
    shape = HostShape(pages=4, layers=len(offsets), page_rows=P, row_bytes=ROW)
    rows = [layer.numpy() for layer in layers]
    wanted = expected_host_bytes(before, "page_first_direct", shape, rows, [(p, p) for p in pages])
    assert np.array_equal(buffer.memory.view, wanted)
    shapes: list[Shape] = []
    planner = Planner(tables.host, tables.device, host_is_target=True)
    for copies in planner.copies(_pairs(pages, pages), range(len(offsets))):
        shapes += _shapes(copies)
    controller.close()
    return sorted(shapes)


def test_layers_at_equal_distances_are_strided_over() -> None:
    """Four layers, each eight pages on."""
    assert _backup_with_layers_at([0, 8, 16, 24], [1]) == [("strided", PAGE, 4, (PAGE, 8 * PAGE))]


def test_layers_at_unequal_distances_are_strided_as_far_as_they_go() -> None:
    """Three layers at one distance, then one further on."""
    shapes = _backup_with_layers_at([0, 8, 16, 40], [1])
    assert shapes == [("plain", PAGE, 1, (0, 0)), ("strided", PAGE, 3, (PAGE, 8 * PAGE))]


def test_layers_that_do_not_ascend_are_plain_copies() -> None:
    """A pitch is never negative: descending layers go one by one."""
    offsets = [24, 16, 8, 0]
    assert _backup_with_layers_at(offsets, [1]) == [("plain", PAGE, 1, (0, 0))] * 4
    assert _backup_with_layers_at(offsets, [1, 2]) == [("strided", PAGE, 2, (4 * PAGE, PAGE))] * 4


@pytest.mark.parametrize("pair", [LAYER_FIRST, PAGE_FIRST_DIRECT], ids="+".join)
def test_no_layers_are_no_copies(make_rig: MakeRig, pair: tuple[str, str]) -> None:
    """I16: a pool that has no layer in a group of layers moves nothing for it."""
    rig = make_rig(pair=pair, options=SLAB)
    assert _copies(rig, _pairs([2, 3], [6, 7]), range(2, 2)) == []


# Work done in Python


def _steps(work: Callable[[], Any]) -> int:
    """How many instructions of Python ``work`` runs; calls into numpy count as one each."""
    count = 0

    def step(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return step

    outer = sys.gettrace()
    sys.settrace(step)
    try:
        work()
    finally:
        sys.settrace(outer)
    return count


def _plan_steps(rig: Rig, pages: int, order: str) -> int:
    rng = np.random.default_rng(pages)
    numbers = np.arange(pages, dtype=np.int64)
    host, device = {
        "neighbours": (numbers, numbers),
        "scattered": (rng.permutation(numbers), rng.permutation(numbers)),
    }[order]
    (tables,) = rig.controller.group.anchor.tables
    planner = Planner(tables.host, tables.device, host_is_target=True)

    def work() -> None:
        pairs = page_pairs(
            slots_of(host, P),
            slots_of(device, P),
            IndexSpace(name="full", page_slots=P),
            host_pages=4096,
            device_pages=4096,
            who="test",
            host_is_target=True,
        )
        planner.copies(pairs, range(LAYERS))

    return _steps(work)


@pytest.mark.parametrize("order", ["neighbours", "scattered"])
@pytest.mark.parametrize("unit", [RowUnit.TOKEN, RowUnit.PAGE])
@pytest.mark.parametrize("pair", [LAYER_FIRST, PAGE_FIRST, PAGE_FIRST_DIRECT], ids="+".join)
def test_planning_does_not_loop_over_pages(
    make_rig: MakeRig, pair: tuple[str, str], unit: RowUnit, order: str
) -> None:
    """Checking and planning 4,096 pages runs about as many instructions as planning four."""
    options = DeviceOptions(pages=4096, slab=True, guard_pages=0)
    rig = make_rig(pool_spec(16, unit=unit), pair=pair, host_pages=4096, options=options)
    few, many = _plan_steps(rig, 4, order), _plan_steps(rig, 4096, order)
    assert 0 < many < 2 * few
    assert many < 4096


def test_a_loop_over_pages_would_be_counted() -> None:
    """The bound above can fail: the shortest of loops is seen."""
    pages = torch.arange(4096)
    assert _steps(lambda: [page for page in pages]) > 4096  # noqa: C416 - the loop is the point
    assert _steps(lambda: pages + pages) < 20
