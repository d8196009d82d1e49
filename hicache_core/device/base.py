"""What the core asks of a device runtime. The engine speaks to this and to nothing below it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field, frozen
from attrs import validators as v

from hicache_core.errors import AddressError
from hicache_core.memory.addresses import HostRange, KernelRange, Provenance
from hicache_core.memory.tables import KernelTable
from hicache_core.spec.platform import Platform
from hicache_core.spec.pool import Span

Int64Array = npt.NDArray[np.int64]
Stream = Any
"""A runtime's own stream object; the engine only hands it on."""


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether everything before it has run; raises what failed there."""

    def synchronize(self) -> None:
        """Wait until everything before it has run; raises what failed there."""


@define(kw_only=True, eq=False)
class StridedCopies:
    """Copies of ``heights[i]`` runs of ``widths[i]`` bytes each, at a pitch on either side.

    Args:
        targets, sources: int64[n], address of the first run.
        widths, heights: int64[n], or one number for all.
        target_pitch, source_pitch: bytes from one run to the next, the same for all copies.
        host_is_target: whether the targets are host memory (else the sources are).
    """

    targets: Int64Array
    sources: Int64Array
    widths: Int64Array | int
    heights: Int64Array | int
    target_pitch: int
    source_pitch: int
    host_is_target: bool

    def __len__(self) -> int:
        return len(self.targets)

    def submit(self, runtime: DeviceRuntime, stream: Stream) -> None:
        """Hand the copies to a runtime."""
        runtime.strided_copies(self, stream)

    def smallest(self) -> int:
        """Bytes of the smallest copy."""
        sizes = self.widths * self.heights
        return sizes if isinstance(sizes, int) else int(np.minimum.reduce(sizes))

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """(target, source, width, height) of each copy."""
        widths, heights = _each(self.widths), _each(self.heights)
        return zip(self.targets.tolist(), self.sources.tolist(), widths, heights, strict=False)


def _each(values: Int64Array | int) -> Iterable[int]:
    return itertools.repeat(values) if isinstance(values, int) else values.tolist()


@define(kw_only=True, eq=False)
class BatchCopies:
    """Plain copies that may run in any order.

    Args:
        targets, sources, sizes: int64[n], addresses and bytes.
        host_is_target: whether the targets are host memory (else the sources are).
    """

    targets: Int64Array
    sources: Int64Array
    sizes: Int64Array
    host_is_target: bool

    def __len__(self) -> int:
        return len(self.targets)

    def submit(self, runtime: DeviceRuntime, stream: Stream) -> None:
        """Hand the copies to a runtime."""
        runtime.batch_copies(self, stream)


def _dereferenced(instance: object, attribute: Any, value: Any) -> None:
    """A table of addresses that a device sees: pageable memory is for runtime copies alone."""
    v.instance_of(KernelTable)(instance, attribute, value)
    if getattr(value, "provenance", None) is Provenance.PAGEABLE:
        raise AddressError(
            who=f"{type(instance).__name__}.{attribute.name}",
            got="addresses of pageable host memory",
            expected="addresses that the device sees",
            remedy="Register the memory, or move it by runtime copies.",
        )


@frozen(kw_only=True, eq=False)
class GatherUnits:
    """One launch of the relayout kernel: rows of all layers, in the order of a page_first host page.

    Unit u is row ``(u // layers) % page_rows`` of layer ``u % layers`` of page
    ``pages[u // (layers * page_rows)]``.

    Args:
        source: the device rows.
        pages: int64[n], device page numbers, a tensor of the device.
        first_unit, units: the run of units to gather.
        target: where the units go, one after another, in device memory.
    """

    source: KernelTable = field(validator=_dereferenced)
    pages: torch.Tensor
    first_unit: int
    units: int
    target: KernelRange


@frozen(kw_only=True, eq=False)
class MoveRows:
    """One launch of the row kernel: pages of some layers from one table to another.

    Args:
        target, source: tables of the launching device; one of them covers host memory.
        target_pages, source_pages: int64[n], page numbers, tensors of the device.
        layers: the layers that move.
    """

    target: KernelTable = field(validator=_dereferenced)
    source: KernelTable = field(validator=_dereferenced)
    target_pages: torch.Tensor
    source_pages: torch.Tensor
    layers: range = field(factory=lambda: range(0))


@frozen(kw_only=True, eq=False)
class MoveTokens:
    """One launch of the token kernel: single tokens of some layers from one table to another.

    Token t is token ``t % row_tokens`` of row ``t // row_tokens``, and row r is row ``r % page_rows`` of page
    ``r // page_rows``. A pair of which either number is negative is skipped.

    Args:
        target, source: tables of the launching device; one of them covers host memory.
        target_tokens, source_tokens: int64[n], contiguous token numbers, tensors of the device.
        layers: the layers that move.
        spans: where one token lies in a row, the same on both sides.
        row_tokens: tokens of one row.
    """

    target: KernelTable = field(validator=_dereferenced)
    source: KernelTable = field(validator=_dereferenced)
    target_tokens: torch.Tensor
    source_tokens: torch.Tensor
    layers: range
    spans: tuple[Span, ...]
    row_tokens: int


class HostStores:
    """Counts launches whose target is host memory, from whatever thread they come."""

    def __init__(self) -> None:
        self.count = 0
        """How many there were."""
        self._lock = threading.Lock()

    def note(self, target: KernelTable | KernelRange) -> None:
        """Count a launch that writes to ``target``, unless that is device memory."""
        if target.provenance is not Provenance.DEVICE_MEMORY:
            with self._lock:
                self.count += 1


class Kernels(Protocol):
    """The kernels of a runtime. They take tables and page or token numbers, never tensors of a pool."""

    @property
    def host_stores(self) -> int:
        """Launches so far whose target is host memory; a launch of nothing is none."""

    def gather_units(self, launch: GatherUnits, stream: Stream) -> None:
        """Gather rows of the device into a run of device memory."""

    def move_rows(self, launch: MoveRows, stream: Stream) -> None:
        """Move pages between host and device through pointer tables."""

    def move_tokens(self, launch: MoveTokens, stream: Stream) -> None:
        """Move single tokens between host and device through pointer tables."""


class DeviceRuntime(Protocol):
    """Memory, streams and copies of the devices of one kind."""

    @property
    def platform(self) -> Platform:
        """The facts about the devices."""

    @property
    def kernels(self) -> Kernels | None:
        """The kernels, or None where this runtime has none."""

    @property
    def kernels_reason(self) -> str:
        """Why there are no kernels; empty where there are."""

    def register(self, host: HostRange) -> None:
        """Make host memory visible to the devices; RegistrationError with the return code where refused.

        Where the platform registers nothing, the framework's pinning takes its place.
        """

    def unregister(self, host: HostRange) -> None:
        """Undo :meth:`register` of exactly this range."""

    def alias(self, host: HostRange, device: int) -> KernelRange:
        """The addresses at which ``device`` sees a registered range."""

    def allocate(self, nbytes: int, device: int) -> torch.Tensor:
        """``uint8[nbytes]`` in the memory of ``device``, its content undefined."""

    def device_range(self, tensor: torch.Tensor, device: int) -> KernelRange:
        """The addresses of a tensor's storage from its first element; refuses a tensor of another device."""

    def allocation_of(self, tensor: torch.Tensor) -> int:
        """A number that two tensors share only where one copy may run over both."""

    def upload(self, values: Int64Array, device: int, stream: Stream) -> torch.Tensor:
        """``values`` as an int64 tensor of ``device``, copied in the order of ``stream``."""

    def new_stream(self, device: int) -> Stream:
        """A stream of ``device``."""

    def current_stream(self, device: int) -> Stream:
        """The stream on which the caller's own work of ``device`` runs."""

    def record(self, stream: Stream) -> Event:
        """An event after everything that was submitted to ``stream``."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let what is submitted to ``stream`` from now on run after ``event``."""

    def wait_current(self, stream: Stream, device: int) -> None:
        """Let what is submitted to ``stream`` from now on run after all work of the caller's own so far."""

    def synchronize(self, stream: Stream) -> None:
        """Wait until everything that was submitted to ``stream`` has run."""

    def strided_copies(self, copies: StridedCopies, stream: Stream) -> None:
        """Submit strided copies; the descriptors are read before the call returns."""

    def batch_copies(self, copies: BatchCopies, stream: Stream) -> None:
        """Submit plain copies; the descriptors are read before the call returns."""
