"""Errors of device runtimes and of transfers."""

from __future__ import annotations

from hicache_core.errors.base import HiCacheError


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
