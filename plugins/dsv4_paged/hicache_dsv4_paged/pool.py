"""Rows of compressed pages, from compress ratio and row format."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import field, frozen
from attrs import validators as v

from hicache_core.spec import BufferSpec, PoolGeometry, PoolSpec, RowUnit, Span


@frozen(kw_only=True)
class RowFormat:
    """Bytes of one compressed slot, and the multiple to which a page row is padded.

    A page row is ``[slots x value][slots x scale][padding]``.

    Args:
        value_bytes: bytes of the value of a slot.
        scale_bytes: bytes of its scales; 0 where it has none.
        row_align_bytes: the multiple to which a row is padded.
        token_ratios: compress ratios whose slots may be copied one by one.
    """

    value_bytes: int = field(validator=[v.instance_of(int), v.ge(1)])
    scale_bytes: int = field(default=0, validator=[v.instance_of(int), v.ge(0)])
    row_align_bytes: int = field(default=1, validator=[v.instance_of(int), v.ge(1)])
    token_ratios: frozenset[int] = frozenset()

    def row_bytes(self, slots: int) -> int:
        """Bytes of a page row of ``slots`` compressed slots."""
        used = slots * (self.value_bytes + self.scale_bytes)
        return -(-used // self.row_align_bytes) * self.row_align_bytes

    def spans(self, slots: int) -> tuple[Span, ...]:
        """Where the value and the scales of one slot lie in a page row of ``slots`` compressed slots."""
        places = ((0, self.value_bytes), (slots * self.value_bytes, self.scale_bytes))
        return tuple(Span(offset=offset, stride=size, nbytes=size) for offset, size in places if size)

    def page_row(self, slots: int, ratio: int) -> BufferSpec:
        """A page row of ``slots`` compressed slots, with the spans of one where it may be copied alone."""
        spans = self.spans(slots) if ratio in self.token_ratios else ()
        return BufferSpec(
            name="kv",
            row_bytes=self.row_bytes(slots),
            spans=spans,
            row_tokens=slots if spans else 1,
        )


ROW_FORMATS: Mapping[str, RowFormat] = {
    # 448 e4m3 + 64 bf16, then 7 ue8m0 scales and a pad byte; whole row a multiple of 576.
    "v4": RowFormat(value_bytes=576, scale_bytes=8, row_align_bytes=576, token_ratios=frozenset({4})),
    # 512 e4m3, then 16 bytes of scales; whole row a multiple of 512.
    "v41": RowFormat(value_bytes=512, scale_bytes=16, row_align_bytes=512),
    # 512 elements of bf16.
    "unified_bf16": RowFormat(value_bytes=1024),
    # 448 e4m3 and 14 bytes of scales in a stride of 512; the rotary part is a pool of its own.
    "unified_fp8": RowFormat(value_bytes=512),
    # 64 elements of bf16, beside unified_fp8.
    "unified_fp8_rope": RowFormat(value_bytes=128),
    # 512 elements of one byte, scaled uniformly.
    "uniform_fp8": RowFormat(value_bytes=512),
    # 128 e4m3 and one fp32 scale: the keys of the indexer.
    "index_fp8": RowFormat(value_bytes=128, scale_bytes=4),
}


def _row_format(geometry: PoolGeometry) -> RowFormat:
    if geometry.params.get("row_format") is None:
        return RowFormat(
            value_bytes=geometry.number("value_bytes"),
            scale_bytes=geometry.number("scale_bytes") if geometry.params.get("scale_bytes") else 0,
            row_align_bytes=geometry.number("row_align_bytes", 1),
        )
    return geometry.choice("row_format", ROW_FORMATS)


def _page_row(geometry: PoolGeometry) -> BufferSpec:
    ratio = geometry.number("compress_ratio")
    slots, rest = divmod(geometry.index_space.page_slots, ratio)
    if rest:
        raise geometry.refusal(
            "compress_ratio",
            "a ratio that divides the page, so that compressed and full pages have the same numbers",
            where=f" for pages of {geometry.index_space.page_slots} slots",
        )
    return _row_format(geometry).page_row(slots, ratio)


_BUFFERS: Mapping[str, Callable[[PoolGeometry], tuple[BufferSpec, ...]]] = {
    "dsv4_anchor": lambda _: (),
    "dsv4_paged": lambda geometry: (_page_row(geometry),),
}


def declare(family: str, geometry: PoolGeometry) -> PoolSpec:
    """The declaration of a pool of ``family``.

    Args:
        family: ``dsv4_paged``, or ``dsv4_anchor`` for a pool without bytes.
        geometry: figures of a model, as the family's schema lists them.

    Raises:
        SpecError: a ratio that does not divide the page, or an unknown row format.
    """
    return geometry.declared(RowUnit.PAGE, _BUFFERS[family](geometry))
