"""The staging ring: one run of device memory per device, through which backups are relaid out."""

from __future__ import annotations

import threading

import torch

from hicache_core.compat import DEFAULT_RING_BYTES
from hicache_core.device.base import DeviceRuntime
from hicache_core.memory.addresses import KernelRange
from hicache_core.memory.ledger import Booking, Kind, Ledger


class StagingRing:
    """Device memory that backups of all pools share; it is made at its first use.

    All of it is used on one stream, whose order keeps a chunk from being overwritten before its copy to the
    host has run.

    Args:
        runtime: the runtime that owns the device.
        device: ordinal of the device.
        nbytes: size, the budget for staging on that device.
        ledger: where it is booked before it is made; None for books of its own.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        device: int,
        nbytes: int = DEFAULT_RING_BYTES,
        ledger: Ledger | None = None,
    ) -> None:
        self.nbytes = nbytes
        self._runtime = runtime
        self._device = device
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None
        self._range: KernelRange | None = None
        self._ledger = Ledger() if ledger is None else ledger
        self._booking: Booking | None = None

    @property
    def made(self) -> bool:
        """Whether the ring takes device memory by now."""
        return self._range is not None

    def release(self) -> None:
        """Let the memory go once nothing runs over it; a second call does nothing."""
        with self._lock:
            self._memory = self._range = None
            if self._booking is not None:
                self._booking.release()
                self._booking = None

    def range(self) -> KernelRange:
        """The addresses of the ring; OverBudgetError where the ledger does not hold it."""
        with self._lock:
            if self._range is None:
                self._range = self._make()
            return self._range

    def _make(self) -> KernelRange:
        who = f"staging ring of device {self._device}"
        booking = self._ledger.book(who, self.nbytes, Kind.STAGING)
        try:
            self._memory = self._runtime.allocate(self.nbytes, self._device)
            made = self._runtime.device_range(self._memory, self._device)
        except BaseException:
            booking.release()
            raise
        self._booking = booking
        return made

    def rows(self, row_bytes: int) -> int:
        """Rows of ``row_bytes`` that fit at once; 0 where one row is larger than the ring."""
        return self.nbytes // row_bytes
