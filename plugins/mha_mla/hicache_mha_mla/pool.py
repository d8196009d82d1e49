"""Row bytes of attention pools, from their geometry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from hicache_core.errors import SpecError
from hicache_core.spec import BufferSpec, PoolGeometry, PoolSpec, RowUnit

ELEMENT_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}

_Choice = TypeVar("_Choice")

FP8_SCALE_GROUP = 128
FP32_BYTES = 4
BF16_BYTES = 2


def _choice(geometry: PoolGeometry, name: str, choices: Mapping[str, _Choice]) -> _Choice:
    value = geometry.params.get(name)
    if not isinstance(value, str) or value not in choices:
        raise SpecError(
            who=f"pool '{geometry.pool}' ({geometry.family})",
            got=f"geometry {name}={value!r}",
            expected=f"one of {', '.join(choices)}",
            remedy=f"Correct {name} in the model file.",
        )
    return choices[value]


def _key_row_bytes(geometry: PoolGeometry) -> int:
    heads = geometry.number("kv_heads")
    return heads * geometry.number("k_head_dim") * _choice(geometry, "dtype", ELEMENT_BYTES)


def _keys_and_values(geometry: PoolGeometry) -> tuple[BufferSpec, ...]:
    k_bytes = _key_row_bytes(geometry)
    k_dim = geometry.number("k_head_dim")
    v_bytes = k_bytes // k_dim * geometry.number("v_head_dim", k_dim)
    return BufferSpec(name="k", row_bytes=k_bytes), BufferSpec(name="v", row_bytes=v_bytes)


def _keys(geometry: PoolGeometry) -> tuple[BufferSpec, ...]:
    return (BufferSpec(name="k", row_bytes=_key_row_bytes(geometry)),)


def _scaled_fp8(latent: int, rope: int) -> int:
    """One byte a latent element, an fp32 scale per group of 128 of them, the rotary part in bf16."""
    return latent + -(-latent // FP8_SCALE_GROUP) * FP32_BYTES + rope * BF16_BYTES


_LATENT_ROWS: dict[str, Callable[[int, int], int]] = {
    "bf16": lambda latent, rope: (latent + rope) * BF16_BYTES,
    "fp8": lambda latent, rope: latent + rope,
    "fp8_scaled": _scaled_fp8,
}


def _latent(geometry: PoolGeometry) -> tuple[BufferSpec, ...]:
    row_bytes = _choice(geometry, "row_format", _LATENT_ROWS)
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
