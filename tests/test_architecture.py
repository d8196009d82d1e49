"""The source tree keeps its rules: imports, names, branches, lengths, copies, and what loads torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import architecture_checks as checks

ROOT = Path(__file__).resolve().parents[1]
PLUGIN_PACKAGES = {path.parent.name: path for path in sorted(ROOT.glob("plugins/*/hicache_*"))}
PLUGINS = {name: checks.load(package) for name, package in PLUGIN_PACKAGES.items()}
CORE = checks.load(ROOT / checks.CORE)
PACKAGES = [*CORE, *(module for plugin in PLUGINS.values() for module in plugin)]

LATER_FAMILIES: set[str] = set()
FAMILIES = LATER_FAMILIES.union(PLUGINS, *map(checks.declared_families, PLUGINS.values()))
GENERIC_WORDS = {"paged", "state", "indexer"}
STEMS = sorted({w for f in {*PLUGINS, *LATER_FAMILIES} for w in checks.words(f)} - GENERIC_WORDS)

LIGHT_MODULES = [
    checks.CORE,
    *(f"{checks.CORE}.{name}" for name in ("hookspecs", "plugins", "spec", "models", "compat", "cli")),
    *(f"{package.name}.plugin" for package in PLUGIN_PACKAGES.values()),
]


def heavy_imports(statement: str, path: Path | None = None) -> set[str]:
    """Which of torch and triton a fresh interpreter holds after ``statement``.

    Args:
        statement: Python source.
        path: a folder that its imports are looked up in first.
    """
    report = "import sys; print(*({'torch', 'triton'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{report}"],
        capture_output=True,
        text=True,
        env={**os.environ, **({"PYTHONPATH": str(path)} if path else {})},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_there_is_something_to_check() -> None:
    """The tree is found: a wrong folder would pass every check below."""
    assert len(CORE) > 10
    assert set(PLUGINS) == {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    assert all(PLUGINS.values())
    assert {"mha", "mla", "dsv4", "dsa", "mamba"} <= set(STEMS)


def test_core_imports_no_plugin() -> None:
    """The core can be installed, imported and tested with no plugin."""
    packages = {package.name for package in PLUGIN_PACKAGES.values()}
    assert checks.plugin_imports_of_core(CORE, packages) == []


def test_core_names_no_family() -> None:
    """A new family changes nothing in the core; data files and prose may name families."""
    assert checks.family_names_in_core(CORE, FAMILIES, STEMS) == []


@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugin_imports_public_modules_only(plugin: str) -> None:
    """A plugin stands on what third parties may stand on."""
    assert checks.private_imports_of_plugin(PLUGINS[plugin]) == []


def test_no_import_cycle() -> None:
    """Modules can be read, and imported, one after the other."""
    assert checks.import_cycles(PACKAGES) == []


def test_no_branch_asks_for_a_name() -> None:
    """Layouts, backends, platforms and families are objects and table entries, never arms of a ladder."""
    assert checks.ladders(PACKAGES) == []


def test_files_keep_their_budget() -> None:
    """A file fits in a head."""
    assert checks.long_files(PACKAGES) == []


def test_functions_keep_their_budget() -> None:
    """A function fits on a screen, most in half of one."""
    assert checks.long_functions(PACKAGES) == []


def test_plugins_hold_no_copies_of_each_other() -> None:
    """What two plugins need belongs to the core."""
    assert checks.copied_runs(PLUGINS) == []


@pytest.mark.slow
@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_import_brings_no_torch(module: str) -> None:
    """A check on a machine without a GPU takes well under half a second."""
    assert heavy_imports(f"import {module}") == set()


@pytest.mark.slow
def test_loading_plugins_brings_no_torch() -> None:
    """Discovery and registration ask for declarations only."""
    code = "from hicache_core.plugins import load_plugins; assert load_plugins(strict=True).plugins"
    assert heavy_imports(code) == set()


@pytest.mark.slow
def test_a_heavy_import_is_seen(tmp_path: Path) -> None:
    """The two tests above can fail."""
    (tmp_path / "torch.py").touch()
    (tmp_path / "violator.py").write_text("import torch\n", encoding="utf-8")
    assert heavy_imports("import violator", tmp_path) == {"torch"}
