"""Allocations: what is mapped, how it is placed, who may have it, and what is left of it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import HostMemoryError, RegisteredTwiceError, SpecError, UnknownNameError
from hicache_core.memory import allocation, libc
from hicache_core.memory.allocation import HUGE_PAGE_BYTES
from hicache_core.memory.host import HostMemory
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.options import MemoryOptions
from hicache_core.testing.rigs import Rig
from hicache_core.testing.stand_ins import pool_spec, registry_of
from tests.core.host_mappings import descriptors, flags_at, our_bytes, our_mappings

PAGE = mmap.PAGESIZE
_FIXED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10


def _memory(nbytes: int, *, allocator: Any = None, ledger: Ledger | None = None, **chosen: Any) -> HostMemory:
    options = MemoryOptions(**chosen)
    return HostMemory(
        nbytes, 64, SimRuntime(), who="test", options=options, allocator=allocator, ledger=ledger
    )


@pytest.mark.parametrize("name", ["anonymous", "memfd"])
def test_memory_starts_at_a_page_and_is_zero(name: str) -> None:
    """A buffer of any size, also of one byte; its bytes can be written to the last."""
    for nbytes in (1, 64, PAGE + 64, 3 << 20):
        memory = HostMemory(nbytes, 1, SimRuntime(), who="test", options=MemoryOptions(allocator=name))
        assert memory.range.start % PAGE == 0
        assert memory.view.size == nbytes
        assert not memory.view.any()
        memory.view[-1] = 1
        memory.destroy()


@pytest.mark.skipif("[never]" in allocation._policy("enabled"), reason="the kernel gives no huge pages")
def test_large_memory_asks_for_huge_pages_and_starts_at_one() -> None:
    """Else the first and the last huge page would be lost."""
    memory = _memory(2 * HUGE_PAGE_BYTES + PAGE)
    assert "hg" in flags_at(memory.range.start)
    assert memory.range.start % HUGE_PAGE_BYTES == 0
    assert memory.facts.notes == ()
    memory.destroy()


@pytest.mark.parametrize(("nbytes", "wanted"), [(HUGE_PAGE_BYTES - PAGE, True), (4 * HUGE_PAGE_BYTES, False)])
def test_huge_pages_are_not_asked_for_in_vain(nbytes: int, wanted: bool) -> None:
    """Memory smaller than one, or an operator who wants none."""
    memory = _memory(nbytes, hugepages=wanted)
    assert "hg" not in flags_at(memory.range.start)
    memory.destroy()


def test_a_policy_without_huge_pages_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice is not given, and the facts say why."""
    monkeypatch.setattr(allocation, "_policy", lambda name: "always madvise [never]\n")
    memory = _memory(4 * HUGE_PAGE_BYTES)
    assert "hg" not in flags_at(memory.range.start)
    assert len(memory.facts.notes) == 1
    assert "[never]" in memory.facts.notes[0]
    memory.destroy()


@pytest.mark.parametrize("node", [1023, 5000])
def test_a_node_that_does_not_exist_is_noted_and_no_error(node: int) -> None:
    """Placement is a wish: memory of another node works."""
    memory = _memory(PAGE, numa_node=node)
    assert len(memory.facts.notes) == 1
    assert f"NUMA node {node}" in memory.facts.notes[0]
    assert memory.registered
    memory.destroy()


@pytest.mark.skipif("not os.path.isdir('/sys/devices/system/node/node0')")
def test_a_node_that_exists_is_granted() -> None:
    """Node 0 is there on every machine whose kernel has nodes."""
    memory = _memory(3 * PAGE, numa_node=0)
    assert memory.facts.notes == ()
    memory.destroy()


def test_a_node_is_asked_for_before_a_page_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole mapping, with the node that was given; pages that are present would not move."""
    calls: list[tuple[str, tuple[int, int, int]]] = []
    for name in ("prefer_node", "advise"):
        monkeypatch.setattr(libc, name, lambda *call, name=name: calls.append((name, call)))
    memory = _memory(3 * PAGE, numa_node=2)
    whole = memory.range.start, 3 * PAGE
    asked = calls.index(("prefer_node", (*whole, 2)))
    assert asked < calls.index(("advise", (*whole, libc.POPULATE_WRITE)))
    memory.destroy()


def test_shared_memory_is_behind_its_descriptor() -> None:
    """What is written through one mapping is read through another, and nothing stays open."""
    before = descriptors()
    memory = HostMemory(3 * PAGE, 64, SimRuntime(), who="test", options=MemoryOptions(allocator="memfd"))
    assert memory.facts.fd is not None
    assert not os.get_inheritable(memory.facts.fd)
    with mmap.mmap(memory.facts.fd, 3 * PAGE) as other:
        memory.view[PAGE : PAGE + 3] = (1, 2, 3)
        assert bytes(other[PAGE : PAGE + 3]) == b"\x01\x02\x03"
        other[0] = 9
        assert memory.view[0] == 9
    memory.destroy()
    assert descriptors() == before


def test_private_memory_has_no_descriptor() -> None:
    """None, and not a number that belongs to something else."""
    before = descriptors()
    memory = _memory(PAGE)
    assert memory.facts.fd is None
    assert descriptors() == before
    memory.destroy()


def _in_child(look: Callable[[], bool]) -> bool:
    """The answer of a forked child, which then ends without clean-up."""
    child = os.fork()
    if not child:
        answer = 1
        try:
            answer = 0 if look() else 3
        finally:
            os._exit(answer)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 3), "the child died"
    return code == 0


def test_private_pages_are_not_in_a_forked_child() -> None:
    """I32: so no write of the parent or the child copies a page that a device reads."""
    memory = _memory(8 * PAGE)
    start = memory.range.start
    assert "dc" in flags_at(start)
    assert _in_child(lambda: "dc" not in flags_at(start) and not our_mappings())
    memory.destroy()


def test_shared_pages_are_the_same_in_a_forked_child() -> None:
    """I32: shared pages are never copied on a write, so the child may have them."""
    memory = HostMemory(PAGE, 64, SimRuntime(), who="test", options=MemoryOptions(allocator="memfd"))

    def write() -> bool:
        memory.view[5] = 42
        return True

    assert _in_child(write)
    assert memory.view[5] == 42
    memory.destroy()


@pytest.mark.parametrize("name", ["anonymous", "memfd"])
def test_a_forked_child_undoes_nothing(name: str) -> None:
    """I30, I32: what it destroys is its parent's; what else is mapped there in the child stays."""
    runtime, ledger = SimRuntime(), Ledger()
    memory = HostMemory(
        4 * PAGE, 64, runtime, who="test", options=MemoryOptions(allocator=name), ledger=ledger
    )
    start = memory.range.start

    def destroy() -> bool:
        if name == "anonymous":
            libc._lib.mmap(start, PAGE, mmap.PROT_READ, _FIXED, -1, 0)
        memory.destroy()
        kept = bool(flags_at(start)) and ledger.total() == 4 * PAGE
        return kept and len(runtime.memory.registrations) == 1

    assert _in_child(destroy)
    memory.destroy()
    assert not runtime.memory.registrations


LEFT_AT_EXIT = """
import atexit
atexit.register(lambda: print("left", len(runtime.memory.registrations)))
from hicache_core.device.sim import SimRuntime
from hicache_core.memory.host import HostMemory
runtime = SimRuntime()
memory = HostMemory(8192, 64, runtime, who="test")
print("made", len(runtime.memory.registrations))
"""


def test_what_nobody_destroyed_is_unregistered_at_exit() -> None:
    """I30: the interpreter's exit does it, before handlers that were registered earlier."""
    done = subprocess.run([sys.executable, "-c", LEFT_AT_EXIT], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["made", "1", "left", "0"], done.stderr


def test_memory_that_is_dropped_is_unregistered_and_unmapped() -> None:
    """I30: without destroy, the object's end does the same."""
    before, runtime, ledger = our_bytes(), SimRuntime(), Ledger()
    memory = HostMemory(4 * PAGE, 64, runtime, who="test", ledger=ledger)
    view = memory.view
    del memory
    assert not runtime.memory.registrations
    assert our_bytes() == before + 4 * PAGE
    del view
    assert our_bytes() == before
    assert ledger.snapshot() == ()


# Allocators of others


class Arena:
    """A storage engine's own memory, of which parts are given out and taken back."""

    def __init__(self, nbytes: int, *, short: int = 0, skew: int = 0, again: bool = False) -> None:
        self.memory = mmap.mmap(-1, nbytes + PAGE)
        self.start = np.frombuffer(self.memory, dtype=np.uint8).ctypes.data
        self.used = 0
        self.given: list[tuple[int, int]] = []
        self.released: list[int] = []
        self._short, self._skew, self._again = short, skew, again

    def allocate(self, nbytes: int, who: str) -> Part:
        """The next pages of the arena."""
        part = Part(self, self.start + self.used + self._skew, nbytes - self._short)
        self.used += 0 if self._again else -(-nbytes // PAGE) * PAGE
        self.given.append((part.address, nbytes))
        return part


class Part:
    """A part of an arena."""

    fd = None

    def __init__(self, arena: Arena, address: int, nbytes: int) -> None:
        self.address, self.nbytes, self._arena = address, nbytes, arena

    def release(self) -> None:
        """Keep that it came back."""
        self._arena.released.append(self.address)


def test_memory_of_another_allocator_is_used_and_given_back_once() -> None:
    """It is registered, keeps what it holds, and goes back after its last view, not before."""
    arena, ledger, runtime = Arena(8 * PAGE), Ledger(), SimRuntime()
    arena.memory[PAGE] = 5
    memory = HostMemory(3 * PAGE, 64, runtime, who="test", allocator=arena, ledger=ledger)
    assert memory.range.start == arena.start
    assert memory.view[PAGE] == 5
    assert [r.host for r in runtime.memory.registrations.values()] == [memory.range]
    assert ledger.total() == 3 * PAGE
    view = memory.view
    memory.destroy()
    memory.destroy()
    assert (arena.released, ledger.total()) == ([], 3 * PAGE)
    del view
    assert (arena.released, ledger.total()) == ([arena.start], 0)


def test_touching_pages_of_another_allocator_keeps_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel cannot populate: each page is written as it is."""
    monkeypatch.setattr(libc, "POPULATE_WRITE", 9999)
    arena = Arena(4 * PAGE)
    arena.memory[:3] = b"abc"
    memory = _memory(4 * PAGE, allocator=arena)
    assert bytes(memory.view[:3]) == b"abc"
    memory.destroy()


@pytest.mark.parametrize("wrong", [{"short": 1}, {"skew": 64}], ids=str)
def test_an_allocation_that_is_not_what_was_asked_for_is_given_back(wrong: dict[str, Any]) -> None:
    """Short, or not at a page: refused before the runtime sees it, and nothing stays booked."""
    arena, ledger, runtime = Arena(8 * PAGE, **wrong), Ledger(), SimRuntime()
    with pytest.raises(HostMemoryError) as caught:
        HostMemory(2 * PAGE, 64, runtime, who="pool", allocator=arena, ledger=ledger)
    assert (caught.value.code, caught.value.who) == ("memory", "pool")
    assert arena.released == [arena.start + wrong.get("skew", 0)]
    assert (ledger.snapshot(), runtime.memory.registrations) == ((), {})


def test_an_allocator_that_raises_leaves_no_booking() -> None:
    """Its error is the cause of one of ours, which names the allocator."""

    class Empty:
        """Has nothing."""

        def allocate(self, nbytes: int, who: str) -> Part:
            """Never."""
            raise MemoryError("none left")

    ledger = Ledger()
    with pytest.raises(HostMemoryError) as caught:
        _memory(PAGE, allocator=Empty(), ledger=ledger)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert "Empty" in caught.value.got
    assert ledger.snapshot() == ()


def test_the_same_memory_given_twice_is_refused_before_the_runtime_is_asked() -> None:
    """I29: the ledger knows who has it; the first holder is not harmed, the second goes back."""
    arena, ledger, runtime = Arena(8 * PAGE, again=True), Ledger(), SimRuntime()
    memory = HostMemory(2 * PAGE, 64, runtime, who="first", allocator=arena, ledger=ledger)
    with pytest.raises(RegisteredTwiceError) as caught:
        HostMemory(2 * PAGE, 64, runtime, who="second", allocator=arena, ledger=ledger)
    assert (caught.value.who, caught.value.start) == ("second", arena.start)
    assert [entry.who for entry in ledger.snapshot()] == ["first"]
    assert runtime.registration_calls == 1
    memory.destroy()


def _arena_hooks(arena: Arena) -> dict[str, Any]:
    return {"hicache_host_allocators": lambda: {"arena": arena}}


def test_a_controller_takes_the_allocator_that_its_options_name() -> None:
    """Every buffer of every pool comes from it, and goes back at close."""
    specs, arena = [pool_spec(48, 32)], Arena(64 * PAGE)
    config = ControllerConfig(
        io_backend="kernel", layout="page_first", host_pages=8, memory=MemoryOptions(allocator="arena")
    )
    with Rig(specs, config, SimRuntime(), registry=registry_of(specs, **_arena_hooks(arena))) as rig:
        buffers = rig.controller.group.anchor.buffers
        assert [b.memory.range.start for b in buffers] == [address for address, _ in arena.given]
        rig.there_and_back()
    assert sorted(arena.released) == sorted(address for address, _ in arena.given)


@pytest.mark.parametrize("name", ["arena", "Anonymous"])
def test_an_allocator_that_nobody_brings_is_refused(name: str) -> None:
    """By the controller and by host memory alone; those that exist are named."""
    specs = [pool_spec(48)]
    options = MemoryOptions(allocator=name)
    config = ControllerConfig(io_backend="direct", layout="layer_first", host_pages=8, memory=options)
    with pytest.raises(UnknownNameError) as caught:
        Rig(specs, config, SimRuntime(), registry=registry_of(specs))
    assert "memfd" in caught.value.expected
    with pytest.raises(UnknownNameError):
        HostMemory(PAGE, 64, SimRuntime(), who="test", options=options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"allocator": ""},
        {"populate_threads": -1},
        {"numa_node": -1},
        {"max_registration_bytes": 0},
        {"max_registration_bytes": (64 << 30) + 1},
        {"min_registration_bytes": 0},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    """I28: among them registrations of more than 64 GiB."""
    with pytest.raises(SpecError):
        MemoryOptions(**wrong)


def test_threads_are_bounded_by_the_cpus_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it may use, not those of the machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6})
    assert [MemoryOptions(populate_threads=n).threads for n in (0, 1, 2, 3, 64)] == [3, 1, 2, 3, 3]


def test_a_configuration_holds_memory_options_and_nothing_else_in_their_place() -> None:
    """By default those of the class."""
    config = ControllerConfig(io_backend="direct", layout="layer_first", host_pages=1)
    assert config.memory == MemoryOptions()
    with pytest.raises(TypeError):
        evolve(config, memory=None)  # type: ignore[arg-type]
