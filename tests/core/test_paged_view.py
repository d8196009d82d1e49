"""Page rows as a view of a tensor of smaller rows: what it covers, what it leaves alone, what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
from attrs import frozen

from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.device_pool import DevicePool, paged_view
from hicache_core.errors import BufferMismatchError
from hicache_core.spec import RowUnit, platform_named
from hicache_core.testing.oracle import (
    POISON,
    Bytes,
    HostShape,
    PagePair,
    distinct_bytes,
    distinct_rows,
    expected_device_rows,
    expected_host_bytes,
    first_difference,
)
from hicache_core.testing.stand_ins import pool_spec, registry_of
from hicache_core.transfer.ticket import Ticket

PLATFORMS = ("cpu-sim", "cuda-wsl2", "rocm-mi355x")
PAIRS = (("kernel", "page_first"), ("direct", "layer_first"), ("direct", "page_first_direct"))
ROW_BYTES = 48
HOST_PAGES = 5
LAYERS = 3


@frozen(kw_only=True)
class Tensor:
    """A tensor of a layer: rows before the pages, the pages, and rows after them."""

    first_row: int
    rows_per_page: int
    pages: int
    rows_after: int

    @property
    def rows(self) -> int:
        """All rows."""
        return self.first_row + self.pages * self.rows_per_page + self.rows_after

    @property
    def page_bytes(self) -> int:
        """Bytes of one page row."""
        return self.rows_per_page * ROW_BYTES

    def page_rows(self, memory: Bytes) -> Bytes:
        """The page rows, as a view of the bytes of the tensor."""
        end = self.first_row + self.pages * self.rows_per_page
        return memory[self.first_row : end].reshape(self.pages, self.page_bytes)


TENSORS = {
    # 6 pages of 8 slots, 8 + 1 rows more, up to a multiple of 4; the last row is the sentinel.
    "state rings with a sentinel row": Tensor(first_row=0, rows_per_page=8, pages=7, rows_after=4),
    "compressed rows behind others": Tensor(first_row=11, rows_per_page=4, pages=7, rows_after=0),
    "one row per page behind others": Tensor(first_row=3, rows_per_page=1, pages=7, rows_after=0),
}


class Door:
    """A controller over layers of one tensor shape, and every byte of both sides."""

    def __init__(self, tensor: Tensor, platform: str, pair: tuple[str, str]) -> None:
        self.tensor = tensor
        self.layout = pair[1]
        self.shape = HostShape(pages=HOST_PAGES, layers=LAYERS, page_rows=1, row_bytes=tensor.page_bytes)
        runtime = SimRuntime(platform_named(platform), seed=7)
        self.memory = [
            runtime.allocate(tensor.rows * ROW_BYTES, 0).view(tensor.rows, ROW_BYTES) for _ in range(LAYERS)
        ]
        views = [
            paged_view(
                memory.view(torch.float32).view(tensor.rows, 3, 4), tensor.rows_per_page, tensor.first_row
            )
            for memory in self.memory
        ]
        spec = pool_spec(tensor.page_bytes, unit=RowUnit.PAGE)
        config = ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=HOST_PAGES, ring_bytes=2_000)
        pool = DevicePool(spec=spec, layers={"b0": views})
        self.controller = Controller(config, [pool], runtime, registry_of([spec]))
        self.controller.group.allocate({"full": HOST_PAGES * self.page_slots})

    @property
    def page_slots(self) -> int:
        """Slots of a page."""
        return self.controller.group.anchor.spec.index_space.page_slots

    @property
    def host(self) -> Bytes:
        """The host bytes, as a view."""
        return self.controller.group.anchor.buffers[0].memory.view

    def slots(self, pages: Iterable[int]) -> torch.Tensor:
        """The slots of some pages."""
        return torch.tensor([page * self.page_slots + i for page in pages for i in range(self.page_slots)])

    def device(self) -> list[Bytes]:
        """Every byte of every layer: uint8[rows, ROW_BYTES], copies."""
        return [memory.numpy().copy() for memory in self.memory]


@pytest.fixture(params=[(p, pair) for p in PLATFORMS for pair in PAIRS], ids=lambda p: f"{p[0]} {p[1]}")
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """A controller for the tensor of the test, on each platform and served pair."""
    made = Door(TENSORS[request.node.callspec.params["tensor"]], *request.param)
    yield made
    made.controller.close()


def assert_same(got: Iterable[Bytes], expected: Iterable[Bytes]) -> None:
    """Every byte of every layer is equal."""
    assert not [
        text for one, other in zip(got, expected, strict=True) if (text := first_difference(one, other))
    ]


@pytest.mark.parametrize("tensor", TENSORS)
def test_a_backup_takes_the_pages_alone(door: Door, tensor: str) -> None:
    """The host gets the page rows that were asked for, and the tensor stays as it was."""
    for layer, memory in enumerate(door.memory):
        rows = distinct_rows("device", layer, rows=door.tensor.rows, row_bytes=ROW_BYTES)
        memory.copy_(torch.from_numpy(rows))
    door.host.fill(POISON)
    device, pairs = door.device(), [(4, 0), (0, 6), (1, 3)]
    pages = [door.tensor.page_rows(memory) for memory in device]
    expected = expected_host_bytes(door.host, door.layout, door.shape, pages, pairs)
    _move(door.controller.backup, door, pairs)
    assert_same([door.host], [expected])
    assert_same(door.device(), device)


@pytest.mark.parametrize("tensor", TENSORS)
def test_a_load_writes_the_pages_alone(door: Door, tensor: str) -> None:
    """Over poison: rows before the first page, the sentinel and rows that fill no page keep it."""
    door.host[...] = distinct_bytes("host", nbytes=door.host.size)
    for memory in door.memory:
        memory.fill_(POISON)
    host, expected, pairs = door.host.copy(), door.device(), [(4, 6), (0, 0), (2, 5)]
    pages = [door.tensor.page_rows(memory) for memory in expected]
    loaded = expected_device_rows(pages, door.layout, door.shape, host, pairs)
    for rows, new in zip(pages, loaded, strict=True):
        rows[...] = new
    _move(door.controller.load, door, pairs)
    assert_same(door.device(), expected)
    assert_same([door.host], [host])


def _move(call: Callable[..., Ticket], door: Door, pairs: list[PagePair]) -> None:
    call(door.slots(h for h, _ in pairs), door.slots(d for _, d in pairs)).wait()


@pytest.mark.parametrize("tensor", TENSORS)
def test_pages_are_counted_from_the_first_row(door: Door, tensor: str) -> None:
    """The controller has as many device pages as are full."""
    assert door.controller.device_pages["full"] == door.tensor.pages


def test_it_is_a_view() -> None:
    """What is written to it is in the tensor, from the first row on; nothing is copied."""
    layer = torch.zeros((12, 2, 3), dtype=torch.int16)
    view = paged_view(layer, 4, 3)
    assert view.shape == (2, 24)
    assert view.data_ptr() == layer[3].data_ptr()
    view.fill_(1)
    assert layer.flatten(1).any(dim=1).tolist() == [False] * 3 + [True] * 8 + [False]


@pytest.mark.parametrize(
    ("rows", "rows_per_page", "first_row", "pages"),
    [
        (16, 4, 0, 4),
        (19, 4, 0, 4),
        (16, 16, 0, 1),
        (16, 17, 0, 0),
        (16, 4, 13, 0),
        (16, 4, 16, 0),
        (0, 4, 0, 0),
    ],
)
def test_rows_that_fill_no_page_are_dropped(
    rows: int, rows_per_page: int, first_row: int, pages: int
) -> None:
    """Whole pages only; there may be none."""
    assert paged_view(torch.zeros((rows, 5)), rows_per_page, first_row).shape == (pages, rows_per_page * 5)


def test_rows_that_lie_apart_are_pages_of_one_row() -> None:
    """Gaps between rows are gaps between pages of one row; they would split a larger page."""
    apart = torch.arange(60).view(12, 5)[:, :3]
    assert np.array_equal(paged_view(apart, 1, 2).numpy(), apart[2:].numpy())
    _refused(apart, 2)


def _refused(layer: torch.Tensor, rows_per_page: int, first_row: int = 0) -> BufferMismatchError:
    with pytest.raises(BufferMismatchError) as caught:
        paged_view(layer, rows_per_page, first_row)
    error = caught.value
    assert error.code == "buffer-mismatch"
    assert all((error.who, error.got, error.expected, error.remedy))
    return error


@pytest.mark.parametrize("rows_per_page", [1, 4])
@pytest.mark.parametrize(
    "layer",
    [
        torch.zeros((6, 12)).t(),
        torch.zeros((12, 6))[:, ::2],
        torch.zeros((12, 2, 3)).transpose(1, 2),
    ],
    ids=["columns", "every second element", "dimensions in another order"],
)
def test_rows_that_only_a_copy_would_make_contiguous_are_refused(
    layer: torch.Tensor, rows_per_page: int
) -> None:
    """What is written to a copy never reaches the tensor; shape and strides are named."""
    assert str(layer.stride()) in _refused(layer, rows_per_page).got


@pytest.mark.parametrize("layer", [torch.zeros((24, 3))[::2], torch.zeros(3).expand(12, 3)])
def test_a_page_of_rows_apart_or_repeated_is_refused(layer: torch.Tensor) -> None:
    """Every second row, or one row over and over, is no run of bytes."""
    _refused(layer, 4)


@pytest.mark.parametrize("first_row", [-1, -12, 13, 100])
def test_a_first_row_outside_the_tensor_is_refused(first_row: int) -> None:
    """Nothing is counted from the end, and nothing is cut to size."""
    assert str(first_row) in _refused(torch.zeros((12, 3)), 4, first_row).got


@pytest.mark.parametrize("rows_per_page", [0, -4])
def test_a_page_without_rows_is_refused(rows_per_page: int) -> None:
    """A page has at least one row."""
    assert str(rows_per_page) in _refused(torch.zeros((12, 3)), rows_per_page).got


@pytest.mark.parametrize("layer", [torch.zeros(12), torch.tensor(1)])
def test_a_tensor_that_does_not_say_where_a_row_ends_is_refused(layer: torch.Tensor) -> None:
    """No dimension, or one."""
    _refused(layer, 4)
