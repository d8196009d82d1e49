"""What mypy must refuse: one kind of address where the other is needed. Never run.

Each marked line is an error. A mark that is not needed is one too (``warn_unused_ignores``), and
``test_tables.py`` takes the marks away and counts the errors.
"""

from __future__ import annotations

import torch

from hicache_core.device.base import DeviceRuntime, GatherUnits, MoveRows
from hicache_core.memory.addresses import HostRange, KernelRange
from hicache_core.memory.ledger import Booking
from hicache_core.memory.registration import Registrations
from hicache_core.memory.tables import BufferTables, HostTable, KernelTable, Segment, host_kernel_table
from hicache_core.spec.layout import RowGrid, Strides
from hicache_core.transfer.plan import Planner


def kernels_take_no_host_table(host: HostTable, device: KernelTable, pages: torch.Tensor) -> None:
    """A kernel is given what its device sees."""
    MoveRows(target=host, source=device, target_pages=pages, source_pages=pages)  # type: ignore[arg-type]
    MoveRows(target=device, source=host, target_pages=pages, source_pages=pages)  # type: ignore[arg-type]


def gathering_takes_no_host_range(
    host: HostTable, device: KernelTable, pages: torch.Tensor, ring: KernelRange, cpu: HostRange
) -> None:
    """The relayout kernel reads and writes memory of its device."""
    GatherUnits(source=host, pages=pages, first_unit=0, units=1, target=ring)  # type: ignore[arg-type]
    GatherUnits(source=device, pages=pages, first_unit=0, units=1, target=cpu)  # type: ignore[arg-type]


def registration_takes_no_kernel_range(runtime: DeviceRuntime, seen: KernelRange) -> None:
    """Registering, unregistering and looking up take CPU addresses."""
    runtime.register(seen)  # type: ignore[arg-type]
    runtime.unregister(seen)  # type: ignore[arg-type]
    runtime.alias(seen, 0)  # type: ignore[arg-type]
    Segment(offset=0, host=seen)  # type: ignore[arg-type]


def books_and_registrations_hold_cpu_addresses(
    booking: Booking, registrations: Registrations, cpu: HostRange, seen: KernelRange
) -> None:
    """What is booked, remembered and unregistered is where the CPU sees it."""
    booking.place(seen)  # type: ignore[arg-type]
    registrations.add(seen)  # type: ignore[arg-type]
    cpu.overlaps(seen)  # type: ignore[arg-type]


def a_table_for_kernels_takes_what_the_device_sees(
    segments: list[Segment], cpu: list[HostRange], grid: RowGrid, strides: Strides
) -> None:
    """The CPU addresses of the segments are no aliases."""
    host_kernel_table(segments, cpu, grid, strides, 0)  # type: ignore[arg-type]


def a_set_of_tables_keeps_its_sides(host: HostTable, kernel: KernelTable) -> None:
    """CPU addresses and addresses of the device have places of their own."""
    BufferTables(host=kernel, host_kernel=kernel, device=kernel)  # type: ignore[arg-type]
    BufferTables(host=host, host_kernel=host, device=kernel)  # type: ignore[arg-type]
    Planner(host, host, host_is_target=True)  # type: ignore[arg-type]


def what_is_right_is_accepted(host: HostTable, kernel: KernelTable, pages: torch.Tensor) -> None:
    """No mark here: these are the right uses."""
    MoveRows(target=kernel, source=kernel, target_pages=pages, source_pages=pages)
    BufferTables(host=host, host_kernel=kernel, device=kernel)
    Planner(host, kernel, host_is_target=True)
    Planner(kernel, kernel, host_is_target=False)
