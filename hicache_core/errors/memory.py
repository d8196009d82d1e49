"""Errors of host memory, addresses and what fits."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from hicache_core.errors.base import HiCacheError


@frozen(kw_only=True)
class StuckRange:
    """A registration that could not be undone; its memory stays mapped.

    Args:
        who: whose memory it is.
        start: CPU address at which the range that was registered starts.
        nbytes: its size.
        offset: byte of the memory at which it starts.
        rc: return code of the runtime; -1 where it gave none.
    """

    who: str
    start: int
    nbytes: int
    offset: int
    rc: int


@frozen(kw_only=True)
class BookedBytes:
    """What somebody holds of a budget."""

    who: str
    nbytes: int


class HostMemoryError(HiCacheError):
    """Host memory could not be obtained, pinned or released."""

    code = "memory"


class RegistrationError(HostMemoryError):
    """The runtime refused to register or unregister host memory.

    Attributes:
        stuck: what had been registered before and could not be undone; it stays mapped and booked.
    """

    code = "registration"
    stuck: tuple[StuckRange, ...] = ()

    def __init__(
        self, *, who: str, got: str, expected: str, remedy: str, rc: int, offset_bytes: int, nbytes: int
    ) -> None:
        self.rc = rc
        self.offset_bytes = offset_bytes
        self.nbytes = nbytes
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


class RegisteredTwiceError(HostMemoryError):
    """Memory would be registered, or held, a second time; the runtime was not asked.

    Attributes:
        start: first address of what was refused.
        nbytes: its size.
    """

    code = "registered-twice"

    def __init__(self, *, who: str, got: str, expected: str, remedy: str, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


class UnregisterError(HostMemoryError):
    """Host memory could not be unregistered; it stays mapped and booked.

    Attributes:
        stuck: each registration that is left, with the runtime's return code.
    """

    code = "unregister"

    def __init__(
        self, *, who: str, got: str, expected: str, remedy: str, stuck: Sequence[StuckRange]
    ) -> None:
        self.stuck = tuple(stuck)
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


class AddressError(HiCacheError):
    """An address leaves its range, or an address of one domain was used where another is needed."""

    code = "address"


class CapacityError(HiCacheError):
    """Something does not fit: a request larger than a tier, a row larger than a budget."""

    code = "capacity"


class HostSizeError(CapacityError):
    """A host size cannot hold what it should; nothing was allocated.

    Attributes:
        reason: ``split`` where the size of a rank is below what its pools need, ``host-memory`` where the
            sizes of all ranks are above what the host has left.
        nbytes: the size that was asked for, of one rank.
        short_bytes: by how much it falls short, over all that is compared.
        fits_bytes: the size of one rank that would fit: the least in a split, the most of the host's memory.
    """

    code = "host-size"

    def __init__(
        self,
        *,
        who: str,
        got: str,
        expected: str,
        remedy: str,
        reason: str,
        nbytes: int,
        short_bytes: int,
        fits_bytes: int,
    ) -> None:
        self.reason = reason
        self.nbytes = nbytes
        self.short_bytes = short_bytes
        self.fits_bytes = fits_bytes
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


class OverBudgetError(CapacityError):
    """A booking is larger than what the budget has left; nothing was booked or allocated.

    Attributes:
        nbytes: what was asked for.
        missing_bytes: by how much it is too large.
        budget_bytes: the budget.
        booked: what is booked already, of the same kind.
    """

    code = "over-budget"

    def __init__(
        self,
        *,
        who: str,
        got: str,
        expected: str,
        remedy: str,
        nbytes: int,
        missing_bytes: int,
        budget_bytes: int,
        booked: Sequence[BookedBytes],
    ) -> None:
        self.nbytes = nbytes
        self.missing_bytes = missing_bytes
        self.budget_bytes = budget_bytes
        self.booked = tuple(booked)
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


class MachineError(HiCacheError):
    """A file in which the kernel states a limit cannot be read or understood.

    Attributes:
        path: the file.
    """

    code = "machine"

    def __init__(self, *, path: str, got: str, expected: str, remedy: str) -> None:
        self.path = path
        super().__init__(who=path, got=got, expected=expected, remedy=remedy)
