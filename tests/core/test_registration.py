"""Registration: every return code is read, refusals are halved or undone, nothing is left behind."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.errors import HostMemoryError, PluginError, RegistrationError, UnregisterError
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.host import HostMemory
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.options import MemoryOptions
from hicache_core.spec import platform_named
from hicache_core.testing.rigs import Rig, differences
from hicache_core.testing.stand_ins import pool_spec, registry_of
from tests.core.host_mappings import flags_at

MakeRig = Callable[..., Rig]
CUT = mmap.PAGESIZE
UNIT = 64


class Recorder(SimRuntime):
    """A simulator that keeps what it was asked to register and to unregister, as (start, bytes)."""

    def __init__(self, faults: Faults | None = None, platform: str = "cpu-sim") -> None:
        super().__init__(platform_named(platform), faults=faults)
        self.tried: list[tuple[int, int]] = []
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[tuple[int, int]] = []

    def register(self, host: HostRange) -> None:
        """Keep the try, and the success."""
        self.tried.append((host.start, host.nbytes))
        super().register(host)
        self.registered.append((host.start, host.nbytes))

    def unregister(self, host: HostRange) -> None:
        """Keep the success."""
        super().unregister(host)
        self.unregistered.append((host.start, host.nbytes))


def _memory(runtime: SimRuntime, cuts: int = 8, limit: int = 64 << 30, unit: int = UNIT) -> HostMemory:
    return HostMemory(
        cuts * CUT, unit, runtime, who="pool 'kv', k", options=MemoryOptions(max_registration_bytes=limit)
    )


def _nothing_is_registered(runtime: SimRuntime) -> None:
    assert not runtime.memory.registrations
    assert not runtime.memory.host_space.regions
    assert not runtime.memory.alias_space.regions


def test_memory_is_registered_in_one_piece_where_it_may_be() -> None:
    """I28: one segment from offset 0, over all bytes."""
    runtime = Recorder()
    memory = _memory(runtime)
    assert runtime.registered == [(memory.range.start, 8 * CUT)]
    assert [(s.offset, s.host) for s in memory.segments] == [(0, memory.range)]
    memory.destroy()


@pytest.mark.parametrize("unit", [1, 48, 64, 576, 4096, 6000])
@pytest.mark.parametrize("limit", [1, 3 * CUT, 10 * CUT])
def test_chunks_hold_whole_copy_units(unit: int, limit: int) -> None:
    """I28: each chunk ends where a copy unit and a page of the system end; only the last may be short."""
    runtime = Recorder()
    nbytes = unit * 1000
    memory = HostMemory(
        nbytes, unit, runtime, who="test", options=MemoryOptions(max_registration_bytes=limit)
    )
    offsets = [segment.offset for segment in memory.segments]
    sizes = [segment.host.nbytes for segment in memory.segments]
    assert offsets == [sum(sizes[:i]) for i in range(len(sizes))]
    assert sum(sizes) == nbytes
    for offset, size in zip(offsets, sizes, strict=True):
        assert offset % unit == 0
        assert offset % CUT == 0
        assert size % unit == 0
    memory.destroy()
    _nothing_is_registered(runtime)


def test_default_limit_of_a_chunk_is_64_gib() -> None:
    """I28: larger registrations are not even tried."""
    config = ControllerConfig(io_backend="direct", layout="layer_first", host_pages=1)
    assert config.memory.max_registration_bytes == 64 << 30


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_refused_call_is_halved_and_tried_again(call: int) -> None:
    """I28: one refusal at the k-th call: all is registered all the same, in smaller parts from there on."""
    runtime = Recorder(Faults(refuse_registration_at=call))
    memory = _memory(runtime, cuts=12, limit=4 * CUT)
    sizes = [nbytes // CUT for _, nbytes in runtime.tried]
    assert sizes == {1: [4, 2, 2, 2, 2, 2, 2], 2: [4, 4, 2, 2, 2, 2], 3: [4, 4, 4, 2, 2]}[call]
    assert sum(nbytes for _, nbytes in runtime.registered) == 12 * CUT
    assert [s.host.start for s in memory.segments] == [start for start, _ in runtime.registered]
    memory.destroy()
    _nothing_is_registered(runtime)


@pytest.mark.parametrize("platform", ["cpu-sim", "rocm-mi355x"])
@pytest.mark.parametrize("call", [1, 2, 5, 8])
def test_a_refusal_at_the_floor_is_undone_in_reverse(call: int, platform: str) -> None:
    """I27: return code, offset and size are named; earlier chunks are undone last first; nothing is left."""
    runtime = Recorder(Faults(refuse_registration_at=call), platform)
    with pytest.raises(RegistrationError) as caught:
        _memory(runtime, cuts=8, limit=1)
    error = caught.value
    assert (error.code, error.rc, error.offset_bytes, error.nbytes) == (
        "registration",
        2,
        (call - 1) * CUT,
        CUT,
    )
    assert error.who == "pool 'kv', k"
    assert "ulimit" in error.remedy
    assert len(runtime.registered) == call - 1
    assert runtime.unregistered == runtime.registered[::-1]
    _nothing_is_registered(runtime)


def test_a_size_that_is_always_refused_ends_at_the_floor() -> None:
    """I28: halving stops at one cut; the error says how small the last try was."""
    runtime = Recorder(Faults(refuse_registration_above=CUT - 1))
    with pytest.raises(RegistrationError) as caught:
        _memory(runtime, cuts=16)
    assert [nbytes // CUT for _, nbytes in runtime.tried] == [16, 8, 4, 2, 1]
    assert (caught.value.offset_bytes, caught.value.nbytes) == (0, CUT)
    _nothing_is_registered(runtime)


@pytest.mark.parametrize(
    "pair", [("kernel", "layer_first"), ("kernel", "page_first"), ("direct", "page_first_direct")]
)
def test_several_segments_carry_the_right_bytes(make_rig: MakeRig, pair: tuple[str, str]) -> None:
    """I28, I31: a platform that refuses large registrations gets several, and every byte still arrives."""
    faults = Faults(refuse_registration_above=5 * CUT)
    rig = make_rig(pool_spec(256), pair=pair, platform="cuda-wsl2", host_pages=24, faults=faults)
    (buffer,) = rig.controller.group.anchor.buffers
    sizes = {segment.host.nbytes for segment in buffer.memory.segments}
    assert len(buffer.memory.segments) > 3
    assert max(sizes) <= 5 * CUT
    rig.allocate(24)
    pairs = [(23 - 2 * i, i) for i in range(12)]
    for move, after in ((rig.controller.backup, rig.after_backup), (rig.controller.load, rig.after_load)):
        before = rig.snapshot()
        move(rig.slots(h for h, _ in pairs), rig.slots(d for _, d in pairs)).wait()
        assert differences(rig.snapshot(), after(before, pairs)) == []
        rig.poison_device()


def test_destroying_twice_is_harmless() -> None:
    """I30: each chunk is unregistered once, by its own base and size, last first."""
    runtime = Recorder()
    memory = _memory(runtime, limit=2 * CUT)
    memory.destroy()
    memory.destroy()
    assert len(runtime.registered) == 4
    assert runtime.unregistered == runtime.registered[::-1]
    assert memory.segments == ()
    assert memory.view.size == 0
    _nothing_is_registered(runtime)


def test_unregister_gets_the_cpu_address() -> None:
    """I30: also where the device sees the memory elsewhere."""
    runtime = Recorder(platform="rocm-mi355x")
    memory = _memory(runtime)
    start = memory.range.start
    assert runtime.alias(memory.range, 0).start != start
    memory.destroy()
    assert runtime.unregistered == [(start, 8 * CUT)]


def test_what_could_not_be_unregistered_stays_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """I30: all others are, the error names it, the bytes are still there, and a later call
    unregisters it once."""
    runtime = Recorder()
    memory = _memory(runtime, limit=2 * CUT)
    memory.view[:4] = 7
    tries = iter((True, False))
    unregister = runtime.unregister

    def fail_second(host: HostRange) -> None:
        if not next(tries, True):
            raise RegistrationError(
                who="sim", got="code 1", expected="0", remedy="-", rc=1, offset_bytes=0, nbytes=host.nbytes
            )
        unregister(host)

    monkeypatch.setattr(runtime, "unregister", fail_second)
    with pytest.raises(UnregisterError) as caught:
        memory.destroy()
    (stuck,) = caught.value.stuck
    assert (stuck.start, stuck.offset, stuck.rc) == (memory.range.start + 4 * CUT, 4 * CUT, 1)
    assert memory.stuck == caught.value.stuck
    assert [segment.host.start for segment in memory.segments] == [stuck.start]
    assert memory.view[:4].tolist() == [7] * 4
    assert len(runtime.memory.registrations) == 1
    memory.destroy()
    assert sorted(runtime.unregistered) == sorted(runtime.registered)
    _nothing_is_registered(runtime)


def test_nothing_is_mapped_or_registered_for_no_bytes() -> None:
    """I16: a buffer without bytes makes no call at all."""
    runtime = Recorder()
    memory = HostMemory(0, UNIT, runtime, who="test")
    memory.destroy()
    assert runtime.tried == []
    assert memory.segments == ()


def test_memory_that_cannot_be_mapped_is_an_error_of_its_own() -> None:
    """I27: more than the address space: the size is named, and nothing was registered."""
    runtime = Recorder()
    with pytest.raises(HostMemoryError) as caught:
        HostMemory(1 << 50, UNIT, runtime, who="test")
    assert caught.value.code == "memory"
    assert str(1 << 50) in caught.value.got
    assert runtime.tried == []


def test_a_child_of_a_fork_does_not_get_the_pages() -> None:
    """I32: the mapping is kept out of children, so that none of them can make pinned pages move."""
    memory = _memory(SimRuntime())
    assert "dc" in flags_at(memory.range.start)
    memory.destroy()


def test_the_mapping_goes_with_its_last_view() -> None:
    """I30: destroying lets the memory go, but not from under a reader that still has a view of it."""
    ledger = Ledger()
    memory = HostMemory(8 * CUT, UNIT, SimRuntime(), who="test", ledger=ledger)
    start, view = memory.range.start, memory.view[CUT:]
    view[0] = 7
    memory.destroy()
    assert "dc" in flags_at(start)
    assert view[0] == 7
    assert ledger.total() == 8 * CUT
    del view
    assert "dc" not in flags_at(start)
    assert ledger.snapshot() == ()


# The simulator's own door


def test_registering_twice_is_refused_with_712() -> None:
    """I29: also a part, or an overlap on either side; the first registration is not harmed."""
    runtime = SimRuntime()
    data = np.zeros(4 * CUT, dtype=np.uint8)
    whole = HostRange(start=data.ctypes.data, nbytes=3 * CUT)
    runtime.register(whole)
    for again in (whole, whole.part(CUT, CUT), HostRange(start=whole.start + 2 * CUT, nbytes=2 * CUT)):
        with pytest.raises(RegistrationError) as caught:
            runtime.register(again)
        assert caught.value.rc == 712
    assert runtime.alias(whole, 0).start == whole.start
    runtime.unregister(whole)
    runtime.register(whole)


def test_unregistering_what_is_no_base_is_refused() -> None:
    """I30: an interior address, another size, and a second time: code 1 each."""
    runtime = SimRuntime()
    data = np.zeros(4 * CUT, dtype=np.uint8)
    whole = HostRange(start=data.ctypes.data, nbytes=4 * CUT)
    runtime.register(whole)
    for wrong in (whole.part(CUT, CUT), whole.part(0, CUT)):
        with pytest.raises(RegistrationError) as caught:
            runtime.unregister(wrong)
        assert caught.value.rc == 1
    runtime.unregister(whole)
    for ask in (runtime.unregister, lambda host: runtime.alias(host, 0)):
        with pytest.raises(RegistrationError) as caught:
            ask(whole)
        assert caught.value.rc == 1


# A controller that fails half-way

GROUP = [
    pool_spec(48, 32, pool="kv"),
    pool_spec(64, pool="second", anchor=False),
    pool_spec(16, 16, pool="third", anchor=False),
]
CONFIG = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=4)


def _construct(runtime: SimRuntime, **hooks: object) -> None:
    registry = registry_of(GROUP, **hooks)
    Rig(GROUP, CONFIG, runtime, registry=registry).controller.close()


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
def test_a_pool_that_is_refused_leaves_no_registration(call: int) -> None:
    """I27: whichever buffer of whichever pool is refused, everything before it is undone, last first."""
    runtime = Recorder(Faults(refuse_registration_at=call))
    with pytest.raises(RegistrationError):
        _construct(runtime)
    assert len(runtime.registered) == call - 1
    assert runtime.unregistered == runtime.registered[::-1]
    _nothing_is_registered(runtime)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
@pytest.mark.parametrize("hook", ["hicache_build_pointer_table", "hicache_staged_write_back"])
def test_a_hook_that_raises_leaves_no_registration(hook: str, error: type[BaseException]) -> None:
    """I27: a plugin that fails at construction undoes the pools that were made, its own included."""

    def staged(pool: object, device: object) -> object:
        raise error

    def table(spec: object, buffers: object, device: object) -> object:
        raise error

    runtime = Recorder()
    hooks: dict[str, object] = {"hicache_build_pointer_table": table, "hicache_staged_write_back": staged}
    with pytest.raises(PluginError) as caught:
        _construct(runtime, **{hook: hooks[hook]})
    assert isinstance(caught.value.__cause__, error)
    assert runtime.registered
    _nothing_is_registered(runtime)


@pytest.mark.parametrize("answer", [5, True, (), (1,), object(), "tables"])
@pytest.mark.parametrize("hook", ["hicache_build_pointer_table", "hicache_staged_write_back"])
def test_a_hook_that_answers_rubbish_is_refused_at_construction(hook: str, answer: object) -> None:
    """Not at the first backup, and nothing stays registered."""

    def table(spec: object, buffers: object, device: object) -> object:
        return answer

    def staged(pool: object, device: object) -> object:
        return answer

    runtime = Recorder()
    with pytest.raises(PluginError):
        _construct(runtime, **{hook: {"hicache_build_pointer_table": table}.get(hook, staged)})
    _nothing_is_registered(runtime)


def test_a_controller_that_is_closed_leaves_no_registration() -> None:
    """I30: all buffers of all pools, each once."""
    runtime = Recorder()
    _construct(runtime)
    assert len(runtime.registered) == 5
    assert sorted(runtime.unregistered) == sorted(runtime.registered)
    _nothing_is_registered(runtime)
