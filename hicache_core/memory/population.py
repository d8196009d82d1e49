"""Populating: the pages of a mapping are made present by several threads, in order, before they are pinned.

The threads take parts from the front, so that what is registered first is ready first and registration runs
beside the rest.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
import time
from types import TracebackType

import numpy as np

from hicache_core.errors import HostMemoryError
from hicache_core.memory import libc
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.options import Progress

PART_BYTES = 32 << 20
_PERIOD_SECONDS = 0.05


def touch(start: int, nbytes: int) -> None:
    """Write a byte of every page as it is, which makes the pages present on any kernel."""
    data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start))[:: mmap.PAGESIZE]
    np.bitwise_or(data, 0, out=data)


def populate(start: int, nbytes: int) -> None:
    """Make pages present and writable; what they hold stays. OSError where the kernel has no memory left.

    A kernel refuses the advice alike where it does not know it and where pages may not be written. Touching
    those would end the process, so that it is done where they may be.
    """
    while True:
        try:
            libc.advise(start, nbytes, libc.POPULATE_WRITE)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                continue
            if error.errno != errno.EINVAL:
                raise
            if not libc.writable(start, nbytes):
                raise OSError(errno.EACCES, "memory that may not be written") from error
            touch(start, nbytes)
        return


class Population:
    """Populates a range while it is a context; leaving it stops and waits for its threads.

    Args:
        host: the range, of a mapping that is readable and writable.
        threads: most threads at once; 0 populates nothing.
        progress: told (bytes done, bytes in all) in the caller's thread.
        who: name for errors.

    Attributes:
        seconds: what it took so far, once it has ended how long.
    """

    def __init__(self, host: HostRange, *, threads: int, progress: Progress | None, who: str) -> None:
        self._host = host
        self._progress = progress
        self._who = who
        self._parts = -(-host.nbytes // PART_BYTES) if threads else 0
        workers = min(threads, self._parts)
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        self._by_caller = workers < 2
        self._changed = threading.Condition()
        self._next = 0
        self._finished: set[int] = set()
        self._ready = 0
        self._told = 0
        self._error: OSError | None = None
        self._stopped = False
        self.seconds = 0.0

    @property
    def threads(self) -> int:
        """How many threads populate."""
        return len(self._threads)

    def __enter__(self) -> Population:
        self._start = time.perf_counter()
        try:
            self._start_threads()
        except BaseException:
            self._stop()
            raise
        return self

    def _start_threads(self) -> None:
        if self._by_caller:
            return
        for number, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:  # The system has no thread left: those that run, or the caller, do it all.
                self._threads, self._by_caller = self._threads[: max(number, 1)], number == 0
                return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def wait(self, nbytes: int) -> None:
        """Wait until the first ``nbytes`` are populated.

        Raises:
            HostMemoryError: the kernel has no memory for them.
        """
        needed = min(-(-nbytes // PART_BYTES), self._parts)
        while True:
            with self._changed:
                if self._ready < needed and not self._by_caller and self._error is None:
                    self._changed.wait(_PERIOD_SECONDS)
                done, error = min(len(self._finished) * PART_BYTES, self._host.nbytes), self._error
            if error is not None:
                raise self._failed(error) from error
            if done > self._told:
                self._told = done
                self.seconds = time.perf_counter() - self._start
                if self._progress is not None:
                    self._progress(done, self._host.nbytes)
            if self._ready >= needed:
                return
            if self._by_caller:
                self._step()

    def _work(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Populate the next part; False where none is left to do."""
        with self._changed:
            number = self._next
            if number >= self._parts or self._stopped:
                return False
            self._next += 1
        start = number * PART_BYTES
        error = None
        try:
            populate(self._host.start + start, min(PART_BYTES, self._host.nbytes - start))
        except OSError as caught:
            error = caught
        with self._changed:
            if error is None:
                self._finished.add(number)
                while self._ready in self._finished:
                    self._ready += 1
            else:
                self._error, self._stopped = error, True
            self._changed.notify_all()
        return error is None

    def _failed(self, error: OSError) -> HostMemoryError:
        return HostMemoryError(
            who=self._who,
            got=f"{error} while {self._host.nbytes} bytes were populated",
            expected="memory for every page",
            remedy="Ask for fewer host pages, or free memory.",
        )
