"""Errors of a running controller: its proofs, its sidecars, its ranks and its readers."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_core.errors.base import HiCacheError


class ProbeError(HiCacheError):
    """The self-test of a pool failed: it does not move as it was declared and planned.

    Attributes:
        pool: its name.
        step: ``alias``, ``backup`` or ``load``, or what lies beside it.
    """

    code = "probe"

    def __init__(self, *, who: str, got: str, expected: str, remedy: str, pool: str, step: str) -> None:
        self.pool = pool
        self.step = step
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


class SidecarError(HiCacheError):
    """A sidecar could not join; the group is what it was. The cause is the error of the step that failed.

    Attributes:
        pool: its name.
        step: ``validate``, ``allocate``, ``register``, ``tables``, ``probe``, ``agree`` or ``publish``.
    """

    code = "sidecar"

    def __init__(self, *, who: str, got: str, expected: str, remedy: str, pool: str, step: str) -> None:
        self.pool = pool
        self.step = step
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


class RankError(HiCacheError):
    """One rank or more failed at what all do together, so no rank may keep its part.

    Attributes:
        rank: the first rank that failed, by its global number; -1 where no rank could be asked.
        ranks: every rank that is known to have failed, ascending.
        reason: what that rank reported, or that it did not answer.
    """

    code = "rank"

    def __init__(self, *, who: str, ranks: Sequence[int], reason: str, remedy: str) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks[0] if self.ranks else -1
        self.reason = reason
        named = f"rank {', '.join(map(str, self.ranks))}: " if self.ranks else ""
        super().__init__(who=who, got=f"{named}{reason}", expected="success on every rank", remedy=remedy)


class LiveError(HiCacheError):
    """The description of a running controller cannot be served or read."""

    code = "live"
