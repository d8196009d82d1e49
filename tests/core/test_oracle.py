"""The oracle and the rigs: right by examples typed by hand, and able to see what goes wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hicache_core.testing.oracle import (
    HostShape,
    TokenShape,
    copy_tokens,
    distinct_bytes,
    distinct_rows,
    expected_device_rows,
    expected_host_bytes,
    first_difference,
    host_offset,
    poison,
)
from hicache_core.testing.rigs import DeviceOptions, Rig, differences
from hicache_core.testing.stand_ins import pool_spec

MakeRig = Callable[..., Rig]
SHAPE = HostShape(pages=2, layers=2, page_rows=2, row_bytes=1)
# The rows of the buffer in the order in which each layout holds them, as (page, layer, row).
ORDERS = {
    "layer_first": ["000", "001", "100", "101", "010", "011", "110", "111"],
    "page_first": ["000", "010", "001", "011", "100", "110", "101", "111"],
    "page_first_direct": ["000", "001", "010", "011", "100", "101", "110", "111"],
}
DEVICE = [
    np.array([[10], [11], [12], [13], [14], [15]], np.uint8),
    np.array([[20], [21], [22], [23], [24], [25]], np.uint8),
]
# Device page 2 is rows 4 and 5 of each layer; it lands in host page 1.
BACKED_UP = {
    "layer_first": [0, 0, 14, 15, 0, 0, 24, 25],
    "page_first": [0, 0, 0, 0, 14, 24, 15, 25],
    "page_first_direct": [0, 0, 0, 0, 14, 15, 24, 25],
}


@pytest.mark.parametrize("layout", ORDERS)
def test_offsets_are_those_of_the_definition(layout: str) -> None:
    """Eight rows of one byte, in the order that the layout's name says."""
    for offset, name in enumerate(ORDERS[layout]):
        page, layer, row = map(int, name)
        assert host_offset(layout, SHAPE, page=page, layer=layer, row=row) == offset


def test_offsets_count_bytes() -> None:
    """Rows of 576 bytes, far out."""
    shape = HostShape(pages=10, layers=3, page_rows=4, row_bytes=576)
    assert shape.nbytes == 10 * 3 * 4 * 576
    assert host_offset("layer_first", shape, page=7, layer=2, row=1) == (2 * 40 + 7 * 4 + 1) * 576
    assert host_offset("page_first", shape, page=7, layer=2, row=1) == (7 * 12 + 1 * 3 + 2) * 576
    assert host_offset("page_first_direct", shape, page=7, layer=2, row=1) == (7 * 12 + 2 * 4 + 1) * 576


@pytest.mark.parametrize("layout", BACKED_UP)
def test_expected_host_bytes_of_an_example(layout: str) -> None:
    """One page of six device rows; the other page keeps what it had, and the argument is not changed."""
    before = np.zeros(8, dtype=np.uint8)
    assert expected_host_bytes(before, layout, SHAPE, DEVICE, [(1, 2)]).tolist() == BACKED_UP[layout]
    assert before.tolist() == [0] * 8


@pytest.mark.parametrize("layout", BACKED_UP)
def test_expected_device_rows_of_an_example(layout: str) -> None:
    """The same page, into device page 0; the other rows keep what they had."""
    host = np.array(BACKED_UP[layout], dtype=np.uint8)
    loaded = expected_device_rows(DEVICE, layout, SHAPE, host, [(1, 0)])
    assert [rows.ravel().tolist() for rows in loaded] == [
        [14, 15, 12, 13, 14, 15],
        [24, 25, 22, 23, 24, 25],
    ]
    assert DEVICE[0][0, 0] == 10


def _two_token_rows() -> tuple[np.ndarray, list[np.ndarray]]:
    """A host buffer of two pages and two layers, and two device rows a layer: distinct bytes, 8 a row."""
    host = np.arange(32, dtype=np.uint8)
    return host, [np.arange(first, first + 16, dtype=np.uint8).reshape(2, 8) for first in (100, 120)]


# A row holds two tokens: a value of 2 bytes each at 0, a scale of 1 byte each at 4, and two bytes of padding.
TWO_TOKENS = TokenShape(row_tokens=2, spans=((0, 2, 2), (4, 1, 1)))
TOKEN_SHAPE = HostShape(pages=2, layers=2, page_rows=1, row_bytes=8)


def test_a_token_backed_up_by_hand() -> None:
    """Host token 3 is the second of page 1, from byte 24 in layer 1 where pages come first."""
    host, device = _two_token_rows()
    pairs = [(3, 0), (-1, 1), (2, -1)]
    copy_tokens(host, device, "page_first", TOKEN_SHAPE, TWO_TOKENS, pairs, [1], to_host=True)
    assert host.tolist() == [*range(26), 120, 121, 28, 124, 30, 31]


def test_a_token_loaded_by_hand() -> None:
    """The same token into the second of device row 0; layer 1 starts at byte 16 where layers come first."""
    host, device = _two_token_rows()
    copy_tokens(host, device, "layer_first", TOKEN_SHAPE, TWO_TOKENS, [(3, 1)], [0, 1], to_host=False)
    assert host.tolist() == [*range(32)]
    assert device[0].ravel().tolist() == [100, 101, 10, 11, 104, 13, *range(106, 116)]
    assert device[1].ravel().tolist() == [120, 121, 26, 27, 124, 29, *range(126, 136)]


def test_distinct_bytes_are_repeatable_and_distinct() -> None:
    """The same labels give the same bytes; another label, another cut of labels, or a shift does not."""
    one = distinct_bytes("kv", "k", 0, nbytes=4096)
    assert np.array_equal(one, distinct_bytes("kv", "k", 0, nbytes=4096))
    for labels in (("kv", "k", 1), ("kv", "v", 0), ("kvk", 0), ("kv", "k0")):
        assert np.mean(one == distinct_bytes(*labels, nbytes=4096)) < 0.05
    assert all(np.mean(one[shift:] == one[:-shift]) < 0.05 for shift in range(1, 65))
    rows = distinct_rows("kv", rows=100, row_bytes=16)
    assert len({row.tobytes() for row in rows}) == 100


def test_first_difference_says_where() -> None:
    """Nothing where all is equal; else how many bytes, the first of them, and both values."""
    one = np.zeros((3, 4), dtype=np.uint8)
    other = one.copy()
    assert first_difference(one, other) == ""
    poison(other[1:, 2:])
    text = first_difference(other, one)
    assert "4 bytes" in text
    assert "(1, 2)" in text
    assert "0xee" in text
    assert "shape" in first_difference(one, one.ravel())


# What a rig sees


def _touch(rig: Rig, layer: int, row: int, byte: int) -> None:
    rig.device_rows["kv"]["b0"].memory[layer][row, byte] ^= 1


def _touch_host(rig: Rig) -> None:
    rig.host_bytes("kv", "b0")[0] ^= 1


BREAKS: dict[str, Callable[[Rig], None]] = {
    "a guard row": lambda rig: _touch(rig, 0, 3, 0),
    "the last guard byte": lambda rig: _touch(rig, 2, -1, -1),
    "a gap byte": lambda rig: _touch(rig, 1, 9, 48),
    "a row of another page": lambda rig: _touch(rig, 1, 4, 0),
    "the last byte of a row": lambda rig: _touch(rig, 2, 4 + 5 * 4 + 3, 47),
    "a host byte": _touch_host,
}


@pytest.mark.parametrize("what", BREAKS)
@pytest.mark.parametrize("slab", [False, True])
def test_one_wrong_byte_is_seen(make_rig: MakeRig, what: str, slab: bool) -> None:
    """After a load of device page 5 that is right, a bit anywhere is a difference."""
    rig = make_rig(options=DeviceOptions(gap_bytes=8, slab=slab))
    rig.allocate(8)
    rig.fill_host()
    before = rig.snapshot()
    rig.controller.load(rig.slots([3]), rig.slots([5])).wait()
    expected = rig.after_load(before, [(3, 5)])
    assert differences(rig.snapshot(), expected) == []
    BREAKS[what](rig)
    assert len(differences(rig.snapshot(), expected)) == 1


def test_a_page_that_did_not_arrive_is_seen(make_rig: MakeRig) -> None:
    """A transfer that moves nothing, or another page, is no success."""
    rig = make_rig(pool_spec(16))
    rig.allocate(8)
    rig.fill_host()
    before = rig.snapshot()
    assert differences(before, rig.after_backup(before, [(3, 5)])) != []
    rig.controller.backup(rig.slots([3]), rig.slots([6])).wait()
    assert differences(rig.snapshot(), rig.after_backup(before, [(3, 5)])) != []
    assert differences(rig.snapshot(), rig.after_backup(before, [(3, 6)])) == []
