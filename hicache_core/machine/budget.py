"""How many bytes the host pools of a rank may take, and which limit says so."""

from __future__ import annotations

import attrs

from hicache_core.machine.limits import MEMINFO, MachineLimits
from hicache_core.spec.checks import name, whole
from hicache_core.spec.units import format_bytes


@attrs.frozen(kw_only=True)
class Headroom:
    """What one limit still allows; negative where more is in use than it grants."""

    source: str = attrs.field(validator=name())
    nbytes: int


@attrs.frozen(kw_only=True)
class Budget:
    """Bytes that all host pools of one rank may take together.

    Args:
        usable_bytes: ordinary memory, the reserve taken off and the rest divided; zero where none is left.
        reserve_bytes: what the host keeps back for everything else, once for all its ranks.
        ranks_per_host: ranks that share the host.
        headrooms: every limit that was considered, the tightest first.
        hugetlb_page_bytes: size of the huge pages that were asked for; zero where none were.
        hugetlb_bytes: whole huge pages of that size for this rank. They were set aside when the machine
            started, so they are neither part of ``usable_bytes`` nor can they be added to it.
    """

    usable_bytes: int = attrs.field(validator=whole(0))
    reserve_bytes: int = attrs.field(validator=whole(0))
    ranks_per_host: int = attrs.field(validator=whole(1))
    headrooms: tuple[Headroom, ...]
    hugetlb_page_bytes: int = attrs.field(default=0, validator=whole(0))
    hugetlb_bytes: int = attrs.field(default=0, validator=whole(0))

    @property
    def binding(self) -> Headroom:
        """The limit that decides."""
        return self.headrooms[0]

    def __str__(self) -> str:
        """The usable figure, then how it comes about."""
        return (
            f"{format_bytes(self.usable_bytes)} a rank: {format_bytes(self.binding.nbytes)} by "
            f"{self.binding.source}, less {format_bytes(self.reserve_bytes)} in reserve, "
            f"over {self.ranks_per_host} rank{'s' if self.ranks_per_host > 1 else ''}"
        )


def memory_budget(
    limits: MachineLimits, *, reserve_bytes: int, ranks_per_host: int = 1, hugetlb_page_bytes: int = 0
) -> Budget:
    """The budget of one rank: the least of what host and control groups allow, less the reserve, divided.

    One snapshot serves all pools of a rank: what the first pool takes must not be missing, and not be counted
    a second time, when the next one is asked. Likewise the ranks of a host read their snapshots before any of
    them allocates; an exchange between the two, which the agreement on a capacity is, sees to it.

    Args:
        limits: the snapshot.
        reserve_bytes: kept back on this host, once for all ranks.
        ranks_per_host: ranks that share the memory. Where each has a control group of its own, the share is
            too small, never too large.
        hugetlb_page_bytes: size of huge pages to use; zero: they are left alone.

    Raises:
        SpecError: an argument is negative, or there is no rank.
    """
    headrooms = [
        Headroom(source=f"MemAvailable of {MEMINFO}", nbytes=limits.available_bytes),
        *(Headroom(source=level.file, nbytes=level.headroom_bytes) for level in limits.memory_levels),
    ]
    headrooms.sort(key=lambda headroom: headroom.nbytes)
    return Budget(
        usable_bytes=max(headrooms[0].nbytes - reserve_bytes, 0) // max(ranks_per_host, 1),
        reserve_bytes=reserve_bytes,
        ranks_per_host=ranks_per_host,
        headrooms=tuple(headrooms),
        hugetlb_page_bytes=hugetlb_page_bytes,
        hugetlb_bytes=_hugetlb_share(limits, hugetlb_page_bytes, max(ranks_per_host, 1)),
    )


def _hugetlb_share(limits: MachineLimits, page_bytes: int, ranks: int) -> int:
    free = sum(pages.free_pages for pages in limits.hugepages if pages.page_bytes == page_bytes)
    return free // ranks * page_bytes
