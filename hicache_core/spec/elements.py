"""Element types that geometries name, and the bytes of one element."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "uint8": 1,
    }
)
"""Bytes of one element, by the name that torch gives its type."""
