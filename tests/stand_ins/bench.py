"""Host and device memory on a machine of the stand-in, and copies between them by their offsets."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from hicache_core.device.base import BatchCopies, StridedCopies
from hicache_core.memory.host import HostMemory
from hicache_core.memory.options import MemoryOptions
from hicache_core.spec import CopyKind
from hicache_core.testing.oracle import POISON, Bytes, distinct_bytes
from tests.stand_ins.machine import NativeMachine

CUT = mmap.PAGESIZE
ROW, PITCH = 48, 80


class Bench:
    """Host memory in registrations of one page of the system, and as many bytes on device 0.

    The host bytes are distinct, the device is poisoned; runs are named by their offsets.
    """

    def __init__(self, machine: NativeMachine, cuts: int = 4, limit: int = CUT) -> None:
        self.machine = machine
        self.runtime = machine.runtime
        self.memory = HostMemory(
            cuts * CUT, 1, self.runtime, who="test", options=MemoryOptions(max_registration_bytes=limit)
        )
        self.memory.view[...] = distinct_bytes("host", nbytes=self.memory.view.size)
        self.device = self.runtime.allocate(cuts * CUT, 0)
        self.device.fill_(POISON)
        self.stream = self.runtime.new_stream(0)

    def host_address(self, offset: int, kind: CopyKind) -> int:
        """Where a copy of that kind finds a host byte, by the facts of the platform."""
        segment = next(s for s in self.memory.segments if s.offset <= offset < s.offset + s.host.nbytes)
        takes_host = kind in self.runtime.platform.copy_accepts_host_address
        start = segment.host.start if takes_host else self.runtime.alias(segment.host, 0).start
        return start + offset - segment.offset

    def batch(self, runs: Sequence[tuple[int, int, int]], kind: CopyKind) -> BatchCopies:
        """Loads of (host offset, device offset, bytes)."""
        columns = [
            [self.device.data_ptr() + device for _, device, _ in runs],
            [self.host_address(host, kind) for host, _, _ in runs],
            [nbytes for _, _, nbytes in runs],
        ]
        targets, sources, sizes = (np.array(column, dtype=np.int64) for column in columns)
        return BatchCopies(targets=targets, sources=sources, sizes=sizes, host_is_target=False)

    def strided(self, runs: Sequence[tuple[int, int, int]], kind: CopyKind = CopyKind.TWO_D) -> StridedCopies:
        """Loads of (host offset, device offset, height), rows of 48 bytes, 80 apart in host memory."""
        return StridedCopies(
            targets=np.array([self.device.data_ptr() + device for _, device, _ in runs], dtype=np.int64),
            sources=np.array([self.host_address(host, kind) for host, _, _ in runs], dtype=np.int64),
            widths=ROW,
            heights=np.array([height for _, _, height in runs], dtype=np.int64),
            target_pitch=ROW,
            source_pitch=PITCH,
            host_is_target=False,
        )

    def untouched(self) -> Bytes:
        """What the device holds before anything ran."""
        return np.full(self.device.numel(), POISON, dtype=np.uint8)

    def device_is(self, expected: Bytes) -> bool:
        """Whether every byte of the device is as expected."""
        return np.array_equal(self.device.numpy(), expected)
