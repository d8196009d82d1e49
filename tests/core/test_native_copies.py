"""Copies, streams and events through the runtime libraries' own calls, against the stand-in in C."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache_core.device.base import BatchCopies, Event, StridedCopies
from hicache_core.errors import AddressError, DeviceError
from hicache_core.spec import CopyKind
from hicache_core.testing.oracle import POISON
from tests.stand_ins.bench import CUT, PITCH, ROW, Bench
from tests.stand_ins.build import BUILDS
from tests.stand_ins.machine import CASES, OLDER, Case, NativeMachine, native_machine

MakeNative = Callable[..., NativeMachine]
ALL = CASES | OLDER


@pytest.fixture
def make_bench(make_native: MakeNative) -> Iterator[Callable[..., Bench]]:
    """Makes benches and destroys their host memory."""
    made: list[Bench] = []

    def make(cuts: int = 4, limit: int = CUT, **settings: int) -> Bench:
        made.append(Bench(make_native(**settings), cuts, limit))
        return made[-1]

    yield make
    for one in made:
        one.memory.destroy()


MakeBench = Callable[..., Bench]
RUNS = [
    (5, 9, 100),
    (CUT + 1, 300, 77),
    (2 * CUT - 7, 1000, 7),
    (3 * CUT, 2000, CUT),
    (200, 130, 1),
    (64, 150, 9),
]
FEW = RUNS[:3]


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_plain_copies_move_their_bytes_and_no_others(make_bench: MakeBench, seed: int) -> None:
    """Few go one by one, many in a batch where the library has one, and nothing around them is touched."""
    bench = make_bench(SEED=seed)
    has_batch = bench.runtime._rt.has_batch
    assert has_batch is ("BATCH" in _defines(bench))
    many = CopyKind.BATCH if has_batch else CopyKind.ONE_D
    for runs, kind in ((FEW, CopyKind.ONE_D), (RUNS, many)):
        bench.device.fill_(POISON)
        expected = bench.untouched()
        for host, device, nbytes in runs:
            expected[device : device + nbytes] = bench.memory.view[host : host + nbytes]
        bench.runtime.batch_copies(bench.batch(runs, kind), bench.stream)
        bench.runtime.synchronize(bench.stream)
        assert bench.device_is(expected)
    counted = {name: bench.machine.stand_in.count(name) for name in ("copy", "batch")}
    assert counted == ({"copy": 3, "batch": 1} if has_batch else {"copy": 9, "batch": 0})


def _defines(bench: Bench) -> tuple[str, ...]:
    return BUILDS[bench.machine.case.build].defines


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_strided_copies_move_their_rows_and_no_others(make_bench: MakeBench) -> None:
    """Rows at another pitch on either side, one call each."""
    bench = make_bench(SEED=3)
    runs = [(0, 16, 5), (CUT + 8, 1000, 40), (2 * CUT, 5000, 1)]
    expected = bench.untouched()
    for host, device, height in runs:
        for row in range(height):
            at, start = device + row * ROW, host + row * PITCH
            expected[at : at + ROW] = bench.memory.view[start : start + ROW]
    bench.runtime.strided_copies(bench.strided(runs), bench.stream)
    bench.runtime.synchronize(bench.stream)
    assert bench.device_is(expected)
    assert bench.machine.stand_in.count("copy_2d") == 3
    assert bench.machine.stand_in.count("batch_3d") == 0


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_many_large_strided_copies_go_in_one_call_where_it_is_bound(make_bench: MakeBench) -> None:
    """A batch of strided copies is CUDA's alone, from 12.8 on; elsewhere each is a call."""
    bench = make_bench(cuts=8704, limit=1 << 26, SEED=4)
    height, width, count = 1024, 1024, 32
    rows = np.arange(count, dtype=np.int64) * height * width
    start = bench.host_address(0, CopyKind.BATCH)
    copies = StridedCopies(
        targets=bench.device.data_ptr() + rows + 64,
        sources=start + rows,
        widths=width,
        heights=height,
        target_pitch=width,
        source_pitch=width,
        host_is_target=False,
    )
    bench.runtime.strided_copies(copies, bench.stream)
    bench.runtime.synchronize(bench.stream)
    expected = bench.untouched()
    moved = count * height * width
    expected[64 : 64 + moved] = bench.memory.view[:moved]
    assert bench.device_is(expected)
    in_one = "BATCH_3D" in _defines(bench) and bench.machine.case.build.startswith("cuda")
    assert bench.machine.stand_in.count("batch_3d") == in_one
    assert bench.machine.stand_in.count("copy_2d") == (0 if in_one else count)


@pytest.mark.parametrize("kind", CopyKind)
def test_a_copy_across_two_registrations_is_refused(make_bench: MakeBench, kind: CopyKind) -> None:
    """Error 1 for each kind of copy, no byte moved, and the error slot is empty again (I27)."""
    bench = make_bench()
    across: dict[CopyKind, StridedCopies | BatchCopies] = {
        CopyKind.ONE_D: bench.batch([(CUT - 8, 0, 16)], kind),
        CopyKind.TWO_D: bench.strided([(CUT - PITCH, 0, 2)], kind),
        CopyKind.BATCH: bench.batch([*RUNS, (CUT - 8, 0, 16)], kind),
    }
    with pytest.raises(DeviceError) as caught:
        across[kind].submit(bench.runtime, bench.stream)
    assert caught.value.rc == 1
    assert bench.machine.stand_in.count("last_error") == 0
    bench.runtime.synchronize(bench.stream)
    assert bench.device_is(bench.untouched())


def test_a_copy_stays_inside_its_device_allocation(make_bench: MakeBench) -> None:
    """A run that leaves it at either end is refused with 1."""
    bench = make_bench()
    for device in (-1, bench.device.numel() - 3):
        with pytest.raises(DeviceError) as caught:
            bench.runtime.batch_copies(bench.batch([(0, device, 4)], CopyKind.ONE_D), bench.stream)
        assert caught.value.rc == 1
    bench.runtime.synchronize(bench.stream)
    assert bench.device_is(bench.untouched())


@pytest.mark.parametrize(
    "case", [CASES["cuda, distinct"], OLDER["cuda 12.8, distinct"]], ids=["13.0", "12.8"]
)
def test_a_batch_wants_aliases_where_the_platform_says_so(make_bench: MakeBench) -> None:
    """The CPU address that plain copies take is refused by a batch; its alias is taken."""
    bench = make_bench()
    assert CopyKind.BATCH not in bench.runtime.platform.copy_accepts_host_address
    with pytest.raises(DeviceError) as caught:
        bench.runtime.batch_copies(bench.batch(RUNS, CopyKind.ONE_D), bench.stream)
    assert caught.value.rc == 1
    bench.runtime.batch_copies(bench.batch(RUNS, CopyKind.BATCH), bench.stream)
    bench.runtime.synchronize(bench.stream)
    assert not bench.device_is(bench.untouched())


def test_descriptors_are_read_at_submission_and_bytes_later(make_bench: MakeBench) -> None:
    """Arrays may be reused once a call has returned; memory may not."""
    bench = make_bench()
    copies = bench.batch(RUNS, CopyKind.BATCH)
    bench.runtime.batch_copies(copies, bench.stream)
    for array in (copies.targets, copies.sources, copies.sizes):
        array[...] = 1
    assert bench.device_is(bench.untouched())
    bench.memory.view[...] = 9
    bench.runtime.synchronize(bench.stream)
    expected = bench.untouched()
    for _, device, nbytes in RUNS:
        expected[device : device + nbytes] = 9
    assert bench.device_is(expected)


def test_an_event_is_passed_when_what_is_before_it_has_run(make_bench: MakeBench) -> None:
    """It is not yet right after submission, and asking does not leave an error behind."""
    bench = make_bench()
    bench.runtime.batch_copies(bench.batch(FEW, CopyKind.ONE_D), bench.stream)
    event = bench.runtime.record(bench.stream)
    assert not event.query()
    assert bench.machine.stand_in.count("last_error") == 0
    polls = 0
    while not event.query():
        polls += 1
        assert polls < 10
    assert not bench.device_is(bench.untouched())


def _after_event(bench: Bench, stream: object, event: Event) -> None:
    bench.runtime.wait_event(stream, event)


def _after_current(bench: Bench, stream: object, event: Event) -> None:
    with bench.machine.stand_in.using(bench.stream):
        bench.runtime.wait_current(stream, 0)


@pytest.mark.parametrize("wait", [_after_event, _after_current])
@pytest.mark.parametrize("seed", [0, 5, 6, 7])
def test_a_stream_goes_on_after_what_it_waits_for(
    make_bench: MakeBench, wait: Callable[[Bench, object, Event], None], seed: int
) -> None:
    """The second stream's copy overwrites the first one's bytes, never the other way round."""
    bench = make_bench(SEED=seed)
    second = bench.runtime.new_stream(0)
    for _ in range(20):
        bench.device.fill_(POISON)
        bench.runtime.batch_copies(bench.batch([(0, 0, 64)], CopyKind.ONE_D), bench.stream)
        wait(bench, second, bench.runtime.record(bench.stream))
        bench.runtime.batch_copies(bench.batch([(CUT, 0, 64)], CopyKind.ONE_D), second)
        bench.runtime.synchronize(second)
        bench.runtime.synchronize(bench.stream)
        assert np.array_equal(bench.device.numpy()[:64], bench.memory.view[CUT : CUT + 64])


def test_streams_that_wait_for_nothing_are_in_no_order(make_native: MakeNative) -> None:
    """Without the wait, the test above would fail for some seed: the stand-in does draw an order."""
    seen = set()
    for seed in range(1, 9):
        bench = Bench(make_native(SEED=seed))
        second = bench.runtime.new_stream(0)
        bench.runtime.batch_copies(bench.batch([(0, 0, 64)], CopyKind.ONE_D), bench.stream)
        bench.runtime.batch_copies(bench.batch([(CUT, 0, 64)], CopyKind.ONE_D), second)
        bench.runtime.synchronize(second)
        bench.runtime.synchronize(bench.stream)
        seen.add(bool(np.array_equal(bench.device.numpy()[:64], bench.memory.view[:64])))
        bench.memory.destroy()
    assert seen == {True, False}


@pytest.mark.parametrize("runs", [FEW, RUNS], ids=["one by one", "a batch"])
def test_a_refused_copy_is_a_device_error_with_its_code(
    make_bench: MakeBench, runs: list[tuple[int, int, int]]
) -> None:
    """I27: whatever the code, and the next call works."""
    bench = make_bench(COPY_FAILS_AT=1, ERROR=46)
    kind = CopyKind.BATCH if runs is RUNS else CopyKind.ONE_D
    with pytest.raises(DeviceError) as caught:
        bench.runtime.batch_copies(bench.batch(runs, kind), bench.stream)
    assert caught.value.rc == 46
    assert bench.machine.stand_in.count("last_error") == 0
    bench.runtime.batch_copies(bench.batch(runs, kind), bench.stream)
    bench.runtime.synchronize(bench.stream)
    assert not bench.device_is(bench.untouched())


def test_a_copy_that_fails_when_it_runs_is_seen_by_whoever_waits(tmp_path: Path, case: Case) -> None:
    """Accepted first; then the query, the wait and every later call report it."""
    machine = native_machine(case, tmp_path, COPY_FAILS_AT=1, COPY_FAILS_LATE=1, ERROR=700)
    bench = Bench(machine)
    bench.runtime.batch_copies(bench.batch(FEW, CopyKind.ONE_D), bench.stream)
    event = bench.runtime.record(bench.stream)
    for waiting in (event.synchronize, event.query, lambda: bench.runtime.synchronize(bench.stream)):
        with pytest.raises(DeviceError) as caught:
            waiting()
        assert caught.value.rc == 700


def test_device_memory_is_known_by_its_device(make_bench: MakeBench) -> None:
    """A tensor of another device, or of host memory, is not taken for one of this."""
    bench = make_bench()
    seen = bench.runtime.device_range(bench.device[64:], 0)
    assert (seen.start, seen.nbytes) == (bench.device.data_ptr() + 64, bench.device.numel() - 64)
    strangers: list[torch.Tensor] = [bench.runtime.allocate(64, 1), torch.zeros(64, dtype=torch.uint8)]
    for tensor in strangers:
        with pytest.raises(AddressError):
            bench.runtime.device_range(tensor, 0)


def test_a_kernel_reads_through_aliases_alone(tmp_path: Path, case: Case) -> None:
    """Rows at the aliases are the host's bytes; the CPU address faults where the two differ."""
    machine = native_machine(case, tmp_path, SEED=8)
    bench = Bench(machine)
    aliases = [bench.runtime.alias(segment.host, 0).start for segment in bench.memory.segments]
    _gather(bench, aliases)
    expected = bench.untouched()
    for n in range(len(aliases)):
        expected[n * 64 : n * 64 + 64] = bench.memory.view[n * CUT : n * CUT + 64]
    assert bench.device_is(expected)
    if machine.distinct:
        with pytest.raises(DeviceError) as caught:
            _gather(bench, [segment.host.start for segment in bench.memory.segments])
        assert caught.value.rc == 700


def test_a_kernel_faults_on_memory_that_nobody_registered(tmp_path: Path, case: Case) -> None:
    """A pageable address in a table for kernels is 700 when the kernel runs."""
    bench = Bench(native_machine(case, tmp_path))
    pageable = np.zeros(64, dtype=np.uint8)
    with pytest.raises(DeviceError) as caught:
        _gather(bench, [pageable.ctypes.data])
    assert caught.value.rc == 700


def _gather(bench: Bench, addresses: list[int]) -> None:
    table = (ctypes.c_void_p * len(addresses))(*addresses)
    code = bench.machine.stand_in.lib.standInGather(
        ctypes.c_void_p(bench.device.data_ptr()),
        table,
        ctypes.c_size_t(len(addresses)),
        ctypes.c_size_t(64),
        ctypes.c_void_p(bench.stream.cuda_stream),
    )
    assert code == 0
    bench.runtime.synchronize(bench.stream)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("device", [0, 1])
def test_a_default_stream_is_that_of_its_own_device(
    make_native: MakeNative, current: int, device: int
) -> None:
    """Its handle, 0, is every device's: copies, events and waits go to its device, whichever is current."""
    machine = make_native()
    runtime, stand_in = machine.runtime, machine.stand_in
    default, other = runtime.current_stream(device), runtime.new_stream(device)
    source, target = runtime.allocate(64, device), runtime.allocate(64, device)
    source.copy_(torch.arange(64, dtype=torch.uint8))
    target.fill_(POISON)
    targets, sources = np.array([target.data_ptr()]), np.array([source.data_ptr()])
    half = BatchCopies(targets=targets, sources=sources, sizes=np.array([32]), host_is_target=False)
    both_halves = StridedCopies(
        targets=targets,
        sources=sources,
        widths=32,
        heights=2,
        target_pitch=32,
        source_pitch=32,
        host_is_target=False,
    )
    with stand_in.on(current):
        runtime.wait_event(default, runtime.record(other))
        runtime.batch_copies(half, default)
        runtime.strided_copies(both_halves, default)
        runtime.record(default)
        event = runtime.record(default)
        assert [stand_in.queued(d) for d in (0, 1)] == [5 * (device == d) for d in (0, 1)]
        runtime.wait_event(other, event)
        runtime.wait_current(other, device)
        runtime.synchronize(other)
        assert stand_in.current_device() == current
    assert torch.equal(target, source)
