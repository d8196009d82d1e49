"""Made-up machines: files of /proc and /sys below a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hicache_core.machine.kernel_files import KernelFiles
from hicache_core.machine.limits import MachineLimits, machine_limits

GIB = 1 << 30
V1_NO_LIMIT = "9223372036854771712"
PLAIN = {
    "/proc/meminfo": "MemTotal:  1073741824 kB\nMemFree:  1 kB\nMemAvailable:  536870912 kB\nMapped:  0 kB\n",
    "/proc/self/limits": (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max cpu time              unlimited            unlimited            seconds   \n"
        "Max locked memory         8388608              unlimited            bytes     \n"
    ),
}
"""A host of 1 TiB of which half is available, with no control groups."""
TMPFS = "30 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
V2_MOUNT = "31 23 0:29 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MEMORY_MOUNT = "35 30 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def plant(root: Path, *parts: Mapping[str, str]) -> Path:
    """Write files below ``root``, later parts over earlier ones; ``root``."""
    for path, text in {name: text for part in parts for name, text in part.items()}.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


def v2_level(folder: str, *, current: int, file: int = 0, **limits: object) -> dict[str, str]:
    """Files of a version 2 level; ``file`` is page cache in all, a quarter of it on the active list.

    Args:
        folder: the level, below the mount.
        current: bytes in use.
        file: bytes of page cache.
        limits: ``max`` and ``high``; a file is absent where its limit is not given.
    """
    stat = f"anon {current - file}\nfile {file}\ninactive_file {file - file // 4}\nactive_file {file // 4}\n"
    base = f"/sys/fs/cgroup{folder}"
    return {
        f"{base}/memory.current": f"{current}\n",
        f"{base}/memory.stat": stat,
        **{f"{base}/memory.{limit}": f"{value}\n" for limit, value in limits.items()},
    }


def v1_level(folder: str, *, limit: object, usage: int, file: int = 0) -> dict[str, str]:
    """Files of a version 1 level, whose own page cache is none: all of it lies in the levels below."""
    base = f"/sys/fs/cgroup/memory{folder}"
    return {
        f"{base}/memory.limit_in_bytes": f"{limit}\n",
        f"{base}/memory.usage_in_bytes": f"{usage}\n",
        f"{base}/memory.stat": (
            "inactive_file 0\nactive_file 0\n"
            f"total_inactive_file {file - file // 4}\ntotal_active_file {file // 4}\n"
        ),
    }


def v2_group(path: str, mount: str = V2_MOUNT) -> dict[str, str]:
    """The process's group where version 2 is mounted alone."""
    return {"/proc/self/cgroup": f"0::{path}\n", "/proc/self/mountinfo": mount}


def v1_group(path: str, mount: str = TMPFS + V1_MEMORY_MOUNT) -> dict[str, str]:
    """The process's group in a version 1 hierarchy of the memory controller."""
    return {"/proc/self/cgroup": f"4:memory:{path}\n1:cpu,cpuacct:/\n0::/\n", "/proc/self/mountinfo": mount}


def limits_of(root: Path, *parts: Mapping[str, str]) -> MachineLimits:
    """The limits of a plain machine with ``parts`` written over it; CPUs 0 to 3, no /dev/shm."""
    return machine_limits(plant(root, PLAIN, *parts), affinity=lambda: {3, 2, 1, 0})


def files_of(root: Path, *parts: Mapping[str, str]) -> KernelFiles:
    """The files of the same machine."""
    return KernelFiles(plant(root, PLAIN, *parts))
