"""Sequences of what can happen to host memory, run on the simulator with its faults; also as a program.

As a program it runs random sequences from a seed, says ``half`` half-way while it holds memory of both kinds,
and ``done`` at the end where nothing is left over:

    python -m tests.core.memory_sequences SEED COUNT
"""

from __future__ import annotations

import mmap
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

from attrs import frozen

from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.errors import HiCacheError, RegistrationError, UnregisterError
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.host import HostMemory
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.options import MemoryOptions
from tests.core.host_mappings import descriptors, our_bytes

PAGE = mmap.PAGESIZE


class Stopped(Exception):
    """What a progress callback raises."""


@frozen(kw_only=True)
class Make:
    """Allocate memory, with what goes wrong meanwhile; 0 and None stand for nothing."""

    pages: int
    allocator: str = "anonymous"
    limit_pages: int = 1 << 20
    refuse_at: int = 0
    refuse_above: int | None = None
    accept_pageable: bool = False
    stop: bool = False
    interrupt_at: int = 0


@frozen(kw_only=True)
class End:
    """Let go of a memory, by destroy or by dropping it; calls of unregister that are refused, from 1."""

    which: int
    drop: bool = False
    keep_view: bool = False
    refuse: frozenset[int] = frozenset()


Step = Make | End


class Machine(SimRuntime):
    """A simulator whose refusals change from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupt_at = 0
        self.refuse_unregister: frozenset[int] = frozenset()
        self._unregister_calls = 0

    def next_step(
        self, faults: Faults, interrupt_at: int = 0, refuse_unregister: frozenset[int] = frozenset()
    ) -> None:
        """Count calls from 1 again, with other faults."""
        self.faults, self.interrupt_at, self.refuse_unregister = faults, interrupt_at, refuse_unregister
        self._registration_calls = self._unregister_calls = 0

    def register(self, host: HostRange) -> None:
        """Be interrupted, or refuse, or register."""
        if self._registration_calls + 1 == self.interrupt_at:
            self._registration_calls += 1
            raise KeyboardInterrupt
        super().register(host)

    def unregister(self, host: HostRange) -> None:
        """Refuse, or unregister."""
        self._unregister_calls += 1
        if self._unregister_calls in self.refuse_unregister:
            raise RegistrationError(
                who="sim", got="code 4", expected="0", remedy="-", rc=4, offset_bytes=0, nbytes=host.nbytes
            )
        super().unregister(host)


class Sequence:
    """Runs steps and checks after each that what is registered belongs to memory that is held."""

    def __init__(self, mapped: int | None = None) -> None:
        self.runtime, self.ledger = Machine(), Ledger()
        self.held: list[HostMemory] = []
        self.views: list[Any] = []
        # Asking the kernel is what takes the time here.
        self._mapped = our_bytes() if mapped is None else mapped
        self._opened = descriptors()

    def run(self, steps: Iterable[Step]) -> None:
        """Run them all, then let go of everything and check that nothing is left."""
        do: dict[type, Callable[[Any], None]] = {Make: self._make, End: self._end}
        for step in steps:
            do[type(step)](step)
            self.check()
        self.close()

    def check(self) -> None:
        """Every registration belongs to a memory that is held, and all of that is booked."""
        assert self.ledger.total() >= sum(memory.facts.mapped_bytes for memory in self.held)
        ours = {part.host for memory in self.held for part in memory.segments if part.registered}
        assert {r.host for r in self.runtime.memory.registrations.values()} == ours

    def close(self) -> None:
        """What is booked is mapped; then everything is let go, and no registration, mapping, descriptor or
        booking is left."""
        assert self.ledger.total() == our_bytes() - self._mapped
        self.runtime.next_step(Faults())
        for memory in self.held:
            memory.destroy()
        self.held.clear()
        self.views.clear()
        memory_left = self.runtime.memory
        assert not memory_left.registrations
        assert not memory_left.host_space.regions
        assert self.ledger.snapshot() == ()
        assert our_bytes() == self._mapped
        assert descriptors() == self._opened

    def _make(self, step: Make) -> None:
        def progress(done: int, total: int) -> None:
            if step.stop:
                raise Stopped

        options = MemoryOptions(
            allocator=step.allocator,
            max_registration_bytes=step.limit_pages * PAGE,
            accept_pageable=step.accept_pageable,
            progress=progress,
        )
        faults = Faults(refuse_registration_at=step.refuse_at, refuse_registration_above=step.refuse_above)
        self.runtime.next_step(faults, step.interrupt_at)
        try:
            made = HostMemory(
                step.pages * PAGE, 64, self.runtime, who="test", options=options, ledger=self.ledger
            )
        except (HiCacheError, Stopped, KeyboardInterrupt):
            return
        made.view[:] = 1
        self.held.append(made)

    def _end(self, step: End) -> None:
        if not self.held:
            return
        self.runtime.next_step(Faults(), refuse_unregister=step.refuse)
        at = step.which % len(self.held)
        if step.keep_view:
            self.views.append(self.held[at].view[1:])
        if step.drop:
            # What is stuck for good stays on purpose, so nothing is refused here.
            self.runtime.next_step(Faults())
            del self.held[at]
            return
        try:
            self.held[at].destroy()
        except UnregisterError:
            return
        self.held.pop(at).destroy()


def random_steps(rng: random.Random) -> list[Step]:
    """Some steps, drawn without hypothesis."""
    steps: list[Step] = []
    for _ in range(rng.randint(1, 8)):
        if rng.random() < 0.4:
            refuse = frozenset(rng.sample(range(1, 9), rng.randint(0, 2)))
            steps.append(End(which=rng.randint(0, 7), drop=rng.random() < 0.3, refuse=refuse))
            continue
        steps.append(
            Make(
                pages=rng.randint(1, 12),
                allocator=rng.choice(["anonymous", "memfd"]),
                limit_pages=rng.randint(1, 6),
                refuse_at=rng.randint(0, 4),
                accept_pageable=rng.random() < 0.5,
                stop=rng.random() < 0.1,
            )
        )
    return steps


def main(seed: int, count: int) -> None:
    """Run ``count`` sequences; half-way there is memory of both kinds that nobody has let go of."""
    rng = random.Random(seed)
    for number in range(count):
        sequence = Sequence()
        if number == count // 2:
            sequence.run([])
            held = Sequence()
            for allocator in ("anonymous", "memfd"):
                held._make(Make(pages=8, allocator=allocator, limit_pages=2))
            held.check()
            assert len(held.held) == 2
            sys.stdout.write("half\n")
            sys.stdout.flush()
            sys.stdin.readline()
            held.close()
            continue
        sequence.run(random_steps(rng))
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
