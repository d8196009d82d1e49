"""Discovery and registration of pool plugins: all or nothing each, isolated, named in errors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy
from attrs import field, frozen

from hicache_core import hookspecs
from hicache_core.errors import HiCacheError, PluginError, SpecError, UnknownNameError
from hicache_core.hookspecs import API_VERSION, ENTRY_POINT_GROUP, PROJECT, Family
from hicache_core.memory.allocation import BUILT_IN, HostAllocator
from hicache_core.spec import (
    PLATFORMS,
    Capabilities,
    Platform,
    PoolGeometry,
    PoolSpec,
    default_capabilities,
)

_HOOK_PREFIX = f"{PROJECT}_"
_POOL_HOOKS = ("hicache_pool_families", "hicache_pool_spec")
_HOOKS = tuple(name for name in vars(hookspecs) if name.startswith(_HOOK_PREFIX))
_ALLOCATORS = "hicache_host_allocators"


@frozen(kw_only=True)
class Plugin:
    """A plugin that is registered.

    Args:
        name: the name of its entry point, or of its module.
        distribution: name and version of its distribution, or empty where it was registered by hand.
        families: the families that it owns.
        hooks: the hooks that it implements.
        allocators: the allocators of host memory that it brings, by name.
        platforms: the platform profiles that it brings.
    """

    name: str
    distribution: str
    families: tuple[Family, ...]
    hooks: tuple[str, ...]
    allocators: Mapping[str, HostAllocator] = field(factory=dict, repr=False, eq=False)
    platforms: tuple[Platform, ...] = ()
    module: Any = field(repr=False, eq=False)

    @property
    def title(self) -> str:
        """``name (distribution version)``, as errors print it."""
        return f"{self.name} ({self.distribution})" if self.distribution else self.name


@frozen(kw_only=True)
class RefusedPlugin:
    """A plugin that was found and not registered, with the error that says why."""

    name: str
    distribution: str
    error: PluginError


class PluginRegistry:
    """The plugins of one process and the families they own."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._plugins: dict[str, Plugin] = {}
        self._owners: dict[str, Plugin] = {}
        self._refused: list[RefusedPlugin] = []

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """The registered plugins, by name."""
        return tuple(self._plugins[name] for name in sorted(self._plugins))

    @property
    def refused(self) -> tuple[RefusedPlugin, ...]:
        """The plugins that were found and refused."""
        return tuple(self._refused)

    @property
    def families(self) -> Mapping[str, Family]:
        """The families that are there, by name."""
        return {f.name: f for p in self.plugins for f in p.families}

    @property
    def platforms(self) -> Mapping[str, Platform]:
        """The platform profiles that there are, by name: the core's, then those of plugins."""
        return {**PLATFORMS, **{one.name: one for plugin in self.plugins for one in plugin.platforms}}

    def register(self, module: Any, *, name: str, distribution: str = "") -> Plugin:
        """Register a plugin; on any refusal the registry is what it was before.

        Args:
            module: a module or object whose attributes carry ``hookimpl`` marks.
            name: name of the plugin, unique.
            distribution: name and version of what installed it.

        Raises:
            PluginError: a name that is taken, an unknown hook, no hook, defaults in a hook's arguments, a
                family or allocator that is taken, or an API version out of range.
        """
        who = f"{name} ({distribution})" if distribution else name
        if name in self._plugins:
            raise _refusal(
                who,
                f"the plugin name '{name}' twice",
                "a name once",
                f"It is held by {self._plugins[name].title}; uninstall one.",
            )
        try:
            hooks = self._marked_hooks(module, who)
            self._manager.register(module, name=name)
            self._manager.check_pending()
            families = self._families_of(module, who) if _POOL_HOOKS[0] in hooks else ()
            platforms = self._platforms_of(module, who) if "hicache_platforms" in hooks else ()
            allocators = self._allocators_of(module, who) if _ALLOCATORS in hooks else {}
        except (Exception, SystemExit) as error:
            if self._manager.get_plugin(name) is not None:
                self._manager.unregister(name=name)
            if isinstance(error, PluginError):
                raise
            raise _refusal(
                who, f"{type(error).__name__}: {error}", "a plugin that loads", "Mend or uninstall it."
            ) from error
        plugin = Plugin(
            name=name,
            distribution=distribution,
            families=families,
            hooks=hooks,
            allocators=allocators,
            platforms=platforms,
            module=module,
        )
        self._plugins[name] = plugin
        self._owners.update({family.name: plugin for family in families})
        return plugin

    def _marked_hooks(self, module: Any, who: str) -> tuple[str, ...]:
        marked = [
            attribute
            for attribute in dir(module)
            if getattr(getattr(module, attribute, None), f"{PROJECT}_impl", None) is not None
        ]
        unknown = [hook for hook in marked if hook not in _HOOKS]
        unmarked = [
            hook
            for hook in dir(module)
            if hook.startswith(_HOOK_PREFIX) and hook not in marked and callable(getattr(module, hook))
        ]
        if unknown or unmarked:
            raise _refusal(
                who,
                f"hooks {unknown} without a specification, {unmarked} without the hookimpl mark",
                f"marked hooks among {', '.join(_HOOKS)}",
                "Correct the names and mark each with @hookimpl.",
            )
        alone = bool(marked) and set(marked) <= {"hicache_platforms", _ALLOCATORS}
        if not alone and not set(_POOL_HOOKS) <= set(marked):
            raise _refusal(
                who,
                f"the hooks {marked}",
                f"at least {' and '.join(_POOL_HOOKS)}, or hicache_platforms or {_ALLOCATORS} alone",
                "Implement both.",
            )
        for hook in marked:
            defaults = [
                p.name
                for p in inspect.signature(getattr(module, hook)).parameters.values()
                if p.default is not inspect.Parameter.empty
            ]
            if defaults:
                raise _refusal(
                    who,
                    f"defaults for {defaults} in {hook}",
                    "arguments without defaults, since a default wins over what the core gives",
                    "Remove the defaults.",
                )
        return tuple(marked)

    def _families_of(self, module: Any, who: str) -> tuple[Family, ...]:
        brought = module.hicache_pool_families()
        if not isinstance(brought, Sequence) or not all(isinstance(one, Family) for one in brought):
            raise _refusal(who, f"{brought!r} as families", "a list of Family", "Correct the list.")
        families = tuple(brought)
        names = [family.name for family in families]
        if not families or len(set(names)) != len(names):
            raise _refusal(who, f"families {names}", "at least one, each name once", "Correct the list.")
        for family in families:
            owner = self._owners.get(family.name)
            if owner is not None:
                raise _refusal(
                    who,
                    f"family '{family.name}', which {owner.title} owns",
                    "a family name that is free",
                    "Rename the family, or uninstall one of the two.",
                )
            lowest, highest = family.api
            if not lowest <= API_VERSION <= highest:
                raise _refusal(
                    who,
                    f"family '{family.name}' for hook API {lowest} to {highest}",
                    f"a range that holds {API_VERSION}",
                    "Install a release of the plugin for this hicache-core.",
                )
        return families

    def _allocators_of(self, module: Any, who: str) -> Mapping[str, HostAllocator]:
        brought = module.hicache_host_allocators()
        usable = isinstance(brought, Mapping) and all(
            isinstance(name, str) and name and callable(getattr(allocator, "allocate", None))
            for name, allocator in brought.items()
        )
        if not brought or not usable:
            raise _refusal(
                who,
                f"{brought!r} as allocators",
                "a mapping from names to objects with allocate(nbytes, who), at least one",
                "Correct hicache_host_allocators.",
            )
        holders = {**dict.fromkeys(BUILT_IN, "the core"), **self._allocator_owners()}
        for name in brought:
            if name in holders:
                raise _refusal(
                    who,
                    f"allocator '{name}', which {holders[name]} owns",
                    "a name of an allocator that is free",
                    "Rename the allocator, or uninstall one of the two.",
                )
        return dict(brought)

    def _allocator_owners(self) -> dict[str, str]:
        return {name: plugin.title for plugin in self.plugins for name in plugin.allocators}

    def host_allocator(self, name: str) -> HostAllocator:
        """The allocator of that name that a plugin brings; UnknownNameError naming those that exist."""
        for plugin in self._plugins.values():
            if name in plugin.allocators:
                return plugin.allocators[name]
        raise UnknownNameError(
            who="plugins",
            got=f"allocator '{name}'",
            expected=f"one of {', '.join(sorted([*BUILT_IN, *self._allocator_owners()]))}",
            remedy=f"Install the distribution that brings '{name}'.",
        )

    def _platforms_of(self, module: Any, who: str) -> tuple[Platform, ...]:
        platforms = tuple(module.hicache_platforms())
        names = [getattr(platform, "name", None) for platform in platforms]
        odd = [platform for platform in platforms if not isinstance(platform, Platform)]
        taken = [name for name in names if name in self.platforms or names.count(name) > 1]
        if odd or taken or not platforms:
            got = f"{odd[0]!r} among its platforms" if odd else f"platforms {names}, {taken} of them taken"
            expected = "at least one Platform, each of a name that is free"
            raise _refusal(who, got, expected, "Correct hicache_platforms.")
        return platforms

    def refuse(self, name: str, distribution: str, error: PluginError) -> None:
        """Keep a refused plugin for introspection."""
        self._refused.append(RefusedPlugin(name=name, distribution=distribution, error=error))

    def owner(self, family: str) -> Plugin:
        """The plugin that owns ``family``; raises UnknownNameError naming what is installed."""
        try:
            return self._owners[family]
        except KeyError:
            mend = ", or mend what was refused: `hicache plugins` says why" if self._refused else ""
            raise UnknownNameError(
                who="plugins",
                got=f"family '{family}'",
                expected=f"one of {', '.join(sorted(self._owners)) or 'none: no plugin is installed'}",
                remedy=f"Install the distribution that brings '{family}'{mend}.",
            ) from None

    def ask(self, family: str, hook: str, /, **arguments: Any) -> Any:
        """Ask the owner of ``family`` alone; None where it does not implement ``hook`` or answers None."""
        owner = self.owner(family)
        others = [plugin.module for plugin in self._plugins.values() if plugin is not owner]
        try:
            return self._manager.subset_hook_caller(hook, remove_plugins=others)(**arguments)
        except HiCacheError:
            raise
        except (Exception, SystemExit) as error:
            raise _refusal(
                owner.title,
                f"{type(error).__name__}: {error} from {hook} for family '{family}'",
                "an answer, or an error of hicache",
                "Mend the plugin.",
            ) from error

    def spec(self, geometry: PoolGeometry) -> PoolSpec:
        """The declaration of a pool; raises PluginError where the owner returns something else."""
        spec = self.ask(geometry.family, "hicache_pool_spec", family=geometry.family, geometry=geometry)
        kept = ("pool", "family", "index_space", "layer_ids", "anchor")
        if not isinstance(spec, PoolSpec) or any(
            getattr(spec, name) != getattr(geometry, name) for name in kept
        ):
            raise _refusal(
                self.owner(geometry.family).title,
                f"{spec!r} as the declaration of pool '{geometry.pool}'",
                f"a PoolSpec with the geometry's {', '.join(kept)}",
                "Correct hicache_pool_spec.",
            )
        return spec

    def capabilities(self, spec: PoolSpec, platform: Platform) -> Capabilities:
        """What the owner declares for the pool, or the core's default for strided rows.

        Raises:
            PluginError: the owner returns something else, a capability that says nothing, or one that the
                declaration of the pool rules out.
        """
        try:
            declared = self.ask(spec.family, "hicache_declare_capabilities", spec=spec, platform=platform)
            if isinstance(declared, Capabilities):
                declared.check_arithmetic(spec)
        except SpecError as error:
            raise _refusal(
                self.owner(spec.family).title, f"{error.who}: {error.got}", error.expected, error.remedy
            ) from error
        if declared is None:
            return default_capabilities(spec, platform)
        if not isinstance(declared, Capabilities):
            raise _refusal(
                self.owner(spec.family).title,
                f"{declared!r} as capabilities of pool '{spec.pool}'",
                "a Capabilities value or None",
                "Correct hicache_declare_capabilities.",
            )
        return declared


def _refusal(who: str, got: str, expected: str, remedy: str) -> PluginError:
    return PluginError(who=who, got=got, expected=expected, remedy=remedy)


def _distribution_of(entry_point: EntryPoint) -> str:
    dist = entry_point.dist
    return f"{dist.name} {dist.version}" if dist is not None else ""


def load_plugins(
    *,
    required: Sequence[str] = (),
    strict: bool = False,
    found: Iterable[EntryPoint] | None = None,
) -> PluginRegistry:
    """Find and register every plugin of the entry-point group ``hicache.pools``.

    A plugin that is broken is kept in ``registry.refused`` and does not hide the others.

    Args:
        required: names of plugins that must be there.
        strict: raise if any plugin was refused.
        found: entry points to load in place of the installed ones.

    Raises:
        PluginError: a required plugin is missing or broken, or, in strict mode, any is; one error with all
            failures in it.
    """
    registry = PluginRegistry()
    group = entry_points(group=ENTRY_POINT_GROUP) if found is None else found
    for entry_point in sorted(group, key=lambda e: (e.name, e.value)):
        distribution = _distribution_of(entry_point)
        who = f"{entry_point.name} ({distribution})" if distribution else entry_point.name
        try:
            module = entry_point.load()
        except (Exception, SystemExit) as error:
            failure = _refusal(
                who,
                f"{type(error).__name__}: {error} while importing {entry_point.value}",
                "a module that imports",
                "Mend or uninstall the distribution.",
            )
            registry.refuse(entry_point.name, distribution, failure)
            continue
        try:
            registry.register(module, name=entry_point.name, distribution=distribution)
        except PluginError as error:
            registry.refuse(entry_point.name, distribution, error)
    _demand(registry, required, strict)
    return registry


def _demand(registry: PluginRegistry, required: Sequence[str], strict: bool) -> None:
    present = {plugin.name for plugin in registry.plugins}
    refused = [r for r in registry.refused if strict or r.name in required]
    missing = sorted(set(required) - present - {r.name for r in refused})
    if refused or missing:
        reasons = [str(r.error) for r in refused] + [f"'{name}' is not installed" for name in missing]
        raise _refusal("plugins", " | ".join(reasons), "every required plugin registered", "See each reason.")
