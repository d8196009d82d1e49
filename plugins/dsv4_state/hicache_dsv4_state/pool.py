"""Row bytes of state rings, from the slots of a ring and the bytes of a slot."""

from __future__ import annotations

from attrs import evolve

from hicache_core.spec import BufferSpec, PoolGeometry, PoolSpec, RowUnit


def _of_all_layers(geometry: PoolGeometry, figure: str) -> int:
    """The figure that all layers share, given as one number or as one per layer."""
    given = geometry.params.get(figure)
    if not isinstance(given, list | tuple):
        return geometry.number(figure)
    distinct = {evolve(geometry, params={figure: one}).number(figure) for one in given}
    if len(given) != len(geometry.layer_ids) or len(distinct) != 1:
        raise geometry.refusal(
            figure,
            "one number, or the same number once per layer: all layers share ring and slot bytes",
            where=f" for {len(geometry.layer_ids)} layers",
        )
    return distinct.pop()


def declare(geometry: PoolGeometry) -> PoolSpec:
    """The declaration of a pool of state rings.

    Args:
        geometry: figures of a model, as the family's schema lists them.

    Raises:
        SpecError: a figure is missing or differs between layers, or the ring does not divide the page.
    """
    ring_slots = _of_all_layers(geometry, "ring_slots")
    if geometry.index_space.page_slots % ring_slots:
        raise geometry.refusal(
            "ring_slots",
            "a ring that divides the page, so that each page has a ring of its own",
            where=f" for pages of {geometry.index_space.page_slots} slots",
        )
    ring = BufferSpec(name="state", row_bytes=ring_slots * _of_all_layers(geometry, "slot_bytes"))
    return geometry.declared(RowUnit.PAGE, (ring,))
