"""What a model file says, as frozen values: a model, its variants and their pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from hicache_core.errors import SpecError, UnknownNameError
from hicache_core.spec import IndexSpace, Platform, PoolGeometry, Reuse, platform_named

FULL_SPACE = "full"
"""The index space of the anchor: slots of all tokens."""


@frozen(kw_only=True)
class Figure:
    """A figure of the model's configuration.

    Args:
        value: the figure, as the model file has it.
        status: ``read`` in the source, ``derived`` by arithmetic on figures that were, or ``uncertain``.
        source: where it was read.
        notes: what to know about it.
    """

    value: Any
    status: str
    source: str
    notes: str = ""


@frozen(kw_only=True)
class PoolEntry:
    """A pool of a variant.

    Args:
        pool: name of the pool, unique in its variant.
        family: the family that declares it.
        index_space: name of the space whose slots name its rows.
        anchor: whether its slots name the pages of the group.
        layer_ids: model layer of each of the pool's own layers, ascending; draft layers last.
        params: the family's own figures.
        reuse: which pages a prefix needs.
        window_slots: slots that trailing pages must cover; None unless ``reuse`` is TRAILING_PAGES.
        derive_from: the pool whose slots it rides on; None where it owns its slots.
        draft_layers: how many of the last ``layer_ids`` are layers of a draft model.
        row_bytes: bytes of one row of one layer, all buffers together; what a declaration is checked against.
        status: ``read``, ``derived`` or ``uncertain``.
        source: how the row is made up, and where that was read.
        notes: what to know about it.
    """

    pool: str
    family: str
    index_space: str
    anchor: bool
    layer_ids: tuple[int, ...]
    params: Mapping[str, Any]
    reuse: Reuse
    window_slots: int | None
    derive_from: str | None
    draft_layers: int
    row_bytes: int
    status: str
    source: str
    notes: str = ""

    @property
    def owns_slots(self) -> bool:
        """Whether the pool has an allocator of its own."""
        return self.derive_from is None

    def geometry(self, page_slots: int, layers: int | None = None) -> PoolGeometry:
        """What the family is asked to declare.

        Args:
            page_slots: slots of a page of the pool's index space.
            layers: keep the first so many of the pool's own layers; None keeps all.
        """
        return PoolGeometry(
            pool=self.pool,
            family=self.family,
            index_space=IndexSpace(
                name=self.index_space,
                page_slots=page_slots,
                reuse=self.reuse,
                window_slots=self.window_slots,
            ),
            layer_ids=self.layer_ids[:layers],
            params=self.params,
            anchor=self.anchor,
        )


@frozen(kw_only=True)
class Variant:
    """A row format of a model.

    Args:
        model: id of its model.
        name: name of the variant.
        platforms: names of the platforms on which it exists; simulators are always among them.
        index_spaces: slots of a page of each index space; None where the operator chooses.
        page_slots_default: what an open space takes where the operator says nothing.
        pools: its pools, in the order of the file.
        notes: what to know about it.
    """

    model: str
    name: str
    platforms: tuple[str, ...]
    index_spaces: Mapping[str, int | None]
    page_slots_default: int
    pools: tuple[PoolEntry, ...]
    notes: str = ""

    def geometries(
        self, page_slots: int | None = None, layers: int | None = None
    ) -> tuple[PoolGeometry, ...]:
        """The geometry of every pool, with index spaces resolved.

        Args:
            page_slots: the operator's slots per page, for spaces that the model leaves open; None takes the
                model's own, or its default.
            layers: keep the first so many layers of each pool's own list; None keeps all.

        Raises:
            SpecError: ``page_slots`` contradicts the model, or a figure is below 1.
        """
        for name, figure in (("page_slots", page_slots), ("layers", layers)):
            if figure is not None and figure < 1:
                self._refuse(f"{name}={figure}", "a whole number of at least 1", f"Give {name} from 1 up.")
        fixed = self.index_spaces[FULL_SPACE]
        if fixed is not None and page_slots not in (None, fixed):
            self._refuse(
                f"page_slots={page_slots}",
                f"{fixed}, which this variant fixes",
                f"Leave page_slots out, or give {fixed}.",
            )
        chosen = self.page_slots_default if page_slots is None else page_slots
        slots = {space: fixed or chosen for space, fixed in self.index_spaces.items()}
        return tuple(entry.geometry(slots[entry.index_space], layers) for entry in self.pools)

    def _refuse(self, got: str, expected: str, remedy: str) -> None:
        raise SpecError(who=f"{self.model}/{self.name}", got=got, expected=expected, remedy=remedy)


@frozen(kw_only=True)
class Model:
    """A model: layers, page size and variants.

    Args:
        id: the name that operators give.
        name: its name where checkpoints are published.
        layer_count: layers of the target model, without draft layers.
        page_slots: slots of a page of the full index space; None where the operator chooses.
        page_slots_default: what an operator gets who chooses nothing.
        default_variant: variant by name of platform.
        config: figures of the model's configuration, by name.
        variants: variants by name, in the order of the file.
        notes: what to know about it, uncertainties first of all.
    """

    id: str
    name: str
    layer_count: int
    page_slots: int | None
    page_slots_default: int
    default_variant: Mapping[str, str]
    config: Mapping[str, Figure]
    variants: Mapping[str, Variant]
    notes: str = ""

    def variant(self, name: str | None, platform: str | Platform) -> Variant:
        """The variant ``name``, or the default one of a platform: a profile, or the name of one of the core.

        Where the model states no default for the platform, the first variant that lists it is taken, and
        where none does, the first of all: whether a variant exists on the platform is for the caller to
        check against ``Variant.platforms``, so that this refusal stands beside all others.

        Raises:
            UnknownNameError: no such variant, or no such platform.
        """
        facts = platform if isinstance(platform, Platform) else platform_named(platform)
        if name is None:
            names = facts.variant_names
            defaults = [self.default_variant[known] for known in names if known in self.default_variant]
            listing = [v.name for v in self.variants.values() if set(names) & set(v.platforms)]
            name = (*defaults, *listing, *self.variants)[0]
        try:
            return self.variants[name]
        except KeyError:
            raise UnknownNameError(
                who=f"model '{self.id}'",
                got=f"variant '{name}'",
                expected=f"one of {', '.join(self.variants)}",
                remedy="Give one of these with --variant, or leave it out.",
            ) from None
