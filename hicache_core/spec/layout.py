"""Host layouts: three choices of strides over the axes (page, layer, row)."""

from __future__ import annotations

from collections.abc import Callable

from attrs import field, frozen

from hicache_core.errors import UnknownNameError
from hicache_core.spec.checks import whole


@frozen(kw_only=True)
class RowGrid:
    """The rows of one buffer: ``pages`` pages of ``page_rows`` rows in each of ``layers`` layers.

    Args:
        pages: pages of the buffer.
        layers: layers of the buffer.
        page_rows: rows of one page in one layer.
        row_bytes: bytes of one row.
    """

    pages: int = field(validator=whole(0))
    layers: int = field(validator=whole(0))
    page_rows: int = field(validator=whole(1))
    row_bytes: int = field(validator=whole(1))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.pages * self.layers * self.page_rows * self.row_bytes


@frozen(kw_only=True)
class Strides:
    """Byte arithmetic of a buffer: the offset of (page p, layer l, row t) is
    ``p * page + l * layer + t * row``; ``copy_unit`` is the run of bytes that a registration may not cut.

    Args:
        page, layer, row: bytes from one page, layer or row to the next.
        copy_unit: bytes of the smallest run that one registration must hold whole.
    """

    page: int
    layer: int
    row: int
    copy_unit: int


def _layer_first(grid: RowGrid) -> Strides:
    page = grid.page_rows * grid.row_bytes
    return Strides(page=page, layer=grid.pages * page, row=grid.row_bytes, copy_unit=page)


def _page_first(grid: RowGrid) -> Strides:
    row = grid.layers * grid.row_bytes
    page = grid.page_rows * row
    return Strides(page=page, layer=grid.row_bytes, row=row, copy_unit=page)


def _page_first_direct(grid: RowGrid) -> Strides:
    layer = grid.page_rows * grid.row_bytes
    page = grid.layers * layer
    return Strides(page=page, layer=layer, row=grid.row_bytes, copy_unit=page)


@frozen(kw_only=True)
class Layout:
    """An order of the axes of a host buffer.

    Args:
        name: the name that operators give.
        axes: the axes from the slowest to the fastest, for people.
        strides: the byte arithmetic of a grid under this layout.
    """

    name: str
    axes: str
    strides: Callable[[RowGrid], Strides] = field(repr=False, eq=False)


LAYER_FIRST = Layout(name="layer_first", axes="layer, page, row", strides=_layer_first)
PAGE_FIRST = Layout(name="page_first", axes="page, row, layer", strides=_page_first)
PAGE_FIRST_DIRECT = Layout(name="page_first_direct", axes="page, layer, row", strides=_page_first_direct)

LAYOUTS = {layout.name: layout for layout in (LAYER_FIRST, PAGE_FIRST, PAGE_FIRST_DIRECT)}
IO_BACKENDS = ("kernel", "direct")


def layout_named(name: str) -> Layout:
    """The layout of that name; raises UnknownNameError listing the names that exist."""
    try:
        return LAYOUTS[name]
    except KeyError:
        raise UnknownNameError(
            who="layout",
            got=repr(name),
            expected=f"one of {', '.join(LAYOUTS)}",
            remedy="Give one of these with --layout.",
        ) from None
