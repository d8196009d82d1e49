"""What this machine allows: one snapshot of its limits, read from /proc and /sys."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

import attrs

from hicache_core.errors import MachineError
from hicache_core.machine.cgroups import MemoryLevel, cpu_quota, memory_levels
from hicache_core.machine.kernel_files import KernelFiles
from hicache_core.spec.checks import whole

MEMINFO = "/proc/meminfo"
_LIMITS = "/proc/self/limits"
_SHM = "/dev/shm"
_NODES = "/sys/devices/system/node"
_HUGEPAGES = "/sys/kernel/mm/hugepages"
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"


class FileSystemSize(Protocol):
    """What is used of :class:`os.statvfs_result`."""

    @property
    def f_frsize(self) -> int:
        """Bytes of a block."""

    @property
    def f_blocks(self) -> int:
        """Blocks in all."""

    @property
    def f_bavail(self) -> int:
        """Blocks that this process may still take."""


@attrs.frozen(kw_only=True)
class HugePages:
    """Huge pages of one size that were set aside (hugetlb).

    ``free_pages`` are those that nobody has and nobody was promised.
    """

    page_bytes: int = attrs.field(validator=whole(1))
    total_pages: int = attrs.field(validator=whole(0))
    free_pages: int = attrs.field(validator=whole(0))


@attrs.frozen(kw_only=True)
class NumaNode:
    """One NUMA node; a node without memory has zero bytes."""

    number: int = attrs.field(validator=whole(0))
    total_bytes: int = attrs.field(validator=whole(0))
    free_bytes: int = attrs.field(validator=whole(0))


@attrs.frozen(kw_only=True)
class MachineLimits:
    """What a process may use of this machine, at one moment.

    Args:
        memlock_soft_bytes: memory that the process may lock by itself; None without a limit.
        memlock_hard_bytes: how far it may raise that; None without a limit.
        total_bytes: memory of the host.
        available_bytes: memory that the kernel reckons can be taken without swapping, page cache included.
        memory_levels: every memory limit of its control groups, innermost first.
        hugepages: sizes of huge pages, ascending.
        thp_policy: policy of transparent huge pages (``always``, ``madvise``, ``never``), empty where the
            kernel has none.
        shm_total_bytes: size of ``/dev/shm``; None where there is none.
        shm_free_bytes: what is free of it; None where there is none.
        cpu_numbers: CPUs that the process may run on, ascending.
        cpu_quota: CPUs' worth of time that its control groups grant; None without a quota.
        nodes: NUMA nodes, ascending; empty where the kernel tells none.
    """

    memlock_soft_bytes: int | None = attrs.field(default=None, validator=whole(0, or_none=True))
    memlock_hard_bytes: int | None = attrs.field(default=None, validator=whole(0, or_none=True))
    total_bytes: int = attrs.field(validator=whole(1))
    available_bytes: int = attrs.field(validator=whole(0))
    memory_levels: tuple[MemoryLevel, ...] = ()
    hugepages: tuple[HugePages, ...] = ()
    thp_policy: str = ""
    shm_total_bytes: int | None = attrs.field(default=None, validator=whole(0, or_none=True))
    shm_free_bytes: int | None = attrs.field(default=None, validator=whole(0, or_none=True))
    cpu_numbers: tuple[int, ...] = ()
    cpu_quota: float | None = None
    nodes: tuple[NumaNode, ...] = ()

    @property
    def cpus(self) -> float:
        """CPUs' worth of time that the process gets at most: its CPUs, or the quota where that is less."""
        count = float(len(self.cpu_numbers))
        return count if self.cpu_quota is None else min(count, self.cpu_quota)


def _own_cpus() -> Collection[int]:
    return os.sched_getaffinity(0)


def machine_limits(
    root: Path = Path("/"),
    *,
    statvfs: Callable[[Path], FileSystemSize] = os.statvfs,
    affinity: Callable[[], Collection[int]] = _own_cpus,
) -> MachineLimits:
    """Read the limits of this machine, or of the one whose /proc and /sys lie below ``root``.

    Args:
        root: folder that stands for ``/``.
        statvfs: asks for the size of a file system.
        affinity: asks for the CPUs that this process may run on.

    Raises:
        MachineError: a file cannot be read or understood, or the memory of the host is not stated.
    """
    files = KernelFiles(root)
    soft, hard = _memlock(files)
    total, available = _host_memory(files)
    shm_total, shm_free = _shared_memory(files, statvfs)
    return MachineLimits(
        memlock_soft_bytes=soft,
        memlock_hard_bytes=hard,
        total_bytes=total,
        available_bytes=available,
        memory_levels=memory_levels(files),
        hugepages=_hugepages(files),
        thp_policy=_thp_policy(files),
        shm_total_bytes=shm_total,
        shm_free_bytes=shm_free,
        cpu_numbers=tuple(sorted(affinity())),
        cpu_quota=cpu_quota(files),
        nodes=_nodes(files),
    )


def _memlock(files: KernelFiles) -> tuple[int | None, int | None]:
    """Soft and hard limit; the kernel states both in bytes."""
    for line in files.required(_LIMITS).splitlines():
        if line.startswith("Max locked memory"):
            words = line.split()[3:5]
            if len(words) != 2:
                raise files.garbage(_LIMITS, line, "a soft and a hard limit")
            soft, hard = (None if word == "unlimited" else files.whole(_LIMITS, word) for word in words)
            return soft, hard
    raise files.garbage(_LIMITS, "no 'Max locked memory'", "that line")


def _host_memory(files: KernelFiles) -> tuple[int, int]:
    files.required(MEMINFO)
    memory = files.entries(MEMINFO, "MemTotal", "MemAvailable")
    if len(memory) < 2:
        raise files.garbage(MEMINFO, f"only {list(memory)}", "MemTotal and MemAvailable")
    return memory["MemTotal"], memory["MemAvailable"]


def _hugepages(files: KernelFiles) -> tuple[HugePages, ...]:
    found = []
    for folder in files.at(_HUGEPAGES).glob("hugepages-*kB"):
        path = f"{_HUGEPAGES}/{folder.name}"
        free = files.number(f"{path}/free_hugepages") or 0
        promised = files.number(f"{path}/resv_hugepages") or 0
        kib = folder.name.removeprefix("hugepages-").removesuffix("kB")
        found.append(
            HugePages(
                page_bytes=files.whole(path, kib) * 1024,
                total_pages=files.number(f"{path}/nr_hugepages") or 0,
                free_pages=max(free - promised, 0),
            )
        )
    return tuple(sorted(found, key=lambda pages: pages.page_bytes))


def _thp_policy(files: KernelFiles) -> str:
    text = files.text(_THP)
    if text is None:
        return ""
    chosen = re.search(r"\[(\w+)\]", text)
    if chosen is None:
        raise files.garbage(_THP, text, "one policy in brackets")
    return chosen[1]


def _shared_memory(
    files: KernelFiles, statvfs: Callable[[Path], FileSystemSize]
) -> tuple[int | None, int | None]:
    try:
        size = statvfs(files.at(_SHM))
    except FileNotFoundError:
        return None, None
    except OSError as error:
        raise MachineError(
            path=_SHM,
            got=str(error.strerror or error),
            expected="a file system whose size can be asked for",
            remedy="Let this process see it, or unmount it.",
        ) from error
    return size.f_frsize * size.f_blocks, size.f_frsize * size.f_bavail


def device_node(pci_address: str, root: Path = Path("/")) -> int | None:
    """The NUMA node of a device; None where the machine has none, or does not say.

    Args:
        pci_address: ``domain:bus:device.function`` in hexadecimal, as /sys/bus/pci/devices lists it.
        root: folder that stands for ``/``.

    Raises:
        MachineError: what the machine says is no node.
    """
    files = KernelFiles(root)
    path = f"/sys/bus/pci/devices/{pci_address}/numa_node"
    text = (files.text(path) or "").strip()
    # The kernel says -1 where the firmware names no node.
    return None if text in ("", "-1") else files.whole(path, text)


def _nodes(files: KernelFiles) -> tuple[NumaNode, ...]:
    nodes = []
    for number in files.numbers(f"{_NODES}/online") or ():
        memory = files.entries(f"{_NODES}/node{number}/meminfo", "MemTotal", "MemFree")
        nodes.append(
            NumaNode(
                number=number, total_bytes=memory.get("MemTotal", 0), free_bytes=memory.get("MemFree", 0)
            )
        )
    return tuple(nodes)
