"""The family of this distribution, as hooks of hicache."""

from __future__ import annotations

from hicache_core.hookspecs import Family, hookimpl
from hicache_core.spec import Capabilities, Platform, PoolGeometry, PoolSpec
from hicache_mamba.pool import capabilities, declare

_FAMILIES = (
    Family(
        name="mamba",
        api=(1, 1),
        geometry={
            "temporal_shape": "shape of a layer's recurrent state; empty, or with a 0, where there is none",
            "temporal_dtype": "its element type, such as float32; not needed where there is none",
            "conv_shapes": "shapes of the convolution states of a layer, one or more",
            "conv_dtype": "element type of all of them, such as bfloat16",
            "side_states": "optional: names of states without layers, each with its bytes a slot",
        },
        description="One slot is a checkpoint of all layers: recurrent, convolution and side states.",
    ),
)


@hookimpl
def hicache_pool_families() -> tuple[Family, ...]:
    """The family of state slots."""
    return _FAMILIES


@hookimpl
def hicache_pool_spec(family: str, geometry: PoolGeometry) -> PoolSpec:
    """The declaration of a pool of state slots."""
    return declare(family, geometry)


@hookimpl
def hicache_declare_capabilities(spec: PoolSpec, platform: Platform) -> Capabilities:
    """What the core gives strided rows, without layer_first."""
    return capabilities(spec, platform)
