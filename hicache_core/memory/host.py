"""Host memory of one buffer: booked, allocated, populated, registered, and given back in reverse."""

from __future__ import annotations

import math
import mmap
import traceback
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from attrs import frozen

from hicache_core.errors import (
    AddressError,
    HostMemoryError,
    RegistrationError,
    StuckRange,
    UnregisterError,
)
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.allocation import Allocation, HostAllocator, built_in, checked, page_bytes
from hicache_core.memory.ledger import Booking, Ledger
from hicache_core.memory.options import MemoryOptions
from hicache_core.memory.population import Population
from hicache_core.memory.registration import Registrar, Registrations
from hicache_core.memory.tables import Segment
from hicache_core.spec.layout import RowGrid, Strides
from hicache_core.spec.pool import BufferSpec

EXIT_SECONDS = 10.0
"""At exit, no further registration of a memory is undone after so long."""

_DEFAULTS = MemoryOptions()


@frozen(kw_only=True)
class MemoryFacts:
    """How a memory came to be.

    Args:
        mapped_bytes: what is booked: the bytes of its pages.
        fd: descriptor of the shared memory behind it, or None.
        threads: threads that populated it; 0 where it was not.
        seconds: how long that took; registration of the front ran beside it.
        notes: what was asked of the kernel and not granted, a sentence each.
    """

    mapped_bytes: int = 0
    fd: int | None = None
    threads: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


class _Hold:
    """Gives an allocation back when no view of it is left and nothing of it is registered."""

    def __init__(self, allocation: Allocation, booking: Booking, registrations: Registrations) -> None:
        self._allocation: Allocation | None = allocation
        self._booking = booking
        self._registrations = registrations
        self._viewed = False

    def view(self, host: HostRange) -> npt.NDArray[np.uint8]:
        """The bytes; the allocation stays while the array or a view of it does."""
        anchor = _Anchor(host)
        self._viewed = True
        weakref.finalize(anchor, self._unviewed).atexit = False
        return np.asarray(anchor)

    def _unviewed(self) -> None:
        self._viewed = False
        self.settle()

    def settle(self) -> None:
        """Give the allocation back if that may be done now."""
        free = not self._viewed and not self._registrations.ranges and self._registrations.own_process
        if free and self._allocation is not None:
            allocation, self._allocation = self._allocation, None
            allocation.release()
            self._booking.release()


class _Anchor:
    """What numpy keeps as the owner of bytes at an address."""

    def __init__(self, host: HostRange) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (host.start, False),
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class HostMemory:
    """Host memory of one buffer and its registrations.

    Its pages are populated by several threads, and registered from the front as they become ready, in parts
    that end where a copy unit and an operating-system page both end. A refused registration is halved and
    tried again down to a floor; if that is refused too, what was registered is undone, last first. So it is
    after whatever else is raised meanwhile, a KeyboardInterrupt included. What is never destroyed is
    unregistered when the object goes, at the latest when the interpreter exits.

    Args:
        nbytes: size; 0 books, maps and registers nothing.
        copy_unit: bytes that one registration must hold whole.
        runtime: the runtime that the memory is registered with.
        who: name for errors and for the ledger.
        options: how it is obtained, populated and registered.
        allocator: what gives the memory; None for the core's allocator that the options name.
        ledger: where it is booked; None for books of its own.

    Attributes:
        view: ``uint8[nbytes]``. The bytes stay mapped, and booked, until the last view of them is gone.
        range: the addresses.
        segments: a part per registration, or one for all of memory that is not registered.
        pageable: why the memory is not registered; empty where it is.
        facts: how it came to be.

    Raises:
        OverBudgetError: the ledger's budget does not hold it.
        HostMemoryError: the mapping was refused, or the kernel has no memory for its pages.
        RegistrationError: the runtime refused even the smallest registration; nothing is left behind but what
            its ``stuck`` lists, which stays mapped and booked.
    """

    def __init__(
        self,
        nbytes: int,
        copy_unit: int,
        runtime: Registrar,
        *,
        who: str,
        options: MemoryOptions = _DEFAULTS,
        allocator: HostAllocator | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._who = who
        self._hold: _Hold | None = None
        self._registrations = Registrations(runtime, HostRange(start=0, nbytes=0), who=who)
        self.view: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self.range = HostRange(start=0, nbytes=0)
        self.segments: tuple[Segment, ...] = ()
        self.pageable = ""
        self.facts = MemoryFacts()
        if not nbytes:
            return
        allocator = allocator or built_in(options)
        booking = (ledger or Ledger()).book(who, page_bytes(nbytes))
        try:
            allocation = checked(_allocated(allocator, nbytes, who), nbytes, who)
        except BaseException:
            booking.release()
            raise
        self.range = HostRange(start=allocation.address, nbytes=nbytes)
        self._registrations = Registrations(runtime, self.range, who=who)
        hold = _Hold(allocation, booking, self._registrations)
        try:
            booking.place(self.range)
            self._prepare(math.lcm(copy_unit, mmap.PAGESIZE), options, allocation)
        except BaseException as error:
            _report(error, self._registrations.undo())
            hold.settle()
            raise
        self._hold = hold
        self.view = hold.view(self.range)
        self.segments = tuple(self._as_segments())
        self._end = weakref.finalize(self, _end, self._registrations, hold)

    def _prepare(self, cut: int, options: MemoryOptions, allocation: Allocation) -> None:
        threads = options.threads if options.populate else 0
        with Population(self.range, threads=threads, progress=options.progress, who=self._who) as pages:
            try:
                self._registrations.fill(cut, options, pages.wait)
            except RegistrationError as error:
                if not options.accept_pageable or self._registrations.undo():
                    raise
                self.pageable = f"code {error.rc} for {error.nbytes} bytes at offset {error.offset_bytes}"
            pages.wait(self.range.nbytes)
        self.facts = MemoryFacts(
            mapped_bytes=page_bytes(self.range.nbytes),
            fd=allocation.fd,
            threads=pages.threads,
            seconds=pages.seconds,
            notes=getattr(allocation, "notes", ()),
        )

    def _as_segments(self) -> Iterator[Segment]:
        if self.pageable:
            yield Segment(offset=0, host=self.range, registered=False)
        for part in self._registrations.ranges:
            yield Segment(offset=part.start - self.range.start, host=part)

    @property
    def registered(self) -> bool:
        """Whether devices may see it; False for pageable memory, and where nothing is mapped."""
        return bool(self._registrations.ranges)

    @property
    def stuck(self) -> tuple[StuckRange, ...]:
        """What the last :meth:`destroy` could not unregister."""
        return self._registrations.stuck

    def destroy(self) -> None:
        """Unregister each part once and let the memory go; a second call does nothing.

        Raises:
            UnregisterError: some of it could not be unregistered. All other parts are, and all of it stays
                mapped and booked; another call tries the rest again.
        """
        if self._hold is None:
            return
        stuck = self._registrations.undo()
        self.segments = tuple(self._as_segments())
        if stuck:
            raise unregister_error(self._who, stuck)
        self.segments = ()
        self.view = np.empty(0, dtype=np.uint8)
        self._end.detach()
        self._hold.settle()
        self._hold = None

    def page_view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The bytes ``offset`` to ``offset + nbytes`` of the buffer; AddressError where they leave it."""
        if offset < 0 or offset + nbytes > self.view.size:
            raise AddressError(
                who=self._who,
                got=f"bytes {offset} to {offset + nbytes} of a buffer of {self.view.size}",
                expected="bytes inside the buffer",
                remedy="Give a page that the pool has.",
            )
        return self.view[offset : offset + nbytes]


def _allocated(allocator: HostAllocator, nbytes: int, who: str) -> Allocation:
    """What the allocator gives; whatever it raises that is no error of ours becomes one."""
    try:
        return allocator.allocate(nbytes, who)
    except HostMemoryError:
        raise
    except Exception as error:
        raise HostMemoryError(
            who=who,
            got=f"{type(error).__name__}: {error} from {type(allocator).__name__} for {nbytes} bytes",
            expected="host memory for the whole buffer",
            remedy="Ask for fewer host pages, or choose another allocator.",
        ) from error


def _report(error: BaseException, stuck: tuple[StuckRange, ...]) -> None:
    """Say on an error what undoing left behind."""
    if stuck:
        error.add_note(str(unregister_error(stuck[0].who, stuck)))
    if isinstance(error, RegistrationError):
        error.stuck = stuck


def _end(registrations: Registrations, hold: _Hold) -> None:
    """Undo what nobody destroyed; there is nobody to tell of what is stuck, which stays mapped."""
    registrations.undo(seconds=EXIT_SECONDS)
    hold.settle()


def unregister_error(who: str, stuck: Iterable[StuckRange]) -> UnregisterError:
    """The error that names all that could not be unregistered."""
    stuck = tuple(stuck)
    listed = ", ".join(f"{s.who} {s.nbytes} bytes at offset {s.offset} (code {s.rc})" for s in stuck)
    return UnregisterError(
        who=who,
        got=f"a refusal to unregister {listed}",
        expected="memory that can be unregistered",
        remedy="It stays mapped and booked; finish what uses it and destroy it again, or end the process.",
        stuck=stuck,
    )


class Destroyable(Protocol):
    """Something that holds host memory."""

    def destroy(self) -> None:
        """Unregister and release it; UnregisterError where some is stuck."""


def destroy_all(things: Iterable[Destroyable], *, who: str) -> None:
    """Destroy each; what is stuck in one does not keep the others, and one error names all of it."""
    stuck: list[StuckRange] = []
    for thing in things:
        try:
            thing.destroy()
        except UnregisterError as error:
            stuck.extend(error.stuck)
    if stuck:
        raise unregister_error(who, stuck)


def destroy_after(error: BaseException, things: Iterable[Destroyable], *, who: str) -> None:
    """Destroy each on the way out of an error, which is told what is stuck.

    The frames that the error has left lose their variables: a view of the memory among them would keep it
    mapped for as long as somebody keeps the error.
    """
    left: BaseException | None = error
    while left is not None:
        traceback.clear_frames(left.__traceback__)
        left = left.__cause__ or left.__context__
    try:
        destroy_all(things, who=who)
    except UnregisterError as stuck:
        error.add_note(str(stuck))


@frozen(kw_only=True, eq=False)
class HostBuffer:
    """The host rows of one buffer."""

    spec: BufferSpec
    grid: RowGrid
    strides: Strides
    memory: HostMemory
