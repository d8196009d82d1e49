"""Kernels compiled for the devices that torch sees, started on streams of torch."""

from __future__ import annotations

import inspect
import itertools
import threading
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction, driver

from hicache_core.device.kernels import source
from hicache_core.device.kernels.launch import LARGE_TILE, SMALL_TILE, WIDEST_VECTOR, Tile
from hicache_core.errors import DeviceError

KERNELS = ("gather_units", "move_rows", "move_tokens")
_CONSTANTS = ("VECTOR", "TILE")
# Since 3.3 a signature lists constants as well, and a launch passes them.
_LISTS_CONSTANTS = "constexprs" in inspect.signature(ASTSource).parameters
_WARPS = {SMALL_TILE: 1, LARGE_TILE: 4}
"""Warps by vectors of a program."""


def compile_kernel(name: str, tile: Tile, target: GPUTarget) -> Any:
    """A kernel of the source for a target, which need not be a device of this machine.

    Every argument is int64, so that one binary serves all tables of one alignment.
    """
    kernel: Any = getattr(source, name)
    constants = dict(zip(_CONSTANTS, tile, strict=True))
    signature = {arg: "i64" for arg in kernel.arg_names if arg not in constants}
    if _LISTS_CONSTANTS:
        signature |= dict.fromkeys(constants, "constexpr")
    return triton.compile(
        ASTSource(kernel, signature, constants),
        target=target,
        # Nothing is fused, and 3.9 warns where this is left open.
        options={"num_warps": _WARPS[tile[1]], "enable_fp_fusion": False},
    )


class CompiledLauncher:
    """Starts compiled kernels; see :class:`~hicache_core.device.kernels.launch.Launcher`.

    A kernel is compiled at its first use on a device, or taken from Triton's cache on disk. The stream is
    handed on as it is: making it torch's current one would take longer than the launch.
    """

    def __init__(self) -> None:
        self._loaded: dict[tuple[int, str, Tile], Any] = {}
        self._lock = threading.Lock()

    def load(self, name: str, tile: Tile, device: int) -> Any:
        """The kernel, compiled and loaded on ``device``, or whatever compiler or driver raise."""
        key = (device, name, tile)
        loaded = self._loaded.get(key)
        if loaded is None:
            with self._lock, torch.cuda.device(device):
                loaded = compile_kernel(name, tile, driver.active.get_current_target())
                # Taking an item loads the module; the grid plays no part in it.
                _ = loaded[(1, 1, 1)]
                self._loaded[key] = loaded
        return loaded

    def device_of(self, stream: torch.cuda.Stream) -> int:
        """The device of a stream of torch."""
        return int(stream.device_index)

    def holds(self, tensor: torch.Tensor, device: int) -> bool:
        """Whether it is a tensor of ``device``."""
        return tensor.is_cuda and tensor.get_device() == device

    def retain(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Tell torch's allocator of the stream; costs nothing where the tensor was made for it."""
        tensor.record_stream(stream)

    def launch(
        self, name: str, programs: int, numbers: tuple[int, ...], tile: Tile, stream: torch.cuda.Stream
    ) -> None:
        """Queue a kernel on a stream; DeviceError where the compiler or the driver refuses it."""
        device = int(stream.device_index)
        arguments = (*numbers, *tile) if _LISTS_CONSTANTS else numbers
        try:
            kernel = self.load(name, tile, device)
            if torch.cuda.current_device() == device:
                kernel[(programs, 1, 1)](*arguments, stream=stream.cuda_stream)
                return
            with torch.cuda.device(device):
                kernel[(programs, 1, 1)](*arguments, stream=stream.cuda_stream)
        except (RuntimeError, triton.CompilationError) as error:
            raise DeviceError(
                who=f"kernel {name} on device {device}",
                got=f"{type(error).__name__}: {error}",
                expected="a launch",
                remedy="Look for an earlier failure of the device; direct needs no kernels.",
            ) from error


def load_launcher(device: int) -> CompiledLauncher:
    """A launcher that has every kernel loaded on ``device`` for rows of the widest vectors.

    No transfer of such rows there waits for a compiler, which takes seconds the first time on a machine; and
    what Triton lacks, a C compiler included, shows now.

    Raises:
        DeviceError: it does not, with the reason.
    """
    if not isinstance(source.move_rows, JITFunction):
        raise _unserved("kernels that the interpreter runs", "Unset TRITON_INTERPRET.")
    launcher = CompiledLauncher()
    try:
        for name, vectors in itertools.product(KERNELS, _WARPS):
            launcher.load(name, (WIDEST_VECTOR, vectors), device)
    except Exception as error:
        # Compilers, linkers and drivers raise what they like.
        raise _unserved(f"{type(error).__name__}: {error}", "Repair it, or do without kernels.") from error
    return launcher


def _unserved(got: str, remedy: str) -> DeviceError:
    return DeviceError(who="triton", got=got, expected="kernels compiled for the device", remedy=remedy)
