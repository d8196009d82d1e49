"""The Triton kernels on the CPU: their source under Triton's interpreter, started on tensors of the host."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType
from unittest import mock

import torch
from attrs import field, frozen
from triton.runtime.jit import mangle_type

from hicache_core.device.base import Int64Array
from hicache_core.device.kernels.launch import Tile, TritonKernels


@frozen(kw_only=True)
class HostStream:
    """A stream on which everything has run once it was submitted."""

    device: int = 0
    name: str = ""


@frozen(kw_only=True)
class Started:
    """A launch that was started."""

    name: str
    programs: int
    tile: Tile


def interpreted_source() -> ModuleType:
    """The source of the kernels, loaded a second time for the interpreter; the first stays as it is."""
    compiled = importlib.util.find_spec("hicache_core.device.kernels.source")
    assert compiled is not None
    assert compiled.origin is not None
    name = "interpreted_kernels"
    spec = importlib.util.spec_from_file_location(name, compiled.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Imports what it needs to look at a number, which cannot be imported while the interpreter runs.
    mangle_type(0)
    # Triton decides when a kernel is defined.
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        spec.loader.exec_module(module)
    # What a kernel calls is called as it is: the interpreter would patch the whole language at each call.
    for inner in [name for name in vars(module) if name.startswith("_") and not name.startswith("__")]:
        setattr(module, inner, getattr(module, inner).fn)
    return module


@frozen(kw_only=True, eq=False)
class Interpreter:
    """Launcher and memory of devices whose addresses are those of the host.

    Args:
        source: the interpreted kernels.
        started: what was started.
        retained: tensors that were to be retained.
        uploaded: what was uploaded.
    """

    source: ModuleType = field(factory=interpreted_source)
    started: list[Started] = field(factory=list)
    retained: list[torch.Tensor] = field(factory=list)
    uploaded: list[Int64Array] = field(factory=list)

    def kernels(self) -> TritonKernels:
        """The kernels over this memory."""
        return TritonKernels(self, self)

    def upload(self, values: Int64Array, device: int, stream: HostStream) -> torch.Tensor:
        """A copy."""
        self.uploaded.append(values)
        return torch.from_numpy(values.copy())

    def new_stream(self, device: int) -> HostStream:
        """A stream."""
        return HostStream(device=device)

    def synchronize(self, stream: HostStream) -> None:
        """Everything has run."""

    def device_of(self, stream: HostStream) -> int:
        """The device that it was made for."""
        return stream.device

    def holds(self, tensor: torch.Tensor, device: int) -> bool:
        """Every device sees the host."""
        return tensor.device.type == "cpu"

    def retain(self, tensor: torch.Tensor, stream: HostStream) -> None:
        """Kept for the test to look at."""
        self.retained.append(tensor)

    def launch(
        self, name: str, programs: int, numbers: tuple[int, ...], tile: Tile, stream: HostStream
    ) -> None:
        """Run every program now."""
        self.started.append(Started(name=name, programs=programs, tile=tile))
        getattr(self.source, name)[(programs,)](*numbers, *tile)
