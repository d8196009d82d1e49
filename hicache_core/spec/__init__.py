"""Declarations: pools, layouts, capabilities and platforms, as frozen values. No torch here."""

from hicache_core.spec.capability import (
    DIRECTIONS,
    SERVED_PAIRS,
    Capabilities,
    Capability,
    GraphCapture,
    IndexPlace,
    PointerDomain,
    Verdict,
    default_capabilities,
    not_applicable,
    supported,
    unsupported,
)
from hicache_core.spec.elements import ELEMENT_BYTES
from hicache_core.spec.layout import IO_BACKENDS, LAYOUTS, Layout, RowGrid, Strides, layout_named
from hicache_core.spec.platform import DEVICES, PLATFORMS, Alias, CopyKind, Platform, platform_named
from hicache_core.spec.pool import BufferSpec, IndexSpace, PoolGeometry, PoolSpec, Reuse, RowUnit, Span
from hicache_core.spec.retention import Retention, retention
from hicache_core.spec.storage import StorageKey, page_format

__all__ = [
    "DEVICES",
    "DIRECTIONS",
    "ELEMENT_BYTES",
    "IO_BACKENDS",
    "LAYOUTS",
    "PLATFORMS",
    "SERVED_PAIRS",
    "Alias",
    "BufferSpec",
    "Capabilities",
    "Capability",
    "CopyKind",
    "GraphCapture",
    "IndexPlace",
    "IndexSpace",
    "Layout",
    "Platform",
    "PointerDomain",
    "PoolGeometry",
    "PoolSpec",
    "Retention",
    "Reuse",
    "RowGrid",
    "RowUnit",
    "Span",
    "StorageKey",
    "Strides",
    "Verdict",
    "default_capabilities",
    "layout_named",
    "not_applicable",
    "page_format",
    "platform_named",
    "retention",
    "supported",
    "unsupported",
]
