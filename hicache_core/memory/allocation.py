"""Allocations of host memory: anonymous mappings, shared memory with a descriptor, and those of plugins."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hicache_core.errors import HostMemoryError, UnknownNameError
from hicache_core.memory import libc
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.options import MemoryOptions

HUGE_PAGE_BYTES = 2 << 20
MEMFD_NAME = "hicache"
_POLICIES = Path("/sys/kernel/mm/transparent_hugepage")
_ON_REQUEST = ("[always]", "[madvise]", "[advise]", "[within_size]")
_ZAP_BYTES = 1 << 30


class Allocation(Protocol):
    """Host memory that somebody gave, page-aligned and until released the holder's alone."""

    @property
    def address(self) -> int:
        """First address."""

    @property
    def nbytes(self) -> int:
        """Bytes that may be used; at least as many as were asked for."""

    @property
    def fd(self) -> int | None:
        """Descriptor of the shared memory behind it, or None; it is the allocation's and not to be closed."""

    def release(self) -> None:
        """Take it back. Called once, when nothing is registered and no view is left."""


class HostAllocator(Protocol):
    """Gives host memory; a plugin may bring one, such as a storage engine's own memory."""

    def allocate(self, nbytes: int, who: str) -> Allocation:
        """``nbytes`` of host memory for ``who``, page-aligned; HostMemoryError where there is none."""


class Mapped:
    """A mapping of the core's own; see :class:`Allocation`.

    Args:
        host: the mapping; its size is that which was asked for.
        fd: descriptor of the shared memory, or None for private memory.

    Attributes:
        notes: what was asked of the kernel and not granted, a sentence each.
    """

    def __init__(self, host: HostRange, fd: int | None) -> None:
        self.address = host.start
        self.nbytes = host.nbytes
        self.fd = fd
        self.notes: tuple[str, ...] = ()

    def release(self) -> None:
        """Unmap it and close its descriptor."""
        if self.fd is None:
            _drop_pages(self.address, self.nbytes)
        libc.unmap(self.address, page_bytes(self.nbytes))
        if self.fd is not None:
            os.close(self.fd)


def page_bytes(nbytes: int) -> int:
    """The bytes that a mapping of ``nbytes`` takes: whole pages of the system."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _drop_pages(start: int, nbytes: int) -> None:
    """Give pages back by several threads, since unmapping is the work of one."""
    parts = [(start + at, min(_ZAP_BYTES, nbytes - at)) for at in range(0, nbytes, _ZAP_BYTES)]
    workers = min(len(parts), len(os.sched_getaffinity(0)))
    if workers < 2:
        return
    left = iter(parts)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                part = next(left, None)
            if part is None:
                return
            libc.advise(*part, libc.DONTNEED)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    started = []
    for thread in threads:
        try:
            thread.start()
        except RuntimeError:  # The interpreter is going down: unmapping does it all.
            break
        started.append(thread)
    for thread in started:
        thread.join()


def _place(host: HostRange, options: MemoryOptions, policy: str) -> Iterable[str]:
    """Ask for huge pages and for a node; what was not granted, as sentences."""
    if options.hugepages and host.nbytes >= HUGE_PAGE_BYTES:
        allowed = _policy(policy)
        if not any(word in allowed for word in _ON_REQUEST):
            yield f"huge pages: the policy is '{allowed.strip() or 'unknown'}'"
        else:
            yield from _tried("huge pages", lambda: libc.advise(host.start, host.nbytes, libc.HUGEPAGE))
    node = options.numa_node
    if node is not None:
        yield from _tried(f"NUMA node {node}", lambda: libc.prefer_node(host.start, host.nbytes, node))


def _policy(name: str) -> str:
    try:
        return (_POLICIES / name).read_text(encoding="utf-8")
    except OSError:
        return ""


def _tried(what: str, call: Callable[[], None]) -> Iterable[str]:
    try:
        call()
    except OSError as error:
        yield f"{what}: {error.strerror}"


class AnonymousMemory:
    """Private anonymous mappings, kept out of the children of a fork."""

    def __init__(self, options: MemoryOptions) -> None:
        self._options = options

    def allocate(self, nbytes: int, who: str) -> Mapped:
        """See :class:`HostAllocator`. A mapping of a huge page or more starts at a multiple of one."""
        size = page_bytes(nbytes)
        spare = HUGE_PAGE_BYTES if size >= HUGE_PAGE_BYTES else 0
        try:
            reserved = libc.map_memory(size + spare)
        except (OSError, OverflowError) as error:
            raise _not_mapped(error, nbytes, who) from error
        start = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if spare else reserved
        libc.unmap(reserved, start - reserved)
        libc.unmap(start + size, reserved + spare - start)
        host = HostRange(start=start, nbytes=nbytes)
        # The child of a fork must not make pinned pages move.
        libc.advise(start, size, libc.DONTFORK)
        mapped = Mapped(host, None)
        mapped.notes = tuple(_place(host, self._options, "enabled"))
        return mapped


class MemfdMemory:
    """Shared memory with a descriptor, for engines that hand it to another process.

    It has no name in the file system: the kernel takes it back with the last mapping and descriptor, also
    from a process that was killed. A forked child shares the pages, so it cannot make them move.
    """

    def __init__(self, options: MemoryOptions) -> None:
        self._options = options

    def allocate(self, nbytes: int, who: str) -> Mapped:
        """See :class:`HostAllocator`."""
        fd = -1
        try:
            fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
            start = libc.map_memory(nbytes, fd)
        except (OSError, OverflowError) as error:
            if fd >= 0:
                os.close(fd)
            raise _not_mapped(error, nbytes, who) from error
        host = HostRange(start=start, nbytes=nbytes)
        mapped = Mapped(host, fd)
        mapped.notes = tuple(_place(host, self._options, "shmem_enabled"))
        return mapped


def _not_mapped(error: BaseException, nbytes: int, who: str) -> HostMemoryError:
    return HostMemoryError(
        who=who,
        got=f"{error} for a mapping of {nbytes} bytes",
        expected="host memory for the whole buffer",
        remedy="Ask for fewer host pages.",
    )


BUILT_IN: Mapping[str, Callable[[MemoryOptions], HostAllocator]] = {
    "anonymous": AnonymousMemory,
    "memfd": MemfdMemory,
}
"""The allocators that the core brings, by the name that options give."""


def built_in(options: MemoryOptions) -> HostAllocator:
    """The core's allocator of the name in ``options``; UnknownNameError where it has none of that name."""
    try:
        return BUILT_IN[options.allocator](options)
    except KeyError:
        raise UnknownNameError(
            who="host memory",
            got=f"allocator '{options.allocator}'",
            expected=f"one of {', '.join(BUILT_IN)}, or one that a plugin brings",
            remedy="Name one of these, or install the distribution that brings it.",
        ) from None


def check_allocation(allocation: Allocation, nbytes: int, who: str) -> None:
    """Refuse an allocation that is short or not page-aligned; the caller gives it back."""
    address: Any = getattr(allocation, "address", None)
    given: Any = getattr(allocation, "nbytes", None)
    counted = type(address) is int and type(given) is int
    if not counted or given < nbytes or address % mmap.PAGESIZE or address <= 0:
        raise no_allocation(allocation, nbytes, who)


def no_allocation(allocation: object, nbytes: int, who: str) -> HostMemoryError:
    """The error about what an allocator gave and cannot be used."""
    address, given = getattr(allocation, "address", None), getattr(allocation, "nbytes", None)
    return HostMemoryError(
        who=who,
        got=f"{given!r} bytes at address {address!r} from its allocator ({type(allocation).__name__})",
        expected=f"an Allocation of {nbytes} bytes at a multiple of {mmap.PAGESIZE}, each an int",
        remedy="Correct the allocator.",
    )
