"""Row bytes of index pages, from the width of a key and its quant blocks."""

from __future__ import annotations

from hicache_core.spec import BufferSpec, PoolGeometry, PoolSpec, RowUnit

E4M3_BYTES = 1
FP32_BYTES = 4


def declare(geometry: PoolGeometry) -> PoolSpec:
    """The declaration of a pool of index pages; its layers are those that own an indexer, possibly none.

    A page row is ``[slots x key][slots x scales]``.

    Args:
        geometry: figures of a model, as the family's schema lists them.

    Raises:
        SpecError: a figure is missing, or quant blocks do not fill a key.
    """
    dim, block = geometry.number("index_head_dim"), geometry.number("quant_block")
    if dim % block:
        raise geometry.refusal(
            "index_head_dim", "a key of whole quant blocks", where=f" in quant blocks of {block}"
        )
    slot_bytes = dim * E4M3_BYTES + dim // block * FP32_BYTES
    rows = BufferSpec(name="index_k", row_bytes=geometry.index_space.page_slots * slot_bytes)
    return geometry.declared(RowUnit.PAGE, (rows,))
