"""Indices of the public calls: checked before anything moves, routed, snapshot, never changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hicache_core.device.sim import SimRuntime
from hicache_core.errors import (
    HiCacheError,
    IndexRangeError,
    IndexTypeError,
    PageContractError,
    PairingError,
    SlotError,
)
from hicache_core.memory.tables import HostTable
from hicache_core.spec import RowGrid
from hicache_core.testing.rigs import Rig, differences
from hicache_core.testing.stand_ins import pool_spec

MakeRig = Callable[..., Rig]
P = 4
HOST_PAGES = 8
DEVICE_PAGES = 12
OWNED = 6
"""Host pages 0 to 5 are allocated, 6 and 7 are free."""


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    """Token rows in pages of four slots."""
    made = make_rig(pool_spec(48, page_slots=P), host_pages=HOST_PAGES)
    assert made.allocate(OWNED) == list(range(OWNED))
    made.poison_host()
    return made


def _slots(*pages: int) -> np.ndarray:
    return np.array([page * P + i for page in pages for i in range(P)], dtype=np.int64)


GOOD = _slots(1, 2)

WRONG: dict[str, tuple[Any, type[HiCacheError], str]] = {
    "int32": (GOOD.astype(np.int32), IndexTypeError, "index-type"),
    "uint64": (GOOD.astype(np.uint64), IndexTypeError, "index-type"),
    "float": (GOOD.astype(np.float64), IndexTypeError, "index-type"),
    "bool": (GOOD.astype(np.bool_), IndexTypeError, "index-type"),
    "other byte order": (GOOD.astype(">i8"), IndexTypeError, "index-type"),
    "two dimensions": (GOOD.reshape(2, P), IndexTypeError, "index-type"),
    "no dimension": (np.int64(4), IndexTypeError, "index-type"),
    "list": (GOOD.tolist(), IndexTypeError, "index-type"),
    "none": (None, IndexTypeError, "index-type"),
    "int32 tensor": (torch.from_numpy(GOOD.astype(np.int32)), IndexTypeError, "index-type"),
    "float tensor": (torch.from_numpy(GOOD.astype(np.float32)), IndexTypeError, "index-type"),
    "2-D tensor": (torch.from_numpy(GOOD.reshape(2, P)), IndexTypeError, "index-type"),
    "tensor of another device": (
        torch.zeros(2 * P, dtype=torch.int64, device="meta"),
        IndexTypeError,
        "index-type",
    ),
    "part of a page": (GOOD[:-1], PageContractError, "page-contract"),
    "misaligned": (GOOD + 1, PageContractError, "page-contract"),
    "run over two pages": (np.arange(2, 2 + 2 * P), PageContractError, "page-contract"),
    "descending": (GOOD[::-1].copy(), PageContractError, "page-contract"),
    "step of two": (np.concatenate((np.arange(0, 2 * P, 2), _slots(3))), PageContractError, "page-contract"),
    "one slot astray": (np.where(GOOD == P + 2, 2, GOOD), PageContractError, "page-contract"),
    "one slot twice": (np.where(GOOD == P + 2, P + 1, GOOD), PageContractError, "page-contract"),
    "negative": (_slots(1, -1), IndexRangeError, "index-range"),
    "smallest": (np.full(2 * P, np.iinfo(np.int64).min), IndexRangeError, "index-range"),
    "largest": (np.full(2 * P, np.iinfo(np.int64).max), IndexRangeError, "index-range"),
    "beyond 32 bits": (_slots(1, 1 << 31), IndexRangeError, "index-range"),
    "one page fewer": (_slots(1), PairingError, "pairing"),
    "one page more": (_slots(1, 2, 3), PairingError, "pairing"),
    "empty": (_slots(), PairingError, "pairing"),
}


def _refused(rig: Rig, move: str, host: Any, device: Any, error: type[HiCacheError], code: str) -> None:
    """Refused with class and code; no byte of either side has changed, nothing is held or queued."""
    before = rig.snapshot()
    free = rig.controller.group.allocators["full"].free_slots
    with pytest.raises(error) as caught:
        getattr(rig.controller, move)(host, device)
    assert type(caught.value) is error
    assert caught.value.code == code
    assert caught.value.who
    rig.controller.engine.drain()
    assert differences(rig.snapshot(), before) == []
    assert rig.controller.group.allocators["full"].free_slots == free
    rig.controller.group.free({"full": _slots(*range(OWNED))})


@pytest.mark.parametrize("move", ["backup", "load"])
@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_indices_are_refused(rig: Rig, move: str, side: str, wrong: str) -> None:
    """I23, I24: either side, either direction; nothing has moved and nothing is held."""
    indices, error, code = WRONG[wrong]
    host, device = (indices, GOOD) if side == "host" else (GOOD, indices)
    _refused(rig, move, host, device, error, code)


@pytest.mark.parametrize("move", ["backup", "load"])
@pytest.mark.parametrize(("side", "page"), [("host", HOST_PAGES), ("device", DEVICE_PAGES)])
def test_first_page_past_the_end_is_refused(rig: Rig, move: str, side: str, page: int) -> None:
    """I24: each side has its own end; the guard pages of the device are past it."""
    wrong = _slots(1, page)
    host, device = (wrong, GOOD) if side == "host" else (GOOD, wrong)
    _refused(rig, move, host, device, IndexRangeError, "index-range")


def test_host_page_twice_in_a_backup_is_refused(rig: Rig) -> None:
    """I26: two device pages for one host page have no order."""
    _refused(rig, "backup", _slots(1, 2, 1), _slots(3, 4, 5), PairingError, "pairing")


def test_device_page_twice_in_a_load_is_refused(rig: Rig) -> None:
    """I26: two host pages for one device page have no order."""
    _refused(rig, "load", _slots(1, 2, 3), _slots(5, 4, 5), PairingError, "pairing")


def test_one_device_page_is_backed_up_twice(rig: Rig) -> None:
    """Only destinations have to be distinct."""
    before = rig.snapshot()
    rig.controller.backup(_slots(1, 2), _slots(7, 7)).wait()
    assert differences(rig.snapshot(), rig.after_backup(before, [(1, 7), (2, 7)])) == []


@pytest.mark.parametrize("move", ["backup", "load"])
def test_host_page_that_is_not_allocated_is_refused(rig: Rig, move: str) -> None:
    """I1: bytes go to, and come from, pages that somebody owns; the page is named."""
    with pytest.raises(SlotError) as caught:
        getattr(rig.controller, move)(_slots(1, OWNED), GOOD)
    assert caught.value.slots == (OWNED * P,)
    _refused(rig, move, _slots(1, OWNED), GOOD, SlotError, "slot")


@pytest.mark.parametrize("move", ["backup", "load"])
@pytest.mark.parametrize(
    "empty", [np.empty(0, np.int64), torch.empty(0, dtype=torch.int64)], ids=["numpy", "torch"]
)
def test_empty_transfer_is_done_without_a_launch(
    rig: Rig, move: str, empty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I24: no copy, no kernel, no upload, no byte; every mark has fired."""
    runtime = rig.runtime
    assert isinstance(runtime, SimRuntime)
    launched: list[str] = []
    for name in ("strided_copies", "batch_copies", "upload", "allocate"):
        monkeypatch.setattr(runtime, name, lambda *_, name=name: launched.append(name))
    monkeypatch.setattr(runtime.scheduler, "submit", lambda *_: launched.append("submit"))
    before = rig.snapshot()
    ticket = getattr(rig.controller, move)(empty, empty)
    assert ticket.poll()
    ticket.wait()
    assert ticket.error is None
    assert ticket.nbytes == 0
    if move == "load":
        assert all(ticket.mark(layer).query() for layer in range(3))
    assert launched == []
    assert differences(rig.snapshot(), before) == []


@pytest.mark.parametrize(
    "pair", [("kernel", "page_first"), ("kernel", "layer_first"), ("direct", "page_first_direct")]
)
def test_indices_are_read_before_the_call_returns(make_rig: MakeRig, pair: tuple[str, str]) -> None:
    """I25: the caller's arrays are not changed by the call, and may change right after it."""
    for page_slots in (1, P):
        rig = make_rig(pool_spec(48, page_slots=page_slots), pair=pair, seed=3)
        rig.allocate(8)
        for move, after in ((rig.controller.backup, rig.after_backup), (rig.controller.load, rig.after_load)):
            host, device = rig.slots([5, 0, 3]), rig.slots([2, 9, 4])
            kept = host.copy(), device.copy()
            before = rig.snapshot()
            ticket = move(host, torch.from_numpy(device))
            assert np.array_equal(host, kept[0])
            assert np.array_equal(device, kept[1])
            host.fill(0)
            device.fill(0)
            ticket.wait()
            assert differences(rig.snapshot(), after(before, [(5, 2), (0, 9), (3, 4)])) == []


def test_views_that_are_not_contiguous_are_read_by_their_strides(rig: Rig) -> None:
    """I17, I23: every other element of an array is what it says, not what follows its first."""
    host = np.stack((_slots(4, 1), _slots(0, 0)), axis=1)[:, 0]
    device = torch.from_numpy(np.stack((_slots(2, 8), _slots(0, 0)), axis=1))[:, 0]
    assert not host.flags.c_contiguous
    assert not device.is_contiguous()
    before = rig.snapshot()
    rig.controller.backup(host, device).wait()
    assert differences(rig.snapshot(), rig.after_backup(before, [(4, 2), (1, 8)])) == []


def test_offsets_of_large_buffers_do_not_wrap() -> None:
    """I23: row 3,728,271 of 576 bytes starts beyond 31 bits; offsets are 64-bit before they multiply."""
    grid = RowGrid(pages=8_000_000, layers=1, page_rows=1, row_bytes=576)
    table = HostTable(
        bases=[[0]],
        homes=[[0]],
        first_pages=[0],
        grid=grid,
        page_stride=grid.row_bytes,
        row_stride=grid.row_bytes,
    )
    pages = np.array([3_728_271, 7_456_541])
    assert table.page_offsets(pages, table.groups_of(pages)).tolist() == [2_147_484_096, 4_294_967_616]
