"""A vendor's runtime library through ctypes: the calls that move bytes, and nothing that torch does already.

CUDA and HIP have the same calls under two prefixes. Signatures follow the library that is loaded, not the
driver: CUDA 13 dropped the failIdx argument of the batch copies, HIP has it. Sources: the runtime API
reference of CUDA 12.8 and 13.0; hip_runtime_api.h of HIP 7.1.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen
from attrs import validators as v

from hicache_core.device.base import StridedCopies
from hicache_core.errors import DeviceError

_REGISTER_PORTABLE_MAPPED = 1 | 2
_COPY_DEFAULT = 4
_ORDER_STREAM = 1
_OPERAND_POINTER = 1
_EVENT_WITHOUT_TIMING = 2
_NOT_READY = 600

_LOCATION = np.dtype([("type", np.int32), ("id", np.int32)])
_ATTRIBUTES = np.dtype(
    [("order", np.int32), ("source", _LOCATION), ("target", _LOCATION), ("flags", np.uint32)], align=True
)
_OPERAND = np.dtype(
    [
        ("type", np.int32),
        ("pointer", np.uint64),
        ("row_length", np.uint64),
        ("layer_height", np.uint64),
        ("location", _LOCATION),
    ],
    align=True,
)
_OPERATION = np.dtype(
    [
        ("source", _OPERAND),
        ("target", _OPERAND),
        ("width", np.uint64),
        ("height", np.uint64),
        ("depth", np.uint64),
        ("order", np.int32),
        ("flags", np.uint32),
    ],
    align=True,
)

Int64Array = npt.NDArray[np.int64]


def loaded_library(name: str) -> str | None:
    """Path of a library that this process has loaded, by the start of its file name.

    Opening it by name could load a second copy with a state of its own.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/") and Path(path).name.startswith(name):
            return path
    return None


@frozen(kw_only=True)
class LibraryNames:
    """What differs between the runtime libraries of two vendors.

    Args:
        vendor: the vendor, as platforms name it.
        prefix: start of every function's name.
        file_name: start of the library's file name.
        build: attribute of ``torch.version`` that is set where torch was built for it.
        fail_index_before: first version whose batch copies have no failIdx argument; None where all have it.
        strided_batch: whether strided copies go in one call where the library exports it.
    """

    vendor: str = field(validator=v.instance_of(str))
    prefix: str = field(validator=v.instance_of(str))
    file_name: str = field(validator=v.instance_of(str))
    build: str = field(validator=v.instance_of(str))
    fail_index_before: int | None = field(default=None, validator=v.optional(v.ge(1)))
    strided_batch: bool = field(default=False, validator=v.instance_of(bool))


CUDA = LibraryNames(
    vendor="cuda",
    prefix="cuda",
    file_name="libcudart.so",
    build="cuda",
    fail_index_before=13000,
    strided_batch=True,
)
HIP = LibraryNames(vendor="rocm", prefix="hip", file_name="libamdhip64.so", build="hip")


class RuntimeLibrary:
    """The runtime library that torch has loaded.

    Args:
        path: the library.
        names: whose it is.

    Every call reads its return code; a failure clears the library's last error and raises DeviceError.
    """

    def __init__(self, path: str, names: LibraryNames) -> None:
        self._lib = ctypes.CDLL(path)
        self._prefix = names.prefix
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._error_name = self._function("GetErrorName", [number], ctypes.c_char_p)
        self._last_error = self._function("GetLastError", [])
        self._register = self._function("HostRegister", [pointer, size, ctypes.c_uint])
        self._unregister = self._function("HostUnregister", [pointer])
        self._alias = self._function("HostGetDevicePointer", [pointer, pointer, ctypes.c_uint])
        self.copy = self._function("MemcpyAsync", [pointer, pointer, size, number, pointer])
        self.copy_2d = self._function(
            "Memcpy2DAsync", [pointer, size, pointer, size, size, size, number, pointer]
        )
        self._create_event = self._function("EventCreateWithFlags", [pointer, ctypes.c_uint])
        self._query = self._function("EventQuery", [pointer])
        self._synchronize = self._function("EventSynchronize", [pointer])
        self._record = self._function("EventRecord", [pointer, pointer])
        self._wait = self._function("StreamWaitEvent", [pointer, pointer, ctypes.c_uint])
        version = ctypes.c_int()
        self._function("RuntimeGetVersion", [pointer])(ctypes.byref(version))
        self.version = version.value
        self._bind_batches(names)

    def _bind_batches(self, names: LibraryNames) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.has_batch = self._exports("MemcpyBatchAsync")
        self.has_strided_batch = names.strided_batch and self._exports("Memcpy3DBatchAsync")
        has_fail_index = names.fail_index_before is None or self.version < names.fail_index_before
        self._fail_index = [pointer] if has_fail_index else []
        if self.has_batch:
            self._batch = self._function(
                "MemcpyBatchAsync",
                [pointer, pointer, pointer, size, pointer, pointer, size, *self._fail_index, pointer],
            )
        if self.has_strided_batch:
            self._batch_3d = self._function(
                "Memcpy3DBatchAsync", [size, pointer, *self._fail_index, ctypes.c_ulonglong, pointer]
            )
        self._attributes = np.zeros(1, dtype=_ATTRIBUTES)
        self._attributes["order"] = _ORDER_STREAM
        self._first_attribute = np.zeros(1, dtype=np.uint64)
        self._failed_at = np.zeros(1, dtype=np.uint64)

    def _exports(self, name: str) -> bool:
        return hasattr(self._lib, self._prefix + name)

    def _function(self, name: str, arguments: list[Any], result: Any = ctypes.c_int) -> Any:
        function = getattr(self._lib, self._prefix + name)
        function.argtypes, function.restype = arguments, result
        return function

    def check(self, rc: int, what: str) -> None:
        """DeviceError for a return code that is not 0; the library's last error is cleared.

        Args:
            rc: the return code.
            what: the call, its name without the prefix first.
        """
        if rc:
            self._last_error()
            name = self._error_name(rc).decode()
            raise DeviceError(
                who=f"{self._prefix}{what}",
                got=f"{name} ({rc})",
                expected="a call that succeeds",
                remedy="See the reference of the runtime library for this code.",
                rc=rc,
            )

    def register(self, start: int, nbytes: int) -> int:
        """Pin and map a run of host memory for all devices; the return code, the last error cleared."""
        return self._cleared(self._register(start, nbytes, _REGISTER_PORTABLE_MAPPED))

    def unregister(self, start: int) -> int:
        """Undo :meth:`register`; the return code, the last error cleared."""
        return self._cleared(self._unregister(start))

    def _cleared(self, rc: int) -> int:
        if rc:
            self._last_error()
        return rc

    def alias(self, start: int) -> int:
        """The address at which the current device sees registered host memory."""
        seen = ctypes.c_void_p()
        self.check(self._alias(ctypes.byref(seen), start, 0), "HostGetDevicePointer")
        return seen.value or 0

    def new_event(self) -> int:
        """An event without timing, of the current device."""
        event = ctypes.c_void_p()
        self.check(self._create_event(ctypes.byref(event), _EVENT_WITHOUT_TIMING), "EventCreateWithFlags")
        return event.value or 0

    def record(self, event: int, stream: int) -> None:
        """Put the event after everything that the stream has."""
        rc = self._record(event, stream)
        if rc:
            self.check(rc, "EventRecord")

    def wait(self, stream: int, event: int) -> None:
        """Let the stream go on after the event, as it is now."""
        rc = self._wait(stream, event, 0)
        if rc:
            self.check(rc, "StreamWaitEvent")

    def query(self, event: int) -> bool:
        """Whether the event has passed."""
        rc = self._query(event)
        if rc == _NOT_READY:
            self._last_error()
            return False
        self.check(rc, "EventQuery")
        return True

    def synchronize(self, event: int) -> None:
        """Wait for the event; other Python threads run meanwhile."""
        self.check(self._synchronize(event), "EventSynchronize")

    def copy_batch(self, targets: Int64Array, sources: Int64Array, sizes: Int64Array, stream: int) -> None:
        """Plain copies in one call."""
        rc = self._batch(
            _address(targets),
            _address(sources),
            _address(sizes),
            len(targets),
            _address(self._attributes),
            _address(self._first_attribute),
            1,
            *([_address(self._failed_at)] if self._fail_index else ()),
            stream,
        )
        self.check(rc, f"MemcpyBatchAsync of {len(targets)} copies")

    def copy_2d_batch(self, copies: StridedCopies, stream: int) -> None:
        """Strided copies in one call."""
        operations = np.zeros(len(copies), dtype=_OPERATION)
        sides = (
            ("source", copies.sources, copies.source_pitch),
            ("target", copies.targets, copies.target_pitch),
        )
        for side, addresses, pitch in sides:
            operand = operations[side]
            operand["type"] = _OPERAND_POINTER
            operand["pointer"] = addresses
            operand["row_length"] = pitch
            operand["layer_height"] = copies.heights
        operations["width"] = copies.widths
        operations["height"] = copies.heights
        operations["depth"] = 1
        operations["order"] = _ORDER_STREAM
        failed = [_address(self._failed_at)] if self._fail_index else ()
        rc = self._batch_3d(len(operations), _address(operations), *failed, 0, stream)
        self.check(rc, f"Memcpy3DBatchAsync of {len(operations)} copies")


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


COPY_DEFAULT = _COPY_DEFAULT
"""The direction is found out from the addresses."""
