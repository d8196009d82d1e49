"""Invariant I11: the budget is the least of host and every control group, less the reserve, divided once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_core.errors import SpecError
from hicache_core.machine.budget import memory_budget
from hicache_core.machine.limits import HugePages, MachineLimits
from tests.core.machine_trees import (
    GIB,
    V1_NO_LIMIT,
    limits_of,
    v1_group,
    v1_level,
    v2_group,
    v2_level,
)


def test_host_binds_where_no_group_limits(tmp_path: Path) -> None:
    """I11: v1's default is no limit; available memory, not free memory nor the total."""
    limits = limits_of(tmp_path, v1_group("/a"), v1_level("/a", limit=V1_NO_LIMIT, usage=GIB))
    budget = memory_budget(limits, reserve_bytes=12 * GIB, ranks_per_host=4)
    assert budget.usable_bytes == 125 * GIB
    assert (budget.binding.source, budget.binding.nbytes) == ("MemAvailable of /proc/meminfo", 512 * GIB)


def test_tighter_parent_binds(tmp_path: Path) -> None:
    """I11: the process's own group alone would allow 63 GiB."""
    limits = limits_of(
        tmp_path,
        v2_group("/pod/box"),
        v2_level("/pod", current=40 * GIB, file=8 * GIB, max=48 * GIB),
        v2_level("/pod/box", current=GIB, max=64 * GIB),
    )
    budget = memory_budget(limits, reserve_bytes=0)
    assert budget.usable_bytes == 16 * GIB
    assert budget.binding.source == "/sys/fs/cgroup/pod/memory.max"
    assert [headroom.nbytes for headroom in budget.headrooms] == [16 * GIB, 63 * GIB, 512 * GIB]


def test_high_binds_below_max(tmp_path: Path) -> None:
    """I11: the file is named, not the level alone."""
    limits = limits_of(tmp_path, v2_group("/a"), v2_level("/a", current=GIB, max=9 * GIB, high=5 * GIB))
    budget = memory_budget(limits, reserve_bytes=GIB)
    assert (budget.binding.source, budget.usable_bytes) == ("/sys/fs/cgroup/a/memory.high", 3 * GIB)


def _limits(available: int, *hugepages: HugePages) -> MachineLimits:
    return MachineLimits(total_bytes=1 << 50, available_bytes=available, hugepages=hugepages)


def test_reserve_is_taken_once_before_the_division() -> None:
    """Not once a rank; what does not divide is left over."""
    budget = memory_budget(_limits(1000), reserve_bytes=99, ranks_per_host=8)
    assert budget.usable_bytes == 112


def test_nothing_left_is_zero() -> None:
    """Never negative."""
    assert memory_budget(_limits(1000), reserve_bytes=1001).usable_bytes == 0


def test_budget_follows_the_snapshot_and_not_the_machine(tmp_path: Path) -> None:
    """I11: the second pool of a rank is asked about the same memory as the first."""
    limits = limits_of(tmp_path)
    first = memory_budget(limits, reserve_bytes=GIB)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\nMemAvailable: 1 kB\n", encoding="utf-8")
    assert memory_budget(limits, reserve_bytes=GIB) == first


PAGES = (
    HugePages(page_bytes=2 << 20, total_pages=100, free_pages=33),
    HugePages(page_bytes=GIB, total_pages=8, free_pages=8),
)


@pytest.mark.parametrize(
    ("page_bytes", "nbytes"), [(0, 0), (2 << 20, 16 * (2 << 20)), (GIB, 4 * GIB), (4096, 0)]
)
def test_hugetlb_pages_count_only_when_asked_for(page_bytes: int, nbytes: int) -> None:
    """Whole free pages of that size for each rank; they are no ordinary memory either way."""
    budget = memory_budget(
        _limits(10 * GIB, *PAGES), reserve_bytes=0, ranks_per_host=2, hugetlb_page_bytes=page_bytes
    )
    assert (budget.hugetlb_bytes, budget.usable_bytes) == (nbytes, 5 * GIB)


def test_message_shows_the_usable_figure() -> None:
    """I10: in GiB, the reserve taken off, with the limit that binds."""
    shown = str(memory_budget(_limits(11 * GIB), reserve_bytes=GIB, ranks_per_host=4))
    assert shown.startswith("2.5 GiB")
    assert "MemAvailable of /proc/meminfo" in shown


@pytest.mark.parametrize("arguments", [{"reserve_bytes": -1}, {"reserve_bytes": 0, "ranks_per_host": 0}])
def test_senseless_arguments_are_refused(arguments: dict[str, int]) -> None:
    """A negative reserve, no rank."""
    with pytest.raises(SpecError):
        memory_budget(_limits(1000), **arguments)
