"""What the core decided by itself: each choice and fallback with its reason, counted, and logged once."""

from __future__ import annotations

import logging
import threading
from typing import Any

from attrs import frozen

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
