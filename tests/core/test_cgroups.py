"""Control groups: every ancestor of either version counts, through whatever mount shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_core.errors import MachineError
from hicache_core.machine.cgroups import MemoryLevel, cpu_quota, memory_levels
from tests.core.machine_trees import (
    GIB,
    TMPFS,
    V1_MEMORY_MOUNT,
    V1_NO_LIMIT,
    V2_MOUNT,
    files_of,
    v1_group,
    v1_level,
    v2_group,
    v2_level,
)


def _headrooms(levels: tuple[MemoryLevel, ...]) -> dict[str, int]:
    return {level.file.removeprefix("/sys/fs/cgroup"): level.headroom_bytes for level in levels}


def test_every_ancestor_of_version_2_is_a_level(tmp_path: Path) -> None:
    """I11: the process's own first; the root of the hierarchy has no files and is no level."""
    files = files_of(
        tmp_path,
        v2_group("/pod/box/job"),
        v2_level("/pod", current=6 * GIB, max=9 * GIB),
        v2_level("/pod/box", current=5 * GIB, max=20 * GIB),
        v2_level("/pod/box/job", current=GIB, max=16 * GIB),
    )
    assert list(_headrooms(memory_levels(files)).items()) == [
        ("/pod/box/job/memory.max", 15 * GIB),
        ("/pod/box/memory.max", 15 * GIB),
        ("/pod/memory.max", 3 * GIB),
    ]


def test_every_ancestor_of_version_1_is_a_level(tmp_path: Path) -> None:
    """I11: the mount's own level included; cache of the levels below counts through the totals."""
    files = files_of(
        tmp_path,
        v1_group("/pod/box"),
        v1_level("", limit=100 * GIB, usage=10 * GIB),
        v1_level("/pod", limit=9 * GIB, usage=8 * GIB, file=4 * GIB),
        v1_level("/pod/box", limit=V1_NO_LIMIT, usage=GIB),
    )
    assert _headrooms(memory_levels(files)) == {
        "/memory/pod/memory.limit_in_bytes": 5 * GIB,
        "/memory/memory.limit_in_bytes": 90 * GIB,
    }


@pytest.mark.parametrize("default", [V1_NO_LIMIT, str((1 << 63) - (1 << 16)), str((1 << 63) - 1)])
def test_default_of_version_1_is_no_limit(tmp_path: Path, default: str) -> None:
    """I11: for pages of 4 KiB, of 64 KiB, and unrounded."""
    files = files_of(tmp_path, v1_group("/a"), v1_level("/a", limit=default, usage=GIB))
    assert memory_levels(files) == ()


def test_max_is_no_limit(tmp_path: Path) -> None:
    """I11: of memory.max and of memory.high alike."""
    files = files_of(tmp_path, v2_group("/a"), v2_level("/a", current=GIB, max="max", high="max"))
    assert memory_levels(files) == ()


def test_high_below_max_is_a_limit(tmp_path: Path) -> None:
    """I11: beyond it the kernel stalls whoever allocates."""
    files = files_of(tmp_path, v2_group("/a"), v2_level("/a", current=GIB, max=8 * GIB, high=4 * GIB))
    assert _headrooms(memory_levels(files)) == {"/a/memory.max": 7 * GIB, "/a/memory.high": 3 * GIB}


def test_reclaimable_cache_counts_as_free(tmp_path: Path) -> None:
    """I11: both file lists."""
    files = files_of(tmp_path, v2_group("/a"), v2_level("/a", current=7 * GIB, file=4 * GIB, max=8 * GIB))
    (level,) = memory_levels(files)
    assert (level.reclaimable_bytes, level.headroom_bytes) == (4 * GIB, 5 * GIB)


def test_cache_beyond_the_usage_frees_no_more_than_the_limit(tmp_path: Path) -> None:
    """Counters of the kernel lag behind each other."""
    files = files_of(
        tmp_path,
        v2_group("/a"),
        v2_level("/a", current=GIB, max=8 * GIB),
        {"/sys/fs/cgroup/a/memory.stat": f"inactive_file {2 * GIB}\n"},
    )
    assert _headrooms(memory_levels(files)) == {"/a/memory.max": 8 * GIB}


def test_other_lines_of_the_statistics_may_have_any_shape(tmp_path: Path) -> None:
    """A newer kernel is no reason to refuse."""
    stat = f"novelty a b -1\n\nword\nactive_file {GIB}\n"
    level = v2_level("/a", current=2 * GIB, max=8 * GIB)
    files = files_of(tmp_path, v2_group("/a"), level, {"/sys/fs/cgroup/a/memory.stat": stat})
    assert _headrooms(memory_levels(files)) == {"/a/memory.max": 7 * GIB}


def test_shared_memory_is_not_reclaimable(tmp_path: Path) -> None:
    """I11: it is in ``file`` and in ``shmem``, but on no file list."""
    stat = f"file {4 * GIB}\nshmem {4 * GIB}\ninactive_file 0\nactive_file 0\n"
    files = files_of(
        tmp_path,
        v2_group("/a"),
        v2_level("/a", current=5 * GIB, max=8 * GIB),
        {"/sys/fs/cgroup/a/memory.stat": stat},
    )
    assert _headrooms(memory_levels(files)) == {"/a/memory.max": 3 * GIB}


def test_usage_above_a_lowered_limit_is_negative_headroom(tmp_path: Path) -> None:
    """A limit may be lowered under a running process."""
    files = files_of(tmp_path, v2_group("/a"), v2_level("/a", current=9 * GIB, max=8 * GIB))
    assert _headrooms(memory_levels(files)) == {"/a/memory.max": -GIB}


def test_level_without_the_controller_is_no_limit(tmp_path: Path) -> None:
    """I11: the level below it and the one above still count."""
    files = files_of(
        tmp_path,
        v2_group("/a/b/c"),
        v2_level("/a", current=GIB, max=2 * GIB),
        {"/sys/fs/cgroup/a/b/cgroup.procs": "1\n"},
        v2_level("/a/b/c", current=GIB, max=4 * GIB),
    )
    assert _headrooms(memory_levels(files)) == {"/a/b/c/memory.max": 3 * GIB, "/a/memory.max": GIB}


@pytest.mark.parametrize(
    ("group", "shown"),
    [
        pytest.param("/", "/", id="in a namespace, mounted inside"),
        pytest.param("/docker/1f", "/docker/1f", id="without a namespace, the group bound to the mount"),
        pytest.param("/", "/../..", id="in a namespace, mounted outside"),
        pytest.param("/elsewhere", "/docker/1f", id="another group is shown"),
    ],
)
def test_mount_itself_is_the_group(tmp_path: Path, group: str, shown: str) -> None:
    """I11: names of the process's namespace are not names below the mount."""
    mount = f"31 23 0:29 {shown} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    files = files_of(tmp_path, v2_group(group, mount), v2_level("", current=GIB, max=4 * GIB))
    assert _headrooms(memory_levels(files)) == {"/memory.max": 3 * GIB}


def test_group_below_the_root_of_the_mount(tmp_path: Path) -> None:
    """I11: what the mount shows is cut from the front of the group's path, by whole names."""
    mount = "31 23 0:29 /docker/1 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    inner = v2_level("/job", current=GIB, max=4 * GIB)
    assert _headrooms(memory_levels(files_of(tmp_path / "in", v2_group("/docker/1/job", mount), inner))) == {
        "/job/memory.max": 3 * GIB
    }
    assert memory_levels(files_of(tmp_path / "out", v2_group("/docker/1x/job", mount), inner)) == ()


def test_mount_that_shows_most_ancestors_is_taken(tmp_path: Path) -> None:
    """I11: a group may be bound to a second place, where its ancestors cannot be seen."""
    bound = "40 23 0:29 /a/b /mnt/bound\\040here rw - cgroup2 cgroup2 rw\n"
    files = files_of(
        tmp_path,
        v2_group("/a/b", bound + V2_MOUNT),
        v2_level("/a", current=GIB, max=2 * GIB),
        {"/mnt/bound here/memory.max": "1\n", "/mnt/bound here/memory.current": "0\n"},
    )
    assert _headrooms(memory_levels(files)) == {"/a/memory.max": GIB}


def test_escaped_mount_point_is_read(tmp_path: Path) -> None:
    """The kernel writes a space of a path as an octal number."""
    mount = "40 23 0:29 / /mnt/a\\040b rw - cgroup2 cgroup2 rw\n"
    files = files_of(
        tmp_path, v2_group("/", mount), {"/mnt/a b/memory.max": f"{GIB}\n", "/mnt/a b/memory.current": "0\n"}
    )
    assert _headrooms(memory_levels(files)) == {"/mnt/a b/memory.max": GIB}


def test_hidden_mount_is_not_read(tmp_path: Path) -> None:
    """What was mounted over it is what the path shows."""
    files = files_of(tmp_path, v2_group("/a", V2_MOUNT + TMPFS), v2_level("/a", current=GIB, max=2 * GIB))
    assert memory_levels(files) == ()


def test_hybrid_takes_the_version_with_the_controller(tmp_path: Path) -> None:
    """I11: version 2 is mounted as well, without the memory controller and with the process elsewhere."""
    unified = "41 30 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    files = files_of(
        tmp_path,
        v1_group("/a", TMPFS + unified + V1_MEMORY_MOUNT),
        v1_level("/a", limit=4 * GIB, usage=GIB),
        v2_level("/unified", current=GIB, max=GIB),
    )
    assert _headrooms(memory_levels(files)) == {"/memory/a/memory.limit_in_bytes": 3 * GIB}


def test_hybrid_with_memory_in_version_2(tmp_path: Path) -> None:
    """I11: version 1 keeps other controllers only."""
    mounts = TMPFS + "32 30 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n" + V2_MOUNT
    files = files_of(
        tmp_path,
        {"/proc/self/cgroup": "1:cpu:/x\n0::/a\n", "/proc/self/mountinfo": mounts},
        v2_level("/a", current=GIB, max=4 * GIB),
    )
    assert _headrooms(memory_levels(files)) == {"/a/memory.max": 3 * GIB}


@pytest.mark.parametrize("files", [{}, {"/proc/self/cgroup": "0::/a\n"}, {"/proc/self/mountinfo": V2_MOUNT}])
def test_machine_without_control_groups_has_no_levels(tmp_path: Path, files: dict[str, str]) -> None:
    """Neither of the two files alone tells a folder."""
    tree = files_of(tmp_path, v2_level("/a", current=GIB, max=2 * GIB), files)
    assert memory_levels(tree) == ()
    assert cpu_quota(tree) is None


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/sys/fs/cgroup/a/memory.max", "much\n"),
        ("/sys/fs/cgroup/a/memory.max", "-1\n"),
        ("/sys/fs/cgroup/a/memory.max", ""),
        ("/sys/fs/cgroup/a/memory.current", "1.5\n"),
        ("/sys/fs/cgroup/a/memory.stat", "inactive_file lots\n"),
        ("/sys/fs/cgroup/a/memory.stat", "active_file -1\n"),
        ("/proc/self/cgroup", "0:/a\n"),
        ("/proc/self/mountinfo", "31 23 0:29 /\n"),
        ("/proc/self/mountinfo", "31 23 0:29 / /sys/fs/cgroup rw - \n"),
    ],
)
def test_garbage_is_refused(tmp_path: Path, path: str, text: str) -> None:
    """I11: a limit that is not understood must not count as none; the file is named."""
    level = v2_level("/a", current=GIB, max=2 * GIB)
    with pytest.raises(MachineError) as raised:
        memory_levels(files_of(tmp_path, v2_group("/a"), level, {path: text}))
    assert raised.value.path == path


def test_limit_without_usage_is_refused(tmp_path: Path) -> None:
    """I11: how much of it is left is not known."""
    files = files_of(tmp_path, v2_group("/a"), {"/sys/fs/cgroup/a/memory.max": f"{GIB}\n"})
    with pytest.raises(MachineError) as raised:
        memory_levels(files)
    assert raised.value.path == "/sys/fs/cgroup/a/memory.current"


def test_unreadable_limit_is_refused(tmp_path: Path) -> None:
    """I11: whoever runs this; a folder in its place cannot be read by anyone."""
    (tmp_path / "sys/fs/cgroup/a/memory.max").mkdir(parents=True)
    with pytest.raises(MachineError) as raised:
        memory_levels(files_of(tmp_path, v2_group("/a")))
    assert raised.value.path == "/sys/fs/cgroup/a/memory.max"


V1_CPU = {
    "/proc/self/cgroup": "2:cpu,cpuacct:/a\n",
    "/proc/self/mountinfo": "32 30 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        pytest.param({**v2_group("/a"), "/sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2.5, id="v2"),
        pytest.param({**v2_group("/a"), "/sys/fs/cgroup/a/cpu.max": "max 100000\n"}, None, id="v2 max"),
        pytest.param(
            {
                **v2_group("/a/b"),
                "/sys/fs/cgroup/a/cpu.max": "100000 100000\n",
                "/sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            1.0,
            id="v2 parent is tighter",
        ),
        pytest.param(
            {
                **V1_CPU,
                "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "150000\n",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            1.5,
            id="v1",
        ),
        pytest.param(
            {
                **V1_CPU,
                "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            None,
            id="v1 none",
        ),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    """The tightest level decides, in CPUs' worth of time."""
    assert cpu_quota(files_of(tmp_path, files)) == quota


@pytest.mark.parametrize("text", ["max\n", "many 100000\n", "1 2 3\n"])
def test_garbage_quota_is_refused(tmp_path: Path, text: str) -> None:
    """The file is named."""
    with pytest.raises(MachineError) as raised:
        cpu_quota(files_of(tmp_path, v2_group("/a"), {"/sys/fs/cgroup/a/cpu.max": text}))
    assert raised.value.path == "/sys/fs/cgroup/a/cpu.max"
