"""The HIP binding against a vendor's own header, where an installed package brings one (triton does)."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from hicache_core.device import library

SOURCE = Path(__file__).parents[1] / "stand_ins" / "hip_header.c"


def include_folder() -> Path:
    """The folder of the HIP headers; skips the test where no package brings them."""
    found = importlib.util.find_spec("triton")
    if found is not None and found.origin is not None:
        folder = Path(found.origin).parent / "backends" / "amd" / "include"
        if (folder / "hip" / "hip_runtime_api.h").exists():
            return folder
    pytest.skip("no installed package brings hip/hip_runtime_api.h (triton does)")


def compiles(target: Path, **wrong: int) -> bool:
    """Whether the header agrees with the binding's structure, of which some figures may be made wrong."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc)")
    fields = library._ATTRIBUTES.fields
    assert fields is not None
    figures = {name: fields[name][1] for name in ("order", "source", "target", "flags")}
    figures |= {"size": library._ATTRIBUTES.itemsize, **wrong}
    defines = [f"-DATTRIBUTES_{name.upper()}={value}" for name, value in figures.items()]
    flags = ["-c", "-Wall", "-Werror", "-Wno-deprecated-declarations", f"-I{include_folder()}"]
    done = subprocess.run([compiler, *flags, *defines, str(SOURCE), "-o", str(target)], capture_output=True)
    return done.returncode == 0


def test_signatures_codes_and_structures_are_those_of_the_header(tmp_path: Path) -> None:
    """Every call that is bound, as its prototype says, and the attributes of a batch, field by field."""
    assert compiles(tmp_path / "header.o")


@pytest.mark.parametrize("field", ["size", "source", "flags"])
def test_another_figure_would_be_seen(tmp_path: Path, field: str) -> None:
    """The comparison is one that can fail."""
    assert not compiles(tmp_path / "header.o", **{field: 2})
