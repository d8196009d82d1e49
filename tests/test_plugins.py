"""The registry refuses by name, changes nothing when it refuses, and asks the owner of a family alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from hicache_core.errors import PluginError, SpecError, UnknownNameError
from hicache_core.hookspecs import API_VERSION, Family, hookimpl
from hicache_core.plugins import PluginRegistry, load_plugins
from hicache_core.spec import (
    PLATFORMS,
    BufferSpec,
    Capabilities,
    IndexSpace,
    PoolGeometry,
    PoolSpec,
    RowUnit,
    default_capabilities,
    unsupported,
)

CUDA = PLATFORMS["cuda"]


def _family(name: str, api: tuple[int, int] = (API_VERSION, API_VERSION)) -> Family:
    return Family(name=name, api=api, geometry={}, description="for tests")


def _declare(geometry: PoolGeometry, row_bytes: int = 64) -> PoolSpec:
    return PoolSpec(
        pool=geometry.pool,
        family=geometry.family,
        index_space=geometry.index_space,
        row_unit=RowUnit.TOKEN,
        layer_ids=geometry.layer_ids,
        buffers=(BufferSpec(name="kv", row_bytes=row_bytes),),
        anchor=geometry.anchor,
    )


def _geometry(family: str) -> PoolGeometry:
    return PoolGeometry(
        pool="kv",
        family=family,
        index_space=IndexSpace(name="full", page_slots=4),
        layer_ids=(0, 1),
        anchor=True,
    )


def _plugin(*families: str | Family, row_bytes: int = 64, **more: Any) -> _Module:
    """A plugin that works, as an object in place of a module; ``more`` adds or replaces hooks."""

    @hookimpl
    def hicache_pool_families() -> list[Family]:
        return [_family(f) if isinstance(f, str) else f for f in families]

    @hookimpl
    def hicache_pool_spec(family: str, geometry: PoolGeometry) -> PoolSpec:
        assert family in {f if isinstance(f, str) else f.name for f in families}
        return _declare(geometry, row_bytes)

    hooks = {"hicache_pool_families": hicache_pool_families, "hicache_pool_spec": hicache_pool_spec}
    return _Module({**hooks, **more})


class _Allocator:
    """Gives nothing; the registry only keeps it."""

    def allocate(self, nbytes: int, who: str) -> Any:
        """Never called."""
        raise NotImplementedError


ARENA = _Allocator()


@hookimpl
def _no_allocators() -> dict[str, _Allocator]:
    return {}


def _allocators(brought: Any, **more: Any) -> _Module:
    """A plugin that brings allocators and no family."""

    @hookimpl
    def hicache_host_allocators() -> Any:
        return brought

    return _Module({"hicache_host_allocators": hicache_host_allocators, **more})


class _Module:
    """Hooks as attributes of an object that is compared by identity, as modules are."""

    def __init__(self, hooks: dict[str, Any]) -> None:
        vars(self).update({name: hook for name, hook in hooks.items() if hook is not None})


@hookimpl
def _unknown_hook() -> None:
    """Marked under a name that no specification has."""


def _unmarked(spec: PoolSpec, platform: object) -> None:
    """A hook without its mark."""


@hookimpl
def _with_default(family: str, geometry: PoolGeometry, pages: int = 3) -> None:
    """An argument with a default."""


@hookimpl
def _with_unknown_argument(family: str, colour: str) -> None:
    """An argument that the specification does not pass."""


@hookimpl
def _broken_families() -> list[Family]:
    raise RuntimeError("no families today")


@hookimpl
def _families_of_nothing() -> list[str]:
    return ["a name, and no Family"]


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "an unknown hook": (lambda: _plugin("new", hicache_pool_colour=_unknown_hook), "hicache_pool_colour"),
    "a hook without its mark": (
        lambda: _plugin("new", hicache_declare_capabilities=_unmarked),
        "hicache_declare_capabilities",
    ),
    "no hook": (lambda: _Module({}), "the hooks []"),
    "one of the two hooks that all need": (lambda: _plugin("new", hicache_pool_spec=None), "['hicache_pool"),
    "a default in an argument": (lambda: _plugin("new", hicache_pool_spec=_with_default), "['pages']"),
    "an unknown argument": (lambda: _plugin("new", hicache_pool_spec=_with_unknown_argument), "colour"),
    "a taken family": (lambda: _plugin("new", "first"), "family 'first'"),
    "a family twice": (lambda: _plugin("new", "new"), "['new', 'new']"),
    "no family": (_plugin, "families []"),
    "an API of the future": (
        lambda: _plugin("new", _family("newer", (API_VERSION + 1, API_VERSION + 2))),
        f"{API_VERSION + 1} to {API_VERSION + 2}",
    ),
    "an API of the past": (lambda: _plugin(_family("old", (0, API_VERSION - 1))), "family 'old'"),
    "families that raise": (
        lambda: _plugin(hicache_pool_families=_broken_families),
        "RuntimeError: no families today",
    ),
    "no allocator": (lambda: _allocators({}), "{} as allocators"),
    "allocators that are none": (lambda: _allocators({"pool": object()}), "as allocators"),
    "allocators without a name": (lambda: _allocators({"": _Allocator()}), "as allocators"),
    "allocators in a list": (lambda: _allocators([_Allocator()]), "as allocators"),
    "an allocator of the core": (
        lambda: _allocators({"memfd": _Allocator()}),
        "'memfd', which the core owns",
    ),
    "a taken allocator": (
        lambda: _allocators({"new": _Allocator(), "arena": _Allocator()}),
        "'arena', which one (one-dist 1.0) owns",
    ),
    "allocators and half a family": (
        lambda: _allocators({"new": _Allocator()}, hicache_pool_families=lambda: [_family("new")]),
        "without the hookimpl mark",
    ),
    "good families with a bad allocator": (
        lambda: _plugin("new", hicache_host_allocators=_no_allocators),
        "{} as allocators",
    ),
    "families that are none": (lambda: _plugin(hicache_pool_families=_families_of_nothing), "as families"),
}


@pytest.fixture
def registry() -> PluginRegistry:
    """A registry that holds one plugin with the family ``first``."""
    registry = PluginRegistry()
    plugin = _plugin("first", hicache_host_allocators=hookimpl(lambda: {"arena": ARENA}))
    registry.register(plugin, name="one", distribution="one-dist 1.0")
    return registry


@pytest.mark.parametrize("cause", REFUSALS)
def test_a_refusal_names_the_plugin_and_changes_nothing(cause: str, registry: PluginRegistry) -> None:
    """After it the registry is what it was, and a good plugin of that name registers and answers."""
    make, got = REFUSALS[cause]
    before = (registry.plugins, dict(registry.families), registry.refused)
    with pytest.raises(PluginError) as caught:
        registry.register(make(), name="two", distribution="two-dist 2.0")
    error = caught.value
    assert (error.code, error.who) == ("plugin", "two (two-dist 2.0)")
    assert got in error.got
    assert error.expected
    assert error.remedy
    assert (registry.plugins, dict(registry.families), registry.refused) == before
    registry.register(_plugin("new", row_bytes=8), name="two", distribution="two-dist 2.1")
    assert sorted(registry.families) == ["first", "new"]
    assert registry.spec(_geometry("new")).buffers[0].row_bytes == 8
    assert registry.spec(_geometry("first")).buffers[0].row_bytes == 64


def test_a_plugin_may_bring_allocators_alone(registry: PluginRegistry) -> None:
    """It owns no family; its allocators are found by name beside those of the others."""
    pool = _Allocator()
    plugin = registry.register(_allocators({"pool": pool}), name="two")
    assert (plugin.families, plugin.hooks) == ((), ("hicache_host_allocators",))
    assert dict(plugin.allocators) == {"pool": pool}
    assert registry.host_allocator("pool") is pool
    assert registry.host_allocator("arena") is ARENA
    assert sorted(registry.families) == ["first"]
    assert registry.spec(_geometry("first")).buffers[0].row_bytes == 64


def test_a_refused_plugin_leaves_no_allocator(registry: PluginRegistry) -> None:
    """All or nothing: also where the allocators were good and a family was not."""
    with pytest.raises(PluginError):
        registry.register(
            _plugin("first", hicache_host_allocators=hookimpl(lambda: {"new": _Allocator()})), name="two"
        )
    with pytest.raises(UnknownNameError) as caught:
        registry.host_allocator("new")
    assert "anonymous, arena, memfd" in caught.value.expected


def test_a_taken_plugin_name_is_refused(registry: PluginRegistry) -> None:
    """The holder is named, and stays."""
    before = registry.plugins
    with pytest.raises(PluginError) as caught:
        registry.register(_plugin("new"), name="one", distribution="other 9")
    assert caught.value.who == "one (other 9)"
    assert "one (one-dist 1.0)" in caught.value.remedy
    assert registry.plugins == before
    registry.register(_plugin("new"), name="three")
    assert sorted(registry.families) == ["first", "new"]


def test_a_module_under_two_names_is_refused(registry: PluginRegistry) -> None:
    """Two entry points of one module would own its families twice."""
    (held,) = registry.plugins
    with pytest.raises(PluginError):
        registry.register(held.module, name="again")
    assert registry.plugins == (held,)
    assert registry.spec(_geometry("first")).buffers[0].row_bytes == 64


def test_the_owner_of_a_taken_family_is_named(registry: PluginRegistry) -> None:
    """Who has it, with its distribution, so that one of the two can go."""
    with pytest.raises(PluginError) as caught:
        registry.register(_plugin("first"), name="two")
    assert "one (one-dist 1.0)" in caught.value.got
    assert caught.value.who == "two"


def test_what_a_plugin_brought_can_be_listed(registry: PluginRegistry) -> None:
    """Name, distribution, families and hooks."""
    (plugin,) = registry.plugins
    assert (plugin.name, plugin.distribution, plugin.title) == ("one", "one-dist 1.0", "one (one-dist 1.0)")
    assert [family.name for family in plugin.families] == ["first"]
    families = {"hicache_pool_families", "hicache_pool_spec"}
    assert set(plugin.hooks) == {*families, "hicache_host_allocators"}
    assert list(plugin.allocators) == ["arena"]


def _declaring(code: str) -> object:
    """A capabilities hook that says no to staging, for the reason ``code``."""

    @hookimpl
    def hook(spec: PoolSpec, platform: Any) -> Capabilities:
        changes = {"staged_write_back": unsupported(code, "for tests", "none")}
        return default_capabilities(spec, platform).amended(changes)

    return hook


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_the_owner_alone_is_asked(order: tuple[str, str]) -> None:
    """Two plugins implement the same hooks; load order decides nothing."""
    registry = PluginRegistry()
    for name in order:
        rows = {"a": 8, "b": 32}[name]
        plugin = _plugin(name, row_bytes=rows, hicache_declare_capabilities=_declaring(f"of-{name}"))
        registry.register(plugin, name=name)
    for name, rows in (("a", 8), ("b", 32)):
        spec = registry.spec(_geometry(name))
        assert spec.buffers[0].row_bytes == rows
        assert registry.capabilities(spec, CUDA).staged_write_back.code == f"of-{name}"


@hookimpl
def _asked_in_vain(spec: PoolSpec, platform: object) -> None:
    """None: the core's default serves."""


def test_a_hook_of_another_plugin_does_not_stand_in() -> None:
    """Where the owner has no such hook, or answers None, the default serves, whatever others declare."""
    registry = PluginRegistry()
    registry.register(_plugin("none"), name="none")
    registry.register(_plugin("vain", hicache_declare_capabilities=_asked_in_vain), name="vain")
    registry.register(_plugin("loud", hicache_declare_capabilities=_declaring("loud")), name="loud")
    for family in ("none", "vain"):
        spec = registry.spec(_geometry(family))
        assert registry.capabilities(spec, CUDA) == default_capabilities(spec, CUDA)


def test_an_unknown_family_is_refused_with_those_that_exist(registry: PluginRegistry) -> None:
    """The remedy is a distribution to install."""
    with pytest.raises(UnknownNameError) as caught:
        registry.spec(_geometry("second"))
    assert (caught.value.code, caught.value.got) == ("unknown-name", "family 'second'")
    assert "first" in caught.value.expected
    assert "refused" not in caught.value.remedy


def test_an_unknown_family_may_be_that_of_a_refused_plugin(found: list[EntryPoint]) -> None:
    """Who has the distribution installed is told to mend it."""
    with pytest.raises(UnknownNameError) as caught:
        load_plugins(found=found).owner("second")
    assert "mend what was refused" in caught.value.remedy


@pytest.mark.parametrize("api", [1, (1,), ("1", "1")])
def test_versions_of_a_family_are_a_pair_of_numbers(api: Any) -> None:
    """Refused where the family is made, which names the field."""
    with pytest.raises(SpecError, match=r"Family\.api"):
        _family("first", api)


@hookimpl
def _renamed(family: str, geometry: PoolGeometry) -> PoolSpec:
    return _declare(PoolGeometry(**{**_fields(geometry), "pool": "other"}))


@hookimpl
def _fewer_layers(family: str, geometry: PoolGeometry) -> PoolSpec:
    return _declare(PoolGeometry(**{**_fields(geometry), "layer_ids": (0,)}))


@hookimpl
def _no_declaration(family: str, geometry: PoolGeometry) -> str:
    return "rows"


def _fields(geometry: PoolGeometry) -> dict[str, Any]:
    names = ("pool", "family", "index_space", "layer_ids", "params", "anchor")
    return {name: getattr(geometry, name) for name in names}


@pytest.mark.parametrize("hook", [_renamed, _fewer_layers, _no_declaration])
def test_a_declaration_of_something_else_is_refused(hook: object) -> None:
    """Name, family, space, layers and anchor are the model's to say."""
    registry = PluginRegistry()
    registry.register(_plugin("first", hicache_pool_spec=hook), name="one", distribution="one-dist 1.0")
    with pytest.raises(PluginError) as caught:
        registry.spec(_geometry("first"))
    assert caught.value.who == "one (one-dist 1.0)"


@hookimpl
def _flag(spec: PoolSpec, platform: object) -> bool:
    return True


def test_capabilities_that_are_none_are_refused() -> None:
    """A boolean where each capability needs a verdict."""
    registry = PluginRegistry()
    registry.register(_plugin("first", hicache_declare_capabilities=_flag), name="one")
    with pytest.raises(PluginError) as caught:
        registry.capabilities(registry.spec(_geometry("first")), CUDA)
    assert caught.value.who == "one"


GOOD_SOURCE = """
from hicache_core.hookspecs import Family, hookimpl

@hookimpl
def hicache_pool_families():
    return [Family(name="{family}", api=(1, 1), geometry={{}}, description="for tests")]

@hookimpl
def hicache_pool_spec(family, geometry):
    return None
"""


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Four entry points: one that does not import, one without a hook, and a good one at each end."""
    sources = {
        "registry_test_a_good": GOOD_SOURCE.format(family="first"),
        "registry_test_b_broken": "raise ImportError('no such engine')",
        "registry_test_c_empty": "",
        "registry_test_d_good": GOOD_SOURCE.format(family="last"),
    }
    monkeypatch.syspath_prepend(tmp_path)
    for module, source in sources.items():
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
        monkeypatch.delitem(sys.modules, module, raising=False)
    short = {module: module.removeprefix("registry_test_") for module in sources}
    return [EntryPoint(name=short[m], value=m, group="hicache.pools") for m in sources]


def test_a_broken_plugin_does_not_hide_the_others(found: list[EntryPoint]) -> None:
    """It is kept with its error, and those before and after it are there."""
    registry = load_plugins(found=found)
    assert sorted(registry.families) == ["first", "last"]
    assert [refused.name for refused in registry.refused] == ["b_broken", "c_empty"]
    broken = registry.refused[0].error
    assert (broken.code, broken.who) == ("plugin", "b_broken")
    assert "ImportError: no such engine" in broken.got


def test_load_order_is_by_name(found: list[EntryPoint]) -> None:
    """The order in which entry points are found decides nothing."""
    assert load_plugins(found=found[::-1]).plugins == load_plugins(found=found).plugins


def test_the_first_by_name_keeps_a_family(tmp_path: Path, found: list[EntryPoint]) -> None:
    """A second owner is refused and named, whichever was found first."""
    (tmp_path / "registry_test_d_good.py").write_text(GOOD_SOURCE.format(family="first"), encoding="utf-8")
    registry = load_plugins(found=found[::-1])
    assert registry.owner("first").name == "a_good"
    assert [refused.name for refused in registry.refused] == ["b_broken", "c_empty", "d_good"]


def test_required_plugins_that_are_there_pass(found: list[EntryPoint]) -> None:
    """Others may be broken."""
    registry = load_plugins(found=found, required=["a_good", "d_good"])
    assert [plugin.name for plugin in registry.plugins] == ["a_good", "d_good"]


@pytest.mark.parametrize(
    ("required", "there", "not_there"),
    [
        (["b_broken"], ["no such engine"], ["c_empty"]),
        (["absent"], ["'absent' is not installed"], ["no such engine", "c_empty"]),
        (["absent", "b_broken", "a_good"], ["'absent'", "no such engine"], ["c_empty", "'a_good'"]),
    ],
)
def test_a_required_plugin_that_is_missing_or_broken_is_an_error(
    found: list[EntryPoint], required: list[str], there: list[str], not_there: list[str]
) -> None:
    """All that are required and not there, in one error, and no others."""
    with pytest.raises(PluginError) as caught:
        load_plugins(found=found, required=required)
    assert all(text in caught.value.got for text in there)
    assert not any(text in caught.value.got for text in not_there)


def test_strict_raises_all_failures_together(found: list[EntryPoint]) -> None:
    """Both broken plugins and a missing one, in one error."""
    with pytest.raises(PluginError) as caught:
        load_plugins(found=found, strict=True, required=["absent"])
    assert all(name in caught.value.got for name in ("b_broken", "c_empty", "'absent'"))


def test_strict_is_silent_where_nothing_failed(found: list[EntryPoint]) -> None:
    """Good plugins alone."""
    registry = load_plugins(found=[found[0], found[3]], strict=True)
    assert registry.refused == ()


def test_installed_plugins_load_strictly() -> None:
    """The distributions of this repository, through their own entry points."""
    installed = ["dsa_indexer", "dsv4_paged", "dsv4_state", "mamba", "mha_mla"]
    registry = load_plugins(strict=True, required=installed)
    families = {"dsa_indexer", "dsv4_anchor", "dsv4_paged", "dsv4_state", "k_only", "mamba", "mha", "mla"}
    assert families <= set(registry.families)
    assert registry.owner("mha").distribution.startswith("hicache-mha-mla ")
