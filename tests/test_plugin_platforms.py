"""Platform profiles that a plugin brings: found by name, refused where a name is taken, used as any other."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner

from hicache_core.cli import introspection
from hicache_core.compat import Member, Outcome, Query, answer
from hicache_core.errors import PluginError, UnknownNameError
from hicache_core.hookspecs import hookimpl
from hicache_core.models import load_model
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import PLATFORMS, Alias, Platform, default_capabilities, platform_named
from hicache_core.testing.stand_ins import pool_spec

ACME = Platform(name="acme-x1", vendor="acme", alias=Alias.DISTINCT, variants_of="cuda")


def _plugin(*platforms: Any) -> SimpleNamespace:
    @hookimpl
    def hicache_platforms() -> tuple[Any, ...]:
        return platforms

    return SimpleNamespace(hicache_platforms=hicache_platforms)


def test_a_plugin_may_bring_platforms_alone() -> None:
    """No family is asked of it; the profile stands beside those of the core."""
    registry = PluginRegistry()
    plugin = registry.register(_plugin(ACME), name="acme", distribution="acme-hicache 0.1")
    assert (plugin.platforms, plugin.families) == ((ACME,), ())
    assert list(registry.platforms) == [*PLATFORMS, "acme-x1"]
    assert platform_named("acme-x1", registry.platforms) is ACME


def test_a_profile_of_a_plugin_takes_the_variants_of_another_platform() -> None:
    """R7 holds the variant against both names; the default variant is that of the other platform."""
    model = load_model("deepseek-v4-flash")
    assert model.variant(None, ACME) is model.variant(None, "cuda")
    member = Member(spec=pool_spec(48), capabilities=default_capabilities(pool_spec(48), ACME))
    asked = Query(
        platform=ACME,
        io_backend="kernel",
        layout="layer_first",
        pools=[member],
        variant_platforms=model.variant(None, ACME).platforms,
    )
    assert answer(asked).outcome is Outcome.YES
    alone = evolve(asked, platform=evolve(ACME, variants_of=""))
    assert [violation.id for violation in answer(alone).violations] == ["R7-variant-platform"]


@pytest.mark.parametrize(
    "platforms",
    [(PLATFORMS["cuda"],), (ACME, ACME), ("acme-x1",), ()],
    ids=["core's", "twice", "a name", "none"],
)
def test_platforms_that_cannot_be_told_apart_are_refused(platforms: tuple[Any, ...]) -> None:
    """Registration is all or nothing: the registry is what it was."""
    registry = PluginRegistry()
    with pytest.raises(PluginError):
        registry.register(_plugin(*platforms), name="acme")
    assert (registry.plugins, dict(registry.platforms)) == ((), PLATFORMS)


def test_a_name_that_another_plugin_brought_is_refused() -> None:
    """The first keeps it."""
    registry = PluginRegistry()
    registry.register(_plugin(ACME), name="acme")
    with pytest.raises(PluginError):
        registry.register(_plugin(evolve(ACME, vendor="other")), name="other")
    assert registry.platforms["acme-x1"] is ACME


FACTS = ("staged_required", "kernel_layer_first", "has_kernels", "relays_out_backups")


@pytest.mark.parametrize("fact", FACTS)
def test_facts_are_true_or_false(fact: str) -> None:
    """A string such as "no" would count as yes."""
    wrong: dict[str, Any] = {fact: "no"}
    with pytest.raises(TypeError):
        evolve(ACME, **wrong)


def test_unknown_platforms_are_named_with_those_of_plugins() -> None:
    """The reader sees what there is."""
    registry = PluginRegistry()
    registry.register(_plugin(ACME), name="acme")
    with pytest.raises(UnknownNameError) as caught:
        platform_named("acme-x2", registry.platforms)
    assert "acme-x1" in caught.value.expected


def test_what_a_plugin_brings_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``hicache plugins``, for people and as JSON; its platform can be asked about."""
    registry = PluginRegistry()
    registry.register(_plugin(ACME), name="acme", distribution="acme-hicache 0.1")
    monkeypatch.setattr(introspection, "load_plugins", lambda: registry)
    (listed,) = json.loads(CliRunner().invoke(introspection.plugins, ["--json"]).output)["plugins"]
    assert (listed["families"], listed["platforms"], listed["allocators"]) == ([], ["acme-x1"], [])
    assert "platform acme-x1" in CliRunner().invoke(introspection.plugins, []).output
