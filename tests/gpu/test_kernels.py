"""What kernels on a CUDA device do beyond moving bytes: whom they write to, wait for and keep alive."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from attrs import evolve

from hicache_core.controller import ControllerConfig
from hicache_core.device.base import Kernels, MoveRows
from hicache_core.device.cuda import CudaRuntime
from hicache_core.errors import AddressError, IndexTypeError
from hicache_core.memory.options import MemoryOptions
from hicache_core.spec import Span
from hicache_core.testing.rigs import DeviceOptions, Rig, differences
from hicache_core.testing.stand_ins import pool_spec

SLEEP_CYCLES = 1_000_000_000
"""About half a second."""
ROWS = pool_spec(1024, 512, page_slots=16, layer_ids=range(5))


def rig_of(runtime: CudaRuntime, layout: str) -> Rig[CudaRuntime]:
    """Two buffers, host rows in several registrations."""
    config = ControllerConfig(
        io_backend="kernel",
        layout=layout,
        host_pages=24,
        memory=MemoryOptions(max_registration_bytes=5 * 16 * 1024 * 5),
    )
    return Rig([ROWS], config, runtime, options=DeviceOptions(pages=20, slab=True))


def kernels_of(runtime: CudaRuntime) -> Kernels:
    """The kernels, which are there."""
    assert runtime.kernels is not None
    return runtime.kernels


@pytest.mark.parametrize(("layout", "stores"), [("layer_first", 2), ("page_first", 0)])
def test_a_staged_backup_stores_nothing_to_the_host(launching: CudaRuntime, layout: str, stores: int) -> None:
    """I43: one launch a buffer for a backup by kernel, and no other transfer counts."""
    with rig_of(launching, layout) as rig:
        host, kernels = rig.allocate(6), kernels_of(launching)
        before = kernels.host_stores
        rig.controller.backup(rig.slots(host), rig.slots(range(6))).wait()
        rig.controller.load(rig.slots(host), rig.slots(range(6))).wait()
        assert kernels.host_stores - before == stores


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_shuffled_pages_from_another_thread(launching: CudaRuntime, layout: str) -> None:
    """A thread that has used no device yet launches as well as any."""
    draw = random.Random(1)
    with rig_of(launching, layout) as rig:
        every = rig.allocate(24)
        for count in (1, 7, 20):
            host, device = draw.sample(every, count), draw.sample(range(20), count)
            expected = rig.after_backup(rig.snapshot(), list(zip(host, device, strict=True)))
            slots = rig.slots(host), rig.slots(device)
            thread = threading.Thread(target=lambda slots=slots: rig.controller.backup(*slots).wait())
            thread.start()
            thread.join()
            assert not differences(rig.snapshot(), expected)


def test_a_launch_waits_for_nothing_on_the_host(launching: CudaRuntime) -> None:
    """The numbers are uploaded in the order of the stream; the call returns while a writer sleeps."""
    with rig_of(launching, "layer_first") as rig:
        host = rig.allocate(8)
        layers = [layer for buffer in ("b0", "b1") for layer in rig.device_rows["kv"][buffer].tensors]
        # Torch loads its kernel at the first call, for which the device has to be idle.
        layers[0].fill_(0)
        rig.controller.backup(rig.slots(host), rig.slots(range(8))).wait()
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        for layer in layers:
            layer.fill_(7)
        ticket = rig.controller.backup(rig.slots(host), rig.slots(range(8)))
        assert not ticket.poll()
        ticket.wait()
        wide = rig.host_bytes("kv", "b0").reshape(5, 24, -1)
        assert (wide[:, host] == 7).all()


@pytest.mark.parametrize("to_host", [True, False], ids=["backup", "load"])
def test_token_numbers_may_be_dropped_while_their_kernel_waits(launching: CudaRuntime, to_host: bool) -> None:
    """Their memory is not given to others before the kernel has read it; pairs with padding are skipped."""
    with rig_of(launching, "page_first") as rig:
        rig.allocate(24)
        rig.fill_host()
        copies = rig.controller.group.anchor.token_copies()
        draw = random.Random(2)
        pairs = list(
            zip(
                draw.sample(range(copies.host_tokens), 200),
                draw.sample(range(copies.device_tokens), 200),
                strict=True,
            )
        )
        padded = [*pairs, (-1, 3), (5, -1), (-9, -9)]
        draw.shuffle(padded)
        expected = rig.after_tokens(rig.snapshot(), pairs, 2, to_host=to_host)
        stream = launching.new_stream(0)
        host, device = (torch.tensor(side, device="cuda") for side in zip(*padded, strict=True))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        (copies.backup_uploaded if to_host else copies.load_uploaded)(host, device, 2, stream)
        assert not launching.record(stream).query()
        del host, device
        # Of the size that was freed, on the stream that it was freed on.
        scratch = [torch.full((203,), 1, dtype=torch.int64, device="cuda") for _ in range(64)]
        launching.synchronize(stream)
        assert not differences(rig.snapshot(), expected)
        assert len(scratch) == 64


def test_narrow_spans_move_by_kernel(launching: CudaRuntime) -> None:
    """Spans of 4 and of 7 bytes, which no wide vector fits."""
    scaled = evolve(
        ROWS.buffers[0],
        row_bytes=8448,
        row_tokens=64,
        spans=[Span(offset=0, stride=128, nbytes=128), Span(offset=8192, stride=4, nbytes=4)],
    )
    odd = evolve(ROWS.buffers[1], row_bytes=1024, row_tokens=64, spans=[Span(offset=3, stride=11, nbytes=7)])
    spec = evolve(ROWS, buffers=[scaled, odd])
    config = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=6)
    with Rig([spec], config, launching, options=DeviceOptions(pages=4, slab=True)) as rig:
        rig.allocate(6)
        rig.fill_host()
        copies = rig.controller.group.anchor.token_copies()
        pairs = [(7 * number + 1, 3 * number) for number in range(300)]
        expected = rig.after_tokens(rig.snapshot(), pairs, None, to_host=False)
        stream = launching.new_stream(0)
        host, device = (np.array(side, dtype=np.int64) for side in zip(*pairs, strict=True))
        copies.load(host, device, None, stream)
        launching.synchronize(stream)
        assert not differences(rig.snapshot(), expected)


def test_a_launch_for_another_device_or_from_the_host_is_refused(launching: CudaRuntime) -> None:
    """The table of a device is for its own streams, and numbers are tensors of the device."""
    with rig_of(launching, "layer_first") as rig:
        tables = rig.controller.group.anchor.tables[0]
        pages = torch.arange(2, device="cuda")
        right = MoveRows(
            target=tables.host_kernel,
            source=tables.device,
            target_pages=pages,
            source_pages=pages,
            layers=range(1),
        )
        kernels, stream = kernels_of(launching), launching.new_stream(0)
        before = kernels.host_stores
        with pytest.raises(AddressError):
            kernels.move_rows(evolve(right, source=evolve(tables.device, device=1)), stream)
        with pytest.raises(IndexTypeError):
            kernels.move_rows(evolve(right, source_pages=torch.arange(2)), stream)
        assert kernels.host_stores == before
        kernels.move_rows(right, stream)
        launching.synchronize(stream)
        assert kernels.host_stores == before + 1
