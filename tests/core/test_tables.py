"""Addresses: tables against the oracle, ranges that nothing leaves, and two kinds that do not mix."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hicache_core.device.base import GatherUnits, MoveRows
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import AddressError, DeviceFault
from hicache_core.memory.addresses import HostRange, KernelRange, Provenance
from hicache_core.memory.host import HostMemory
from hicache_core.memory.options import MemoryOptions
from hicache_core.memory.tables import HostTable, KernelTable, Segment, host_kernel_table, host_table
from hicache_core.spec import LAYOUTS, RowGrid, RowUnit, layout_named, platform_named
from hicache_core.testing.oracle import HostShape, host_offset
from hicache_core.testing.rigs import DeviceOptions, Rig
from hicache_core.testing.stand_ins import pool_spec

MakeRig = Callable[..., Rig]
ROOT = Path(__file__).resolve().parents[2]
ROW_BYTES = 256


def _address(table: HostTable | KernelTable, page: int, layer: int, row: int) -> int:
    """The formula of the tables' module, one address at a time."""
    group = int(table.groups_of(np.array([page]))[0])
    inside = int(table.page_offsets(np.array([page]), np.array([group]))[0])
    return int(table.bases[group, layer]) + inside + row * table.row_stride


def _shape(grid: RowGrid) -> HostShape:
    return HostShape(pages=grid.pages, layers=grid.layers, page_rows=grid.page_rows, row_bytes=grid.row_bytes)


@pytest.mark.parametrize("platform", ["cpu-sim", "rocm-mi355x", "npu"])
@pytest.mark.parametrize("limit", [1 << 36, 80_000, 1], ids=["one", "three", "many"])
@pytest.mark.parametrize("page_rows", [1, 2, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_hold_every_address(layout: str, page_rows: int, limit: int, platform: str) -> None:
    """I31: the CPU address of each row, and where the device sees the same byte, over all segments."""
    grid = RowGrid(pages=3 * 256 // (3 * page_rows), layers=3, page_rows=page_rows, row_bytes=ROW_BYTES)
    strides = layout_named(layout).strides(grid)
    runtime = SimRuntime(platform_named(platform), seed=page_rows)
    memory = HostMemory(
        grid.nbytes,
        strides.copy_unit,
        runtime,
        who="test",
        options=MemoryOptions(max_registration_bytes=limit),
    )
    assert len(memory.segments) == {1 << 36: 1, 80_000: 3}.get(limit, len(memory.segments))
    assert limit > 1 or len(memory.segments) > 3
    aliases = [runtime.alias(segment.host, 0) for segment in memory.segments]
    cpu = host_table(memory.segments, grid, strides)
    seen = host_kernel_table(memory.segments, aliases, grid, strides, 0)
    distinct = platform == "rocm-mi355x"
    for page in range(grid.pages):
        for layer in range(grid.layers):
            for row in range(page_rows):
                offset = host_offset(layout, _shape(grid), page=page, layer=layer, row=row)
                at = memory.range.start + offset
                assert _address(cpu, page, layer, row) == at
                kernel = _address(seen, page, layer, row)
                region = runtime.memory.kernel_spaces[0].find(kernel)
                assert region is not None
                assert region.data.ctypes.data + kernel - region.start == at
                assert (kernel != at) == distinct
                assert kernel + ROW_BYTES <= region.end
    memory.destroy()


@pytest.mark.parametrize("slab", [False, True])
@pytest.mark.parametrize("gap_bytes", [0, 40])
def test_device_table_follows_stride_and_storage_offset(
    make_rig: MakeRig, gap_bytes: int, slab: bool
) -> None:
    """I17: guard pages before the rows, and gaps between them, are in the addresses."""
    options = DeviceOptions(gap_bytes=gap_bytes, slab=slab)
    rig = make_rig(pool_spec(48, page_slots=4), options=options)
    (tables,) = rig.controller.group.anchor.tables
    rows = rig.device_rows["kv"]["b0"]
    for layer, tensor in enumerate(rows.tensors):
        for page in range(options.pages):
            for row in range(4):
                assert _address(tables.device, page, layer, row) == tensor[page * 4 + row].data_ptr()
    assert len(set(tables.device.homes[0].tolist())) == (1 if slab else 3)
    assert tables.device.provenance is Provenance.DEVICE_MEMORY


@pytest.mark.parametrize(
    ("platform", "provenance"),
    [("cpu-sim", Provenance.ALIAS), ("cuda-wsl2", Provenance.ALIAS), ("npu", Provenance.RAW)],
)
def test_kernel_tables_say_where_their_addresses_come_from(
    make_rig: MakeRig, platform: str, provenance: Provenance
) -> None:
    """I30: aliases where memory is registered, raw addresses where the platform registers nothing."""
    rig = make_rig(platform=platform, pair=("direct", "layer_first"))
    (tables,) = rig.controller.group.anchor.tables
    assert tables.host_kernel.provenance is provenance
    assert tables.host_kernel.device == 0


def test_tables_cannot_be_changed() -> None:
    """A table that is shared by transfers is a value."""
    grid = RowGrid(pages=2, layers=1, page_rows=1, row_bytes=8)
    table = HostTable(bases=[[64]], homes=[[0]], first_pages=[0], grid=grid, page_stride=8, row_stride=8)
    with pytest.raises(ValueError, match="read-only"):
        table.bases[0, 0] = 1
    with pytest.raises(AttributeError):
        table.page_stride = 16  # type: ignore[misc]


RANGES: list[HostRange | KernelRange] = [
    HostRange(start=1000, nbytes=64),
    KernelRange(start=1000, nbytes=64, device=0, provenance=Provenance.ALIAS),
]


@pytest.mark.parametrize("run", RANGES, ids=["host", "kernel"])
def test_no_address_leaves_its_range(run: HostRange | KernelRange) -> None:
    """I31: one byte before, one byte after, and a negative length are refused; the end itself is not."""
    assert run.at(0) == 1000
    assert run.at(0, 64) == 1000
    assert run.at(63, 1) == 1063
    assert run.at(64) == 1064
    for offset, length in ((-1, 0), (65, 0), (64, 1), (0, 65), (1, 64), (0, -1)):
        with pytest.raises(AddressError) as caught:
            run.at(offset, length)
        assert caught.value.code == "address"


def test_part_of_a_host_range_stays_inside() -> None:
    """I31: a part is a range of its own, with its own end."""
    part = HostRange(start=1000, nbytes=64).part(16, 8)
    assert (part.start, part.nbytes) == (1016, 8)
    with pytest.raises(AddressError):
        part.at(0, 9)
    with pytest.raises(AddressError):
        HostRange(start=1000, nbytes=64).part(60, 5)


@pytest.mark.parametrize(("device", "nbytes"), [(1, 4096), (0, 4095)])
def test_alias_of_another_device_or_size_is_refused(device: int, nbytes: int) -> None:
    """I30: a table is made of ranges of its own device that cover its segments."""
    grid = RowGrid(pages=16, layers=1, page_rows=1, row_bytes=256)
    segments = [Segment(offset=0, host=HostRange(start=1 << 20, nbytes=4096))]
    seen = KernelRange(start=1 << 24, nbytes=nbytes, device=device, provenance=Provenance.ALIAS)
    with pytest.raises(AddressError):
        host_kernel_table(segments, [seen], grid, layout_named("page_first").strides(grid), 0)


def test_kinds_of_addresses_do_not_stand_in_for_each_other_at_run_time() -> None:
    """I30: a CPU range is no alias, and a segment is made of CPU addresses."""
    grid = RowGrid(pages=16, layers=1, page_rows=1, row_bytes=256)
    host = HostRange(start=1 << 20, nbytes=4096)
    segments = [Segment(offset=0, host=host)]
    strides = layout_named("page_first").strides(grid)
    with pytest.raises(AddressError):
        host_kernel_table(segments, [host], grid, strides, 0)  # type: ignore[list-item]
    seen = KernelRange(start=1 << 24, nbytes=4096, device=0, provenance=Provenance.ALIAS)
    with pytest.raises(TypeError):
        Segment(offset=0, host=seen)  # type: ignore[arg-type]


def test_segments_that_do_not_cover_the_buffer_are_refused() -> None:
    """I31: a row past the last segment has no address."""
    grid = RowGrid(pages=1, layers=32, page_rows=1, row_bytes=256)
    segments = [Segment(offset=0, host=HostRange(start=1 << 20, nbytes=4096))]
    with pytest.raises(AddressError):
        host_table(segments, grid, layout_named("layer_first").strides(grid))


def _launches(rig: Rig) -> dict[str, Callable[[], Any]]:
    (tables,) = rig.controller.group.anchor.tables
    pages = torch.zeros(1, dtype=torch.int64)
    wrong: Any = tables.host
    ring = rig.controller.engine.ring.range()
    return {
        "target": lambda: MoveRows(
            target=wrong, source=tables.device, target_pages=pages, source_pages=pages
        ),
        "source": lambda: MoveRows(
            target=tables.device, source=wrong, target_pages=pages, source_pages=pages
        ),
        "gather": lambda: GatherUnits(source=wrong, pages=pages, first_unit=0, units=1, target=ring),
    }


@pytest.mark.parametrize("launch", ["target", "source", "gather"])
@pytest.mark.parametrize("platform", ["cpu-sim", "cuda-wsl2"])
def test_a_launch_with_a_host_table_fails_at_run_time(make_rig: MakeRig, platform: str, launch: str) -> None:
    """Even where both kinds of address are equal numbers, the launch is refused by type."""
    rig = make_rig(platform=platform)
    with pytest.raises(TypeError):
        _launches(rig)[launch]()


@pytest.mark.parametrize("unit", [RowUnit.TOKEN, RowUnit.PAGE])
def test_cpu_addresses_in_a_kernel_table_fault(make_rig: MakeRig, unit: RowUnit) -> None:
    """Numbers smuggled past the types die in the kernel, where an alias differs."""
    rig = make_rig(pool_spec(48, unit=unit), platform="cuda-wsl2")
    (tables,) = rig.controller.group.anchor.tables
    host = tables.host
    smuggled = KernelTable(
        bases=host.bases,
        homes=host.homes,
        first_pages=host.first_pages,
        grid=host.grid,
        page_stride=host.page_stride,
        row_stride=host.row_stride,
        device=0,
        provenance=Provenance.ALIAS,
    )
    pages = torch.zeros(1, dtype=torch.int64)
    launch = MoveRows(
        target=tables.device, source=smuggled, target_pages=pages, source_pages=pages, layers=range(1)
    )
    stream = rig.runtime.new_stream(0)
    kernels = rig.runtime.kernels
    assert kernels is not None
    kernels.move_rows(launch, stream)
    with pytest.raises(DeviceFault) as caught:
        rig.runtime.synchronize(stream)
    assert caught.value.address == int(host.bases[0, 0])


@pytest.mark.slow
def test_mypy_refuses_each_marked_line(tmp_path: Path) -> None:
    """Without the marks, mypy reports an error on each marked line and on no other."""
    source = (Path(__file__).parent / "typing_addresses.py").read_text(encoding="utf-8")
    marked = {n for n, line in enumerate(source.splitlines(), 1) if "# type: ignore[arg-type]" in line}
    bare = tmp_path / "bare_addresses.py"
    bare.write_text(re.sub(r"  # type: ignore\[arg-type\]", "", source), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-pretty", str(bare)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    reported = re.findall(r"bare_addresses\.py:(\d+): error: .*\[arg-type\]", done.stdout)
    assert len(marked) == 15
    assert {int(line) for line in reported} == marked, done.stdout + done.stderr
    assert done.stdout.count("error:") == len(reported)
