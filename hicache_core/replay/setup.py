"""What a replay is asked to do, and the pools that it makes of a model."""

from __future__ import annotations

from attrs import field, frozen

from hicache_core.compat import Member, Query, solve
from hicache_core.errors import CapacityError
from hicache_core.models import Variant, load_model
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import IndexSpace, Platform, PoolSpec, Retention, Reuse, platform_named, retention
from hicache_core.spec.checks import whole


@frozen(kw_only=True)
class ReplayConfig:
    """The choices of an operator; see ``hicache replay --help``.

    Args:
        model: name of a model, or path of a model file.
        variant: name of a variant, or None for the platform's default.
        platform: name of a platform.
        io_backend, layout: how rows move and lie.
        policy: when blocks are backed up.
        device_blocks, host_blocks: blocks that each tier holds.
        swa_pages: device pages of an index space of windows; None for as many as the blocks can have. The
            host has as many more as it has blocks.
        state_slots: device slots of an index space of checkpoints; None for STATE_SLOTS.
        page_slots: slots of a page, where the model leaves it open.
        layers: layers that each pool keeps; None for all.
        block_tokens: tokens that one block of the trace stands for; None for the trace's own figure.
        limit: requests to replay; None for all.
        seed: seed of the content and of the simulator.
        device: which runtime.
    """

    model: str
    variant: str | None = None
    platform: str
    io_backend: str
    layout: str
    policy: str = "write_through"
    device_blocks: int = field(validator=whole(1))
    host_blocks: int = field(validator=whole(1))
    swa_pages: int | None = field(default=None, validator=whole(1, or_none=True))
    state_slots: int | None = field(default=None, validator=whole(1, or_none=True))
    page_slots: int | None = field(default=None, validator=whole(1, or_none=True))
    layers: int | None = field(default=None, validator=whole(1, or_none=True))
    block_tokens: int | None = field(default=None, validator=whole(1, or_none=True))
    limit: int | None = field(default=None, validator=whole(1, or_none=True))
    seed: int = 0
    device: str = "sim"


STATE_SLOTS = 16
"""Device slots of checkpoints where the operator says nothing: one may take hundreds of megabytes."""


@frozen(kw_only=True)
class SpaceSize:
    """How many pages of an index space a replay has.

    Args:
        space: the space.
        retention: what a block keeps of it.
        device_pages, host_pages: usable pages of each tier, whole blocks.
    """

    space: IndexSpace
    retention: Retention
    device_pages: int
    host_pages: int


@frozen(kw_only=True)
class LeftOut:
    """A pool of the model that the replay does without, and why."""

    pool: str
    reason: str


@frozen(kw_only=True)
class Assembly:
    """The pools of a replay.

    Args:
        model: id of the model.
        variant: name of the variant.
        layer_count: layers of the model.
        specs: declarations of the pools that take part.
        full_layers: how many layers each pool has without shrinking.
        left_out: the pools that do not take part.
    """

    model: str
    variant: str
    layer_count: int
    specs: tuple[PoolSpec, ...]
    full_layers: dict[str, int]
    left_out: tuple[LeftOut, ...]

    @property
    def anchor_space(self) -> IndexSpace:
        """The index space of the anchor."""
        return next(spec.index_space for spec in self.specs if spec.anchor)

    def block_pages(self, block_tokens: int) -> int:
        """Pages of one block of the anchor's space; at least one, a partial page counts as a full one."""
        return -(-block_tokens // self.anchor_space.page_slots)

    def specs_in(self, space: str) -> list[PoolSpec]:
        """The declarations of the pools of an index space."""
        return [spec for spec in self.specs if spec.index_space.name == space]

    def sizes(self, config: ReplayConfig, block_tokens: int) -> dict[str, SpaceSize]:
        """The pages of each index space, the anchor's first."""
        anchor = self.anchor_space
        spaces = {anchor.name: anchor, **{spec.index_space.name: spec.index_space for spec in self.specs}}
        block_slots = self.block_pages(block_tokens) * anchor.page_slots
        return {name: _size(config, space, retention(space, block_slots)) for name, space in spaces.items()}


def _size(config: ReplayConfig, space: IndexSpace, kept: Retention) -> SpaceSize:
    asked = {
        Reuse.ALL_PAGES: None,
        Reuse.TRAILING_PAGES: config.swa_pages,
        Reuse.LEAF: config.state_slots or STATE_SLOTS,
    }[space.reuse]
    blocks = config.device_blocks if asked is None else asked // kept.block_pages
    if blocks < 1:
        raise CapacityError(
            who=f"index space '{space.name}'",
            got=f"{asked} device pages",
            expected=f"at least {kept.block_pages}, what one block keeps",
            remedy="Give it more pages.",
        )
    host_blocks = -(-blocks * config.host_blocks // config.device_blocks)
    return SpaceSize(
        space=space,
        retention=kept,
        device_pages=blocks * kept.block_pages,
        host_pages=host_blocks * kept.block_pages,
    )


def assemble(config: ReplayConfig, registry: PluginRegistry) -> Assembly:
    """The pools of a replay, checked as a whole before anything is allocated.

    Raises:
        UnknownNameError: no such model, variant or platform.
        IncompatibleError: the combination cannot work; carries every reason.
        CapacityError: no pool with bytes is left.
    """
    model = load_model(config.model)
    platform = platform_named(config.platform, registry.platforms)
    variant = model.variant(config.variant, platform)
    specs, left_out = [], []
    for entry, geometry in zip(
        variant.pools, variant.geometries(config.page_slots, config.layers), strict=True
    ):
        if entry.family in registry.families:
            specs.append(registry.spec(geometry))
        else:
            reason = f"no installed plugin brings family '{entry.family}'"
            left_out.append(LeftOut(pool=entry.pool, reason=reason))
    if not any(spec.page_bytes for spec in specs):
        raise CapacityError(
            who=f"model '{model.id}', variant '{variant.name}'",
            got="no pool that this version can replay",
            expected="at least one pool with bytes",
            remedy="; ".join(f"{left.pool}: {left.reason}" for left in left_out),
        )
    _check(config, platform, variant, specs, registry)
    return Assembly(
        model=model.id,
        variant=variant.name,
        layer_count=model.layer_count,
        specs=tuple(specs),
        full_layers={entry.pool: len(entry.layer_ids) for entry in variant.pools},
        left_out=tuple(left_out),
    )


def _check(
    config: ReplayConfig,
    platform: Platform,
    variant: Variant,
    specs: list[PoolSpec],
    registry: PluginRegistry,
) -> None:
    solve(
        Query(
            platform=platform,
            io_backend=config.io_backend,
            layout=config.layout,
            pools=[Member(spec=spec, capabilities=registry.capabilities(spec, platform)) for spec in specs],
            variant_platforms=variant.platforms,
        ),
        who=f"{variant.model}/{variant.name}",
    )
