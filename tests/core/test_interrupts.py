"""Interrupts while a runtime registers or unregisters: nothing stays registered, mapped or booked."""

from __future__ import annotations

import threading

import pytest

from hicache_core.device.sim import SimRuntime
from hicache_core.errors import DeviceError
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.host import HostMemory
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.options import MemoryOptions
from hicache_core.memory.registration import Registrations
from tests.core.host_mappings import our_bytes
from tests.core.test_stuck import CUT, Sticky

PARTS = 4


class Interrupted(SimRuntime):
    """A simulator whose calls are interrupted, once each, after they have done their work, as by a signal."""

    def __init__(self, *, registering: int = 0, unregistering: int = 0, error: BaseException) -> None:
        super().__init__()
        self._left = {"register": registering, "unregister": unregistering}
        self._error = error

    def _count(self, call: str) -> None:
        self._left[call] -= 1
        if self._left[call] == 0:
            raise self._error

    def register(self, host: HostRange) -> None:
        """Register, and be interrupted before the caller knows."""
        super().register(host)
        self._count("register")

    def unregister(self, host: HostRange) -> None:
        """Unregister, and be interrupted before the caller knows."""
        super().unregister(host)
        self._count("unregister")


def _memory(runtime: SimRuntime, ledger: Ledger) -> HostMemory:
    options = MemoryOptions(max_registration_bytes=CUT)
    return HostMemory(PARTS * CUT, 64, runtime, who="test", options=options, ledger=ledger)


def _device_error() -> DeviceError:
    return DeviceError(who="sim", got="something else", expected="0", remedy="-")


@pytest.mark.parametrize("call", range(1, PARTS + 1))
@pytest.mark.parametrize("error", [KeyboardInterrupt(), _device_error()], ids=["interrupt", "other"])
def test_a_registration_that_was_made_when_it_was_interrupted_is_undone(
    call: int, error: BaseException
) -> None:
    """Pinning takes seconds, so that a signal is most likely handled right after it."""
    mapped, ledger, runtime = our_bytes(), Ledger(), Interrupted(registering=call, error=error)
    with pytest.raises(type(error)) as caught:
        _memory(runtime, ledger)
    assert not hasattr(caught.value, "__notes__")
    assert not runtime.memory.registrations
    assert (our_bytes(), ledger.snapshot()) == (mapped, ())


@pytest.mark.parametrize("call", range(1, PARTS + 1))
def test_destroying_again_after_an_interrupt_ends_it(call: int) -> None:
    """The part that was unregistered is not held for stuck."""
    mapped, ledger = our_bytes(), Ledger()
    runtime = Interrupted(unregistering=call, error=KeyboardInterrupt())
    memory = _memory(runtime, ledger)
    with pytest.raises(KeyboardInterrupt):
        memory.destroy()
    assert our_bytes() == mapped + PARTS * CUT
    memory.destroy()
    assert (memory.stuck, runtime.memory.registrations) == ((), {})
    assert (our_bytes(), ledger.snapshot()) == (mapped, ())


def test_the_end_of_the_interpreter_does_not_wait_for_a_thread_that_hangs() -> None:
    """A driver may hang in unregistering; another thread waits as long as it was told, and undoes nothing."""
    runtime = Sticky()
    registrations = Registrations(runtime, HostRange(start=CUT, nbytes=CUT), who="test")
    inside, go_on, unregister = threading.Event(), threading.Event(), runtime.unregister

    def hangs(host: HostRange) -> None:
        inside.set()
        go_on.wait(10)
        unregister(host)

    runtime.unregister = hangs  # type: ignore[method-assign]
    registrations.add(HostRange(start=CUT, nbytes=CUT))
    thread = threading.Thread(target=registrations.undo)
    thread.start()
    assert inside.wait(5)
    assert registrations.undo(seconds=0.05) == ()
    assert (len(registrations.ranges), runtime.calls) == (1, 0)
    go_on.set()
    thread.join()
    assert (registrations.ranges, runtime.calls) == ((), 1)
