"""Registrations of one run of host memory: made in whole copy units, remembered exactly, undone once each."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from hicache_core.errors import RegisteredTwiceError, RegistrationError, StuckRange
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.options import MemoryOptions

_PIPELINE_PARTS = 8
_PIPELINE_PART_BYTES = 1 << 30
_UNKNOWN_RC = -1
_NOT_REGISTERED = (1, 713)
"""Return codes of CUDA and HIP for an address at which nothing is registered."""


class Registrar(Protocol):
    """What makes host memory visible to devices; a device runtime is one."""

    def register(self, host: HostRange) -> None:
        """Make a range visible; RegistrationError with the return code where refused."""

    def unregister(self, host: HostRange) -> None:
        """Undo :meth:`register` of exactly this range."""


class Registrations:
    """The registrations of a run of memory. Only the process that made them undoes them, not a forked child.

    Args:
        runtime: what the memory is registered with.
        whole: the memory.
        who: name for errors.
    """

    def __init__(self, runtime: Registrar, whole: HostRange, *, who: str) -> None:
        self._runtime = runtime
        self._whole = whole
        self._who = who
        self._owner = os.getpid()
        self._ranges: list[HostRange] = []
        # What a call is about or was interrupted in, so that nobody knows whether it is registered.
        self._doubtful: set[HostRange] = set()
        self._undoing = threading.RLock()
        self.stuck: tuple[StuckRange, ...] = ()

    @property
    def ranges(self) -> tuple[HostRange, ...]:
        """What is registered now, in the order of registration."""
        return tuple(self._ranges)

    @property
    def own_process(self) -> bool:
        """Whether this is the process that registered, and not a child that was forked since."""
        return os.getpid() == self._owner

    def add(self, part: HostRange) -> None:
        """Register a part.

        Raises:
            RegisteredTwiceError: some of it is registered here; the runtime is not asked.
            RegistrationError: the runtime refused.
        """
        if any(known.overlaps(part) for known in self._ranges):
            raise RegisteredTwiceError(
                who=self._who,
                got=f"{part.nbytes} bytes at {part.start:#x}, of which some are registered",
                expected="memory that is not registered",
                remedy="Register each byte once.",
                start=part.start,
                nbytes=part.nbytes,
            )
        self._doubtful.add(part)
        self._ranges.append(part)
        try:
            self._runtime.register(part)
        except RegistrationError:
            self._forget(part)
            raise
        self._doubtful.discard(part)

    def _forget(self, part: HostRange) -> None:
        self._ranges = [kept for kept in self._ranges if kept != part]
        self._doubtful.discard(part)

    def fill(self, cut: int, options: MemoryOptions, ready: Callable[[int], None]) -> None:
        """Register all of it from the front, in parts that end at a multiple of ``cut``.

        A refused part is halved and tried again; what was registered stays for :meth:`undo`.

        Args:
            cut: bytes that a part holds whole numbers of; the last part may be short.
            options: largest and smallest part.
            ready: waits until that many bytes from the start may be registered.

        Raises:
            RegistrationError: even the smallest part was refused.
        """
        floor = _cuts(options.min_registration_bytes, cut)
        chunk = max(_cuts(options.max_registration_bytes, cut), floor)
        chunk = min(chunk, max(_pipelined(self._whole.nbytes, cut), floor))
        offset = 0
        while offset < self._whole.nbytes:
            part = self._whole.part(offset, min(chunk, self._whole.nbytes - offset))
            ready(offset + part.nbytes)
            try:
                self.add(part)
            except RegistrationError as error:
                if part.nbytes <= floor:
                    raise self._refused(error, offset, part.nbytes) from error
                chunk = max(_cuts(part.nbytes // 2, cut), floor)
                continue
            offset += part.nbytes

    def _refused(self, error: RegistrationError, offset: int, nbytes: int) -> RegistrationError:
        return RegistrationError(
            who=self._who,
            got=f"return code {error.rc} for {nbytes} bytes at offset {offset} of {self._whole.nbytes}",
            expected="registered host memory",
            remedy="Raise the memlock limit (ulimit -l), or ask for fewer host pages.",
            rc=error.rc,
            offset_bytes=offset,
            nbytes=nbytes,
        )

    def undo(self, *, seconds: float | None = None) -> tuple[StuckRange, ...]:
        """Unregister each part, last first; one that is refused does not stop the others.

        A part whose registration was interrupted is tried too: that it is not registered is no refusal then.

        Args:
            seconds: no further part is begun after so long, nor is another thread that undoes waited for
                longer; None for no limit.

        Returns:
            What could not be unregistered. It stays in :attr:`ranges`; another call tries it again.
        """
        if not self.own_process:
            return ()
        until = None if seconds is None else time.monotonic() + seconds
        if not self._undoing.acquire(timeout=-1 if seconds is None else seconds):
            return self.stuck
        try:
            self.stuck = tuple(self._refusals(until))
        finally:
            self._undoing.release()
        return self.stuck

    def _refusals(self, until: float | None) -> Iterator[StuckRange]:
        for part in reversed(self._ranges):
            if until is not None and time.monotonic() > until:
                return
            rc = self._undone(part)
            if rc is not None:
                offset = part.start - self._whole.start
                yield StuckRange(who=self._who, start=part.start, nbytes=part.nbytes, offset=offset, rc=rc)

    def _undone(self, part: HostRange) -> int | None:
        """Unregister a part; None once it is not registered, else the return code of the refusal."""
        doubtful = part in self._doubtful
        self._doubtful.add(part)
        try:
            self._runtime.unregister(part)
        except Exception as error:
            rc: int = getattr(error, "rc", _UNKNOWN_RC)
            if not doubtful or rc not in _NOT_REGISTERED:
                if not doubtful:
                    self._doubtful.discard(part)
                return rc
        self._forget(part)
        return None


def _cuts(nbytes: int, cut: int) -> int:
    """The largest whole number of cuts within ``nbytes``, at least one."""
    return max(nbytes // cut, 1) * cut


def _pipelined(nbytes: int, cut: int) -> int:
    """The part in which large memory is registered, so that one is pinned while the next is populated."""
    part = max(-(-nbytes // _PIPELINE_PARTS), _PIPELINE_PART_BYTES)
    return -(-part // cut) * cut
