"""The self-test at start-up: pages of a pool through the exact path that was planned, every byte compared."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from hicache_core.device.base import DeviceRuntime
from hicache_core.errors import HiCacheError, ProbeError
from hicache_core.memory.host import HostBuffer
from hicache_core.memory.slots import Int64Array, page_numbers
from hicache_core.memory.tables import seen_from
from hicache_core.pool import HostPool
from hicache_core.spec import Alias
from hicache_core.transfer.engine import Engine
from hicache_core.transfer.pairs import page_pairs
from hicache_core.transfer.ticket import Ticket

Bytes = npt.NDArray[np.uint8]
_MOST_PAGES = 4
_MOST_BYTES = 64 << 20
"""What one pool's probe moves at most, though never less than two pages."""


@frozen(kw_only=True, eq=False)
class _Series:
    """One layer of one buffer on both sides, as rows of bytes.

    Args:
        label: for errors.
        host: uint8[pages, page_rows, row_bytes], a view of the host rows.
        device: uint8[rows, row_bytes], a view of the device rows.
    """

    label: str
    host: Bytes
    device: torch.Tensor

    def read_device(self, pages: Int64Array) -> Bytes:
        """uint8[n, page_rows, row_bytes], a copy."""
        rows = self.device.index_select(0, self._rows(pages))
        return rows.cpu().numpy().reshape(len(pages), *self.host.shape[1:])

    def write_device(self, pages: Int64Array, content: Bytes) -> None:
        """Write uint8[n, page_rows, row_bytes]."""
        rows = torch.from_numpy(content.reshape(-1, content.shape[-1])).to(self.device.device)
        self.device.index_copy_(0, self._rows(pages), rows)

    def _rows(self, pages: Int64Array) -> torch.Tensor:
        page_rows = self.host.shape[1]
        rows = (pages[:, None] * page_rows + np.arange(page_rows)).ravel()
        return torch.from_numpy(rows).to(self.device.device)


def _series(pool: HostPool) -> Iterator[_Series]:
    for buffer in pool.buffers:
        for number, layer in enumerate(pool.device_pool.layers[buffer.spec.name]):
            yield _Series(
                label=f"buffer '{buffer.spec.name}', layer {number}",
                host=_host_rows(buffer, number),
                device=layer.view(layer.shape[0], -1).view(torch.uint8),
            )


def _host_rows(buffer: HostBuffer, layer: int) -> Bytes:
    """The rows of one layer in the host memory, by the strides of the layout and by nothing else."""
    grid, strides = buffer.grid, buffer.strides
    return np.ndarray(
        shape=(grid.pages, grid.page_rows, grid.row_bytes),
        dtype=np.uint8,
        buffer=buffer.memory.view,
        offset=layer * strides.layer,
        strides=(strides.page, strides.row, 1),
    )


def _pattern(label: str, shape: tuple[int, ...]) -> Bytes:
    """Bytes that differ from row to row, and from those of any other label."""
    return np.random.default_rng(zlib.crc32(label.encode())).integers(0, 256, shape, dtype=np.uint8)


def _chosen(pool: HostPool) -> tuple[Int64Array, Int64Array]:
    """Host and device pages to move: of each registration one, and the last; device pages from the end."""
    starts = [table.host.first_pages for table in pool.tables]
    wanted = np.unique(np.concatenate([*starts, np.array([0, pool.pages - 1], dtype=np.int64)]))
    budget = max(_MOST_BYTES // max(pool.spec.page_bytes, 1), 2)
    count = min(len(wanted), _MOST_PAGES, budget, pool.device_pool.pages or 0)
    spread = np.linspace(0, len(wanted) - 1, count).astype(np.int64)
    last = (pool.device_pool.pages or 0) - 1
    # The last page first: a pool that ignores its indices, or swaps the sides, is seen.
    return wanted[spread], last - np.arange(count, dtype=np.int64)


def _beside(pages: Int64Array, count: int) -> Int64Array:
    """The neighbours of pages that are none of them."""
    both = np.concatenate([pages - 1, pages + 1])
    return np.setdiff1d(both[(both >= 0) & (both < count)], pages)


class _Probe:
    """The probe of one pool; :meth:`run` leaves all bytes as they were."""

    def __init__(self, pool: HostPool, engine: Engine, runtime: DeviceRuntime, device: int) -> None:
        self._pool = pool
        self._engine = engine
        self._runtime = runtime
        self._device_number = device
        self._series = list(_series(pool))
        self._host, self._device = _chosen(pool)
        self._host_beside = _beside(self._host, pool.pages)
        self._device_beside = _beside(self._device, pool.device_pool.pages or 0)

    def run(self) -> int:
        """Move the pages out and back; returns the bytes that were compared."""
        hosts = np.concatenate([self._host, self._host_beside])
        devices = np.concatenate([self._device, self._device_beside])
        kept = [(one.host[hosts].copy(), one.read_device(devices)) for one in self._series]
        try:
            self._there_and_back(kept)
        except BaseException:
            # An interrupt leaves transfers behind that run over these bytes.
            self._engine.drain()
            # A device that has failed may refuse this too; what failed first is what counts.
            with contextlib.suppress(RuntimeError):
                self._put_back(hosts, devices, kept)
            raise
        self._put_back(hosts, devices, kept)
        # Whoever comes next may be on another stream than the one on which the rows were put back.
        self._runtime.synchronize(self._runtime.current_stream(self._device_number))
        return 2 * len(self._host) * self._pool.spec.page_bytes

    def _put_back(self, hosts: Int64Array, devices: Int64Array, kept: list[tuple[Bytes, Bytes]]) -> None:
        for one, (host, device) in zip(self._series, kept, strict=True):
            one.host[hosts] = host
            one.write_device(devices, device)

    def _there_and_back(self, kept: list[tuple[Bytes, Bytes]]) -> None:
        moved = len(self._host)
        name = self._pool.spec.pool
        patterns = [_pattern(f"{name} {one.label}", (moved, *one.host.shape[1:])) for one in self._series]
        for one, pattern in zip(self._series, patterns, strict=True):
            one.write_device(self._device, pattern)
            one.host[self._host] = ~pattern
        self._move("backup", self._engine.backup)
        for one, pattern, (host, _) in zip(self._series, patterns, kept, strict=True):
            self._compare("backup", one, one.host[self._host], pattern)
            self._compare("backup, beside", one, one.host[self._host_beside], host[moved:])
            one.write_device(self._device, ~pattern)
        self._move("load", self._engine.load)
        for one, pattern, (_, device) in zip(self._series, patterns, kept, strict=True):
            self._compare("load", one, one.read_device(self._device), pattern)
            self._compare("load, beside", one, one.read_device(self._device_beside), device[moved:])

    def _move(self, step: str, move: Callable[..., Ticket]) -> None:
        pool, kernels = self._pool, self._runtime.kernels
        stores = kernels.host_stores if kernels is not None else 0
        pairs = page_pairs(
            self._host,
            self._device,
            pool.spec.index_space,
            host_pages=pool.pages,
            device_pages=pool.device_pool.pages or 0,
            who=f"probe of pool '{pool.spec.pool}'",
            host_is_target=step == "backup",
            numbers=page_numbers,
        )
        lanes = self._engine.lanes([pool.ways] if pool.ways is not None else [])
        try:
            move(
                {pool.spec.index_space.name: pairs}, after=None, on_acknowledged=lambda: None, lanes=lanes
            ).wait()
        except Exception as error:
            # A writer of a plugin may raise anything.
            got = str(error) if isinstance(error, HiCacheError) else f"{type(error).__name__}: {error}"
            raise self._failed(step, got, "a transfer without a device error") from error
        if step == "backup" and pool.staged and kernels is not None and kernels.host_stores > stores:
            got = f"{kernels.host_stores - stores} launches of kernels that store to host memory"
            raise self._failed(step, got, "copies issued by the host, as staged write-back declares")

    def _compare(self, step: str, one: _Series, found: Bytes, expected: Bytes) -> None:
        wrong = int(np.count_nonzero(found != expected))
        if wrong:
            got = f"{wrong} wrong bytes of {found.size} in {one.label}"
            raise self._failed(step, got, "every byte moved")

    def _failed(self, step: str, got: str, expected: str) -> ProbeError:
        return ProbeError(
            who=f"probe of pool '{self._pool.spec.pool}' ({self._pool.spec.family})",
            got=f"{step}: {got}",
            expected=expected,
            remedy="A declaration, a pointer table, a writer or the platform's profile is not true here.",
            pool=self._pool.spec.pool,
            step=step,
        )


def probe_aliases(pool: HostPool, runtime: DeviceRuntime, device: int) -> None:
    """Hold the platform's fact about aliases against what the runtime says of the pool's own memory.

    Raises:
        ProbeError: the profile has them equal to the CPU addresses, and one is not.
    """
    if runtime.platform.alias is not Alias.EQUAL:
        return
    for buffer in pool.buffers:
        for segment in buffer.memory.segments:
            seen = seen_from(segment, runtime, device)
            if seen.start != segment.host.start:
                raise ProbeError(
                    who=f"probe of pool '{pool.spec.pool}' ({pool.spec.family})",
                    got=f"alias {seen.start:#x} of registered memory at {segment.host.start:#x}",
                    expected=f"equal addresses, as the profile {runtime.platform.name} has it",
                    remedy="Use the profile of this machine: Platform.probe() says which.",
                    pool=pool.spec.pool,
                    step="alias",
                )


def probe_pool(pool: HostPool, engine: Engine, runtime: DeviceRuntime, device: int) -> int:
    """Prove that a pool moves as planned, before anything depends on it.

    Moves up to four pages there and back through the pool's own ways, on the engine's streams: bytes that
    differ from row to row, targets poisoned, neighbours compared. All bytes are as before at the end.

    Args:
        pool: a bound pool, none of whose pages is in use.
        engine: the engine that will move it.
        runtime: the runtime of the device.
        device: its ordinal.

    Returns:
        Bytes that were compared, neighbours not counted; 0 for a pool without ways or device pages.

    Raises:
        ProbeError: a byte is wrong, a transfer failed, a kernel stored where staged write-back was declared,
            or the platform's profile is not true here.
    """
    probe_aliases(pool, runtime, device)
    if pool.ways is None or not pool.device_pool.pages or not pool.pages:
        return 0
    return _Probe(pool, engine, runtime, device).run()
