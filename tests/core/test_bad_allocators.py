"""Allocators of plugins that misbehave: clear errors, and nothing of ours is left behind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache_core.device.sim import SimRuntime
from hicache_core.errors import HostMemoryError, UnregisterError
from hicache_core.memory import host, registration
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.host import HostMemory, destroy_after, destroy_all
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.options import MemoryOptions
from tests.core.host_mappings import our_bytes
from tests.core.test_allocation import PAGE, Arena
from tests.core.test_stuck import CUT, Sticky

PARTS = 4


class Odd:
    """An allocator that gives parts of an arena which are changed by a function."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.arena = Arena(16 * PAGE)
        self._change = change

    def allocate(self, nbytes: int, who: str) -> Any:
        """A part of the arena, changed."""
        return self._change(self.arena.allocate(nbytes, who))


def _with(**changed: Any) -> Callable[[Any], Any]:
    def change(part: Any) -> Any:
        vars(part).update(changed)
        return part

    return change


def _numpy_address(part: Any) -> Any:
    part.address = np.int64(part.address)
    return part


def _without_address(part: Any) -> Any:
    return SimpleNamespace(nbytes=part.nbytes, fd=None, release=lambda: None)


def _refuse() -> None:
    raise OSError("not mine")


def _exit(part: Any) -> Any:
    sys.exit("no memory")


@pytest.mark.parametrize(
    "change",
    [
        _with(nbytes="8192"),
        _with(address=-PAGE),
        _with(nbytes=None),
        _numpy_address,
        _without_address,
        lambda part: None,
        lambda part: SimpleNamespace(address=part.address, nbytes=part.nbytes, fd=None),
        _exit,
    ],
    ids=["text", "negative", "none", "numpy", "missing", "nothing", "release", "exit"],
)
def test_what_is_no_allocation_is_refused_and_nothing_stays_booked(change: Callable[[Any], Any]) -> None:
    """An address or size of another kind, no way to give it back, or an allocator that ends the process."""
    ledger, runtime = Ledger(), SimRuntime()
    with pytest.raises(HostMemoryError) as caught:
        HostMemory(2 * PAGE, 64, runtime, who="pool", allocator=Odd(change), ledger=ledger)
    assert (caught.value.code, caught.value.who) == ("memory", "pool")
    assert (ledger.snapshot(), runtime.registration_calls) == ((), 0)


def test_a_refused_allocation_that_cannot_be_given_back_is_refused_all_the_same() -> None:
    """The error of its release is a note, and its bytes stay booked."""
    ledger = Ledger()
    with pytest.raises(HostMemoryError) as caught:
        HostMemory(
            2 * PAGE,
            64,
            SimRuntime(),
            who="pool",
            allocator=Odd(_with(nbytes=1, release=_refuse)),
            ledger=ledger,
        )
    (note,) = caught.value.__notes__
    assert "not mine" in note
    assert ledger.total() == 2 * PAGE


def _memory(allocator: Any, ledger: Ledger, runtime: SimRuntime | None = None) -> HostMemory:
    return HostMemory(2 * PAGE, 64, runtime or SimRuntime(), who="pool", allocator=allocator, ledger=ledger)


def test_a_release_that_fails_keeps_nobody_else_from_being_destroyed() -> None:
    """One error says so, the bytes stay booked, and a second call does nothing."""
    ledger, honest = Ledger(), Arena(4 * PAGE)
    memories = [_memory(Odd(_with(release=_refuse)), ledger), _memory(honest, ledger)]
    with pytest.raises(HostMemoryError) as caught:
        destroy_all(memories, who="group")
    assert isinstance(caught.value.__cause__, OSError)
    assert honest.released == [honest.start]
    assert ledger.total() == 2 * PAGE
    destroy_all(memories, who="group")


def test_a_release_that_fails_beside_memory_that_is_stuck_is_a_note() -> None:
    """The error is that of what is stuck, which can be tried again."""
    ledger, sticky = Ledger(), Sticky(1)
    memories = [_memory(Odd(_with(release=_refuse)), ledger), _memory(Arena(4 * PAGE), ledger, sticky)]
    with pytest.raises(UnregisterError) as caught:
        destroy_all(memories, who="group")
    assert len(caught.value.stuck) == 1
    assert len(caught.value.__notes__) == 1
    error = ZeroDivisionError()
    destroy_after(error, memories, who="group")
    assert not hasattr(error, "__notes__")
    assert ledger.total() == 2 * PAGE


def test_an_error_that_is_its_own_cause_does_not_stop_the_cleaning_up() -> None:
    """``raise error from error`` makes a chain without an end."""
    ledger, arena, error = Ledger(), Arena(4 * PAGE), OSError()
    error.__cause__ = error
    destroy_after(error, [_memory(arena, ledger)], who="group")
    assert (arena.released, ledger.total()) == ([arena.start], 0)


def _interrupted_at(number: int, call: Callable[[], object]) -> bool:
    """Interrupt a call at a line of the two modules, counted from 1; whether there is such a line."""
    files, left = (host.__file__, registration.__file__), number

    def trace(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        left -= event == "line"
        if left == 0 and event == "line":
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_line_of_a_construction_leaves_nothing_registered_or_mapped() -> None:
    """Signals are handled between any two steps of the interpreter."""
    mapped, number, made = our_bytes(), 0, list[HostMemory]()
    options = MemoryOptions(max_registration_bytes=CUT, populate=False)
    while not made:
        number += 1
        runtime = SimRuntime()
        interrupted = _interrupted_at(
            number,
            lambda: made.append(HostMemory(PARTS * CUT, 64, runtime, who="test", options=options)),  # noqa: B023
        )
        assert interrupted is not bool(made)
        if interrupted:
            assert (number, len(runtime.memory.registrations), our_bytes()) == (number, 0, mapped)
    assert number > 50


def test_two_threads_destroy_the_same_memory_once() -> None:
    """The second waits for the first, which has undone every part by then."""
    runtime, ledger, errors = Sticky(), Ledger(), []
    options = MemoryOptions(max_registration_bytes=CUT)
    memory = HostMemory(PARTS * CUT, 64, runtime, who="test", options=options, ledger=ledger)
    inside, go_on = threading.Event(), threading.Event()
    unregister = runtime.unregister

    def slow(host: HostRange) -> None:
        inside.set()
        go_on.wait(5)
        unregister(host)

    runtime.unregister = slow  # type: ignore[method-assign]

    def destroy() -> None:
        try:
            memory.destroy()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=destroy) for _ in range(2)]
    threads[0].start()
    assert inside.wait(5)
    threads[1].start()
    threads[1].join(0.05)
    go_on.set()
    for thread in threads:
        thread.join()
    assert (errors, len(runtime.undone), ledger.snapshot()) == ([], PARTS, ())
