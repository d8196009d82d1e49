"""The device rows of a pool, which the engine owns: views of its tensors, held against the declaration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import field, frozen

from hicache_core.errors import BufferMismatchError
from hicache_core.spec import BufferSpec, PoolSpec


@frozen(kw_only=True, eq=False)
class DevicePool:
    """The device rows of a pool, which belong to the serving engine.

    Args:
        spec: the pool's declaration.
        layers: for each buffer, one tensor per layer of the pool, or one in all where the buffer has no layer
            axis; row r of a tensor holds page r, or token slot r, in ``row_bytes`` contiguous bytes of any
            dtype; rows may lie further apart.
    """

    spec: PoolSpec
    layers: Mapping[str, Sequence[torch.Tensor]] = field(factory=dict)

    @property
    def pages(self) -> int | None:
        """Whole pages that the shortest layer holds; None for a pool without rows."""
        rows = [layer.shape[0] for layers in self.layers.values() for layer in layers]
        return min(rows) // self.spec.page_rows if rows else None

    @property
    def row_bytes(self) -> dict[str, int]:
        """Bytes of the rows that there are, by buffer; of unequal layers one that is not as declared."""
        found = {}
        for buffer in self.spec.buffers:
            layers = [layer for layer in self.layers.get(buffer.name, ()) if layer.dim() > 1 and len(layer)]
            sizes = {layer[0].numel() * layer.element_size() for layer in layers}
            found[buffer.name] = min(sizes - {buffer.row_bytes}, default=buffer.row_bytes)
        return found


def _mismatch(who: str, got: str, expected: str) -> BufferMismatchError:
    return BufferMismatchError(
        who=who,
        got=got,
        expected=expected,
        remedy="Give the tensors that the engine allocated for this pool.",
    )


def _unviewable(got: str, expected: str, remedy: str) -> BufferMismatchError:
    return BufferMismatchError(who="paged view", got=got, expected=expected, remedy=remedy)


def paged_view(layer: torch.Tensor, rows_per_page: int, first_row: int = 0) -> torch.Tensor:
    """A view, never a copy, in which each row is a page of ``rows_per_page`` rows of ``layer``.

    ::

        layer   [before first_row][page 0][page 1]...[page n-1][rows that fill no page]
        view                      [row 0 ][row 1 ]...[row n-1 ]

    Args:
        layer: the rows of one layer, ``[rows, ...]``, a page's rows in one run of bytes.
        rows_per_page: rows of one page, at least 1.
        first_row: where page 0 starts; the rows before it are no part of the view.

    Returns:
        ``[(rows - first_row) // rows_per_page, rows_per_page * row elements]``; 0 pages where none is full.

    Raises:
        BufferMismatchError: a figure is out of range, or a page is not one run of bytes.
    """
    if layer.dim() < 2:
        raise _unviewable(
            f"a tensor of {layer.dim()} dimensions", "rows, then their elements", "Give [rows, elements]."
        )
    if rows_per_page < 1:
        raise _unviewable(f"rows_per_page={rows_per_page}", "at least 1", "Give the rows of one page.")
    if not 0 <= first_row <= layer.shape[0]:
        raise _unviewable(
            f"first_row={first_row}",
            f"0 to {layer.shape[0]}, the rows of the layer",
            "Give a row of the layer.",
        )
    pages = (layer.shape[0] - first_row) // rows_per_page
    rows = layer.narrow(0, first_row, pages * rows_per_page).view(pages, rows_per_page, *layer.shape[1:])
    if pages and not rows[0].is_contiguous():
        raise _unviewable(
            f"rows of shape {tuple(layer.shape)} at strides {layer.stride()}",
            f"{rows_per_page} rows in one run of bytes",
            "Give the tensor that the engine allocated, not a part of its columns.",
        )
    return rows.flatten(1)


def _check_layer(who: str, layer: torch.Tensor, buffer: BufferSpec) -> None:
    if layer.dim() < 2:
        raise _mismatch(who, f"a tensor of {layer.dim()} dimensions", "rows, then their elements")
    if not layer.shape[0]:
        raise BufferMismatchError(
            who=who,
            got="a layer of no rows",
            expected="rows in every layer that the pool lists",
            remedy="Leave layers that own nothing out of layer_ids, and their tensors out of the pool.",
        )
    row_bytes = layer[0].numel() * layer.element_size()
    if row_bytes != buffer.row_bytes:
        raise _mismatch(who, f"rows of {row_bytes} bytes", f"{buffer.row_bytes}, as the host rows")
    if not layer[0].is_contiguous():
        raise _mismatch(who, f"a row of strides {layer[0].stride()}", "contiguous rows")
    if layer.shape[0] > 1 and layer.stride(0) * layer.element_size() < buffer.row_bytes:
        raise _mismatch(who, f"rows {layer.stride(0) * layer.element_size()} bytes apart", "rows apart")


def check_device_pool(device_pool: DevicePool) -> None:
    """Hold device tensors against the declaration; BufferMismatchError before anything is allocated."""
    spec = device_pool.spec
    who = f"pool '{spec.pool}' ({spec.family})"
    if set(device_pool.layers) != {buffer.name for buffer in spec.buffers}:
        raise _mismatch(
            who, f"buffers {sorted(device_pool.layers)}", f"{sorted(b.name for b in spec.buffers)}"
        )
    for buffer in spec.buffers:
        layers = device_pool.layers[buffer.name]
        if len(layers) != spec.layers_of(buffer):
            raise _mismatch(f"{who}, {buffer.name}", f"{len(layers)} layers", f"{spec.layers_of(buffer)}")
        for number, layer in enumerate(layers):
            _check_layer(f"{who}, {buffer.name}, layer {number}", layer, buffer)
        strides = {layer.stride(0) * layer.element_size() for layer in layers if layer.shape[0] > 1}
        if len(strides) > 1:
            raise _mismatch(f"{who}, {buffer.name}", f"row strides {sorted(strides)}", "one in all layers")


def check_apart(device_pools: Sequence[DevicePool]) -> None:
    """Refuse device rows that share bytes, in one pool or in two: what one load wrote, another would lose.

    Layers may interleave: at one row stride, each in bytes of its own between the others' rows.
    """
    spans = sorted(
        (
            (layer.data_ptr(), layer.shape[0], layer.stride(0) * layer.element_size(), buffer.row_bytes, pool)
            for pool in device_pools
            for buffer in pool.spec.buffers
            for layer in pool.layers[buffer.name]
            if layer.shape[0]
        ),
        key=lambda span: span[0],
    )
    open_spans: list[tuple[int, int, int, int, DevicePool]] = []
    for span in spans:
        start, _, stride, row_bytes, pool = span
        open_spans = [s for s in open_spans if s[0] + (s[1] - 1) * s[2] + s[3] > start]
        for first, _, other_stride, other_bytes, _ in open_spans:
            inside = (start - first) % stride if stride else 0
            if stride != other_stride or inside < other_bytes or inside + row_bytes > stride:
                raise _mismatch(
                    f"pool '{pool.spec.pool}' ({pool.spec.family})",
                    f"rows at {start:#x} that share bytes with rows at {first:#x}",
                    "rows of their own",
                )
        open_spans.append(span)
