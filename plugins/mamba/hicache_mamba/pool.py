"""Row bytes of recurrent states, from the shapes of their tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from hicache_core.spec import (
    ELEMENT_BYTES,
    BufferSpec,
    Capabilities,
    Platform,
    PoolGeometry,
    PoolSpec,
    RowUnit,
    default_capabilities,
    supported,
)

SLOT_PAIRS = frozenset({("kernel", "page_first"), ("direct", "page_first_direct")})
"""(io_backend, layout) pairs that serve slots: all layers of a buffer in one run on the host."""


def _whole(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _elements(shape: object) -> int | None:
    """Elements of a tensor, 0 where its shape is empty; None for what is no shape."""
    if not isinstance(shape, list | tuple) or not all(_whole(extent, 0) for extent in shape):
        return None
    return math.prod(shape) if shape else 0


def _temporal(geometry: PoolGeometry) -> Iterator[BufferSpec]:
    """The recurrent state; nothing for a conv-only model."""
    elements = _elements(geometry.params.get("temporal_shape"))
    if elements is None:
        raise geometry.refusal("temporal_shape", "a list of whole numbers; empty for a conv-only model")
    if elements:
        element_bytes = geometry.choice("temporal_dtype", ELEMENT_BYTES)
        yield BufferSpec(name="temporal", row_bytes=elements * element_bytes)


def _convs(geometry: PoolGeometry) -> Iterator[BufferSpec]:
    shapes = geometry.params.get("conv_shapes")
    counts = [_elements(shape) for shape in shapes] if isinstance(shapes, list | tuple) else []
    if not counts or not all(counts):
        raise geometry.refusal("conv_shapes", "one or more lists of whole numbers of at least 1")
    element_bytes = geometry.choice("conv_dtype", ELEMENT_BYTES)
    for number, elements in enumerate(filter(None, counts)):
        yield BufferSpec(name=f"conv_{number}", row_bytes=elements * element_bytes)


def _side_states(geometry: PoolGeometry) -> Iterator[BufferSpec]:
    """States that follow the slot and have no layers: they count once a slot."""
    states = geometry.params.get("side_states", {})
    if not isinstance(states, Mapping) or not all(_whole(nbytes, 1) for nbytes in states.values()):
        raise geometry.refusal("side_states", "a mapping of names to bytes a slot, each at least 1")
    for name, nbytes in states.items():
        yield BufferSpec(name=name, row_bytes=nbytes, per_layer=False)


def declare(family: str, geometry: PoolGeometry) -> PoolSpec:
    """The declaration of a pool of ``family``.

    Args:
        family: ``mamba``.
        geometry: figures of a model, as the family's schema lists them; pages of one slot.

    Raises:
        SpecError: a figure is missing or wrong, a side state has the name of another buffer, or the index
            space has pages of more than one slot.
    """
    return PoolSpec(
        pool=geometry.pool,
        family=family,
        index_space=geometry.index_space,
        row_unit=RowUnit.SLOT,
        layer_ids=geometry.layer_ids,
        buffers=(*_temporal(geometry), *_convs(geometry), *_side_states(geometry)),
        anchor=geometry.anchor,
    )


def capabilities(spec: PoolSpec, platform: Platform) -> Capabilities:
    """What the core gives strided rows, under the pairs that serve slots.

    Args:
        spec: the pool's declaration.
        platform: the platform it is asked for.
    """
    return default_capabilities(spec, platform).amended({"served_pairs": supported(SLOT_PAIRS)})
