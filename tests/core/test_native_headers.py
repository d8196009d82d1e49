"""The bindings against the vendors' own headers, where an installed package brings them (triton does)."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_core.device import runtime_library

SOURCES = Path(__file__).parents[1] / "stand_ins"
HEADERS = {"hip": ("amd", "hip/hip_runtime_api.h"), "cuda": ("nvidia", "cuda_runtime_api.h")}
STRUCTURES = {
    "ATTRIBUTES": runtime_library._ATTRIBUTES,
    "OPERAND": runtime_library._OPERAND,
    "OPERATION": runtime_library._OPERATION,
}


def include_folder(vendor: str) -> Path:
    """The folder of a vendor's headers; skips the test where no package brings them."""
    backend, header = HEADERS[vendor]
    found = importlib.util.find_spec("triton")
    if found is not None and found.origin is not None:
        folder = Path(found.origin).parent / "backends" / backend / "include"
        if (folder / header).exists():
            return folder
    pytest.skip(f"no installed package brings {header} (triton does)")


def figures() -> Iterator[tuple[str, int]]:
    """Size of each structure of the binding, and where its fields lie."""
    for name, dtype in STRUCTURES.items():
        yield f"{name}_SIZE", dtype.itemsize
        for field, (_, offset, *_) in (dtype.fields or {}).items():
            yield f"{name}_{field.upper()}", offset


def compiles(vendor: str, target: Path, **wrong: int) -> bool:
    """Whether a header agrees with the binding, of which some figures may be made wrong."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc)")
    defines = [f"-D{name}={value}" for name, value in {**dict(figures()), **wrong}.items()]
    flags = ["-c", "-Werror", "-Wno-deprecated-declarations", f"-I{include_folder(vendor)}"]
    source = SOURCES / f"{vendor}_header.c"
    done = subprocess.run([compiler, *flags, *defines, str(source), "-o", str(target)], capture_output=True)
    return done.returncode == 0


@pytest.mark.parametrize("vendor", HEADERS)
def test_signatures_codes_and_structures_are_those_of_the_header(tmp_path: Path, vendor: str) -> None:
    """Every call that is bound, as its prototype says, and the structures of batches, field by field."""
    assert compiles(vendor, tmp_path / "header.o")


@pytest.mark.parametrize(
    ("vendor", "figure"),
    [
        ("hip", "ATTRIBUTES_SIZE"),
        ("hip", "ATTRIBUTES_FLAGS"),
        ("cuda", "OPERAND_LOCATION"),
        ("cuda", "OPERATION_ORDER"),
    ],
)
def test_another_figure_would_be_seen(tmp_path: Path, vendor: str, figure: str) -> None:
    """The comparison is one that can fail."""
    assert not compiles(vendor, tmp_path / "header.o", **{figure: 2})
