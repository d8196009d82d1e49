"""What a replay is asked to do, and the pools that it makes of a model."""

from __future__ import annotations

from attrs import field, frozen

from hicache_core.compat import Query, solve
from hicache_core.errors import CapacityError
from hicache_core.models import Variant, load_model
from hicache_core.models.entries import PoolEntry
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import Platform, PoolSpec, platform_named
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
    page_slots: int | None = field(default=None, validator=whole(1, or_none=True))
    layers: int | None = field(default=None, validator=whole(1, or_none=True))
    block_tokens: int | None = field(default=None, validator=whole(1, or_none=True))
    limit: int | None = field(default=None, validator=whole(1, or_none=True))
    seed: int = 0
    device: str = "sim"


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
    def page_slots(self) -> int:
        """Slots of a page."""
        return self.specs[0].index_space.page_slots

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all pools, all layers."""
        return sum(spec.page_bytes for spec in self.specs)

    def block_pages(self, block_tokens: int) -> int:
        """Pages of one block; at least one, a partial page counts as a full one."""
        return -(-block_tokens // self.page_slots)


def _why_not(entry: PoolEntry, anchor_space: str, registry: PluginRegistry) -> str | None:
    if entry.index_space != anchor_space:
        return f"index space '{entry.index_space}' has slots of its own, which this version does not replay"
    if entry.family not in registry.families:
        return f"no installed plugin brings family '{entry.family}'"
    return None


def assemble(config: ReplayConfig, registry: PluginRegistry) -> Assembly:
    """The pools of a replay, checked as a whole before anything is allocated.

    Raises:
        UnknownNameError: no such model, variant or platform.
        IncompatibleError: the combination cannot work; carries every reason.
        CapacityError: no pool with bytes is left.
    """
    model = load_model(config.model)
    platform = platform_named(config.platform)
    variant = model.variant(config.variant, platform.name)
    anchor_space = next(entry.index_space for entry in variant.pools if entry.anchor)
    specs, left_out = [], []
    for entry, geometry in zip(
        variant.pools, variant.geometries(config.page_slots, config.layers), strict=True
    ):
        reason = _why_not(entry, anchor_space, registry)
        if reason is None:
            specs.append(registry.spec(geometry))
        else:
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
            pools=[(spec, registry.capabilities(spec, platform)) for spec in specs],
            variant_platforms=variant.platforms,
        ),
        who=f"{variant.model}/{variant.name}",
    )
