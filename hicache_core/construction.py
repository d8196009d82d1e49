"""What a controller works out from its configuration and pools before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen
from attrs import validators as v

from hicache_core.compat import DEFAULT_RING_BYTES, Member, Query
from hicache_core.device_pool import DevicePool, check_apart, check_device_pool
from hicache_core.errors import SpecError
from hicache_core.events import DecisionLog
from hicache_core.memory.agreement import MOST_TIMEOUT_S, Ranks
from hicache_core.memory.options import MemoryOptions
from hicache_core.plugins import PluginRegistry
from hicache_core.sizing import SizeRequest, split_host_size
from hicache_core.spec import Platform
from hicache_core.spec.checks import refuse, whole


def _seconds(instance: object, attribute: Any, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= MOST_TIMEOUT_S:  # type: ignore[operator]
        refuse(instance, attribute, value, f"seconds, more than 0 and at most {MOST_TIMEOUT_S:g}")


@frozen(kw_only=True)
class ControllerConfig:
    """What an operator chooses.

    Args:
        io_backend: ``kernel`` or ``direct``.
        layout: name of the host layout.
        host_pages: host pages of the anchor's index space, shared by the pools that ride on it; None where
            ``host_bytes`` says how much there is.
        other_host_pages: host pages of each index space that is not the anchor's.
        host_bytes: bytes of this rank for all pools together, split over the index spaces in whole pages;
            spaces of ``other_host_pages`` have theirs. None where the pages are given.
        first_layer: first model layer of this pipeline stage; layer ids are those of the whole model.
        layer_count: layers of the stage; loads have a completion mark for each. 0 takes those up to the
            highest that a pool names.
        ring_bytes: budget of the staging ring of a device.
        memory: how host memory is obtained, populated and registered.
        allow_kernel_layer_first: take kernel + layer_first where the platform serves it on request only,
            after a probe.
        probe: move pages of every pool there and back before the first request, and compare them.
        name: what ranks know this controller by; where one rank has several, each needs its own.
        agree_timeout_s: seconds that ranks wait for the slowest of them, whose memory is being pinned.
    """

    io_backend: str
    layout: str
    host_pages: int | None = field(default=None, validator=whole(1, or_none=True))
    other_host_pages: Mapping[str, int] = field(factory=dict)
    host_bytes: int | None = field(default=None, validator=whole(1, or_none=True))
    first_layer: int = field(default=0, validator=whole(0))
    layer_count: int = field(default=0, validator=whole(0))
    ring_bytes: int = field(default=DEFAULT_RING_BYTES, validator=whole(0))
    memory: MemoryOptions = field(factory=MemoryOptions, validator=v.instance_of(MemoryOptions))
    allow_kernel_layer_first: bool = field(default=False, validator=v.instance_of(bool))
    probe: bool = field(default=True, validator=v.instance_of(bool))
    name: str = field(default="", validator=v.instance_of(str))
    agree_timeout_s: float = field(default=600.0, validator=_seconds)

    def __attrs_post_init__(self) -> None:
        if (self.host_pages is None) == (self.host_bytes is None):
            raise SpecError(
                who="controller",
                got=f"host_pages={self.host_pages} and host_bytes={self.host_bytes}",
                expected="one of the two",
                remedy="Give the host pages of the anchor's index space, or the bytes for all pools.",
            )


def query(
    config: ControllerConfig,
    device_pools: Sequence[DevicePool],
    host_pages: Mapping[str, int],
    platform: Platform,
    registry: PluginRegistry,
) -> Query:
    """What the solver is asked about a group.

    Args:
        config: the operator's choices.
        device_pools: the pools of the group.
        host_pages: host pages of pools by name, where they are known.
        platform: facts about the device.
        registry: the plugins that own the families.
    """
    return Query(
        platform=platform,
        io_backend=config.io_backend,
        layout=config.layout,
        pools=[
            Member(
                spec=pool.spec,
                capabilities=registry.capabilities(pool.spec, platform),
                host_pages=host_pages.get(pool.spec.pool),
                device_row_bytes=pool.row_bytes,
            )
            for pool in device_pools
        ],
        allow_kernel_layer_first=config.allow_kernel_layer_first,
        probe=config.probe,
        ring_bytes=config.ring_bytes,
    )


def checked_pools(device_pools: Iterable[DevicePool]) -> tuple[DevicePool, ...]:
    """The pools as a tuple; SpecError where one is something else, such as a declaration alone."""
    pools = tuple(device_pools)
    for pool in pools:
        if not isinstance(pool, DevicePool):
            raise SpecError(
                who="controller",
                got=f"{type(pool).__name__} among the device pools",
                expected="a DevicePool: a declaration with the engine's tensors",
                remedy="Give DevicePool(spec=..., layers=...).",
            )
    return pools


def stage_layers(config: ControllerConfig, device_pools: Sequence[DevicePool]) -> range:
    """The model layers of the stage; SpecError where a pool has one before it."""
    first = config.first_layer
    stop = first + config.layer_count
    for pool in device_pools:
        ids = pool.spec.layer_ids
        if ids and ids[0] < first:
            raise _layer_error(pool, ids[0], f"layers from {first} on, where this stage starts")
        stop = max(stop, ids[-1] + 1 if ids else 0)
    return range(first, stop)


def check_joining(
    pool: DevicePool, present: Sequence[DevicePool], layers: range, device_pages: int
) -> None:
    """Hold the device rows of a pool that joins against its declaration and against the group.

    Args:
        pool: the pool that joins.
        present: the pools of the group.
        layers: model layers of the stage.
        device_pages: device pages of its index space; 0 where it brings the space.

    Raises:
        BufferMismatchError: its tensors are not what it declares, or share bytes with another pool's.
        SpecError: a model layer is none of the stage's and would never move, or a slot would name no row.
    """
    check_device_pool(pool)
    check_apart([*present, pool])
    for layer in pool.spec.layer_ids:
        if layer not in layers:
            those = f"layers {layers.start} to {layers.stop - 1}, those of this stage"
            raise _layer_error(pool, layer, those)
    if pool.pages is not None and pool.pages < device_pages:
        space = pool.spec.index_space.name
        raise SpecError(
            who=f"pool '{pool.spec.pool}' ({pool.spec.family})",
            got=f"{pool.pages} device pages",
            expected=f"at least {device_pages}, as the other pools of index space '{space}'",
            remedy="Give it the device rows of as many slots.",
        )


def _layer_error(pool: DevicePool, layer: int, expected: str) -> SpecError:
    return SpecError(
        who=f"pool '{pool.spec.pool}' ({pool.spec.family})",
        got=f"model layer {layer}",
        expected=expected,
        remedy="Give layer ids of the whole model, and the stage's own pools and layer_count.",
    )


def mean_page_bytes(device_pools: Sequence[DevicePool]) -> int:
    """Bytes of a page of a pool, in the mean over those that have bytes."""
    page_bytes = [pool.spec.page_bytes for pool in device_pools if pool.spec.page_bytes]
    return sum(page_bytes) // max(len(page_bytes), 1)


def device_pages(device_pools: Sequence[DevicePool]) -> dict[str, int]:
    """Pages of each index space that every pool of it has on the device."""
    counts: dict[str, list[int]] = {pool.spec.index_space.name: [] for pool in device_pools}
    for pool in device_pools:
        if pool.pages is not None:
            counts[pool.spec.index_space.name].append(pool.pages)
    return {name: min(mine, default=0) for name, mine in counts.items()}


def host_pages(config: ControllerConfig, device_pools: Sequence[DevicePool]) -> dict[str, int]:
    """Host pages of each index space.

    Raises:
        SpecError: a space has no figure, or a figure no space.
        CapacityError: the bytes do not hold a page of each space.
    """
    anchor = next(pool.spec.index_space.name for pool in device_pools if pool.spec.anchor)
    if config.host_bytes is not None:
        request = SizeRequest(host_bytes=config.host_bytes, pages=config.other_host_pages)
        sizing = split_host_size([pool.spec for pool in device_pools], request)
        return {name: sized.pages for name, sized in sizing.spaces.items()}
    assert config.host_pages is not None, "the configuration has either pages or bytes"
    pages = {**config.other_host_pages, anchor: config.host_pages}
    spaces = {pool.spec.index_space.name for pool in device_pools}
    if set(pages) != spaces or anchor in config.other_host_pages:
        raise SpecError(
            who="controller",
            got=f"host pages for index spaces {', '.join(sorted(config.other_host_pages)) or 'none'} beside "
            f"'{anchor}'",
            expected=f"{', '.join(sorted(spaces - {anchor})) or 'none'}, as the pools have",
            remedy="Give other_host_pages for each index space that is not the anchor's.",
        )
    for name, count in config.other_host_pages.items():
        checked_page_count(name, count)
    return pages


def checked_page_count(space: str, count: int | None) -> int:
    """A number of host pages of an index space; SpecError where it is not positive."""
    if type(count) is not int or count < 1:
        raise SpecError(
            who="controller",
            got=f"{count!r} host pages for index space '{space}'",
            expected="a whole number of at least 1",
            remedy="Correct the host pages of that space.",
        )
    return count


def agreed_pages(
    own: Mapping[str, int], device_pools: Sequence[DevicePool], ranks: Ranks, decisions: DecisionLog
) -> dict[str, int]:
    """Host pages of each index space that every rank which has the space can hold, agreed on in slots.

    Args:
        own: what this rank can hold.
        device_pools: its pools.
        ranks: the ranks that must be equal.
        decisions: where it is kept that a rank holds less than it could.

    Raises:
        RankError: a rank failed, or does not answer.
    """
    page_slots = {pool.spec.index_space.name: pool.spec.index_space.page_slots for pool in device_pools}
    slots = ranks.minimum({name: pages * page_slots[name] for name, pages in own.items()})
    agreed = {}
    for name, pages in own.items():
        agreed[name] = checked_page_count(name, slots[name] // page_slots[name])
        if agreed[name] < pages:
            reason = f"{agreed[name]} host pages of '{name}' in place of {pages}: a rank has room for no more"
            decisions.record("agreed-on-fewer-pages", reason)
    return agreed
