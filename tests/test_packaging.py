"""What the wheels hold, and that a plugin is found once its wheel is installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
PACKAGES = {ROOT: "hicache_core", **{project: f"hicache_{project.name}" for project in PLUGINS}}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """A wheel of each project, by the project's folder."""
    out = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    for project in PACKAGES:
        subprocess.run([*build, str(project)], check=True, capture_output=True)
    return {project: next(out.glob(f"{package}-*.whl")) for project, package in PACKAGES.items()}


def _files(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("project", PACKAGES, ids=PACKAGES.values())
def test_wheel_holds_its_package_alone(wheels: dict[Path, Path], project: Path) -> None:
    """No tests, no tools, no other distribution; typed, and with its licence."""
    package = PACKAGES[project]
    files = _files(wheels[project])
    assert {file.split("/")[0].split("-")[0] for file in files} == {package}
    assert f"{package}/py.typed" in files
    assert any(file.endswith(".dist-info/licenses/LICENSE") for file in files)
    assert not [file for file in files if "/tests/" in file or "__pycache__" in file]


@pytest.mark.parametrize("project", PACKAGES, ids=PACKAGES.values())
def test_wheel_holds_every_source_and_data_file(wheels: dict[Path, Path], project: Path) -> None:
    """Models and other data travel with the code."""
    sources = {
        path.relative_to(project).as_posix()
        for path in (project / PACKAGES[project]).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources - _files(wheels[project]) == set()


def test_core_wheel_holds_models(wheels: dict[Path, Path]) -> None:
    """The command line knows models wherever it is installed."""
    models = [Path(file) for file in _files(wheels[ROOT]) if file.startswith("hicache_core/models/")]
    assert [model for model in models if model.suffix == ".json"]


@pytest.mark.parametrize("project", PLUGINS, ids=[project.name for project in PLUGINS])
def test_plugin_is_found_from_its_wheel(wheels: dict[Path, Path], project: Path, tmp_path: Path) -> None:
    """Installed beside the core, it is found and registered, and its code is the wheel's."""
    install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, str(wheels[ROOT]), str(wheels[project])], check=True, capture_output=True)
    code = f"""
import sys
sys.path[:0] = {[str(tmp_path), *_third_party()]!r}
from hicache_core.plugins import load_plugins
for plugin in load_plugins(strict=True).plugins:
    print(plugin.name, plugin.module.__file__)
"""
    # Without site no .pth is read: the editable packages are out of reach.
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert found[project.name] == str(tmp_path / PACKAGES[project] / "plugin.py")


def _third_party() -> list[str]:
    """The folders that hold what the core depends on."""
    specs = [find_spec(name) for name in ("attrs", "pluggy")]
    return sorted({str(Path(str(spec.origin)).parents[1]) for spec in specs if spec})
