"""Builds the stand-in of a vendor's runtime library with the C compiler of this machine."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from attrs import frozen

SOURCE = Path(__file__).with_name("runtime.c")


@frozen(kw_only=True)
class Build:
    """One way to compile the stand-in.

    Args:
        prefix: start of every function's name.
        version: what its RuntimeGetVersion says.
        defines: which batch copies it exports, and whether they have the argument failIdx.
    """

    prefix: str
    version: int
    defines: tuple[str, ...] = ()


BUILDS = {
    "cuda": Build(prefix="cuda", version=13000, defines=("BATCH", "BATCH_3D")),
    "cuda 12.8": Build(prefix="cuda", version=12080, defines=("BATCH", "BATCH_3D", "FAIL_INDEX")),
    "cuda 12.6": Build(prefix="cuda", version=12060),
    "hip": Build(prefix="hip", version=70125424, defines=("BATCH", "BATCH_3D", "FAIL_INDEX")),
    "hip 6": Build(prefix="hip", version=60443482),
}
"""By name: whose library is stood in for, and since when its batch copies are as they are."""


@functools.cache
def library(name: str) -> bytes:
    """The stand-in of that name, compiled once a process; skips the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the stand-ins of the runtime libraries need a C compiler (cc or gcc) on Linux")
    build = BUILDS[name]
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
    names = [f"PREFIX={build.prefix}", f"VERSION={build.version}", *build.defines]
    defined = [f"-D{name}" for name in names]
    with tempfile.TemporaryDirectory(prefix="hicache-stand-in-") as folder:
        target = Path(folder) / "stand-in.so"
        command = [compiler, *flags, *defined, str(SOURCE), "-pthread", "-o", str(target)]
        subprocess.run(command, check=True, timeout=120)
        return target.read_bytes()
