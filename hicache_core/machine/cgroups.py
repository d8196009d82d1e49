"""Control groups of this process, versions 1 and 2: what each level from its own up to the mount allows."""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs

from hicache_core.machine.kernel_files import KernelFiles
from hicache_core.spec.checks import name, whole

# Without a limit, version 1 shows the largest signed number that is whole pages, which depends on the page.
_V1_UNLIMITED_BYTES = 1 << 62
_ESCAPE = re.compile(r"\\([0-7]{3})")


@attrs.frozen(kw_only=True)
class MemoryLevel:
    """One memory limit of one level of the hierarchy.

    Args:
        file: the file that states the limit, as this machine names it.
        limit_bytes: the limit.
        usage_bytes: what the level and all below it use, page cache included.
        reclaimable_bytes: page cache among it that the kernel drops before anything fails.
    """

    file: str = attrs.field(validator=name())
    limit_bytes: int = attrs.field(validator=whole(0))
    usage_bytes: int = attrs.field(validator=whole(0))
    reclaimable_bytes: int = attrs.field(validator=whole(0))

    @property
    def headroom_bytes(self) -> int:
        """Bytes that can still be taken here; negative where more is in use than allowed."""
        return self.limit_bytes - max(self.usage_bytes - self.reclaimable_bytes, 0)


@attrs.frozen(kw_only=True)
class _Version:
    """How a version of the control groups names things.

    ``limits``: files of a limit each. ``usage``: the file of the usage. ``cache``: entries of ``memory.stat``
    that count file pages on the two lists that reclaim works on, those of all levels below included. The
    entry ``file`` would be too much: shared memory is in it and cannot be dropped; neither can locked pages,
    which are on a list of their own.
    """

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


# memory.high kills nobody, but beyond it every allocation is made to wait for reclaim, and pinned pages
# cannot be reclaimed: a pool that exceeds it stalls its process for good.
_VERSIONS = {
    "cgroup": _Version(
        limits=("memory.limit_in_bytes",),
        usage="memory.usage_in_bytes",
        cache=("total_inactive_file", "total_active_file"),
    ),
    "cgroup2": _Version(
        limits=("memory.max", "memory.high"), usage="memory.current", cache=("inactive_file", "active_file")
    ),
}


@attrs.frozen(kw_only=True)
class _Mount:
    """A mounted hierarchy: ``shown`` is the group that stands at ``point``."""

    fstype: str
    shown: str
    point: str
    controllers: frozenset[str]


def memory_levels(files: KernelFiles) -> tuple[MemoryLevel, ...]:
    """Every memory limit on the way from the process's group up to the mount, innermost first.

    Levels without a limit are left out, and so is a level whose controller has no files: the root, or one at
    which the controller is not enabled. Groups above the mount (outside of a namespace) cannot be seen.

    Raises:
        MachineError: a file cannot be read or understood.
    """
    levels: list[MemoryLevel] = []
    for fstype, folder in _folders(files, "memory"):
        levels.extend(_levels_at(files, folder, _VERSIONS[fstype]))
    return tuple(levels)


def cpu_quota(files: KernelFiles) -> float | None:
    """CPUs' worth of time that the tightest level grants; None without a quota; MachineError as above."""
    quotas = [_QUOTAS[fstype](files, folder) for fstype, folder in _folders(files, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _levels_at(files: KernelFiles, folder: str, version: _Version) -> Iterator[MemoryLevel]:
    for file in version.limits:
        path = f"{folder}/{file}"
        limit = files.number(path, unlimited="max")
        if limit is None or limit >= _V1_UNLIMITED_BYTES:
            continue
        yield _level(files, path, limit, folder, version)


def _level(files: KernelFiles, path: str, limit: int, folder: str, version: _Version) -> MemoryLevel:
    usage_path = f"{folder}/{version.usage}"
    cache = files.entries(f"{folder}/memory.stat", *version.cache)
    return MemoryLevel(
        file=path,
        limit_bytes=limit,
        usage_bytes=files.whole(usage_path, files.required(usage_path).strip()),
        reclaimable_bytes=sum(cache.values()),
    )


def _quota_v1(files: KernelFiles, folder: str) -> float | None:
    quota = files.number(f"{folder}/cpu.cfs_quota_us", minimum=-1)
    period = files.number(f"{folder}/cpu.cfs_period_us")
    return None if not quota or not period or quota < 0 else quota / period


def _quota_v2(files: KernelFiles, folder: str) -> float | None:
    path = f"{folder}/cpu.max"
    text = files.text(path)
    if text is None:
        return None
    words = text.split()
    if len(words) != 2:
        raise files.garbage(path, text, "a quota and a period")
    period = files.whole(path, words[1])
    return None if words[0] == "max" or not period else files.whole(path, words[0]) / period


_QUOTAS = {"cgroup": _quota_v1, "cgroup2": _quota_v2}


def _folders(files: KernelFiles, controller: str) -> Iterator[tuple[str, str]]:
    """Type and folder of each level that governs ``controller`` here, the process's own first.

    Where both versions are mounted, a controller belongs to the version 1 hierarchy that lists it.
    """
    own = _own_groups(files)
    mounts = _mounts(files)
    hierarchies = (
        ("cgroup", controller, [m for m in mounts if m.fstype == "cgroup" and controller in m.controllers]),
        ("cgroup2", "", [m for m in mounts if m.fstype == "cgroup2"]),
    )
    for fstype, key, candidates in hierarchies:
        if candidates and key in own:
            mount, below = _best(candidates, own[key])
            for depth in range(len(below), -1, -1):
                yield fstype, "/".join([mount.point.rstrip("/"), *below[:depth]])
            return


def _best(mounts: list[_Mount], group: str) -> tuple[_Mount, list[str]]:
    """The mount that shows the most ancestors of ``group``, and the names from there down to the group.

    The group is named as the process's namespace sees it, the mount as well; where the mount was made
    outside of the namespace, or shows another group, the way down has no names, and the mount's own level
    is all that can be read.
    """
    ways = [(mount, _below(mount.shown, group)) for mount in mounts]
    known = [(mount, below) for mount, below in ways if below is not None]
    return max(known, key=lambda way: len(way[1]), default=(mounts[0], []))


def _below(shown: str, group: str) -> list[str] | None:
    top, names = _names(shown), _names(group)
    below = names[len(top) :]
    return below if names[: len(top)] == top and ".." not in below else None


def _names(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _own_groups(files: KernelFiles) -> dict[str, str]:
    """Path of the process's group by controller; that of version 2 by the empty name."""
    path = "/proc/self/cgroup"
    groups: dict[str, str] = {}
    for line in (files.text(path) or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            raise files.garbage(path, line, "number:controllers:path")
        groups.update(dict.fromkeys(parts[1].split(","), parts[2]))
    return groups


def _mounts(files: KernelFiles) -> list[_Mount]:
    """Hierarchies that are mounted; of mounts on one point, the last hides the others."""
    path = "/proc/self/mountinfo"
    by_point: dict[str, _Mount] = {}
    for line in (files.text(path) or "").splitlines():
        head, separator, tail = line.partition(" - ")
        fields, source = head.split(), tail.split()
        if not separator or len(fields) < 6 or not source:
            raise files.garbage(path, line, "the fields of a mount")
        mount = _Mount(
            fstype=source[0],
            shown=_plain(fields[3]),
            point=_plain(fields[4]),
            controllers=frozenset(source[-1].split(",")),
        )
        by_point[mount.point] = mount
    return [mount for mount in by_point.values() if mount.fstype in _VERSIONS]


def _plain(field: str) -> str:
    """A field of mountinfo without its octal escapes (spaces, among others)."""
    return _ESCAPE.sub(lambda matched: chr(int(matched[1], 8)), field)
