"""The simulator is strict: which addresses kernels, copies and devices see, and how they fault."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hicache_core.device.base import GatherUnits, MoveRows
from hicache_core.errors import AddressError
from hicache_core.memory.addresses import KernelRange, Provenance

MakeMachine = Callable[..., Any]
ROW = 64
HOST_BYTES = 128 * ROW
DISTINCT = ("cuda-wsl2", "rocm-mi355x")


def _pages(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


# What a kernel sees


@pytest.mark.parametrize("platform", DISTINCT)
def test_kernel_given_a_cpu_address_faults(machine: MakeMachine, platform: str) -> None:
    """The fault names the device and the first address that was touched; no byte moved."""
    m = machine(platform)
    before = m.tensor.clone()
    error = m.fault(lambda: m.load(m.cpu_table_as_kernel_table(), _pages(2, 3)))
    assert error.address == m.memory.range.start + 2 * ROW
    assert error.device == 0
    assert hex(error.address) in str(error)
    assert "alias" in error.got or "elsewhere" in error.got
    assert torch.equal(m.tensor, before)


@pytest.mark.parametrize("platform", ["cpu-sim", *DISTINCT])
def test_kernel_given_the_pointer_table_passes(machine: MakeMachine, platform: str) -> None:
    """The same launch, with the aliases of both registrations."""
    m = machine(platform)
    m.load(m.alias_table(), _pages(2, 63, 64, 127))
    m.runtime.synchronize(m.stream)
    for page in (2, 63, 64, 127):
        rows = slice(page * ROW, (page + 1) * ROW)
        assert np.array_equal(m.tensor.numpy()[rows], m.memory.view[rows])


def test_aliases_lie_at_distances_of_their_own(machine: MakeMachine) -> None:
    """I31: neighbours on the host are no neighbours for the device, in either direction, at any seed."""
    deltas = set()
    for seed in range(8):
        m = machine("rocm-mi355x", seed=seed)
        one, two = (m.runtime.alias(segment.host, 0).start for segment in m.memory.segments)
        assert m.memory.segments[1].host.start - m.memory.segments[0].host.start == 4096
        deltas.add(two - one)
    assert 4096 not in deltas
    assert len(deltas) > 1


def test_raw_dereference_of_an_alias_dies() -> None:
    """Code that skips the simulator's address space is killed, so it cannot work by chance."""
    code = (
        "import ctypes\n"
        "from hicache_core.device.sim import SimRuntime\n"
        "from hicache_core.memory.host import HostMemory\n"
        "from hicache_core.spec import platform_named\n"
        "runtime = SimRuntime(platform_named('cuda-wsl2'))\n"
        "memory = HostMemory(4096, 64, runtime, who='test')\n"
        "alias = runtime.alias(memory.segments[0].host, 0)\n"
        "assert ctypes.string_at(memory.range.start, 1) == bytes(1)\n"
        "ctypes.string_at(alias.start, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV, done.stderr


def test_kernel_that_leaves_a_registration_faults(machine: MakeMachine) -> None:
    """I31: an address carried from the first registration into the second is caught at its end."""
    m = machine("cpu-sim")
    table = m.table_at([[m.memory.range.start]], [0], 0, Provenance.ALIAS)
    error = m.fault(lambda: m.load(table, _pages(63, 64)))
    assert error.address == m.memory.range.start + 4096


def test_kernel_that_leaves_its_allocation_faults(machine: MakeMachine) -> None:
    """Device allocations lie apart, so that an overrun meets nothing."""
    m = machine()
    m.runtime.allocate(1 << 20, 0)
    start = m.tensor.data_ptr() + ROW
    target = m.table_at([[start]], [0], 0, Provenance.DEVICE_MEMORY)
    launch = MoveRows(
        target=target,
        source=m.alias_table(),
        target_pages=_pages(127),
        source_pages=_pages(127),
        layers=range(1),
    )
    kernels = m.runtime.kernels
    assert kernels is not None
    error = m.fault(lambda: kernels.move_rows(launch, m.stream))
    assert error.address == m.tensor.data_ptr() + HOST_BYTES


def test_gather_past_its_target_faults(machine: MakeMachine) -> None:
    """The relayout kernel is as strict about the ring as about the rows."""
    m = machine()
    ring = m.runtime.allocate(2 * ROW, 0)
    target = m.runtime.device_range(ring, 0)
    kernels = m.runtime.kernels
    assert kernels is not None
    launch = GatherUnits(source=m.device_table(), pages=_pages(0, 1, 2), first_unit=0, units=3, target=target)
    assert m.fault(lambda: kernels.gather_units(launch, m.stream)).address == ring.data_ptr() + 2 * ROW


def test_unregistered_memory_faults_for_kernels_and_copies(machine: MakeMachine) -> None:
    """Kernels over unpinned memory are refused; so are copies of it."""
    m = machine()
    bare = np.zeros(HOST_BYTES, dtype=np.uint8)
    table = m.table_at([[bare.ctypes.data]], [0], 0, Provenance.ALIAS)
    assert m.fault(lambda: m.load(table, _pages(1))).address == bare.ctypes.data + ROW
    assert m.fault(lambda: m.batch(bare.ctypes.data, m.tensor.data_ptr(), 8)).address == bare.ctypes.data
    assert m.fault(lambda: m.strided(bare.ctypes.data, m.tensor.data_ptr(), 8)).address == bare.ctypes.data


def test_memory_that_was_unregistered_faults(machine: MakeMachine) -> None:
    """I30: the sight of a registration ends with it."""
    m = machine("cuda-wsl2")
    table = m.alias_table()
    m.load(table, _pages(0))
    m.runtime.synchronize(m.stream)
    m.memory.destroy()
    m.fault(lambda: m.load(table, _pages(0)))


# Copies


@pytest.mark.parametrize("kind", ["batch", "strided"])
@pytest.mark.parametrize("platform", ["cpu-sim", "cuda"])
def test_one_copy_across_two_registrations_faults(machine: MakeMachine, platform: str, kind: str) -> None:
    """I31: both halves are registered and neighbours, as measured on real devices."""
    m = machine(platform)
    end = m.memory.range.start + 4096
    copies: dict[str, Callable[[], None]] = {
        "batch": lambda: m.batch(end - ROW, m.tensor.data_ptr(), 2 * ROW),
        "strided": lambda: m.strided(end - ROW, m.tensor.data_ptr(), ROW, 2),
    }
    assert m.fault(copies[kind]).address == end
    m.batch(end - ROW, m.tensor.data_ptr(), ROW)
    m.strided(end, m.tensor.data_ptr(), ROW, 2)
    m.runtime.synchronize(m.stream)


def test_wsl2_batch_copy_wants_the_alias(machine: MakeMachine) -> None:
    """The batch copy faults on the CPU address and takes the alias; the 2D copy takes both."""
    m = machine("cuda-wsl2")
    cpu = m.memory.range.start
    alias = m.runtime.alias(m.memory.segments[0].host, 0).start
    assert m.fault(lambda: m.batch(cpu, m.tensor.data_ptr(), ROW)).address == cpu
    m.strided(cpu, m.tensor.data_ptr(), ROW)
    m.batch(alias + ROW, m.tensor.data_ptr() + ROW, ROW)
    m.strided(alias + 2 * ROW, m.tensor.data_ptr() + 2 * ROW, ROW)
    m.runtime.synchronize(m.stream)
    assert np.array_equal(m.memory.view[: 3 * ROW], m.tensor.numpy()[: 3 * ROW])


def test_rocm_copies_take_cpu_address_and_alias(machine: MakeMachine) -> None:
    """There the runtime resolves the alias by itself, for every kind of copy."""
    m = machine("rocm-mi355x")
    cpu = m.memory.range.start
    alias = m.runtime.alias(m.memory.segments[0].host, 0).start
    for number, base in enumerate((cpu, alias)):
        start, source = base + 2 * number * ROW, m.tensor.data_ptr() + 2 * number * ROW
        m.batch(start, source, ROW)
        m.strided(start + ROW, source + ROW, ROW)
    m.runtime.synchronize(m.stream)
    assert np.array_equal(m.memory.view[: 4 * ROW], m.tensor.numpy()[: 4 * ROW])


# Two devices


def test_tensor_of_another_device_is_refused(machine: MakeMachine) -> None:
    """Looking up a device address is aware of the device; host memory is of none."""
    m = machine(devices=2)
    other = m.runtime.allocate(64, 1)
    assert m.runtime.device_range(other, 1).device == 1
    for tensor, device in ((other, 0), (m.tensor, 1), (torch.zeros(64), 0)):
        with pytest.raises(AddressError) as caught:
            m.runtime.device_range(tensor, device)
        assert hex(tensor.data_ptr()) in caught.value.got


def test_device_range_ends_with_its_allocation(machine: MakeMachine) -> None:
    """A view's range starts at its first element and ends with the allocation."""
    m = machine()
    seen = m.runtime.device_range(m.tensor[ROW:], 0)
    assert seen == KernelRange(
        start=m.tensor.data_ptr() + ROW,
        nbytes=HOST_BYTES - ROW,
        device=0,
        provenance=Provenance.DEVICE_MEMORY,
    )


def test_kernel_of_one_device_does_not_see_the_memory_of_another(machine: MakeMachine) -> None:
    """A launch on device 1 over rows of device 0 faults, and the reason says whose memory it is."""
    m = machine(devices=2)
    m.stream = m.runtime.new_stream(1)
    error = m.fault(lambda: m.load(m.alias_table(1), _pages(5), device=1))
    assert error.address == m.tensor.data_ptr() + 5 * ROW
    assert error.device == 1
    assert "device 0" in error.got


def test_aliases_are_of_one_device(machine: MakeMachine) -> None:
    """Where aliases are distinct, device 1 does not see what device 0 sees."""
    m = machine("rocm-mi355x", devices=2)
    tables = m.alias_table(0), m.alias_table(1)
    assert int(tables[0].bases[0, 0]) != int(tables[1].bases[0, 0])
    assert m.fault(lambda: m.load(tables[1], _pages(0))).address == int(tables[1].bases[0, 0])
