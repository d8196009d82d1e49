"""Events of the vendors' runtimes where threads share streams and devices share handles, on the stand-ins."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.stand_ins.machine import NativeMachine

MakeNative = Callable[..., NativeMachine]


class Emptied(list[int]):
    """Events of which another thread takes the last between a look and a pop."""

    def pop(self, index: object = None) -> int:
        """The other thread has it."""
        raise IndexError


def test_an_event_is_of_its_streams_device_though_another_thread_took_the_last(
    make_native: MakeNative,
) -> None:
    """Else it would be one of the current device, which the stream refuses."""
    runtime = make_native().runtime
    stream = runtime.new_stream(1)
    runtime._events[1] = Emptied([7])
    runtime.record(stream).synchronize()


def test_two_threads_that_share_a_stream_wait_each_for_its_own_work(
    make_native: MakeNative, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines may: torch has few streams. No fence is recorded again before it is waited for."""
    runtime = make_native().runtime
    shared, calls, threads = runtime.new_stream(0), list[str](), list[threading.Thread]()
    record, wait = runtime._rt.record, runtime._rt.wait

    def recorded(event: int, stream: int) -> None:
        calls.append("record")
        record(event, stream)
        if not threads:
            threads.append(threading.Thread(target=runtime.wait_current, args=(shared, 0)))
            threads[0].start()
            threads[0].join(0.1)

    def waited(stream: int, event: int) -> None:
        calls.append("wait")
        wait(stream, event)

    monkeypatch.setattr(runtime._rt, "record", recorded)
    monkeypatch.setattr(runtime._rt, "wait", waited)
    runtime.wait_current(shared, 0)
    threads[0].join()
    assert calls == ["record", "wait"] * 2


def test_the_default_streams_of_two_devices_wait_for_work_of_their_own(make_native: MakeNative) -> None:
    """Both have the handle 0; a record and a wait go to each, whichever is current."""
    machine = make_native()
    runtime, stand_in = machine.runtime, machine.stand_in
    for device in (0, 1):
        runtime.wait_current(runtime.current_stream(device), device)
        assert [stand_in.queued(d) for d in (0, 1)] == [2, 2 * device]
