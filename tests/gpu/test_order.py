"""Streams, events and registration on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from hicache_core.controller import ControllerConfig
from hicache_core.device.cuda import CudaRuntime
from hicache_core.errors import DeviceError, RegistrationError
from hicache_core.memory.host import HostMemory
from hicache_core.memory.options import MemoryOptions
from hicache_core.testing.oracle import POISON
from hicache_core.testing.rigs import DeviceOptions, Rig
from hicache_core.testing.stand_ins import pool_spec

CONFIG = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=64)
SLEEP_CYCLES = 1_000_000_000
"""About half a second."""


def large_rig(cuda: CudaRuntime) -> Rig[CudaRuntime]:
    """Sixteen layers of 64 KiB token rows."""
    spec = pool_spec(65536, page_slots=1, layer_ids=range(16))
    rig = Rig([spec], CONFIG, cuda, options=DeviceOptions(pages=64, slab=True))
    # The first launch of a kernel loads it, which may take longer than a test's writer sleeps.
    rig.poison_device()
    torch.cuda.synchronize()
    return rig


def test_a_backup_sees_what_the_current_stream_wrote_before_it(cuda: CudaRuntime) -> None:
    """The writer is still asleep when the backup is submitted, and its bytes arrive."""
    with large_rig(cuda) as rig:
        host = rig.allocate(8)
        rig.poison_host()
        writer = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(writer):
            torch.cuda._sleep(SLEEP_CYCLES)
            for layer in rig.device_rows["kv"]["b0"].tensors:
                layer.fill_(7)
            ticket = rig.controller.backup(rig.slots(host), rig.slots(range(8)))
        assert not ticket.poll()
        ticket.wait()
        moved = rig.host_bytes("kv", "b0").reshape(64, -1)
        assert (moved[host] == 7).all()
        assert (moved[[p for p in range(64) if p not in host]] == POISON).all()


def test_a_backup_waits_for_the_event_that_it_is_given(cuda: CudaRuntime) -> None:
    """A writer on another stream than the current one is awaited through its event."""
    with large_rig(cuda) as rig:
        host = rig.allocate(8)
        writer = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(writer):
            torch.cuda._sleep(SLEEP_CYCLES)
            for layer in rig.device_rows["kv"]["b0"].tensors:
                layer.fill_(9)
        ticket = rig.controller.backup(rig.slots(host), rig.slots(range(8)), after=cuda.record(writer))
        ticket.wait()
        assert (rig.host_bytes("kv", "b0").reshape(64, -1)[host] == 9).all()


def test_a_load_waits_for_readers_and_marks_its_layers(cuda: CudaRuntime) -> None:
    """A slow reader keeps its bytes, and a stream that waits for a layer's mark sees the new ones."""
    with large_rig(cuda) as rig:
        host = rig.allocate(32)
        layers = rig.device_rows["kv"]["b0"].tensors
        rig.host_bytes("kv", "b0")[...] = 5
        for layer in layers:
            layer.fill_(3)
        reader = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(reader):
            torch.cuda._sleep(SLEEP_CYCLES)
            old = [layer[:32].clone() for layer in layers]
            ticket = rig.controller.load(rig.slots(host), rig.slots(range(32)))
        compute = torch.cuda.Stream()
        seen = []
        for number, layer in enumerate(layers):
            ticket.wait_layer(cuda, compute, number)
            with torch.cuda.stream(compute):
                seen.append(layer[:32].clone())
        torch.cuda.synchronize()
        ticket.wait()
        assert all(bool((copy == 3).all()) for copy in old)
        assert all(bool((copy == 5).all()) for copy in seen)
        assert all(bool((layer[32:] == 3).all()) for layer in layers)


def test_the_first_layer_lands_before_the_last(cuda: CudaRuntime) -> None:
    """Marks of a large load fire one after another, in the order of the layers."""
    with large_rig(cuda) as rig:
        host = rig.allocate(64)
        ticket = rig.controller.load(rig.slots(host), rig.slots(range(64)))
        ticket.mark(0).synchronize()
        first_of_all = not ticket.mark(15).query()
        ticket.wait()
        assert first_of_all
        assert ticket.mark(15).query()


def test_a_second_tensor_of_another_dtype_in_the_way_is_untouched(cuda: CudaRuntime) -> None:
    """Layers allocated one by one, with other tensors between them: neither is written."""
    spec = pool_spec(1024, 512, page_slots=16, layer_ids=range(6))
    options = DeviceOptions(pages=8, slab=False, dtype=torch.float32)
    others = [torch.full((4096,), 2.5, dtype=torch.float64, device="cuda") for _ in range(4)]
    with Rig([spec], CONFIG, cuda, options=options) as rig:
        others += [torch.full((777,), 1.5, dtype=torch.float16, device="cuda") for _ in range(4)]
        host = rig.allocate(8)
        rig.controller.backup(rig.slots(host), rig.slots(range(8))).wait()
        rig.poison_device()
        torch.cuda.synchronize()
        rig.controller.load(rig.slots(host), rig.slots(range(8))).wait()
        assert all(bool((t == (2.5 if t.dtype == torch.float64 else 1.5)).all()) for t in others)


def test_a_registration_is_made_once_and_undone_once(cuda: CudaRuntime) -> None:
    """712 for a second registration, 1 for a second undoing; neither stays behind as the next error."""
    memory = HostMemory(1 << 20, 4096, cuda, who="test")
    with pytest.raises(RegistrationError) as caught:
        cuda.register(memory.range)
    assert caught.value.rc == 712
    alias = cuda.alias(memory.range, 0)
    assert alias.nbytes == memory.range.nbytes
    memory.destroy()
    memory.destroy()
    with pytest.raises(RegistrationError):
        cuda.unregister(memory.range)
    with pytest.raises(DeviceError):
        cuda.alias(memory.range, 0)
    assert float(torch.ones(4, device="cuda").sum()) == 4.0


def test_nothing_is_registered_while_a_graph_is_captured(cuda: CudaRuntime) -> None:
    """The refusal comes from us, before the runtime could spoil the capture."""
    memory = HostMemory(1 << 20, 4096, cuda, who="test")
    part = memory.range
    cuda.unregister(part)
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(RegistrationError):
            cuda.register(part)
    graph.replay()
    torch.cuda.synchronize()
    cuda.register(part)
    memory.destroy()
    assert float(x.sum()) == 4.0


def test_a_copy_across_two_registrations_is_refused_and_a_plan_makes_none(cuda: CudaRuntime) -> None:
    """The bare call fails with 1; a backup of the same pages is split there and works."""
    spec = pool_spec(65536, page_slots=1, layer_ids=range(2))
    config = ControllerConfig(
        io_backend="direct",
        layout="page_first_direct",
        host_pages=8,
        memory=MemoryOptions(max_registration_bytes=4 * 131072),
    )
    with Rig([spec], config, cuda, options=DeviceOptions(pages=8, slab=True)) as rig:
        host = rig.allocate(8)
        tables = rig.controller.group.anchor.tables[0].host
        assert len(tables.first_pages) == 2
        across = cuda.new_stream(0)
        start = int(tables.bases[0, 0]) + 3 * tables.page_stride
        device = rig.device_rows["kv"]["b0"].tensors[0].data_ptr()
        with pytest.raises(DeviceError) as caught:
            cuda._rt.check(
                cuda._rt.copy_2d(start, tables.page_stride, device, 65536, 65536, 2, 4, across.cuda_stream),
                "Memcpy2DAsync across two registrations",
            )
        assert caught.value.rc == 1
        rig.controller.backup(rig.slots(host), rig.slots(range(8))).wait()
        assert rig.controller.group.allocators["full"].free_pages == 0
