"""Every error of hicache: one base class, one subclass per cause, a stable reason code each.

A message always says who speaks, what was got, what was expected and what to do. Callers (and tests)
look at the class, its ``code`` and its typed fields, never at the sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol


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


class PoolsFileError(HiCacheError):
    """A file of hand-made pools cannot be read or does not follow its form; names the file and the key."""

    code = "pools-file"


class ByteSizeError(HiCacheError):
    """A text is no size in bytes, or its unit does not say whether it is a power of ten or of two."""

    code = "byte-size"


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
    """The runtime refused to register or unregister host memory."""

    code = "registration"

    def __init__(
        self, *, who: str, got: str, expected: str, remedy: str, rc: int, offset_bytes: int, nbytes: int
    ) -> None:
        self.rc = rc
        self.offset_bytes = offset_bytes
        self.nbytes = nbytes
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
        step: ``validate``, ``allocate``, ``register``, ``tables``, ``probe`` or ``publish``.
    """

    code = "sidecar"

    def __init__(self, *, who: str, got: str, expected: str, remedy: str, pool: str, step: str) -> None:
        self.pool = pool
        self.step = step
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


class LiveError(HiCacheError):
    """The description of a running controller cannot be served or read."""

    code = "live"


class ByteSizeError(HiCacheError):
    """A text is no number of bytes.

    Attributes:
        text: what was given.
    """

    code = "byte-size"

    def __init__(self, *, who: str, text: str, expected: str, remedy: str) -> None:
        self.text = text
        super().__init__(who=who, got=repr(text), expected=expected, remedy=remedy)


class MachineError(HiCacheError):
    """A file in which the kernel states a limit cannot be read or understood.

    Attributes:
        path: the file.
    """

    code = "machine"

    def __init__(self, *, path: str, got: str, expected: str, remedy: str) -> None:
        self.path = path
        super().__init__(who=path, got=got, expected=expected, remedy=remedy)


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
