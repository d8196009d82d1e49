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
from attrs import evolve, frozen

from hicache_core.errors import (
    HostMemoryError,
    RegistrationError,
    StuckRange,
    UnregisterError,
)
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.allocation import (
    Allocation,
    HostAllocator,
    built_in,
    check_allocation,
    no_allocation,
    page_bytes,
)
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

    def __init__(self, booking: Booking, registrations: Registrations, who: str) -> None:
        self._booking = booking
        self._who = who
        # Whoever takes it out gives it back: a finalizer may settle in the middle of another call that does.
        self._given: list[Allocation] = []
        self._viewed = False
        self.ending = False
        self.registrations = registrations

    def take(self, allocator: HostAllocator, nbytes: int) -> Allocation:
        """Have the allocator give memory; where it gives none that can be used, nothing stays booked."""
        try:
            self._given.append(_allocated(allocator, nbytes, self._who))
            if not callable(getattr(self._given[0], "release", None)):
                raise no_allocation(self._given.pop(), nbytes, self._who)
        except BaseException:
            if not self._given:
                self._booking.release()
            raise
        check_allocation(self._given[0], nbytes, self._who)
        return self._given[0]

    def view(self, host: HostRange) -> npt.NDArray[np.uint8]:
        """The bytes; the allocation stays while the array or a view of it does."""
        anchor = _Anchor(host)
        weakref.finalize(anchor, self._unviewed).atexit = False
        self._viewed = True
        return np.asarray(anchor)

    def _unviewed(self) -> None:
        self._viewed = False
        # What fails here has nobody to tell, so that whoever is about to settle does it.
        if not self.ending:
            self.settle()

    def settle(self) -> None:
        """Give the allocation back if that may be done; HostMemoryError where its allocator fails at it."""
        if self._viewed or self.registrations.ranges or not self.registrations.own_process:
            return
        try:
            allocation = self._given.pop()
        except IndexError:
            return
        try:
            allocation.release()
        except Exception as error:
            raise HostMemoryError(
                who=self._who,
                got=f"{type(error).__name__}: {error} from the release of {type(allocation).__name__}",
                expected="memory that its allocator takes back",
                remedy="Correct the allocator. The memory is not used any more, and stays booked.",
            ) from error
        except BaseException:
            self._booking.release()
            raise
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
        self._hold = _Hold(booking, self._registrations, who)
        self._end = weakref.finalize(self, _end, self._hold)
        try:
            self._obtain(self._hold, booking, nbytes, allocator, runtime)
            self._prepare(math.lcm(copy_unit, mmap.PAGESIZE), options)
            self.view = self._hold.view(self.range)
            self.segments = tuple(self._as_segments())
        except BaseException as error:
            self._drop(error)
            raise

    def _obtain(
        self, hold: _Hold, booking: Booking, nbytes: int, allocator: HostAllocator, runtime: Registrar
    ) -> None:
        allocation = hold.take(allocator, nbytes)
        self.facts = MemoryFacts(fd=allocation.fd, notes=getattr(allocation, "notes", ()))
        self.range = HostRange(start=allocation.address, nbytes=nbytes)
        self._registrations = hold.registrations = Registrations(runtime, self.range, who=self._who)
        booking.place(self.range)

    def _drop(self, error: BaseException) -> None:
        """Undo a construction that failed; what is interrupted here is done when the object goes."""
        hold, self._hold = self._hold, None
        self.view = np.empty(0, dtype=np.uint8)
        _report(error, self._registrations.undo())
        if hold is not None:
            try:
                hold.settle()
            except HostMemoryError as failed:
                error.add_note(str(failed))
        self._end.detach()

    def _prepare(self, cut: int, options: MemoryOptions) -> None:
        threads = options.threads if options.populate else 0
        with Population(self.range, threads=threads, progress=options.progress, who=self._who) as pages:
            try:
                self._registrations.fill(cut, options, pages.wait)
            except RegistrationError as error:
                if not options.accept_pageable or self._registrations.undo():
                    raise
                self.pageable = f"code {error.rc} for {error.nbytes} bytes at offset {error.offset_bytes}"
            pages.wait(self.range.nbytes)
        self.facts = evolve(
            self.facts,
            mapped_bytes=page_bytes(self.range.nbytes),
            threads=pages.threads,
            seconds=pages.seconds,
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
            HostMemoryError: its allocator failed at taking it back.
        """
        hold = self._hold
        if hold is None:
            return
        stuck = self._registrations.undo()
        self.segments = tuple(self._as_segments())
        if stuck:
            raise unregister_error(self._who, stuck)
        self.segments = ()
        hold.ending = True
        self.view = np.empty(0, dtype=np.uint8)
        hold.ending = False
        self._hold = None
        hold.settle()
        self._end.detach()


def _allocated(allocator: HostAllocator, nbytes: int, who: str) -> Allocation:
    """What the allocator gives; whatever it raises that is no error of ours becomes one."""
    try:
        return allocator.allocate(nbytes, who)
    except HostMemoryError:
        raise
    except (Exception, SystemExit) as error:
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


def _end(hold: _Hold) -> None:
    """Undo what nobody destroyed; there is nobody to tell of what is stuck, which stays mapped."""
    hold.registrations.undo(seconds=EXIT_SECONDS)
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
    """Destroy each; what one fails at does not keep the others, and one error names all of it."""
    stuck: list[StuckRange] = []
    failed: list[HostMemoryError] = []
    for thing in things:
        try:
            thing.destroy()
        except UnregisterError as error:
            stuck.extend(error.stuck)
        except HostMemoryError as error:
            failed.append(error)
    if stuck:
        failed.insert(0, unregister_error(who, stuck))
    for other in failed[1:]:
        failed[0].add_note(str(other))
    if failed:
        raise failed[0]


def destroy_after(error: BaseException, things: Iterable[Destroyable], *, who: str) -> None:
    """Destroy each on the way out of an error, which is told what is stuck.

    The frames that the error has left lose their variables: a view of the memory among them would keep it
    mapped for as long as somebody keeps the error.
    """
    left: BaseException | None = error
    seen: set[int] = set()
    while left is not None and id(left) not in seen:
        seen.add(id(left))
        traceback.clear_frames(left.__traceback__)
        left = left.__cause__ or left.__context__
    try:
        destroy_all(things, who=who)
    except HostMemoryError as failed:
        error.add_note("\n".join([str(failed), *getattr(failed, "__notes__", ())]))


@frozen(kw_only=True, eq=False)
class HostBuffer:
    """The host rows of one buffer."""

    spec: BufferSpec
    grid: RowGrid
    strides: Strides
    memory: HostMemory
