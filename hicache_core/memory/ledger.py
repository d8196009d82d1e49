"""The ledger: what a process holds in host memory and in device staging, booked before it is allocated."""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping

from attrs import field, frozen
from attrs import validators as v

from hicache_core.errors import BookedBytes, OverBudgetError, RegisteredTwiceError
from hicache_core.memory.addresses import HostRange
from hicache_core.spec.checks import name, whole


class Kind(enum.Enum):
    """What is booked; each kind has a total and a budget of its own."""

    HOST = "host memory"
    STAGING = "device staging"


@frozen(kw_only=True)
class Entry:
    """One booking, as :meth:`Ledger.snapshot` lists it."""

    who: str = field(validator=name())
    kind: Kind = field(validator=v.instance_of(Kind))
    nbytes: int = field(validator=whole(0))


class Booking:
    """Bytes that a ledger keeps for somebody; made by :meth:`Ledger.book`."""

    def __init__(self, ledger: Ledger, entry: Entry) -> None:
        self.entry = entry
        self._ledger = ledger

    def place(self, host: HostRange) -> None:
        """Say where the bytes lie; RegisteredTwiceError where they overlap those of another booking."""
        self._ledger._place(self, host)

    def release(self) -> None:
        """Give the bytes back; a second call does nothing."""
        self._ledger._release(self)


class Ledger:
    """The books of one process; whoever makes pools hands it on. Any thread may call it.

    Args:
        budget_bytes: most host memory that may be booked at once; None for no limit.
        staging_budget_bytes: most device staging; None for no limit.
        source: how the budget of host memory comes about, for errors.
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        *,
        staging_budget_bytes: int | None = None,
        source: str = "",
    ) -> None:
        self.source = source
        self.budgets: Mapping[Kind, int | None] = {
            Kind.HOST: budget_bytes,
            Kind.STAGING: staging_budget_bytes,
        }
        self._totals = dict.fromkeys(Kind, 0)
        self._bookings: dict[Booking, HostRange | None] = {}
        # A booking may be released by a finalizer, which can run inside any call of the same thread.
        self._lock = threading.RLock()

    def book(self, who: str, nbytes: int, kind: Kind = Kind.HOST) -> Booking:
        """Book bytes before they are allocated.

        Args:
            who: who will hold them.
            nbytes: how many.
            kind: which total they count to.

        Raises:
            OverBudgetError: the budget does not hold them; nothing is booked.
        """
        entry = Entry(who=who, kind=kind, nbytes=nbytes)
        booking = Booking(self, entry)
        with self._lock:
            budget = self.budgets[kind]
            total = self._totals[kind] + nbytes
            if budget is not None and total > budget:
                raise _over(entry, budget, total - budget, self.snapshot(), self.source)
            self._totals[kind] = total
            self._bookings[booking] = None
        return booking

    def total(self, kind: Kind = Kind.HOST) -> int:
        """Bytes that are booked of a kind."""
        return self._totals[kind]

    def snapshot(self) -> tuple[Entry, ...]:
        """What is booked, in the order of booking."""
        with self._lock:
            return tuple(booking.entry for booking in self._bookings)

    def _place(self, booking: Booking, host: HostRange) -> None:
        with self._lock:
            for other, taken in self._bookings.items():
                if taken is not None and other is not booking and taken.overlaps(host):
                    raise RegisteredTwiceError(
                        who=booking.entry.who,
                        got=f"{host.nbytes} bytes at {host.start:#x}, of which {other.entry.who} holds some",
                        expected="memory that nobody else holds",
                        remedy="Have the allocator give each caller memory of its own.",
                        start=host.start,
                        nbytes=host.nbytes,
                    )
            if booking in self._bookings:
                self._bookings[booking] = host

    def _release(self, booking: Booking) -> None:
        with self._lock:
            if booking in self._bookings:
                del self._bookings[booking]
                self._totals[booking.entry.kind] -= booking.entry.nbytes


def _over(
    entry: Entry, budget: int, missing: int, booked: tuple[Entry, ...], source: str
) -> OverBudgetError:
    mine = tuple(other for other in booked if other.kind is entry.kind)
    holders = ", ".join(f"{other.who} {other.nbytes}" for other in mine) or "nothing"
    why = f" ({source})" if source and entry.kind is Kind.HOST else ""
    return OverBudgetError(
        who=entry.who,
        got=f"{entry.nbytes} bytes of {entry.kind.value}, {missing} above what is left of {budget}{why}",
        expected=f"a demand beside what is booked: {holders}",
        remedy="Ask for fewer pages, close what holds the rest, or raise the budget.",
        nbytes=entry.nbytes,
        missing_bytes=missing,
        budget_bytes=budget,
        booked=[BookedBytes(who=other.who, nbytes=other.nbytes) for other in mine],
    )
