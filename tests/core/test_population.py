"""Populating: every page is present before it is registered, and whatever stops it leaves nothing."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from hicache_core.device.sim import SimRuntime
from hicache_core.errors import HostMemoryError
from hicache_core.memory import libc, population, registration
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.host import HostMemory
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.options import MemoryOptions, Progress
from tests.core.host_mappings import descriptors, mappings, our_bytes

PAGE = mmap.PAGESIZE
PART = 16 * PAGE
WHOLE = 10 * PART + 3 * PAGE
ALLOCATORS = ["anonymous", "memfd"]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts of 16 pages and three CPUs: several threads have several parts each. No thread is left."""
    monkeypatch.setattr(population, "PART_BYTES", PART)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def _resident(host: HostRange) -> bool:
    (mapping,) = (m for m in mappings() if m.start <= host.start < m.end)
    return mapping.resident == mapping.size


class Watched(SimRuntime):
    """A simulator that looks whether what it is to register is present, page by page."""

    def __init__(self) -> None:
        super().__init__()
        self.present: list[bool] = []
        self.refuse: BaseException | None = None

    def register(self, host: HostRange) -> None:
        """Ask the kernel's page map, then go on."""
        if self.refuse is not None and self.present:
            raise self.refuse
        pages = -(-host.nbytes // PAGE)
        with open("/proc/self/pagemap", "rb") as pagemap:
            pagemap.seek(host.start // PAGE * 8)
            entries = pagemap.read(pages * 8)
        self.present.append(all(entries[i * 8 + 7] & 0x80 for i in range(pages)))
        super().register(host)


def _obtain(
    runtime: SimRuntime,
    ledger: Ledger | None = None,
    *,
    threads: int = 0,
    progress: Progress | None = None,
    allocator: str = "anonymous",
    limit: int = 3 * PART,
) -> HostMemory:
    options = MemoryOptions(
        allocator=allocator, populate_threads=threads, progress=progress, max_registration_bytes=limit
    )
    return HostMemory(WHOLE, 64, runtime, who="test", options=options, ledger=ledger)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_every_page_is_present_before_it_is_registered(threads: int, allocator: str) -> None:
    """Part by part, by as many threads as were asked for and there are CPUs."""
    runtime = Watched()
    memory = _obtain(runtime, threads=threads, allocator=allocator)
    assert runtime.present == [True] * 4
    assert _resident(memory.range)
    assert memory.facts.threads == min(threads, 3)
    assert memory.facts.seconds > 0
    memory.destroy()


def test_nothing_is_populated_where_that_is_switched_off() -> None:
    """Then registration does it, on a machine where that is wanted."""
    memory = HostMemory(WHOLE, 64, SimRuntime(), who="test", options=MemoryOptions(populate=False))
    assert not _resident(memory.range)
    assert (memory.facts.threads, memory.facts.seconds) == (0, 0.0)
    memory.destroy()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_kernel_that_cannot_populate_gets_its_pages_touched(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Every page is present all the same."""
    advise = libc.advise

    def old_kernel(start: int, nbytes: int, advice: int) -> None:
        if advice == libc.POPULATE_WRITE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        advise(start, nbytes, advice)

    monkeypatch.setattr(libc, "advise", old_kernel)
    runtime = Watched()
    memory = _obtain(runtime, threads=threads)
    assert runtime.present == [True] * 4
    assert not memory.view.any()
    memory.destroy()


@pytest.mark.parametrize("threads", [1, 3])
def test_progress_rises_to_the_whole_in_the_callers_thread(threads: int) -> None:
    """Bytes done never fall, and the last call has all of them."""
    told: list[tuple[int, int]] = []
    callers: set[int] = set()

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        callers.add(threading.get_ident())

    memory = _obtain(SimRuntime(), threads=threads, progress=progress)
    done = [figure for figure, _ in told]
    assert done == sorted(set(done))
    assert told[-1] == (WHOLE, WHOLE)
    assert {total for _, total in told} == {WHOLE}
    assert callers == {threading.get_ident()}
    memory.destroy()


class Stop(Exception):
    """What a caller raises to stop."""


def _raise_stop() -> None:
    raise Stop


def _interrupt() -> None:
    """As Ctrl-C would: also where the shell that started the tests has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("after_bytes", [0, 5 * PART])
@pytest.mark.parametrize(("stop", "raised"), [(_raise_stop, Stop), (_interrupt, KeyboardInterrupt)])
def test_what_stops_populating_leaves_nothing(
    stop: Callable[[], None], raised: type[BaseException], after_bytes: int, threads: int, allocator: str
) -> None:
    """A callback that raises and an interrupt: registrations, mapping, descriptor and booking are undone."""
    mapped, opened, runtime, ledger = our_bytes(), descriptors(), SimRuntime(), Ledger()

    def progress(done: int, total: int) -> None:
        if done > after_bytes:
            stop()

    with pytest.raises(raised):
        _obtain(runtime, ledger, threads=threads, progress=progress, allocator=allocator)
    assert not runtime.memory.registrations
    assert (our_bytes(), descriptors(), ledger.snapshot()) == (mapped, opened, ())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError()])
def test_what_a_runtime_raises_leaves_nothing(error: BaseException) -> None:
    """Also what is no refusal: the first registration is undone while other parts still populate."""
    mapped, ledger, runtime = our_bytes(), Ledger(), Watched()
    runtime.refuse = error
    with pytest.raises(type(error)):
        _obtain(runtime, ledger)
    assert runtime.present == [True]
    assert not runtime.memory.registrations
    assert (our_bytes(), ledger.snapshot()) == (mapped, ())


@pytest.mark.parametrize("threads", [1, 3])
def test_a_kernel_without_memory_is_an_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """The first error of a thread ends all of them."""
    advise, calls = libc.advise, []

    def full(start: int, nbytes: int, advice: int) -> None:
        calls.append(advice)
        if calls.count(libc.POPULATE_WRITE) > 4:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        advise(start, nbytes, advice)

    monkeypatch.setattr(libc, "advise", full)
    mapped, runtime, ledger = our_bytes(), SimRuntime(), Ledger()
    with pytest.raises(HostMemoryError) as caught:
        _obtain(runtime, ledger, threads=threads)
    assert (caught.value.code, caught.value.who) == ("memory", "test")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOMEM
    assert calls.count(libc.POPULATE_WRITE) <= 4 + threads
    assert not runtime.memory.registrations
    assert (our_bytes(), ledger.snapshot()) == (mapped, ())


def test_large_memory_is_registered_in_parts_beside_populating(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth at a time, though one registration could hold all: the front while the rest is populated."""
    monkeypatch.setattr(registration, "_PIPELINE_PART_BYTES", PART)
    runtime = Watched()
    memory = _obtain(runtime, limit=64 << 30)
    sizes = [segment.host.nbytes for segment in memory.segments]
    eighth = -(-WHOLE // 8 // PAGE) * PAGE
    assert sizes == [eighth] * 7 + [WHOLE - 7 * eighth]
    assert all(runtime.present)
    memory.destroy()
    assert not runtime.memory.registrations


@pytest.mark.parametrize("started", [0, 1, 2])
def test_a_system_without_threads_left_populates_with_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    """Or with the caller's own; the facts say how many."""
    start, begun = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(begun) == started:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    mapped, runtime = our_bytes(), Watched()
    memory = _obtain(runtime, threads=3)
    assert memory.facts.threads == max(started, 1)
    assert runtime.present == [True] * 4
    memory.destroy()
    assert our_bytes() == mapped


def test_an_interrupt_while_threads_are_started_stops_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would go on in memory that is not mapped any more."""
    start, begun = threading.Thread.start, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        if len(begun) == 2:
            raise KeyboardInterrupt
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    mapped, ledger = our_bytes(), Ledger()
    with pytest.raises(KeyboardInterrupt):
        _obtain(Watched(), ledger, threads=3)
    assert not any(thread.is_alive() for thread in begun)
    assert (our_bytes(), ledger.snapshot()) == (mapped, ())


_READ_ONLY = """
import ctypes, mmap
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import HostMemoryError
from hicache_core.memory import libc
from hicache_core.memory.host import HostMemory
from hicache_core.memory.ledger import Ledger

class Given:
    fd, nbytes, released = None, 4 * mmap.PAGESIZE, 0

    def __init__(self):
        self.address = libc.map_memory(self.nbytes)
        last = ctypes.c_void_p(self.address + 3 * mmap.PAGESIZE)
        assert not ctypes.CDLL(None).mprotect(last, ctypes.c_size_t(mmap.PAGESIZE), 1)

    def allocate(self, nbytes, who):
        return self

    def release(self):
        self.released += 1

given, ledger, runtime = Given(), Ledger(), SimRuntime()
try:
    HostMemory(given.nbytes, 64, runtime, who="test", allocator=given, ledger=ledger)
except HostMemoryError as error:
    print(error.code, given.released, len(ledger.snapshot()), runtime.registration_calls)
"""


def test_memory_that_may_not_be_written_is_refused() -> None:
    """Its last page cannot be; touching it would end the process."""
    told = subprocess.run([sys.executable, "-c", _READ_ONLY], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout.split()) == (0, ["memory", "1", "0", "0"])
