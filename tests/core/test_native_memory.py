"""Host memory over the libraries of the vendors, on the stand-in: its books, and forks."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from hicache_core.memory.host import HostMemory
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.options import MemoryOptions
from tests.core.host_mappings import mappings
from tests.core.test_native_registration import CUT, bytes_at
from tests.stand_ins.machine import NativeMachine

MakeNative = Callable[..., NativeMachine]
ALLOCATORS = ("anonymous", "memfd")


def _memory(machine: NativeMachine, allocator: str, ledger: Ledger) -> HostMemory:
    options = MemoryOptions(allocator=allocator, max_registration_bytes=2 * CUT)
    return HostMemory(6 * CUT, 64, machine.runtime, who="test", options=options, ledger=ledger)


def _resident(start: int, nbytes: int) -> int:
    """Bytes of a range that the kernel lists as mapped and present."""
    inside = (m for m in mappings() if start <= m.start and m.end <= start + nbytes)
    return sum(m.resident for m in inside)


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_bytes_booked_are_bytes_mapped(make_native: MakeNative, allocator: str) -> None:
    """I9: registered or given back, whatever the driver does with the pages meanwhile."""
    machine, ledger = make_native(), Ledger()
    memory = _memory(machine, allocator, ledger)
    start, nbytes = memory.range.start, memory.facts.mapped_bytes
    memory.view[...] = 7
    whole = [m for m in mappings() if m.start <= start and start + nbytes <= m.end]
    assert ledger.total() == nbytes == 6 * CUT
    assert _resident(start, nbytes) == nbytes or (whole and whole[0].resident >= nbytes)
    assert machine.stand_in.count("live_registrations") == 3
    memory.destroy()
    assert ledger.snapshot() == ()
    assert machine.stand_in.count("live_registrations") == 0
    assert machine.stand_in.count("live_mappings") == 0


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_fork_moves_no_page_away_from_the_device(make_native: MakeNative, allocator: str) -> None:
    """I32: what is written while a child lives is what the device sees, page by page."""
    machine = make_native()
    memory = _memory(machine, allocator, Ledger())
    memory.view[...] = 1
    aliases = [machine.runtime.alias(segment.host, 0) for segment in memory.segments]
    hold, release = os.pipe()
    child = os.fork()
    if not child:
        os.read(hold, 1)
        os._exit(0)
    try:
        memory.view[...] = np.arange(6 * CUT, dtype=np.uint64).astype(np.uint8)
        for segment, alias in zip(memory.segments, aliases, strict=True):
            written = memory.view[segment.offset : segment.offset + alias.nbytes]
            assert np.array_equal(bytes_at(alias.start, alias.nbytes), written)
    finally:
        os.write(release, b"x")
        os.waitpid(child, 0)
    memory.destroy()
