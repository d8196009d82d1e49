"""A machine of the stand-in: its library, loaded afresh, and what torch would do beside it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from hicache_core.device.base import DeviceRuntime, Int64Array
from hicache_core.device.cuda import CudaRuntime
from hicache_core.device.hip import HipRuntime
from hicache_core.device.kernels import Found
from hicache_core.device.native import NativeRuntime
from hicache_core.spec import platform_named
from tests.stand_ins.build import BUILDS, library

_DEVICE_MEMORY = 2
_NON_BLOCKING = 1
_RUNTIMES: Mapping[str, type[CudaRuntime | HipRuntime]] = {"cuda": CudaRuntime, "hip": HipRuntime}


@frozen(kw_only=True)
class Case:
    """A vendor's machine.

    Args:
        build: the library, by name of :data:`~tests.stand_ins.build.BUILDS`.
        platform: the profile that its runtime is given.
        environment: settings of the stand-in that make it such a machine.
    """

    build: str
    platform: str
    environment: Mapping[str, str]


DISTINCT = {"STAND_IN_ALIAS": "distinct"}
WSL2 = {**DISTINCT, "STAND_IN_BATCH_REFUSES_HOST": "1"}
CASES = {
    "cuda, equal": Case(build="cuda", platform="cuda", environment={}),
    "cuda, distinct": Case(build="cuda", platform="cuda-wsl2", environment=WSL2),
    "hip, equal": Case(build="hip", platform="rocm", environment={}),
    "hip, distinct": Case(build="hip", platform="rocm-mi355x", environment=DISTINCT),
}
OLDER = {
    "cuda 12.8, distinct": Case(build="cuda 12.8", platform="cuda-wsl2", environment=WSL2),
    "cuda 12.6, equal": Case(build="cuda 12.6", platform="cuda", environment={}),
    "hip 6, distinct": Case(build="hip 6", platform="rocm-mi355x", environment=DISTINCT),
}
"""Libraries without batch copies, or with other arguments for them."""


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
    )


@frozen(kw_only=True)
class StandInStream:
    """A stream as torch's are: with the handle that the library knows it by, 0 for a default stream."""

    cuda_stream: int
    device_index: int


class StandIn:
    """The library of a case and, as :class:`~hicache_core.device.torch_side.TorchSide`, torch's part.

    Device memory is of the library's own allocation, seen as CPU tensors.

    Args:
        case: the machine.
        folder: where a copy of the library goes, so that it is loaded with a state of its own.
        settings: further settings by name, without ``STAND_IN_``.
    """

    def __init__(self, case: Case, folder: Path, settings: Mapping[str, int]) -> None:
        copy = folder / f"{len(list(folder.iterdir()))}-{case.build}.so"
        copy.write_bytes(library(case.build))
        self.library_path = str(copy)
        self._prefix = BUILDS[case.build].prefix
        own = {f"STAND_IN_{name}": str(value) for name, value in settings.items()}
        with _environment({**case.environment, **own}):
            self.lib = ctypes.CDLL(self.library_path)
        self.lib.standInCount.restype = ctypes.c_longlong
        self._current: dict[int, StandInStream] = {}

    def call(self, name: str, *arguments: Any) -> int:
        """The return code of a call of the library, by its name without the prefix."""
        code: int = getattr(self.lib, self._prefix + name)(*arguments)
        return code

    def _expect(self, name: str, *arguments: Any) -> None:
        code = self.call(name, *arguments)
        assert code == 0, f"{self._prefix}{name}: {code}"

    def count(self, name: str) -> int:
        """One of the library's counts: live registrations, calls by kind, the last error."""
        counted: int = self.lib.standInCount(name.encode())
        assert counted >= 0, f"no count {name}"
        return counted

    def queued(self, device: int) -> int:
        """How much waits in the default stream of a device."""
        return self.count(f"queued_{device}")

    def current_handle(self, device: int, /) -> int:
        """See TorchSide."""
        return self.current_stream(device).cuda_stream

    def current_device(self) -> int:
        """The ordinal of the caller's current device."""
        device = ctypes.c_int()
        self._expect("GetDevice", ctypes.byref(device))
        return device.value

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """See TorchSide; as torch does, it sets nothing where the device is the current one."""
        before = self.current_device()
        changes = device != before
        if changes:
            self._expect("SetDevice", device)
        try:
            yield
        finally:
            if changes:
                self._expect("SetDevice", before)

    @contextlib.contextmanager
    def using(self, stream: StandInStream) -> Iterator[None]:
        """A context in which ``stream`` is the current one of its device."""
        before = self.current_stream(stream.device_index)
        self._current[stream.device_index] = stream
        try:
            yield
        finally:
            self._current[stream.device_index] = before

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """A context in which a stream of device 0, the current one, is captured; its end must succeed."""
        stream, graph = self.new_stream(0), ctypes.c_void_p()
        self._expect("StreamBeginCapture", ctypes.c_void_p(stream.cuda_stream), 0)
        with self.using(stream):
            yield
        self._expect("StreamEndCapture", ctypes.c_void_p(stream.cuda_stream), ctypes.byref(graph))

    def pci_address(self, device: int) -> str:
        """See TorchSide."""
        return f"0000:ff:{device:02x}.0"

    def find_kernels(self, runtime: DeviceRuntime) -> Found:
        """See TorchSide."""
        return Found(reason="the stand-in launches no kernels")

    def is_capturing(self) -> bool:
        """See TorchSide."""
        status = ctypes.c_int()
        handle = self.current_handle(self.current_device())
        self._expect("StreamIsCapturing", ctypes.c_void_p(handle), ctypes.byref(status))
        return bool(status.value)

    def allocate(self, nbytes: int, device: int) -> torch.Tensor:
        """See TorchSide; a CPU tensor, whose memory is freed with its storage."""
        start = ctypes.c_void_p()
        with self.on(device):
            self._expect("Malloc", ctypes.byref(start), ctypes.c_size_t(nbytes))
        assert start.value is not None
        memory = (ctypes.c_uint8 * nbytes).from_address(start.value)
        weakref.finalize(memory, self.call, "Free", start).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """See TorchSide."""
        seen = _Attributes()
        self._expect("PointerGetAttributes", ctypes.byref(seen), ctypes.c_void_p(tensor.data_ptr()))
        return seen.device if seen.type == _DEVICE_MEMORY else None

    def upload(self, values: Int64Array, device: int, stream: StandInStream) -> torch.Tensor:
        """See TorchSide; the values are there at once."""
        target = self.allocate(max(values.nbytes, 1), device)[: values.nbytes].view(torch.int64)
        return target.copy_(torch.from_numpy(values))

    def new_stream(self, device: int) -> StandInStream:
        """See TorchSide."""
        handle = ctypes.c_void_p()
        with self.on(device):
            self._expect("StreamCreateWithFlags", ctypes.byref(handle), _NON_BLOCKING)
        return StandInStream(cuda_stream=handle.value or 0, device_index=device)

    def current_stream(self, device: int) -> StandInStream:
        """See TorchSide."""
        return self._current.get(device, StandInStream(cuda_stream=0, device_index=device))


@frozen(kw_only=True)
class NativeMachine:
    """A stand-in, and the runtime of this project over it."""

    case: Case
    stand_in: StandIn
    runtime: NativeRuntime

    @property
    def distinct(self) -> bool:
        """Whether aliases differ from CPU addresses."""
        return self.case.environment.get("STAND_IN_ALIAS") == "distinct"


def native_machine(case: Case, folder: Path, **settings: int) -> NativeMachine:
    """A machine with a state of its own.

    Args:
        case: which.
        folder: for the copy of its library.
        settings: of the stand-in, by name without ``STAND_IN_``: ``SEED=3``.
    """
    stand_in = StandIn(case, folder, settings)
    runtime = _RUNTIMES[BUILDS[case.build].prefix](platform_named(case.platform), stand_in)
    return NativeMachine(case=case, stand_in=stand_in, runtime=runtime)


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]
        os.environ.update(before)
