"""What the core decided by itself: each choice and fallback with its reason, counted, and logged once."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from hicache_core.compat import PoolPlan
    from hicache_core.pool import HostPool

_LOG = logging.getLogger("hicache")


@frozen(kw_only=True)
class Decision:
    """Something that the core chose, fell back to or noticed.

    Args:
        code: reason code.
        reason: for people.
        pool: the pool that it is about, or empty.
    """

    code: str
    reason: str
    pool: str = ""


class DecisionLog:
    """Counts decisions; the first of each kind makes a line in the log ``hicache``.

    Nothing is recorded while bytes move: decisions are taken where pools are made, probed or join.
    """

    def __init__(self) -> None:
        self._counts: dict[Decision, int] = {}
        self._lock = threading.Lock()

    def record(self, code: str, reason: str, *, pool: str = "") -> None:
        """Count a decision."""
        decision = Decision(code=code, reason=reason, pool=pool)
        with self._lock:
            count = self._counts[decision] = self._counts.get(decision, 0) + 1
        if count == 1:
            _LOG.info("%s%s: %s", f"pool '{pool}', " if pool else "", code, reason)

    def count(self, code: str) -> int:
        """How often decisions of a code were taken."""
        with self._lock:
            return sum(count for decision, count in self._counts.items() if decision.code == code)

    def as_data(self) -> list[dict[str, Any]]:
        """Every decision with its count, as plain data, in the order in which they were first taken."""
        with self._lock:
            return [
                {"code": d.code, "pool": d.pool, "reason": d.reason, "count": count}
                for d, count in self._counts.items()
            ]


def note_pool(log: DecisionLog, pool: HostPool, plan: PoolPlan | None, device_pages: int) -> None:
    """Record what was decided where a pool was planned and made.

    Args:
        log: where it is kept.
        pool: a pool that is in its group.
        plan: its plan; None for a pool without bytes.
        device_pages: device pages of its index space.
    """
    name = pool.spec.pool
    for choice in plan.choices if plan is not None else ():
        log.record(choice.code, choice.text, pool=name)
    for buffer in pool.buffers:
        for note in buffer.memory.facts.notes:
            log.record("memory-as-it-came", note, pool=name)
        if len(buffer.memory.segments) > 1:
            reason = f"'{buffer.spec.name}' lies in {len(buffer.memory.segments)} registrations"
            log.record("registered-in-parts", reason, pool=name)
    if pool.pageable:
        log.record("pageable", pool.pageable, pool=name)
    if pool.pages < device_pages and pool.spec.buffers:
        reason = f"{pool.pages} host pages are fewer than {device_pages} on the device"
        log.record("host-smaller-than-device", reason, pool=name)
