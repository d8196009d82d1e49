"""The kernels themselves. They dereference addresses of pointer tables and know nothing of tensors.

Every argument is an int64 number, addresses included, so that a kernel is compiled once for a device and not
for each size of what it is given. What moves is cut into vectors of ``VECTOR`` bytes, the widest that all
addresses of a launch are multiples of, and a program moves ``TILE`` vectors. Numbers of a program are 64-bit;
those of its lanes count from the program's own start and may be 32-bit.
"""

# mypy: ignore-errors
# fmt: off

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _int64s(address):
    """The int64 values at an address."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit
def _row_addresses(bases, first_pages, groups, search, layers, page_stride, row_stride, page, layer, row):
    """Address of a row of a page in a layer, by the formula of the tables.

    ``search`` is the largest power of two below ``groups``: the group is found by steps of it and its halves.
    """
    group = page * 0
    step = search.to(tl.int64)
    while step > 0:
        later = group + step
        first = tl.load(_int64s(first_pages) + later, mask=later < groups, other=0x7FFFFFFFFFFFFFFF)
        group = tl.where(first <= page, later, group)
        step = step // 2
    base = tl.load(_int64s(bases) + group * layers + layer)
    inside = page - tl.load(_int64s(first_pages) + group)
    return base + inside * page_stride + row.to(tl.int64) * row_stride


@triton.jit
def _copy_words(target, source, kept, word: tl.constexpr, WORDS: tl.constexpr, VECTOR: tl.constexpr):
    inner = tl.arange(0, WORDS)[None, :]
    # An address from a table carries no alignment: without the hint each byte would be a load of its own.
    to = tl.multiple_of(target[:, None].to(tl.pointer_type(word)) + inner, (VECTOR, VECTOR))
    frm = tl.multiple_of(source[:, None].to(tl.pointer_type(word)) + inner, (VECTOR, VECTOR))
    tl.store(to, tl.load(frm, mask=kept[:, None]), mask=kept[:, None])


@triton.jit
def _copy(target, source, kept, VECTOR: tl.constexpr):
    """Copy ``VECTOR`` bytes from each source to each target address that is kept."""
    if VECTOR == 16:
        _copy_words(target, source, kept, tl.int32, 4, 16)
    elif VECTOR == 8:
        _copy_words(target, source, kept, tl.int32, 2, 8)
    elif VECTOR == 4:
        _copy_words(target, source, kept, tl.int32, 1, 4)
    elif VECTOR == 2:
        _copy_words(target, source, kept, tl.int16, 1, 2)
    else:
        _copy_words(target, source, kept, tl.int8, 1, 1)


@triton.jit
def gather_units(
    bases,
    first_pages,
    groups,
    search,
    layers,
    page_stride,
    row_stride,
    page_rows,
    row_vectors,
    pages,
    first_unit,
    vectors,
    target,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
):
    """Units in host order, one after another: layer by layer of a row, row by row of a page.

    Grid: tiles of ``vectors``, which all units of the launch have.
    """
    start = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    kept = lane < vectors - start
    # Where the program's first vector lies; lanes carry over from there.
    unit = first_unit + start // row_vectors
    row = unit // layers
    column = (start % row_vectors).to(tl.int32) + lane
    at_layer = (unit % layers).to(tl.int32) + column // row_vectors.to(tl.int32)
    at_row = (row % page_rows).to(tl.int32) + at_layer // layers.to(tl.int32)
    page_index = row // page_rows + at_row // page_rows.to(tl.int32)
    page = tl.load(_int64s(pages) + page_index, mask=kept, other=0)
    source = _row_addresses(
        bases,
        first_pages,
        groups,
        search,
        layers,
        page_stride,
        row_stride,
        page,
        at_layer % layers.to(tl.int32),
        at_row % page_rows.to(tl.int32),
    )
    source += (column % row_vectors.to(tl.int32)).to(tl.int64) * VECTOR
    _copy(target + (start + lane) * VECTOR, source, kept, VECTOR)


@triton.jit
def move_rows(
    target_bases, target_first_pages, target_groups, target_search, target_layers,
    target_page_stride, target_row_stride,
    source_bases, source_first_pages, source_groups, source_search, source_layers,
    source_page_stride, source_row_stride,
    target_pages, source_pages,
    first_layer, layer_step,
    layer_count,
    page_tiles, page_vectors, row_vectors,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
):
    """Whole pages: ``page_vectors`` of each page and layer, in rows of ``row_vectors``.

    Grid: pages x ``layer_count`` x ``page_tiles``, the last counting fastest.
    """
    program = tl.program_id(0).to(tl.int64)
    piece = program // page_tiles
    start = program % page_tiles * TILE
    index = piece // layer_count
    layer = first_layer + piece % layer_count * layer_step
    lane = tl.arange(0, TILE)
    kept = lane < page_vectors - start
    column = (start % row_vectors).to(tl.int32) + lane
    row = start // row_vectors + column // row_vectors.to(tl.int32)
    inside = (column % row_vectors.to(tl.int32)).to(tl.int64) * VECTOR
    target = _row_addresses(
        target_bases, target_first_pages, target_groups, target_search, target_layers,
        target_page_stride, target_row_stride,
        tl.load(_int64s(target_pages) + index),
        layer,
        row,
    )
    source = _row_addresses(
        source_bases, source_first_pages, source_groups, source_search, source_layers,
        source_page_stride, source_row_stride,
        tl.load(_int64s(source_pages) + index),
        layer,
        row,
    )
    _copy(target + inside, source + inside, kept, VECTOR)


@triton.jit
def move_tokens(
    target_bases, target_first_pages, target_groups, target_search, target_layers,
    target_page_stride, target_row_stride,
    target_page_rows,
    source_bases, source_first_pages, source_groups, source_search, source_layers,
    source_page_stride, source_row_stride,
    source_page_rows,
    target_tokens, source_tokens,
    row_tokens,
    first_layer, layer_step,
    layer_tiles,
    vectors,
    span_offset, span_stride, span_vectors,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
):
    """One span of each listed token; a pair of which either number is negative is skipped.

    Grid: layers x ``layer_tiles`` of the ``vectors`` that the tokens of one layer have.
    """
    program = tl.program_id(0).to(tl.int64)
    layer = first_layer + program // layer_tiles * layer_step
    start = program % layer_tiles * TILE
    lane = tl.arange(0, TILE)
    listed = lane < vectors - start
    column = (start % span_vectors).to(tl.int32) + lane
    index = start // span_vectors + column // span_vectors.to(tl.int32)
    to = tl.load(_int64s(target_tokens) + index, mask=listed, other=-1)
    frm = tl.load(_int64s(source_tokens) + index, mask=listed, other=-1)
    kept = (to >= 0) & (frm >= 0)
    to = tl.where(kept, to, 0)
    frm = tl.where(kept, frm, 0)
    inside = span_offset + (column % span_vectors.to(tl.int32)).to(tl.int64) * VECTOR
    target = _row_addresses(
        target_bases, target_first_pages, target_groups, target_search, target_layers,
        target_page_stride, target_row_stride,
        to // row_tokens // target_page_rows,
        layer,
        to // row_tokens % target_page_rows,
    )
    source = _row_addresses(
        source_bases, source_first_pages, source_groups, source_search, source_layers,
        source_page_stride, source_row_stride,
        frm // row_tokens // source_page_rows,
        layer,
        frm // row_tokens % source_page_rows,
    )
    target += inside + to % row_tokens * span_stride
    source += inside + frm % row_tokens * span_stride
    _copy(target, source, kept, VECTOR)
