"""Expected bytes, worked out apart from the code under test: plain loops over (page, layer, row).

Nothing here imports the core's layouts, tables or plans; the orders of the axes are written down once more.
A test fills a device buffer with :func:`distinct_rows`, poisons the target, lets the core move some pages,
and compares every byte of both sides with :func:`expected_host_bytes` or :func:`expected_device_rows`.

All arrays are uint8. The device rows of one layer are ``uint8[rows, row_bytes]``, where row
``p * page_rows + t`` is row t of page p. A host buffer is its flat bytes, ``uint8[nbytes]``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from attrs import field, frozen
from attrs import validators as v

Bytes = npt.NDArray[np.uint8]
PagePair = tuple[int, int]
"""(host page, device page)."""

POISON = 0xEE

_POSITIVE = [v.instance_of(int), v.ge(1)]
_NOT_NEGATIVE = [v.instance_of(int), v.ge(0)]

_AXES = {
    "layer_first": ("layer", "page", "row"),
    "page_first": ("page", "row", "layer"),
    "page_first_direct": ("page", "layer", "row"),
}


@frozen(kw_only=True)
class HostShape:
    """The rows of one host buffer.

    Args:
        pages: pages of the buffer.
        layers: layers of its pool.
        page_rows: rows of one page in one layer.
        row_bytes: bytes of one row.
    """

    pages: int = field(validator=_NOT_NEGATIVE)
    layers: int = field(validator=_NOT_NEGATIVE)
    page_rows: int = field(validator=_POSITIVE)
    row_bytes: int = field(validator=_POSITIVE)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.pages * self.layers * self.page_rows * self.row_bytes


def host_offset(layout: str, shape: HostShape, *, page: int, layer: int, row: int) -> int:
    """The byte at which row ``row`` of page ``page`` of layer ``layer`` starts in a host buffer.

    Args:
        layout: ``layer_first``, ``page_first`` or ``page_first_direct``.
        shape: the buffer's rows.
        page, layer, row: the coordinates, each from 0.
    """
    at = {"page": page, "layer": layer, "row": row}
    extent = {"page": shape.pages, "layer": shape.layers, "row": shape.page_rows}
    number = 0
    for axis in _AXES[layout]:
        assert 0 <= at[axis] < extent[axis], f"{axis} {at[axis]} of {extent[axis]}"
        number = number * extent[axis] + at[axis]
    return number * shape.row_bytes


def distinct_bytes(*labels: object, nbytes: int) -> Bytes:
    """Bytes hashed from labels and position: no other labels, and no shift, give the same: uint8[nbytes].

    Args:
        labels: what the bytes belong to, such as pool, buffer and layer.
        nbytes: how many.
    """
    name = "\x1f".join(map(str, labels)).encode()
    return np.frombuffer(hashlib.shake_128(name).digest(nbytes), dtype=np.uint8).copy()


def distinct_rows(*labels: object, rows: int, row_bytes: int) -> Bytes:
    """Rows that can all be told apart: uint8[rows, row_bytes].

    Args:
        labels: what the rows belong to, such as pool, buffer and layer.
        rows: how many.
        row_bytes: bytes of each.
    """
    return distinct_bytes(*labels, nbytes=rows * row_bytes).reshape(rows, row_bytes)


def poison(target: Bytes) -> None:
    """Overwrite every byte of ``target`` in place, so that a byte that was not moved is seen."""
    target[...] = POISON


def _moved_rows(shape: HostShape, pairs: Iterable[PagePair]) -> Iterator[tuple[int, int, int, int]]:
    """(host page, device page, layer, row) of each row that a transfer of ``pairs`` moves."""
    for host_page, device_page in pairs:
        for layer in range(shape.layers):
            for row in range(shape.page_rows):
                yield host_page, device_page, layer, row


def expected_host_bytes(
    before: Bytes, layout: str, shape: HostShape, device: Sequence[Bytes], pairs: Iterable[PagePair]
) -> Bytes:
    """The bytes of a host buffer after a backup.

    Args:
        before: uint8[shape.nbytes], the buffer before it; not changed.
        layout: its layout.
        shape: its rows.
        device: for each layer, the device rows, uint8[rows, row_bytes].
        pairs: the pages that are backed up, each host page at most once.

    Returns:
        uint8[shape.nbytes]; the bytes of all other pages are those of ``before``.
    """
    after = before.copy()
    for host_page, device_page, layer, row in _moved_rows(shape, pairs):
        start = host_offset(layout, shape, page=host_page, layer=layer, row=row)
        after[start : start + shape.row_bytes] = device[layer][device_page * shape.page_rows + row]
    return after


def expected_device_rows(
    before: Sequence[Bytes], layout: str, shape: HostShape, host: Bytes, pairs: Iterable[PagePair]
) -> list[Bytes]:
    """The rows of a device buffer after a load.

    Args:
        before: for each layer, the device rows before it, uint8[rows, row_bytes]; not changed.
        layout: the layout of the host buffer.
        shape: its rows.
        host: uint8[shape.nbytes], its bytes.
        pairs: the pages that are loaded, each device page at most once.

    Returns:
        For each layer uint8[rows, row_bytes]; the rows of all other pages are those of ``before``.
    """
    after = [rows.copy() for rows in before]
    for host_page, device_page, layer, row in _moved_rows(shape, pairs):
        start = host_offset(layout, shape, page=host_page, layer=layer, row=row)
        after[layer][device_page * shape.page_rows + row] = host[start : start + shape.row_bytes]
    return after


@frozen(kw_only=True)
class TokenShape:
    """Where single tokens lie in the rows of a buffer.

    Args:
        row_tokens: tokens of one row.
        spans: (offset, stride, nbytes) of each run of bytes that a token has in its row.
    """

    row_tokens: int = field(validator=_POSITIVE)
    spans: tuple[tuple[int, int, int], ...]


def copy_tokens(
    host: Bytes,
    device: Sequence[Bytes],
    layout: str,
    shape: HostShape,
    tokens: TokenShape,
    pairs: Iterable[tuple[int, int]],
    layers: Iterable[int],
    *,
    to_host: bool,
) -> None:
    """Copy single tokens one after another, in place.

    Args:
        host: uint8[shape.nbytes], the host buffer.
        device: for each layer, the device rows, uint8[rows, row_bytes].
        layout: the layout of the host buffer.
        shape: its rows.
        tokens: where single tokens lie in them.
        pairs: (host token, device token); one with a negative number is left out.
        layers: the layers that move.
        to_host: whether the host buffer is written, else the device rows are.
    """
    moved = [pair for pair in pairs if min(pair) >= 0]
    for layer in layers:
        for host_token, device_token in moved:
            host_row, host_within = divmod(host_token, tokens.row_tokens)
            device_row, device_within = divmod(device_token, tokens.row_tokens)
            page, row = divmod(host_row, shape.page_rows)
            start = host_offset(layout, shape, page=page, layer=layer, row=row)
            for offset, stride, nbytes in tokens.spans:
                first = start + offset + host_within * stride
                in_host = host[first : first + nbytes]
                first = offset + device_within * stride
                in_device = device[layer][device_row][first : first + nbytes]
                target, source = (in_host, in_device) if to_host else (in_device, in_host)
                target[...] = source


def first_difference(got: Bytes, expected: Bytes) -> str:
    """Where two arrays differ first, for an assertion's message; empty where every byte is equal."""
    if got.shape != expected.shape:
        return f"shape {got.shape}, expected {expected.shape}"
    if np.array_equal(got, expected):
        return ""
    at = np.argwhere(got != expected)
    where = tuple(at[0].tolist())
    return f"{len(at)} bytes differ, first at {where}: {got[where]:#04x}, expected {expected[where]:#04x}"
