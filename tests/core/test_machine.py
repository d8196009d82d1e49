"""The limits of a machine: what each file says, and what its absence says."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from hicache_core.errors import MachineError
from hicache_core.machine.limits import HugePages, NumaNode, device_node, machine_limits
from tests.core.machine_trees import GIB, PLAIN, limits_of, plant, v2_group, v2_level


@attrs.frozen(kw_only=True)
class _Size:
    f_frsize: int
    f_blocks: int
    f_bavail: int


def _hugepages(kib: int, total: int, free: int, promised: int) -> dict[str, str]:
    folder = f"/sys/kernel/mm/hugepages/hugepages-{kib}kB"
    return {
        f"{folder}/nr_hugepages": f"{total}\n",
        f"{folder}/free_hugepages": f"{free}\n",
        f"{folder}/resv_hugepages": f"{promised}\n",
    }


def test_bare_machine(tmp_path: Path) -> None:
    """Where the kernel tells nothing more, nothing more is known: None, empty, no quota."""
    limits = limits_of(tmp_path)
    assert (limits.total_bytes, limits.available_bytes) == (1024 * GIB, 512 * GIB)
    assert (limits.memlock_soft_bytes, limits.memlock_hard_bytes) == (8 << 20, None)
    assert (limits.memory_levels, limits.hugepages, limits.nodes, limits.thp_policy) == ((), (), (), "")
    assert (limits.shm_total_bytes, limits.shm_free_bytes) == (None, None)
    assert (limits.cpu_numbers, limits.cpu_quota, limits.cpus) == ((0, 1, 2, 3), None, 4.0)


def test_memory_levels_and_quota_are_part_of_the_snapshot(tmp_path: Path) -> None:
    """A quota below the CPUs of the process is what it gets."""
    group = {**v2_group("/a"), "/sys/fs/cgroup/a/cpu.max": "150000 100000\n"}
    limits = limits_of(tmp_path, group, v2_level("/a", current=GIB, max=3 * GIB))
    assert [level.headroom_bytes for level in limits.memory_levels] == [2 * GIB]
    assert (limits.cpu_quota, limits.cpus) == (1.5, 1.5)


def test_quota_above_the_cpus_gives_no_more_of_them(tmp_path: Path) -> None:
    """Four CPUs are four."""
    group = {**v2_group("/a"), "/sys/fs/cgroup/a/cpu.max": "900000 100000\n"}
    assert limits_of(tmp_path, group).cpus == 4.0


def test_hugepages_of_every_size(tmp_path: Path) -> None:
    """Ascending by size, not by name; pages promised to a mapping are not free."""
    limits = limits_of(tmp_path, _hugepages(1 << 20, 2, 1, 0), _hugepages(2048, 512, 100, 30))
    assert limits.hugepages == (
        HugePages(page_bytes=2 << 20, total_pages=512, free_pages=70),
        HugePages(page_bytes=GIB, total_pages=2, free_pages=1),
    )


@pytest.mark.parametrize("policy", ["always", "madvise", "never"])
def test_policy_of_transparent_huge_pages(tmp_path: Path, policy: str) -> None:
    """The one in brackets."""
    text = "always madvise never\n".replace(policy, f"[{policy}]")
    assert limits_of(tmp_path, {"/sys/kernel/mm/transparent_hugepage/enabled": text}).thp_policy == policy


def test_shared_memory_is_asked_for_below_the_root(tmp_path: Path) -> None:
    """In fragments of the file system, as much as this process may take."""
    asked: list[Path] = []

    def statvfs(path: Path) -> _Size:
        asked.append(path)
        return _Size(f_frsize=4096, f_blocks=1000, f_bavail=10)

    limits = machine_limits(plant(tmp_path, PLAIN), statvfs=statvfs, affinity=lambda: {0})
    assert (limits.shm_total_bytes, limits.shm_free_bytes) == (4_096_000, 40_960)
    assert asked == [tmp_path / "dev/shm"]


def test_nodes(tmp_path: Path) -> None:
    """Lists and ranges; a node may be without memory, and the kernel may not tell."""
    limits = limits_of(
        tmp_path,
        {
            "/sys/devices/system/node/online": "0-1,4\n",
            "/sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  2048 kB\nNode 0 MemFree:  1024 kB\n",
            "/sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:  0 kB\nNode 1 MemFree:  0 kB\n",
        },
    )
    assert limits.nodes == (
        NumaNode(number=0, total_bytes=2 << 20, free_bytes=1 << 20),
        NumaNode(number=1, total_bytes=0, free_bytes=0),
        NumaNode(number=4, total_bytes=0, free_bytes=0),
    )


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/proc/meminfo", "MemTotal: 10 kB\n"),
        ("/proc/meminfo", "MemTotal: ten kB\nMemAvailable: 1 kB\n"),
        ("/proc/self/limits", "Max locked memory         some                 some                 bytes\n"),
        ("/proc/self/limits", "Max locked memory         8388608\n"),
        (
            "/proc/self/limits",
            "Max cpu time              unlimited            unlimited            seconds\n",
        ),
        ("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise never\n"),
        ("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "x\n"),
        ("/sys/devices/system/node/online", "0-x\n"),
        ("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "9" * 5000),
        ("/sys/devices/system/node/online", "9" * 5000),
    ],
    ids=range(10),
)
def test_garbage_is_refused(tmp_path: Path, path: str, text: str) -> None:
    """The file is named."""
    with pytest.raises(MachineError) as raised:
        limits_of(tmp_path, {path: text})
    assert raised.value.path == path


@pytest.mark.parametrize("path", PLAIN)
def test_machine_that_does_not_state_its_memory_is_refused(tmp_path: Path, path: str) -> None:
    """No /proc, for one."""
    plant(tmp_path, {name: text for name, text in PLAIN.items() if name != path})
    with pytest.raises(MachineError) as raised:
        machine_limits(tmp_path, affinity=lambda: {0})
    assert raised.value.path == path


def _refusal(error: OSError) -> Callable[[Path], os.statvfs_result]:
    def statvfs(path: Path) -> os.statvfs_result:
        raise error

    return statvfs


def test_shared_memory_that_cannot_be_asked_for_is_refused(tmp_path: Path) -> None:
    """Absent is one thing, forbidden another."""
    plant(tmp_path, PLAIN)
    with pytest.raises(MachineError) as raised:
        machine_limits(tmp_path, statvfs=_refusal(PermissionError(13, "no")), affinity=lambda: {0})
    assert raised.value.path == "/dev/shm"


def test_this_machine() -> None:
    """The real files are understood, and say something sensible."""
    limits = machine_limits()
    assert limits.total_bytes >= limits.available_bytes > 0
    assert 0 < limits.cpus <= len(limits.cpu_numbers)
    assert all(level.limit_bytes < 1 << 62 for level in limits.memory_levels)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), (None, None)])
def test_the_node_of_a_device(tmp_path: Path, text: str | None, node: int | None) -> None:
    """As the kernel says; -1 is none, and so is a device that is not listed."""
    if text is not None:
        folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(text)
    assert device_node("0000:3b:00.0", tmp_path) == node


def test_a_node_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    """Rather than memory on any node."""
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("left\n")
    with pytest.raises(MachineError):
        device_node("0000:3b:00.0", tmp_path)
