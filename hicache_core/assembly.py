"""From a model, or a file of hand-made pools, to the group that the solver is asked about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen
from attrs import validators as v

from hicache_core.compat import Member, Query
from hicache_core.models import Variant, load_model, load_pools
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import Platform, PoolSpec


def _specs(specs: Iterable[PoolSpec]) -> tuple[PoolSpec, ...]:
    return tuple(specs)


@frozen(kw_only=True)
class PoolGroup:
    """The pools of a model's variant, or of a file, as the installed plugins declare them.

    Args:
        title: what messages call it: ``model/variant``, or the file.
        specs: declarations of the pools whose families are there.
        missing: the families that no installed plugin brings, by the name of the pool that needs them.
        variant_platforms: platforms on which the variant exists; None where there is no variant.
    """

    title: str = field(validator=v.instance_of(str))
    specs: tuple[PoolSpec, ...] = field(converter=_specs)
    missing: Mapping[str, str] = field(factory=dict)
    variant_platforms: tuple[str, ...] | None = None

    def required(self, registry: PluginRegistry) -> dict[str, str]:
        """The pools that are missing, each with what to do about it."""
        refused = ", ".join(plugin.name for plugin in registry.refused)
        mend = f", or mend what was refused ({refused})" if refused else ""
        return {
            pool: f"Install a plugin that brings family '{family}'{mend}; see `hicache plugins`."
            for pool, family in self.missing.items()
        }

    def query(self, registry: PluginRegistry, platform: Platform, **choices: Any) -> Query:
        """What the solver is asked about the whole group; a pool that is missing is required.

        Args:
            registry: the plugins that declare capabilities.
            platform: facts about the device.
            choices: the other fields of :class:`~hicache_core.compat.Query`: io_backend, layout and options.
        """
        return Query(
            platform=platform,
            pools=[
                Member(spec=spec, capabilities=registry.capabilities(spec, platform)) for spec in self.specs
            ],
            variant_platforms=self.variant_platforms,
            required=self.required(registry),
            **choices,
        )


def variant_group(
    variant: Variant, registry: PluginRegistry, *, page_slots: int | None = None, layers: int | None = None
) -> PoolGroup:
    """The pools of a variant.

    Args:
        variant: a variant of a model.
        registry: the plugins that declare the pools.
        page_slots: slots of a page, where the model leaves it open.
        layers: keep the first so many layers of each pool's own list; None keeps all.

    Raises:
        SpecError: a figure contradicts the model, or a family refuses the geometry.
    """
    geometries = variant.geometries(page_slots, layers)
    return PoolGroup(
        title=f"{variant.model}/{variant.name}",
        specs=[registry.spec(g) for g in geometries if g.family in registry.families],
        missing={g.pool: g.family for g in geometries if g.family not in registry.families},
        variant_platforms=variant.platforms,
    )


def model_group(
    model: str,
    variant: str | None,
    platform: Platform,
    registry: PluginRegistry,
    *,
    page_slots: int | None = None,
) -> PoolGroup:
    """The pools of a model, in the named variant or in the default one of a platform.

    Raises:
        UnknownNameError: no such model or variant.
        ModelFileError: the model file cannot be read.
        SpecError: ``page_slots`` contradicts the model.
    """
    return variant_group(load_model(model).variant(variant, platform), registry, page_slots=page_slots)


def file_group(path: str | Path, registry: PluginRegistry) -> PoolGroup:
    """The hand-made pools of a file; see :func:`~hicache_core.models.load_pools` for its form.

    Raises:
        PoolsFileError: the file cannot be read, breaks a rule of its form, or holds a figure that the family
            refuses or does not know.
    """
    specs, missing = [], {}
    for entry in load_pools(path):
        family = registry.families.get(entry.geometry.family)
        if family is None:
            missing[entry.geometry.pool] = entry.geometry.family
            continue
        entry.check_figures(tuple(family.geometry))
        with entry.refusals():
            specs.append(registry.spec(entry.geometry))
    return PoolGroup(title=str(path), specs=specs, missing=missing)
