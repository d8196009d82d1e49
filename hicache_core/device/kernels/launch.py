"""The host side of the Triton kernels: tables on the device, checks, and the arithmetic of a launch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import gcd
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from attrs import define, field, frozen

from hicache_core.device.base import (
    GatherUnits,
    HostStores,
    Int64Array,
    MoveRows,
    MoveTokens,
    Stream,
)
from hicache_core.errors import AddressError, IndexTypeError, PairingError
from hicache_core.memory.tables import KernelTable
from hicache_core.spec.layout import RowGrid

WIDEST_VECTOR = 16
"""Bytes of the widest load of a thread."""
LARGE_TILE, SMALL_TILE = 1024, 128
"""Vectors of a program: of four warps, and of one where the work is small."""
_FEW_VECTORS = 1 << 14
"""Up to so many vectors, small tiles spread them over more of the device."""
_MOST_PROGRAMS = 1 << 22
"""Of one launch: a grid of more threads than 32 bits count is refused by HIP."""
_MOST_ROW_BYTES = 1 << 30
"""So that the numbers of a program's lanes fit in 32 bits."""

Tile = tuple[int, int]
"""Bytes of a vector, vectors of a program."""


class Memory(Protocol):
    """What the kernels ask of their runtime; see :class:`~hicache_core.device.base.DeviceRuntime`."""

    def upload(self, values: Int64Array, device: int, stream: Stream) -> torch.Tensor:
        """``values`` as an int64 tensor of ``device``."""

    def new_stream(self, device: int) -> Stream:
        """A stream of ``device``."""

    def synchronize(self, stream: Stream) -> None:
        """Wait until everything that was submitted to ``stream`` has run."""


class Launcher(Protocol):
    """Starts the kernels of :mod:`~hicache_core.device.kernels.source`."""

    def device_of(self, stream: Stream) -> int:
        """The device of a stream."""

    def holds(self, tensor: torch.Tensor, device: int) -> bool:
        """Whether kernels of ``device`` may be given the address of ``tensor``."""

    def retain(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of ``tensor`` from being reused before what ``stream`` has now has run."""

    def launch(self, name: str, programs: int, numbers: tuple[int, ...], tile: Tile, stream: Stream) -> None:
        """Queue ``programs`` programs of the kernel of that name; DeviceError where it is refused."""


@frozen(kw_only=True, eq=False)
class _Uploaded:
    """A table on its device.

    Args:
        tensors: what the addresses among ``numbers`` belong to.
        numbers: what a kernel is told about the table.
        grid: its rows.
        alignment: what every address of a row is a multiple of, up to the widest vector.
        streams: handles of the streams that the tensors are retained for.
    """

    tensors: tuple[torch.Tensor, torch.Tensor]
    numbers: tuple[int, ...]
    grid: RowGrid
    alignment: int
    streams: set[int] = field(factory=set)


@define(kw_only=True)
class _Work:
    """The tables and numbers of a checked launch."""

    target: _Uploaded
    source: _Uploaded
    target_numbers: int
    source_numbers: int
    count: int


class TritonKernels:
    """The kernels in Triton, for the devices that a launcher serves.

    A table is uploaded at its first launch and kept as long as it lives. Nothing else is allocated, and no
    host work grows with the pages or tokens of a launch.

    Args:
        memory: the runtime of the devices.
        launcher: starts the kernels.
    """

    def __init__(self, memory: Memory, launcher: Launcher) -> None:
        self._memory = memory
        self._launcher = launcher
        self._tables: WeakKeyDictionary[KernelTable, _Uploaded] = WeakKeyDictionary()
        self._upload_streams: dict[int, Stream] = {}
        self._lock = threading.Lock()
        self._stores = HostStores()

    @property
    def host_stores(self) -> int:
        """Launches so far whose target is host memory."""
        return self._stores.count

    def gather_units(self, launch: GatherUnits, stream: Stream) -> None:
        """See :class:`~hicache_core.device.base.Kernels`.

        Raises:
            AddressError: the table or the target is of another device, or too small for the units.
            IndexTypeError: the pages are no contiguous int64 tensor of the device.
            DeviceError: the runtime refused the launch.
        """
        who, grid = "kernel gather_units", launch.source.grid
        device = self._device(who, stream, launch.source.device, launch.target.device)
        pages = self._numbers(who, launch.pages, device, stream)
        listed = launch.pages.numel() * grid.layers * grid.page_rows
        _check(who, "units", launch.first_unit, launch.units, listed)
        target = launch.target.at(0, launch.units * grid.row_bytes)
        if not launch.units:
            return
        source = self._table(launch.source, stream)
        vector = gcd(source.alignment, target)
        row_vectors = grid.row_bytes // vector
        self._stores.note(launch.target)
        tile = _tile(launch.units * row_vectors)
        most = max(_MOST_PROGRAMS * tile // row_vectors, 1)
        for done, units in _parts(launch.units, most):
            vectors = units * row_vectors
            numbers = (
                *source.numbers,
                grid.page_rows,
                row_vectors,
                pages,
                launch.first_unit + done,
                vectors,
                target + done * grid.row_bytes,
            )
            self._launcher.launch("gather_units", -(-vectors // tile), numbers, (vector, tile), stream)

    def move_rows(self, launch: MoveRows, stream: Stream) -> None:
        """See :class:`~hicache_core.device.base.Kernels`.

        Raises:
            AddressError: a table is of another device, or the two have not the same rows, or not the layers.
            IndexTypeError: the pages are no contiguous int64 tensors of the device.
            PairingError: unequal numbers of pages.
            DeviceError: the runtime refused the launch.
        """
        numbers = launch.target_pages, launch.source_pages
        work = self._work("kernel move_rows", launch, numbers, stream)
        if work is None:
            return
        grid, layers = work.target.grid, launch.layers
        vector = gcd(work.target.alignment, work.source.alignment)
        row_vectors = grid.row_bytes // vector
        page_vectors = grid.page_rows * row_vectors
        small = page_vectors <= LARGE_TILE // 2 or page_vectors * work.count * len(layers) <= _FEW_VECTORS
        tile = SMALL_TILE if small else LARGE_TILE
        page_tiles = -(-page_vectors // tile)
        page_programs = page_tiles * len(layers)
        for done, pages in _parts(work.count, max(_MOST_PROGRAMS // page_programs, 1)):
            given = (
                *work.target.numbers,
                *work.source.numbers,
                work.target_numbers + done * 8,
                work.source_numbers + done * 8,
                layers.start,
                layers.step,
                len(layers),
                page_tiles,
                page_vectors,
                row_vectors,
            )
            self._launcher.launch("move_rows", pages * page_programs, given, (vector, tile), stream)

    def move_tokens(self, launch: MoveTokens, stream: Stream) -> None:
        """See :class:`~hicache_core.device.base.Kernels`; as :meth:`move_rows`, one launch per span.

        A number that is negative skips its pair; one that is out of range is not looked for.
        """
        numbers = launch.target_tokens, launch.source_tokens
        work = self._work("kernel move_tokens", launch, numbers, stream)
        if work is None:
            return
        layers = launch.layers
        for span in launch.spans:
            ends = span.end(launch.row_tokens)
            _check("kernel move_tokens", "bytes of a row", span.offset, ends - span.offset, _row_bytes(work))
            vector = gcd(work.target.alignment, work.source.alignment, span.offset, span.stride, span.nbytes)
            span_vectors = span.nbytes // vector
            tile = _tile(work.count * span_vectors * len(layers))
            most = max((_MOST_PROGRAMS - len(layers)) * tile // (span_vectors * len(layers)), 1)
            for done, tokens in _parts(work.count, most):
                layer_tiles = -(-tokens * span_vectors // tile)
                given = (
                    *work.target.numbers,
                    work.target.grid.page_rows,
                    *work.source.numbers,
                    work.source.grid.page_rows,
                    work.target_numbers + done * 8,
                    work.source_numbers + done * 8,
                    launch.row_tokens,
                    layers.start,
                    layers.step,
                    layer_tiles,
                    tokens * span_vectors,
                    span.offset,
                    span.stride,
                    span_vectors,
                )
                programs = layer_tiles * len(layers)
                self._launcher.launch("move_tokens", programs, given, (vector, tile), stream)

    def _work(
        self,
        who: str,
        launch: MoveRows | MoveTokens,
        numbers: tuple[torch.Tensor, torch.Tensor],
        stream: Stream,
    ) -> _Work | None:
        """The checked launch, or None where nothing moves."""
        target, source, layers = launch.target, launch.source, launch.layers
        device = self._device(who, stream, target.device, source.device)
        to = self._numbers(who, numbers[0], device, stream)
        frm = self._numbers(who, numbers[1], device, stream)
        count = numbers[0].numel()
        if count != numbers[1].numel():
            raise PairingError(
                who=who,
                got=f"{count} target numbers and {numbers[1].numel()} source numbers",
                expected="one for one",
                remedy="Give both sides the same number.",
            )
        grids = target.grid, source.grid
        if grids[0].row_bytes != grids[1].row_bytes or grids[0].page_rows != grids[1].page_rows:
            raise _refused(who, f"rows of {grids[0]} and {grids[1]}", "the same rows on both sides")
        if not count or not layers:
            return None
        least, most = sorted((layers[0], layers[-1]))
        _check(who, "layers", least, most - least + 1, min(grids[0].layers, grids[1].layers))
        self._stores.note(target)
        return _Work(
            target=self._table(target, stream),
            source=self._table(source, stream),
            target_numbers=to,
            source_numbers=frm,
            count=count,
        )

    def _device(self, who: str, stream: Stream, *devices: int) -> int:
        """The device of the stream, which is that of all addresses."""
        device = self._launcher.device_of(stream)
        for other in devices:
            if other != device:
                raise _refused(
                    who, f"addresses of device {other} on a stream of {device}", f"those of device {device}"
                )
        return device

    def _numbers(self, who: str, tensor: torch.Tensor, device: int, stream: Stream) -> int:
        """The address of page or token numbers, which stay until the kernel has run."""
        whole = tensor.dtype is torch.int64 and tensor.dim() == 1 and tensor.is_contiguous()
        if not whole or not self._launcher.holds(tensor, device):
            raise IndexTypeError(
                who=who,
                got=f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}, strides {tensor.stride()}",
                expected=f"a contiguous int64[n] tensor of device {device}",
                remedy="Upload the numbers with the runtime of the launch.",
            )
        self._launcher.retain(tensor, stream)
        return tensor.data_ptr()

    def _table(self, table: KernelTable, stream: Stream) -> _Uploaded:
        found = self._tables.get(table)
        if found is None:
            with self._lock:
                found = self._tables.get(table)
                if found is None:
                    found = self._tables[table] = self._upload(table)
        key = hash(stream)
        if key not in found.streams:
            for tensor in found.tensors:
                self._launcher.retain(tensor, stream)
            found.streams.add(key)
        return found

    def _upload(self, table: KernelTable) -> _Uploaded:
        grid, device = table.grid, table.device
        if grid.row_bytes > _MOST_ROW_BYTES:
            raise _refused("pointer table", f"rows of {grid.row_bytes} bytes", f"at most {_MOST_ROW_BYTES}")
        # A stream of its own: what the launching stream waits for is not waited for here.
        upload_stream = self._upload_streams.get(device)
        if upload_stream is None:
            upload_stream = self._upload_streams[device] = self._memory.new_stream(device)
        bases, first_pages = (
            self._memory.upload(values, device, upload_stream)
            for values in (table.bases.ravel(), table.first_pages)
        )
        self._memory.synchronize(upload_stream)
        groups = len(table.first_pages)
        strides = table.page_stride, table.row_stride
        return _Uploaded(
            tensors=(bases, first_pages),
            numbers=(
                bases.data_ptr(),
                first_pages.data_ptr(),
                groups,
                1 << (groups - 1).bit_length() >> 1,
                grid.layers,
                *strides,
            ),
            grid=grid,
            alignment=gcd(WIDEST_VECTOR, grid.row_bytes, *strides, *table.bases.ravel().tolist()),
        )


def _row_bytes(work: _Work) -> int:
    return work.target.grid.row_bytes


def _tile(vectors: int) -> int:
    return SMALL_TILE if vectors <= _FEW_VECTORS else LARGE_TILE


def _parts(total: int, most: int) -> Iterator[tuple[int, int]]:
    """(done before, of this one) of launches of at most ``most`` each."""
    for done in range(0, total, most):
        yield done, min(most, total - done)


def _refused(who: str, got: str, expected: str) -> AddressError:
    return AddressError(
        who=who, got=got, expected=expected, remedy="Build the launch from the tables of one pool and device."
    )


def _check(who: str, what: str, first: int, count: int, limit: int) -> None:
    if first < 0 or count < 0 or first + count > limit:
        raise _refused(who, f"{what} {first} to {first + count}", f"at most {limit}")
