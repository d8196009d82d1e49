"""Registration through the runtime libraries' own calls, against the stand-in in C."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hicache_core.device.cuda import CudaRuntime
from hicache_core.device.hip import HipRuntime
from hicache_core.device.native import NativeRuntime
from hicache_core.errors import DeviceError, RegistrationError, UnregisterError
from hicache_core.memory.host import HostMemory
from hicache_core.memory.options import MemoryOptions
from hicache_core.spec import platform_named
from hicache_core.testing.oracle import distinct_bytes
from tests.stand_ins.machine import NativeMachine

MakeNative = Callable[..., NativeMachine]
CUT = mmap.PAGESIZE


def memory_of(machine: NativeMachine, cuts: int = 6, limit: int = CUT) -> HostMemory:
    """Host memory of so many pages of the system, by default each registered by itself."""
    return HostMemory(
        cuts * CUT, 64, machine.runtime, who="test", options=MemoryOptions(max_registration_bytes=limit)
    )


def bytes_at(start: int, nbytes: int) -> np.ndarray:
    """The bytes at an address of this process."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start))


def test_each_part_is_registered_once_and_undone_once(make_native: MakeNative) -> None:
    """I30: as many undone as were made, by their bases; a second destroy asks for nothing."""
    machine = make_native()
    memory = memory_of(machine)
    assert machine.stand_in.count("live_registrations") == machine.stand_in.count("register") == 6
    assert machine.stand_in.count("live_mappings") == 12 * machine.distinct
    memory.destroy()
    assert machine.stand_in.count("live_registrations") == machine.stand_in.count("live_mappings") == 0
    memory.destroy()
    assert machine.stand_in.count("unregister") == 6


def test_an_alias_shows_the_same_bytes(make_native: MakeNative) -> None:
    """What is written at either address is read at the other, on each device, in each registration."""
    machine = make_native(SEED=1)
    memory = memory_of(machine, limit=2 * CUT)
    memory.view[...] = distinct_bytes("host", nbytes=memory.view.size)
    for segment in memory.segments:
        one, other = (machine.runtime.alias(segment.host, device).start for device in (0, 1))
        assert ((one != segment.host.start), (other != one)) == (machine.distinct,) * 2
        own = memory.view[segment.offset : segment.offset + segment.host.nbytes]
        for alias in (one, other):
            assert np.array_equal(bytes_at(alias, segment.host.nbytes), own)
            bytes_at(alias, segment.host.nbytes)[::7] += 1
            assert np.array_equal(bytes_at(alias, segment.host.nbytes), own)
    kept = memory.view.copy()
    view = memory.view
    memory.destroy()
    assert np.array_equal(view, kept)


def test_every_registration_has_a_distance_of_its_own(make_native: MakeNative) -> None:
    """I31: neighbours in host memory lie anywhere as aliases, before one another too."""
    machine = make_native(SEED=2)
    memory = memory_of(machine)
    parts = [segment.host for segment in memory.segments]
    starts = [machine.runtime.alias(part, 0).start for part in parts]
    distances = {start - part.start for start, part in zip(starts, parts, strict=True)}
    backwards = [b < a for a, b in itertools.pairwise(starts)]
    assert len(distances) == (len(parts) if machine.distinct else 1)
    assert any(backwards) is machine.distinct
    assert not all(backwards)
    memory.destroy()


def test_the_current_device_is_left_as_it_was(make_native: MakeNative) -> None:
    """A look-up for another device, one that fails too, changes it for its own time only."""
    machine = make_native()
    memory = memory_of(machine)
    part = memory.segments[0].host
    for device in (0, 1):
        machine.runtime.alias(part, device)
        assert machine.stand_in.current_device() == 0
    with machine.stand_in.on(1):
        machine.runtime.alias(part, 0)
        assert machine.stand_in.current_device() == 1
    memory.destroy()
    with pytest.raises(DeviceError) as caught:
        machine.runtime.alias(part, 1)
    assert caught.value.rc == 1
    assert machine.stand_in.current_device() == 0


@pytest.mark.parametrize("at", [1, 2, 6])
def test_a_refusal_undoes_what_was_registered(make_native: MakeNative, at: int) -> None:
    """I27: the code, offset and size of the refused part; nothing registered, no error left behind."""
    machine = make_native(REGISTER_FAILS_AT=at, ERROR=304)
    with pytest.raises(RegistrationError) as caught:
        memory_of(machine)
    error = caught.value
    assert (error.rc, error.offset_bytes, error.nbytes) == (304, (at - 1) * CUT, CUT)
    assert machine.stand_in.count("unregister") == at - 1
    assert machine.stand_in.count("live_registrations") == machine.stand_in.count("live_mappings") == 0


def test_a_large_part_that_is_refused_is_halved(make_native: MakeNative) -> None:
    """I28: down to what the library takes; every byte is registered in the end."""
    machine = make_native(REGISTER_FAILS_ABOVE=2 * CUT)
    memory = memory_of(machine, cuts=8, limit=8 * CUT)
    assert [segment.host.nbytes for segment in memory.segments] == [2 * CUT] * 4
    assert machine.stand_in.count("register") == 2 + 4
    memory.destroy()
    assert machine.stand_in.count("live_registrations") == 0


def test_registering_twice_is_712_and_leaves_the_first(make_native: MakeNative) -> None:
    """I29: the library keeps it as its last error, which the runtime takes away."""
    machine = make_native()
    memory = memory_of(machine, limit=8 * CUT)
    memory.view[...] = 7
    with pytest.raises(RegistrationError) as caught:
        machine.runtime.register(memory.range)
    assert caught.value.rc == 712
    assert machine.stand_in.count("last_error") == 0
    alias = machine.runtime.alias(memory.range, 0)
    assert (bytes_at(alias.start, alias.nbytes) == 7).all()
    memory.destroy()


def test_the_library_itself_keeps_its_last_error(make_native: MakeNative) -> None:
    """Without the runtime in between, a later call that succeeds does not take a failure away."""
    machine = make_native()
    assert machine.stand_in.call("HostUnregister", None) == 1
    assert machine.stand_in.current_device() == 0
    assert machine.stand_in.call("PeekAtLastError") == 1
    assert [machine.stand_in.call("GetLastError") for _ in "12"] == [1, 0]


def test_only_a_base_can_be_unregistered(make_native: MakeNative) -> None:
    """I27: an address inside a registration gives 1, as does one that is none any more."""
    machine = make_native()
    memory = memory_of(machine, limit=8 * CUT)
    for wrong in (memory.range.part(CUT, CUT), memory.range.part(64, 64)):
        with pytest.raises(RegistrationError) as caught:
            machine.runtime.unregister(wrong)
        assert caught.value.rc == 1
        assert machine.stand_in.count("last_error") == 0
    assert machine.stand_in.count("live_registrations") == 1
    memory.destroy()
    with pytest.raises(RegistrationError):
        machine.runtime.unregister(memory.range)


def test_what_cannot_be_unregistered_is_kept_and_tried_again(make_native: MakeNative) -> None:
    """I30: the others are given back, what failed stays mapped, and the next destroy finishes."""
    machine = make_native(UNREGISTER_FAILS_AT=2, ERROR=999)
    memory = memory_of(machine, cuts=3)
    with pytest.raises(UnregisterError) as caught:
        memory.destroy()
    (stuck,) = caught.value.stuck
    assert stuck.rc == 999
    assert machine.stand_in.count("live_registrations") == 1
    bytes_at(stuck.start, stuck.nbytes)[...] = 1
    memory.destroy()
    assert machine.stand_in.count("live_registrations") == 0
    assert machine.stand_in.count("unregister") == 4


def test_nothing_is_registered_while_a_stream_is_captured(make_native: MakeNative) -> None:
    """I33: the library is not even asked, so that the capture ends well; afterwards it is registered."""
    machine = make_native()
    memory = memory_of(machine, limit=8 * CUT)
    machine.runtime.unregister(memory.range)
    asked = machine.stand_in.count("register")
    with machine.stand_in.capturing():
        with pytest.raises(RegistrationError) as caught:
            machine.runtime.register(memory.range)
        assert caught.value.rc == 900
    assert machine.stand_in.count("register") == asked
    machine.runtime.register(memory.range)
    memory.destroy()


def test_the_library_refuses_as_well_and_spoils_the_capture(make_native: MakeNative) -> None:
    """What the runtime's own refusal averts: 900 from the library, and a capture that ends in 901."""
    machine = make_native()
    stream = machine.stand_in.new_stream(0)
    page = mmap.mmap(-1, CUT)
    start = np.frombuffer(page, dtype=np.uint8).ctypes.data
    handle, graph = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p()
    assert machine.stand_in.call("StreamBeginCapture", handle, 0) == 0
    size = ctypes.c_size_t(CUT)
    assert machine.stand_in.call("HostRegister", ctypes.c_void_p(start), size, 3) == 900
    assert machine.stand_in.call("StreamEndCapture", handle, ctypes.byref(graph)) == 901
    assert machine.stand_in.call("GetLastError") == 901


@pytest.mark.parametrize(("runtime", "platform"), [(CudaRuntime, "rocm"), (HipRuntime, "cuda")])
def test_a_runtime_refuses_the_platform_of_another_vendor(
    runtime: type[CudaRuntime | HipRuntime], platform: str
) -> None:
    """Before torch is asked for anything."""
    with pytest.raises(DeviceError) as caught:
        runtime(platform_named(platform))
    assert caught.value.code == "device"


@pytest.mark.parametrize(("runtime", "build"), [(CudaRuntime, "cuda"), (HipRuntime, "hip")])
def test_a_torch_that_was_built_for_neither_is_refused(
    monkeypatch: pytest.MonkeyPatch, runtime: Callable[[], NativeRuntime], build: str
) -> None:
    """The error says what torch was built without."""
    monkeypatch.setattr(torch.version, build, None)
    with pytest.raises(DeviceError) as caught:
        runtime()
    assert build in caught.value.got
