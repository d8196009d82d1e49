"""Memory calls of the C library through ctypes: they release the interpreter lock while the kernel works.

The calls of :mod:`mmap` do not (``mmap.madvise`` of a gigabyte stops every Python thread), and a mapping made
there goes with its object, where memory that a driver still holds must stay. Source: madvise(2), mbind(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

PRIVATE, SHARED = 2, 1
DONTNEED, DONTFORK, HUGEPAGE, POPULATE_WRITE = 4, 10, 14, 23

_READ_WRITE = 1 | 2
_ANONYMOUS = 0x20
_FAILED = ctypes.c_void_p(-1).value
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
_NODE_BITS = 1024

_lib = ctypes.CDLL(None, use_errno=True)
_lib.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_lib.mmap.restype = ctypes.c_void_p
_lib.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_lib.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _failure() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def map_memory(nbytes: int, fd: int | None = None) -> int:
    """Map ``nbytes`` of fresh private memory, or of a file as shared memory; its address, or OSError."""
    flags = PRIVATE | _ANONYMOUS if fd is None else SHARED
    start = _lib.mmap(None, nbytes, _READ_WRITE, flags, -1 if fd is None else fd, 0)
    if start == _FAILED:
        raise _failure()
    return int(start)


def unmap(start: int, nbytes: int) -> None:
    """Take a mapping away; OSError where the kernel refuses."""
    if nbytes and _lib.munmap(start, nbytes):
        raise _failure()


def advise(start: int, nbytes: int, advice: int) -> None:
    """Give the kernel advice about a mapping, or have it act on one; OSError where it refuses."""
    if nbytes and _lib.madvise(start, nbytes, advice):
        raise _failure()


def writable(start: int, nbytes: int) -> bool:
    """Whether all of a run of addresses is mapped, readable and writable. Source: proc_pid_maps(5)."""
    reached, end = start, start + nbytes
    # In the order of addresses; only a run that starts where the last one ended goes on.
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        span, access = line.split(maxsplit=2)[:2]
        first, last = (int(word, 16) for word in span.split(b"-"))
        if first <= reached < last and access.startswith(b"rw"):
            reached = last
    return reached >= end


def prefer_node(start: int, nbytes: int, node: int) -> None:
    """Have the pages of a mapping come from a NUMA node while that has any; OSError where it is refused.

    Args:
        start, nbytes: the mapping, of which no page has been touched.
        node: number of the node.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _NODE_BITS:
        raise OSError(0, f"no way to ask for node {node} on {platform.machine()}")
    mask = (ctypes.c_uint64 * (_NODE_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    call = (
        ctypes.c_long(number),
        ctypes.c_void_p(start),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(_PREFERRED),
        ctypes.byref(mask),
        # The kernel reads one bit less than it is told.
        ctypes.c_ulong(_NODE_BITS + 1),
        ctypes.c_uint(0),
    )
    if _lib.syscall(*call):
        raise _failure()
