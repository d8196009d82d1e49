"""The staging ring: one run of device memory per device, through which backups are relaid out."""

from __future__ import annotations

import threading

import torch

from hicache_core.compat import DEFAULT_RING_BYTES
from hicache_core.device.base import DeviceRuntime
from hicache_core.memory.addresses import KernelRange


class StagingRing:
    """Device memory that backups of all pools share; it is made at its first use.

    All of it is used on one stream, whose order keeps a chunk from being overwritten before its copy to the
    host has run.

    Args:
        runtime: the runtime that owns the device.
        device: ordinal of the device.
        nbytes: size, the budget for staging on that device.
    """

    def __init__(self, runtime: DeviceRuntime, device: int, nbytes: int = DEFAULT_RING_BYTES) -> None:
        self.nbytes = nbytes
        self._runtime = runtime
        self._device = device
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None
        self._range: KernelRange | None = None

    def range(self) -> KernelRange:
        """The addresses of the ring."""
        with self._lock:
            if self._range is None:
                self._memory = self._runtime.allocate(self.nbytes, self._device)
                self._range = self._runtime.device_range(self._memory, self._device)
            return self._range

    @property
    def made(self) -> bool:
        """Whether the ring takes device memory by now."""
        return self._range is not None

    def release(self) -> None:
        """Give the device memory back; nothing that uses it may be running."""
        with self._lock:
            self._memory = self._range = None

    def rows(self, row_bytes: int) -> int:
        """Rows of ``row_bytes`` that fit at once; 0 where one row is larger than the ring."""
        return self.nbytes // row_bytes
