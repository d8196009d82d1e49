"""The whole extension surface. No hook is called while bytes move.

Five hooks are asked of the plugin that owns a family, at construction: it implements the two that name
families and declare pools; each of the others may answer None, and the core's default for strided rows
serves. A plugin may bring platforms or allocators of host memory too, or nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy
from attrs import field, frozen
from attrs import validators as v

from hicache_core.spec.checks import name as a_name
from hicache_core.spec.checks import refuse

if TYPE_CHECKING:
    from hicache_core.memory.allocation import HostAllocator
    from hicache_core.memory.tables import PoolTables
    from hicache_core.pool import HostPool, PoolBuffers
    from hicache_core.spec import Capabilities, Platform, PoolGeometry, PoolSpec
    from hicache_core.transfer.ways import Writer

PROJECT = "hicache"
ENTRY_POINT_GROUP = "hicache.pools"
API_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


def _versions(instance: object, attribute: Any, value: Any) -> None:
    if not isinstance(value, tuple) or [type(one) for one in value] != [int, int]:
        refuse(instance, attribute, value, "the lowest and the highest version, such as (1, 1)")


@frozen(kw_only=True)
class Family:
    """A pool family that a distribution brings.

    Args:
        name: what model files call it; unique over all plugins.
        api: lowest and highest version of the hook API that it was written for.
        geometry: schema of its geometry: the figure's name and what it means.
        description: one line for people.
    """

    name: str = field(validator=a_name())
    api: tuple[int, int] = field(validator=_versions)
    geometry: dict[str, str] = field(validator=v.instance_of(dict))
    description: str = field(validator=a_name())


@hookspec
def hicache_pool_families() -> Sequence[Family]:
    """The families of this distribution. Asked when the plugin is loaded."""
    raise NotImplementedError


@hookspec
def hicache_platforms() -> Sequence[Platform]:
    """Platform profiles of this distribution, for ``--platform``. Asked when the plugin is loaded."""
    raise NotImplementedError


@hookspec(firstresult=True)
def hicache_pool_spec(family: str, geometry: PoolGeometry) -> PoolSpec:
    """The declaration of a pool of ``family``. Asked when a model is assembled."""
    raise NotImplementedError


@hookspec(firstresult=True)
def hicache_declare_capabilities(spec: PoolSpec, platform: Platform) -> Capabilities | None:
    """What the pool can do on the platform, each with a reason. Asked at construction and to introspect."""


@hookspec(firstresult=True)
def hicache_build_pointer_table(spec: PoolSpec, buffers: PoolBuffers, device: Any) -> PoolTables | None:
    """The pool's pointer tables for a device, one pair per buffer. Asked at construction."""


@hookspec(firstresult=True)
def hicache_staged_write_back(pool: HostPool, device: Any) -> Writer | None:
    """A bound writer for the pool's backups under kernel + page_first. Asked at construction."""


@hookspec
def hicache_host_allocators() -> Mapping[str, HostAllocator]:
    """Allocators of host memory by the name that options choose. Asked when the plugin is loaded."""
    raise NotImplementedError
