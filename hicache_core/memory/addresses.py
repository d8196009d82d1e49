"""Ranges of addresses, typed by who may use them.

A :class:`HostRange` is CPU virtual memory: what storage, unregistration and page metadata see. A
:class:`KernelRange` is what one device dereferences, with the reason why it can. They share no base class, so
that neither mypy nor the running program lets one stand for the other.
"""

from __future__ import annotations

import enum

from attrs import field, frozen
from attrs import validators as v

from hicache_core.errors import AddressError
from hicache_core.spec.checks import whole


class Provenance(enum.Enum):
    """Why a device can see an address."""

    DEVICE_MEMORY = "device-memory"
    ALIAS = "alias"
    """The runtime's device address of registered host memory."""
    RAW = "raw"
    """Host memory as it is, on platforms that register nothing."""
    PAGEABLE = "pageable"
    """The CPU address of memory that could not be registered: for runtime copies, refused to kernels."""


def _inside(who: str, start: int, nbytes: int, offset: int, length: int) -> int:
    if offset < 0 or length < 0 or offset + length > nbytes:
        raise AddressError(
            who=who,
            got=f"bytes {offset} to {offset + length} of a range of {nbytes} at {start:#x}",
            expected="bytes inside the range",
            remedy="An address is never carried over the end of its range; look it up in the next one.",
        )
    return start + offset


@frozen(kw_only=True)
class HostRange:
    """A run of CPU virtual addresses.

    Args:
        start: first address.
        nbytes: length in bytes.
    """

    start: int = field(validator=whole(0))
    nbytes: int = field(validator=whole(0))

    def at(self, offset: int, length: int = 0) -> int:
        """The address ``offset`` bytes in, of which ``length`` bytes lie inside; else AddressError."""
        return _inside("host range", self.start, self.nbytes, offset, length)

    def part(self, offset: int, nbytes: int) -> HostRange:
        """The run of ``nbytes`` that starts ``offset`` bytes in; AddressError where it leaves the range."""
        return HostRange(start=self.at(offset, nbytes), nbytes=nbytes)

    def overlaps(self, other: HostRange) -> bool:
        """Whether the two have an address in common."""
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes


@frozen(kw_only=True)
class KernelRange:
    """A run of addresses that one device dereferences.

    Args:
        start: first address.
        nbytes: length in bytes.
        device: ordinal of the device that sees it.
        provenance: why it does.
    """

    start: int = field(validator=whole(0))
    nbytes: int = field(validator=whole(0))
    device: int = field(validator=whole(0))
    provenance: Provenance = field(validator=v.instance_of(Provenance))

    def at(self, offset: int, length: int = 0) -> int:
        """The address ``offset`` bytes in, of which ``length`` bytes lie inside; else AddressError."""
        return _inside(f"kernel range of device {self.device}", self.start, self.nbytes, offset, length)
