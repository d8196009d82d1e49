"""The rules of compatibility, stated a second time, as data.

Written from what is asked of the product and from what was published or measured, never from the solver;
:mod:`tests.golden.statement` reads the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Pair = tuple[str, str]

KERNEL_LAYER_FIRST: Pair = ("kernel", "layer_first")
KERNEL_PAGE_FIRST: Pair = ("kernel", "page_first")
DIRECT_LAYER_FIRST: Pair = ("direct", "layer_first")
DIRECT_PAGE_FIRST_DIRECT: Pair = ("direct", "page_first_direct")

SERVED = {KERNEL_LAYER_FIRST, KERNEL_PAGE_FIRST, DIRECT_LAYER_FIRST, DIRECT_PAGE_FIRST_DIRECT}

FAMILY_PAIRS: Mapping[str, set[Pair]] = {"mamba": {KERNEL_PAGE_FIRST, DIRECT_PAGE_FIRST_DIRECT}}
"""Families that serve fewer: state slots have all layers of a buffer in one run on the host."""
LOGICAL_FAMILIES = {"dsv4_anchor"}
"""Families without bytes: a free list of slots."""

STAGED_MULTIPLE, KERNEL_MULTIPLE = 16, 8
"""What divides the rows that a staged write-back, or a kernel, moves."""


class Facts(NamedTuple):
    """A platform.

    Args:
        kernels: whether the core has kernels for it.
        registers: whether host memory is registered; else the framework pins it, and addresses are raw.
        alias: whether the device's address of registered memory is another than the CPU's.
        batch_copies_take_cpu: whether the batch copy takes the CPU address of registered memory.
        page_first_is_staged: whether kernel + page_first needs a staged write-back of every pool.
        layer_first_by_kernel: kernel + layer_first, without being asked or on request.
        relayout: whether a staged backup is relaid out on the device, else copied strided.
        page_first_loads: what loads pages under kernel + page_first.
    """

    kernels: bool
    registers: bool
    alias: Literal["same", "other"]
    batch_copies_take_cpu: bool
    page_first_is_staged: bool
    layer_first_by_kernel: Literal["served", "on request"]
    relayout: bool
    page_first_loads: Literal["kernel", "copies"]


# fmt: off
PLATFORMS: Mapping[str, Facts] = {
    #                     kernels registers alias batch staged layer_first   relayout page_first loads
    "cpu-sim":      Facts(True,  True,  "same",  True,  False, "served",     True,  "kernel"),
    # Strided copies were the fastest both ways on an H200.
    "cuda":         Facts(True,  True,  "same",  True,  False, "served",     False, "copies"),
    # RTX 5090 under WSL2: a kernel faults on the CPU address, and so does a batch copy of one descriptor.
    "cuda-wsl2":    Facts(True,  True,  "other", False, False, "served",     False, "copies"),
    # Page-first loads by runtime copies, which resolve the alias themselves.
    "rocm":         Facts(True,  True,  "same",  True,  True,  "on request", True,  "copies"),
    "rocm-mi355x":  Facts(True,  True,  "other", True,  True,  "on request", True,  "copies"),
    "npu":          Facts(False, False, "same",  True,  False, "served",     True,  "copies"),
    "musa":         Facts(False, False, "same",  True,  False, "served",     True,  "copies"),
    "xpu":          Facts(False, False, "same",  True,  False, "served",     True,  "copies"),
}
# fmt: on

EVERYWHERE = {"cpu-sim", "cuda", "cuda-wsl2", "rocm", "rocm-mi355x"}
"""Where row formats exist that no platform has to itself."""
VARIANT_PLATFORMS: Mapping[str, set[str]] = {
    "rocm_unified_bf16": {"rocm", "rocm-mi355x", "cpu-sim"},
    "rocm_unified_fp8": {"rocm", "rocm-mi355x", "cpu-sim"},
    "sm100_v41": {"cuda", "cpu-sim"},
    "trtllm_uniform_fp8": {"cuda", "cpu-sim"},
    "tp2_fp8kv_bf16state_mtp1": {"rocm", "rocm-mi355x", "cuda", "cpu-sim"},
}
"""The variants that exist on some of these alone; nobody lists NPU, MUSA or XPU."""
