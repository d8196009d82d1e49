"""Stand-ins: a declaration in one line, and a plugin that owns whatever declarations it is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hicache_core.hookspecs import API_VERSION, Family, hookimpl
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import BufferSpec, IndexSpace, PoolGeometry, PoolSpec, RowUnit


def pool_spec(
    *row_bytes: int,
    page_slots: int = 4,
    layer_ids: Iterable[int] = (0, 1, 2),
    unit: RowUnit = RowUnit.TOKEN,
    pool: str = "kv",
    anchor: bool = True,
    space: IndexSpace | None = None,
) -> PoolSpec:
    """A declaration with a buffer ``b0``, ``b1``, ... for each of ``row_bytes``, in index space ``full``."""
    return PoolSpec(
        pool=pool,
        family="rows",
        index_space=space or IndexSpace(name="full", page_slots=page_slots),
        row_unit=unit,
        layer_ids=layer_ids,
        buffers=[BufferSpec(name=f"b{i}", row_bytes=size) for i, size in enumerate(row_bytes)],
        anchor=anchor,
    )


def registry_of(specs: Sequence[PoolSpec], **hooks: Any) -> PluginRegistry:
    """A registry with one plugin that owns the families of ``specs``.

    Args:
        specs: the declarations that it knows.
        hooks: further hooks by name, functions that are not marked yet.
    """
    owner = _Owner({spec.pool: spec for spec in specs}, {spec.family: None for spec in specs})
    for name, function in hooks.items():
        setattr(owner, name, hookimpl(function))
    registry = PluginRegistry()
    registry.register(owner, name="rig")
    return registry


class _Owner:
    """A plugin whose families are those of some declarations."""

    def __init__(self, specs: Mapping[str, PoolSpec], families: Iterable[str]) -> None:
        self._specs = specs
        self._families = tuple(families)

    @hookimpl
    def hicache_pool_families(self) -> tuple[Family, ...]:
        """The families of the declarations."""
        return tuple(
            Family(name=name, api=(API_VERSION, API_VERSION), geometry={}, description="rows of a rig")
            for name in self._families
        )

    @hookimpl
    def hicache_pool_spec(self, family: str, geometry: PoolGeometry) -> PoolSpec:
        """The declaration that was given for the pool."""
        return self._specs[geometry.pool]
