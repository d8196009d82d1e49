"""Row bytes of attention pools, from their geometry."""

from __future__ import annotations

from collections.abc import Callable

from hicache_core.spec import ELEMENT_BYTES, BufferSpec, PoolGeometry, PoolSpec, RowUnit

FP8_SCALE_GROUP = 128
FP32_BYTES = 4
BF16_BYTES = 2


def _key_row_bytes(geometry: PoolGeometry) -> int:
    heads = geometry.number("kv_heads")
    return heads * geometry.number("k_head_dim") * geometry.choice("dtype", ELEMENT_BYTES)


def _scales(geometry: PoolGeometry, *names: str) -> tuple[BufferSpec, ...]:
    """A buffer of scales for each name whose ``<name>_bytes`` is neither absent nor zero."""
    return tuple(
        BufferSpec(name=name, row_bytes=geometry.number(f"{name}_bytes"))
        for name in names
        if geometry.params.get(f"{name}_bytes", 0) != 0
    )


def _keys_and_values(geometry: PoolGeometry) -> tuple[BufferSpec, ...]:
    k_bytes = _key_row_bytes(geometry)
    k_dim = geometry.number("k_head_dim")
    v_bytes = k_bytes // k_dim * geometry.number("v_head_dim", k_dim)
    rows = BufferSpec(name="k", row_bytes=k_bytes), BufferSpec(name="v", row_bytes=v_bytes)
    return (*rows, *_scales(geometry, "k_scale", "v_scale"))


def _keys(geometry: PoolGeometry) -> tuple[BufferSpec, ...]:
    return (BufferSpec(name="k", row_bytes=_key_row_bytes(geometry)), *_scales(geometry, "k_scale"))


def _scaled_fp8(latent: int, rope: int) -> int:
    """One byte a latent element, an fp32 scale per group of 128 of them, the rotary part in bf16."""
    return latent + -(-latent // FP8_SCALE_GROUP) * FP32_BYTES + rope * BF16_BYTES


_LATENT_ROWS: dict[str, Callable[[int, int], int]] = {
    "bf16": lambda latent, rope: (latent + rope) * BF16_BYTES,
    "fp8": lambda latent, rope: latent + rope,
    "fp8_scaled": _scaled_fp8,
}


def _latent(geometry: PoolGeometry) -> tuple[BufferSpec, ...]:
    row_bytes = geometry.choice("row_format", _LATENT_ROWS)
    return (
        BufferSpec(
            name="kv", row_bytes=row_bytes(geometry.number("latent_dim"), geometry.number("rope_dim"))
        ),
    )


_BUFFERS = {"mha": _keys_and_values, "mla": _latent, "k_only": _keys}


def declare(family: str, geometry: PoolGeometry) -> PoolSpec:
    """The declaration of a pool of ``family``.

    Args:
        family: ``mha``, ``mla`` or ``k_only``.
        geometry: figures of a model, as the family's schema lists them.

    Raises:
        SpecError: a figure is missing or out of range.
    """
    return PoolSpec(
        pool=geometry.pool,
        family=family,
        index_space=geometry.index_space,
        row_unit=RowUnit.TOKEN,
        layer_ids=geometry.layer_ids,
        buffers=_BUFFERS[family](geometry),
        anchor=geometry.anchor,
    )
