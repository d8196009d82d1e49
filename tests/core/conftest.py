"""Fixtures of the core's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hicache_core.controller import ControllerConfig
from hicache_core.device.base import BatchCopies, MoveRows, StridedCopies
from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.device.sim.streams import SimStream
from hicache_core.errors import DeviceFault
from hicache_core.memory.addresses import Provenance
from hicache_core.memory.host import HostMemory
from hicache_core.memory.options import MemoryOptions
from hicache_core.memory.tables import KernelTable, host_kernel_table, host_table
from hicache_core.spec import RowGrid, layout_named, platform_named
from hicache_core.testing.oracle import distinct_bytes
from hicache_core.testing.rigs import DeviceOptions, Rig
from hicache_core.testing.stand_ins import pool_spec
from tests.stand_ins.machine import CASES, Case, NativeMachine, native_machine

MakeRig = Callable[..., Rig]
ROW = 64
PAGES = 128
GRID = RowGrid(pages=PAGES, layers=1, page_rows=1, row_bytes=ROW)


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """Makes rigs and closes them: kernel + page_first on cpu-sim, 8 host pages, 3 layers of 48-byte rows."""
    made: list[Rig] = []

    def make(
        *specs: Any,
        platform: str = "cpu-sim",
        pair: tuple[str, str] = ("kernel", "page_first"),
        seed: int = 0,
        faults: Faults | None = None,
        options: DeviceOptions | None = None,
        devices: int = 1,
        device: int = 0,
        **config: Any,
    ) -> Rig:
        limit = config.pop("max_registration_bytes", None)
        if limit is not None:
            config["memory"] = MemoryOptions(max_registration_bytes=limit)
        # Faults are counted from the first call on, and a probe would be the first to meet them.
        chosen = {"host_pages": 8, "ring_bytes": 4096, "probe": faults is None, **config}
        rig = Rig(
            list(specs) or [pool_spec(48)],
            ControllerConfig(io_backend=pair[0], layout=pair[1], **chosen),
            SimRuntime(platform_named(platform), devices=devices, seed=seed, faults=faults),
            options=options,
            device=device,
        )
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.controller.close()


class Machine:
    """A simulator with 128 host rows of 64 bytes in two registrations, and as many device rows."""

    def __init__(
        self, platform: str = "cpu-sim", *, devices: int = 1, seed: int = 0, faults: Faults | None = None
    ):
        self.runtime = SimRuntime(platform_named(platform), devices=devices, seed=seed, faults=faults)
        self.memory = HostMemory(
            GRID.nbytes, ROW, self.runtime, who="test", options=MemoryOptions(max_registration_bytes=4096)
        )
        self.memory.view[...] = distinct_bytes("host", nbytes=GRID.nbytes)
        self.strides = layout_named("page_first").strides(GRID)
        self.tensor = self.runtime.allocate(GRID.nbytes, 0)
        self.tensor.numpy()[...] = distinct_bytes("device", nbytes=GRID.nbytes)
        self.stream = self.runtime.new_stream(0)

    def device_table(self, device: int = 0, tensor: torch.Tensor | None = None) -> KernelTable:
        """The device rows, as ``device`` is told of them."""
        start = (self.tensor if tensor is None else tensor).data_ptr()
        return self.table_at([[start]], [0], device, Provenance.DEVICE_MEMORY)

    def alias_table(self, device: int = 0) -> KernelTable:
        """The host rows, where ``device`` sees them."""
        segments = self.memory.segments
        aliases = [self.runtime.alias(segment.host, device) for segment in segments]
        return host_kernel_table(segments, aliases, GRID, self.strides, device)

    def cpu_table_as_kernel_table(self) -> KernelTable:
        """The mistake: CPU addresses in a table for kernels."""
        table = host_table(self.memory.segments, GRID, self.strides)
        return self.table_at(table.bases, table.first_pages, 0, Provenance.ALIAS)

    def table_at(self, bases: Any, first_pages: Any, device: int, provenance: Provenance) -> KernelTable:
        """Rows at addresses that a test makes up."""
        return KernelTable(
            bases=bases,
            homes=np.zeros(np.shape(bases), dtype=np.int64),
            first_pages=first_pages,
            grid=GRID,
            page_stride=ROW,
            row_stride=ROW,
            device=device,
            provenance=provenance,
        )

    def load(
        self, source: KernelTable, pages: torch.Tensor, *, stream: SimStream | None = None, device: int = 0
    ) -> None:
        """Queue the row kernel from host rows to device rows of the same numbers."""
        kernels = self.runtime.kernels
        assert kernels is not None
        target = self.device_table(device)
        launch = MoveRows(
            target=target, source=source, target_pages=pages, source_pages=pages, layers=range(1)
        )
        kernels.move_rows(launch, stream or self.stream)

    def batch(self, target: int, source: int, nbytes: int) -> None:
        """Submit one plain copy to the host."""
        self.runtime.batch_copies(
            BatchCopies(
                targets=one_number(target),
                sources=one_number(source),
                sizes=one_number(nbytes),
                host_is_target=True,
            ),
            self.stream,
        )

    def strided(self, target: int, source: int, width: int, height: int = 1) -> None:
        """Submit one strided copy to the host, rows of ``width`` bytes at a pitch of 64."""
        self.runtime.strided_copies(
            StridedCopies(
                targets=one_number(target),
                sources=one_number(source),
                widths=one_number(width),
                heights=one_number(height),
                target_pitch=ROW,
                source_pitch=ROW,
                host_is_target=True,
            ),
            self.stream,
        )

    def fault(self, work: Callable[[], None]) -> DeviceFault:
        """Run some work to its end; the fault that it dies of."""
        with pytest.raises(DeviceFault) as caught:
            self._run(work)
        assert caught.value.code == "device-fault"
        return caught.value

    def _run(self, work: Callable[[], None]) -> None:
        work()
        self.runtime.synchronize(self.stream)


def one_number(value: int) -> np.ndarray:
    """The number as int64[1]."""
    return np.array([value], dtype=np.int64)


@pytest.fixture
def machine() -> Iterator[Callable[..., Machine]]:
    """Makes machines and destroys their host memory."""
    made: list[Machine] = []

    def make(*args: object, **options: object) -> Machine:
        made.append(Machine(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.memory.destroy()


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    """A machine of each vendor, with aliases that are the CPU addresses and with others."""
    chosen: Case = request.param
    return chosen


@pytest.fixture
def make_native(tmp_path: Path, case: Case) -> Iterator[Callable[..., NativeMachine]]:
    """Makes machines of the stand-in; none is left with an error that the next call would find.

    Nor was memory unregistered of which a copy was still to come.
    """
    made: list[NativeMachine] = []

    def make(**settings: int) -> NativeMachine:
        made.append(native_machine(case, tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        assert one.stand_in.count("last_error") == 0
        assert one.stand_in.count("unregistered_in_use") == 0
