"""The simulator is asynchronous: what is read when, and in which order, drawn from a seed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hicache_core.device.base import BatchCopies, StridedCopies
from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.device.sim.streams import SimEvent
from hicache_core.errors import DeviceError

MakeMachine = Callable[..., Any]
ROW = 64


def _one(value: int) -> np.ndarray:
    return np.array([value], dtype=np.int64)


def _pages(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_descriptors_are_read_at_submission(machine: MakeMachine) -> None:
    """The arrays of a copy may change after the call, although the bytes have not moved yet."""
    m = machine(faults=Faults(slow_streams={1}))
    arrays = [_one(m.memory.range.start), _one(m.tensor.data_ptr()), _one(ROW)]
    heights = _one(2)
    strided = StridedCopies(
        targets=arrays[0] + 4 * ROW,
        sources=arrays[1],
        widths=arrays[2],
        heights=heights,
        target_pitch=ROW,
        source_pitch=ROW,
        host_is_target=True,
    )
    batch = BatchCopies(targets=arrays[0], sources=arrays[1], sizes=arrays[2], host_is_target=True)
    m.runtime.batch_copies(batch, m.stream)
    m.runtime.strided_copies(strided, m.stream)
    before = m.memory.view.copy()
    for array in (*arrays, heights, strided.targets):
        array[...] = 0
    assert np.array_equal(m.memory.view, before)
    m.runtime.synchronize(m.stream)
    expected = before.copy()
    expected[:ROW] = m.tensor.numpy()[:ROW]
    expected[4 * ROW : 6 * ROW] = m.tensor.numpy()[: 2 * ROW]
    assert np.array_equal(m.memory.view, expected)


def test_bytes_are_read_when_a_copy_runs(machine: MakeMachine) -> None:
    """A source that changes after the call is copied as it then is."""
    m = machine(faults=Faults(slow_streams={1}))
    m.batch(m.memory.range.start, m.tensor.data_ptr(), ROW)
    m.tensor.fill_(7)
    m.runtime.synchronize(m.stream)
    assert m.memory.view[:ROW].tolist() == [7] * ROW


def test_index_tensors_are_read_when_a_kernel_runs(machine: MakeMachine) -> None:
    """Page numbers on the device that change before the kernel runs are what it moves."""
    m = machine(faults=Faults(slow_streams={1}))
    before = m.tensor.numpy().copy()
    pages = _pages(3)
    m.load(m.alias_table(), pages)
    pages.fill_(9)
    m.runtime.synchronize(m.stream)
    before[9 * ROW : 10 * ROW] = m.memory.view[9 * ROW : 10 * ROW]
    assert np.array_equal(m.tensor.numpy(), before)


def test_upload_takes_a_snapshot_and_lands_in_stream_order(machine: MakeMachine) -> None:
    """The host array may change after the call; the tensor is filled when its stream gets there."""
    m = machine(faults=Faults(slow_streams={1}))
    values = np.array([4, 5], dtype=np.int64)
    tensor = m.runtime.upload(values, 0, m.stream)
    values[:] = 0
    assert tensor.tolist() == [-1, -1]
    m.runtime.synchronize(m.stream)
    assert tensor.tolist() == [4, 5]


# Order


def _order(seed: int) -> list[int]:
    """The order in which nine operations on three streams run."""
    runtime = SimRuntime(seed=seed)
    ran: list[int] = []
    streams = [runtime.new_stream(0) for _ in range(3)]
    for number in range(9):
        runtime.launch(functools.partial(ran.append, number), streams[number % 3])
    for stream in streams:
        runtime.synchronize(stream)
    return ran


def test_same_seed_same_order() -> None:
    """A failure is replayed with its seed; other seeds give other orders; a stream keeps its own."""
    orders = [_order(seed) for seed in range(20)]
    assert orders == [_order(seed) for seed in range(20)]
    assert len({tuple(order) for order in orders}) > 5
    for order in orders:
        assert sorted(order) == list(range(9))
        for stream in range(3):
            assert [n for n in order if n % 3 == stream] == [stream, stream + 3, stream + 6]


def test_an_event_is_done_after_what_stands_before_it(machine: MakeMachine) -> None:
    """Querying may run some of the queue, and tells the truth for every seed."""
    for seed in range(20):
        m = machine(seed=seed)
        ran: list[int] = []
        for number in range(5):
            m.runtime.launch(functools.partial(ran.append, number), m.stream)
        event = m.runtime.record(m.stream)
        while not event.query():
            assert len(ran) <= 5
        assert len(ran) == 5


def test_a_slow_stream_runs_only_when_waited_for(machine: MakeMachine) -> None:
    """However often others are asked."""
    m = machine(faults=Faults(slow_streams={1}))
    ran: list[int] = []
    m.runtime.launch(lambda: ran.append(1), m.stream)
    event = m.runtime.record(m.stream)
    for _ in range(50):
        assert not event.query()
    assert ran == []
    event.synchronize()
    assert ran == [1]


def test_a_deadlock_is_reported(machine: MakeMachine) -> None:
    """A stream that waits for an event that nobody will record: an error, no hang."""
    m = machine()
    other = m.runtime.new_stream(0)
    m.runtime.wait_event(m.stream, SimEvent(m.runtime.scheduler, other))
    with pytest.raises(DeviceError) as caught:
        m.runtime.synchronize(m.stream)
    assert caught.value.code == "streams-stuck"
    assert not m.runtime.record(m.stream).query()


def test_a_failure_belongs_to_the_next_event_of_its_stream(machine: MakeMachine) -> None:
    """Events before it, of other streams, and after the one that reports it are clean."""
    m = machine(faults=Faults(fail_copy_at=2))
    m.batch(m.memory.range.start, m.tensor.data_ptr(), ROW)
    before = m.runtime.record(m.stream)
    m.batch(m.memory.range.start, m.tensor.data_ptr(), ROW)
    failed = m.runtime.record(m.stream)
    m.batch(m.memory.range.start, m.tensor.data_ptr(), ROW)
    after = m.runtime.record(m.stream)
    before.synchronize()
    for _ in range(2):
        with pytest.raises(DeviceError):
            failed.synchronize()
    after.synchronize()
