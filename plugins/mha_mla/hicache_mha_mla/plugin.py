"""The families of this distribution, as hooks of hicache."""

from __future__ import annotations

from hicache_core.hookspecs import Family, hookimpl
from hicache_core.spec import PoolGeometry, PoolSpec
from hicache_mha_mla.pool import declare

_FAMILIES = (
    Family(
        name="mha",
        api=(1, 1),
        geometry={
            "kv_heads": "key-value heads of this rank",
            "k_head_dim": "elements of a key head",
            "v_head_dim": "elements of a value head; equal to k_head_dim where absent",
            "dtype": "element type of both, such as bfloat16",
            "k_scale_bytes": "bytes of a token's key scales, where they have a buffer of their own",
            "v_scale_bytes": "bytes of a token's value scales, where they have a buffer of their own",
        },
        description="Keys and values in rows of their own, one row per token; widths may differ.",
    ),
    Family(
        name="mla",
        api=(1, 1),
        geometry={
            "latent_dim": "elements of the latent vector",
            "rope_dim": "elements of the rotary part",
            "row_format": "bf16, fp8 (both parts one byte) or fp8_scaled (bf16 rotary part, fp32 scales)",
        },
        description="One latent row per token.",
    ),
    Family(
        name="k_only",
        api=(1, 1),
        geometry={
            "kv_heads": "heads of this rank",
            "k_head_dim": "elements of a key head",
            "dtype": "element type, such as bfloat16",
            "k_scale_bytes": "bytes of a token's key scales, where they have a buffer of their own",
        },
        description="Keys alone, one row per token.",
    ),
)


@hookimpl
def hicache_pool_families() -> tuple[Family, ...]:
    """The three families of token rows."""
    return _FAMILIES


@hookimpl
def hicache_pool_spec(family: str, geometry: PoolGeometry) -> PoolSpec:
    """The declaration of a pool of token rows."""
    return declare(family, geometry)
