"""Every kernel builds for the devices that it is meant for, without one here, and moves wide vectors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton.backends.compiler import GPUTarget

from hicache_core.device.kernels import find_kernels
from hicache_core.device.kernels.compiled import KERNELS, compile_kernel
from hicache_core.device.sim import SimRuntime
from tests.core.interpreted import interpreted_source

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
CODE = {"cuda": "ptx", "hip": "amdgcn"}
WIDE = {
    "cuda": {16: ("ld.global.v4.b32", "st.global.v4.b32"), 8: ("ld.global.v2.b32", "st.global.v2.b32")},
    "hip": {
        16: (r"(buffer|global)_load_dwordx4", r"(buffer|global)_store_dwordx4"),
        8: (r"(buffer|global)_load_dwordx2", r"(buffer|global)_store_dwordx2"),
    },
}
BYTE_WISE = re.compile(r"(ld|st)\.global(\.\w+)*\.[bu]8|(buffer|global)_(load|store)_(u?byte|short)")


@pytest.fixture(autouse=True)
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes from an earlier run, and nothing is left."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def code_of(compiled: Any, target: GPUTarget) -> str:
    """The assembly."""
    return str(compiled.asm[CODE[target.backend]])


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(16, 1024), (16, 128), (8, 1024), (8, 128)], ids=str)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_and_moves_vectors(name: str, target: str, tile: tuple[int, int]) -> None:
    """Loads and stores of 16 and 8 bytes, none of single bytes, and no spill to memory."""
    to = TARGETS[target]
    compiled = compile_kernel(name, tile, to)
    code = code_of(compiled, to)
    assert all(re.search(wide, code) for wide in WIDE[to.backend][tile[0]])
    assert not BYTE_WISE.search(code)
    assert ".local" not in code
    assert set(re.findall(r"spill_count: *(\d+)", code)) <= {"0"}
    assert compiled.asm["cubin" if to.backend == "cuda" else "hsaco"]


@pytest.mark.slow
@pytest.mark.parametrize("vector", [1, 2, 4])
@pytest.mark.parametrize("name", KERNELS)
def test_narrow_rows_compile(name: str, vector: int) -> None:
    """Spans of four bytes and fewer have kernels of their own, which load no more than these."""
    code = code_of(compile_kernel(name, (vector, 128), TARGETS["sm_90"]), TARGETS["sm_90"])
    assert f"st.global.b{8 * vector}" in code
    assert ".v2." not in code
    assert ".v4." not in code


@pytest.mark.slow
def test_one_binary_serves_all_tables() -> None:
    """Every argument but the tile is a plain 64-bit number: nothing is compiled anew for other values."""
    code = code_of(compile_kernel("move_rows", (16, 128), TARGETS["sm_90"]), TARGETS["sm_90"])
    declared = re.findall(r"\.param +\.(\w+)(?: +\.ptr)?", code)
    assert set(declared[:20]) == {"u64"}


def test_interpreted_kernels_serve_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under TRITON_INTERPRET a device has no kernels, and the reason says so."""
    monkeypatch.setattr("hicache_core.device.kernels.compiled.source", interpreted_source())
    found = find_kernels(SimRuntime(), 0)
    assert found.kernels is None
    assert "TRITON_INTERPRET" in found.reason


def test_no_device_of_triton_is_a_reason_and_no_failure() -> None:
    """Where triton has no driver for a device there are no kernels."""
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    found = find_kernels(SimRuntime(), 0)
    assert found.kernels is None
    assert found.reason


def test_a_missing_triton_is_a_reason_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core runs without the extra."""
    monkeypatch.setitem(sys.modules, "hicache_core.device.kernels.compiled", None)
    found = find_kernels(SimRuntime(), 0)
    assert found.kernels is None
    assert "hicache-core[kernels]" in found.reason
