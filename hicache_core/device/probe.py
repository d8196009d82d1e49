"""What the machine at hand is: asked of its runtime and of bytes; an attribute alone is no evidence."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping

import numpy as np
import torch
from attrs import evolve

from hicache_core.device.base import BatchCopies, DeviceRuntime, StridedCopies
from hicache_core.device.cuda import CudaRuntime
from hicache_core.device.hip import HipRuntime
from hicache_core.device.native import NativeRuntime
from hicache_core.errors import DeviceError
from hicache_core.memory.host import HostMemory
from hicache_core.memory.options import MemoryOptions
from hicache_core.spec.platform import PLATFORMS, Alias, CopyKind, Platform

_RUNS, _RUN_BYTES = 8, 512
"""Enough runs that a runtime takes its batch call for them."""
_PROFILES: Mapping[tuple[str, Alias], str] = {
    ("cuda", Alias.EQUAL): "cuda",
    ("cuda", Alias.DISTINCT): "cuda-wsl2",
    ("rocm", Alias.EQUAL): "rocm",
    ("rocm", Alias.DISTINCT): "rocm-mi355x",
}
_RUNTIMES: Mapping[str, Callable[[Platform], NativeRuntime]] = {"cuda": CudaRuntime, "rocm": HipRuntime}
_FRAMEWORK_PINNED = ("npu", "musa", "xpu")


def _strided(starts: np.ndarray[tuple[int], np.dtype[np.int64]], host: int) -> StridedCopies:
    return StridedCopies(
        targets=starts[:1],
        sources=np.array([host], dtype=np.int64),
        widths=_RUN_BYTES,
        heights=_RUNS,
        target_pitch=_RUN_BYTES,
        source_pitch=_RUN_BYTES,
        host_is_target=False,
    )


def _batch(starts: np.ndarray[tuple[int], np.dtype[np.int64]], host: int) -> BatchCopies:
    return BatchCopies(
        targets=starts,
        sources=host + np.arange(_RUNS, dtype=np.int64) * _RUN_BYTES,
        sizes=np.full(_RUNS, _RUN_BYTES, dtype=np.int64),
        host_is_target=False,
    )


_COPIES: Mapping[CopyKind, Callable[..., StridedCopies | BatchCopies]] = {
    CopyKind.TWO_D: _strided,
    CopyKind.BATCH: _batch,
}


def _moves(runtime: DeviceRuntime, device: int, kind: CopyKind, memory: HostMemory, host: int) -> bool:
    """Whether a kind of copy brings the bytes of ``memory`` to the device from the address ``host``."""
    nbytes = _RUNS * _RUN_BYTES
    target = runtime.allocate(nbytes, device)
    target.fill_(0)
    stream = runtime.new_stream(device)
    runtime.wait_current(stream, device)
    start = runtime.device_range(target, device).start
    try:
        _COPIES[kind](start + np.arange(_RUNS, dtype=np.int64) * _RUN_BYTES, host).submit(runtime, stream)
        runtime.synchronize(stream)
    except DeviceError:
        return False
    return bool(np.array_equal(target.cpu().numpy(), memory.view[:nbytes]))


def probed(runtime: DeviceRuntime, device: int = 0) -> Platform:
    """The facts of a runtime's platform, each held against what the runtime says and does.

    Registers two runs of host memory, asks for their aliases, and moves bytes from them by each kind of copy:
    from the CPU address where the profile says that the kind takes it, else from the alias.

    Args:
        runtime: the runtime, made with the profile that its vendor's devices have most often.
        device: ordinal of the device.

    Returns:
        The profile that fits the aliases, with the kinds of copy that were seen to take the CPU address.

    Raises:
        DeviceError: bytes arrive from neither address.
        RegistrationError: the runtime registers nothing.
    """
    page = mmap.PAGESIZE
    options = MemoryOptions(max_registration_bytes=page)
    memory = HostMemory(2 * page, page, runtime, who="probe", options=options)
    try:
        memory.view[:] = np.random.default_rng(1).integers(0, 256, 2 * page, dtype=np.uint8)
        aliases = [runtime.alias(segment.host, device) for segment in memory.segments]
        equal = all(a.start == s.host.start for a, s in zip(aliases, memory.segments, strict=True))
        vendor = runtime.platform.vendor
        name = _PROFILES.get((vendor, Alias.EQUAL if equal else Alias.DISTINCT))
        facts = PLATFORMS[name] if name else runtime.platform
        host, alias = memory.segments[0].host.start, aliases[0].start
        takes = {k for k in facts.copy_accepts_host_address if k not in _COPIES}
        for kind in _COPIES:
            if kind in facts.copy_accepts_host_address and _moves(runtime, device, kind, memory, host):
                takes.add(kind)
            elif not _moves(runtime, device, kind, memory, alias):
                raise DeviceError(
                    who=f"probe of {vendor}",
                    got=f"no bytes by {kind.value} copies from registered memory",
                    expected="them at its alias, if not at its CPU address",
                    remedy="The driver is in a state in which host memory cannot be used.",
                )
    finally:
        memory.destroy()
    return evolve(facts, copy_accepts_host_address=takes, has_kernels=runtime.kernels is not None)


def machine_runtime() -> NativeRuntime | None:
    """The runtime of this machine's devices, with the profile that was probed; None where torch sees none.

    Raises:
        DeviceError: there is a device, and its runtime fails.
    """
    if not torch.cuda.is_available():
        return None
    vendor = "rocm" if torch.version.hip else "cuda"
    usual = _RUNTIMES[vendor](PLATFORMS[vendor])
    found = probed(usual)
    return usual if found == usual.platform else _RUNTIMES[vendor](found)


def probe_platform() -> Platform:
    """See :meth:`hicache_core.spec.Platform.probe`."""
    runtime = machine_runtime()
    if runtime is not None:
        return runtime.platform
    for vendor in _FRAMEWORK_PINNED:
        module = getattr(torch, vendor, None)
        if module is not None and module.is_available():
            return PLATFORMS[vendor]
    return PLATFORMS["cpu-sim"]
