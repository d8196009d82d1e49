"""Every error of hicache: one base class, one subclass per cause, a stable reason code each.

A message always says who speaks, what was got, what was expected and what to do. Callers (and tests)
look at the class, its ``code`` and its typed fields, never at the sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from hicache_core.memory.ledger import Entry
    from hicache_core.memory.registration import StuckRange


class HiCacheError(Exception):
    """Base of all errors raised by hicache.

    Args:
        who: the part that speaks: a pool, a plugin with its distribution, a command.
        got: what was found.
        expected: what would have been right.
        remedy: what the reader can do about it.
    """

    code: ClassVar[str] = "hicache"

    def __init__(self, *, who: str, got: str, expected: str, remedy: str) -> None:
        self.who = who
        self.got = got
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"{who}: got {got}; expected {expected}. {remedy}")


class SpecError(HiCacheError):
    """A declaration (pool, buffer, geometry, platform) contradicts itself."""

    code = "spec"


class PluginError(HiCacheError):
    """A plugin was refused; the registry is what it was before."""

    code = "plugin"


class UnknownNameError(HiCacheError):
    """A model, variant, platform, layout, io_backend or family of that name does not exist here."""

    code = "unknown-name"


class ModelFileError(HiCacheError):
    """A model file cannot be read or does not follow the schema."""

    code = "model-file"


class TraceError(HiCacheError):
    """A trace cannot be read; names the file and, where one is at fault, the line (1-based)."""

    code = "trace"

    def __init__(self, *, path: str, line: int | None, got: str, expected: str, remedy: str) -> None:
        self.path = path
        self.line = line
        where = path if line is None else f"{path}:{line}"
        super().__init__(who=where, got=got, expected=expected, remedy=remedy)


class Reason(Protocol):
    """Why a combination cannot work."""

    @property
    def id(self) -> str:
        """Rule and reason code."""

    @property
    def pool(self) -> str:
        """The pool that breaks it, or empty."""


class IncompatibleError(HiCacheError):
    """A combination of platform, io_backend, layout and pools cannot work; carries every reason.

    Attributes:
        violations: the reasons.
        nearest: the nearest combination that works for the whole group; None where none is known.
    """

    code = "incompatible"

    def __init__(
        self, *, who: str, violations: Sequence[Reason], remedy: str, nearest: object | None = None
    ) -> None:
        self.violations = tuple(violations)
        self.nearest = nearest
        super().__init__(
            who=who,
            got="; ".join(str(violation) for violation in self.violations),
            expected="a combination that every pool serves",
            remedy=remedy,
        )


class BufferMismatchError(HiCacheError):
    """A device buffer is not what its declaration says: row bytes, layers, device, stride or dtype."""

    code = "buffer-mismatch"


class IndicesError(HiCacheError):
    """Base of the errors about slot indices given to a public call; nothing has moved."""

    code = "index"


class IndexTypeError(IndicesError):
    """Indices are not a one-dimensional int64 array of the right device."""

    code = "index-type"


class IndexRangeError(IndicesError):
    """An index lies outside its index space."""

    code = "index-range"


class PageContractError(IndicesError):
    """Indices do not list whole pages: a run does not start at a page or does not step by one."""

    code = "page-contract"


class PairingError(IndicesError):
    """Host and device indices do not pair: unequal lengths, or a destination twice."""

    code = "pairing"


class UnsupportedTokensError(HiCacheError):
    """A pool's tokens cannot be copied one by one, or not in the way that was asked for.

    Attributes:
        reason: code of the reason, that of the pool's ``token_granular`` where it is the declaration's.
    """

    code = "unsupported-tokens"

    def __init__(self, *, who: str, got: str, expected: str, remedy: str, reason: str) -> None:
        self.reason = reason
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


class SlotError(HiCacheError):
    """Slots were asked for or given back in a way that breaks their ownership; nothing changed."""

    code = "slot"

    def __init__(
        self, *, who: str, got: str, expected: str, remedy: str, slots: Sequence[int] = ()
    ) -> None:
        self.slots = tuple(slots)
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


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

    def __init__(
        self, *, who: str, got: str, expected: str, remedy: str, start: int, nbytes: int
    ) -> None:
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


class PageTypeError(HiCacheError):
    """Memory given for flat pages is not contiguous uint8 on the CPU, or may not be written to."""

    code = "page-type"


class PageSizeError(HiCacheError):
    """Memory given for flat pages has another size; no page was touched.

    Attributes:
        nbytes: its size.
        expected_bytes: the size of the pages.
    """

    code = "page-size"

    def __init__(
        self, *, who: str, got: str, expected: str, remedy: str, nbytes: int, expected_bytes: int
    ) -> None:
        self.nbytes = nbytes
        self.expected_bytes = expected_bytes
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


class AddressError(HiCacheError):
    """An address leaves its range, or an address of one domain was used where another is needed."""

    code = "address"


class DeviceError(HiCacheError):
    """The device runtime reported a failure; ``rc`` is its return code."""

    code = "device"

    def __init__(self, *, who: str, got: str, expected: str, remedy: str, rc: int = 0) -> None:
        self.rc = rc
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


class StreamsStuckError(DeviceError):
    """Streams wait for one another, or for what nobody will record: what they hold is still in use."""

    code = "streams-stuck"


class DeviceFault(DeviceError):
    """A kernel or copy touched an address that its device cannot see.

    Attributes:
        address: the first faulting address.
        device: ordinal of the device.
    """

    code = "device-fault"

    def __init__(self, *, who: str, address: int, device: int, reason: str, remedy: str) -> None:
        self.address = address
        self.device = device
        super().__init__(
            who=who,
            got=f"address {address:#x} on device {device}: {reason}",
            expected="an address that this device sees",
            remedy=remedy,
            rc=700,
        )


class TransferError(HiCacheError):
    """A submitted backup or load failed; its bytes count as not moved."""

    code = "transfer"


class CapacityError(HiCacheError):
    """Something does not fit: a request larger than a tier, a row larger than a budget."""

    code = "capacity"


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
        booked: Sequence[Entry],
    ) -> None:
        self.nbytes = nbytes
        self.missing_bytes = missing_bytes
        self.budget_bytes = budget_bytes
        self.booked = tuple(booked)
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)
