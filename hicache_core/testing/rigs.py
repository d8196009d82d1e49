"""Rigs: a controller over a runtime, with device rows of distinct bytes and guard pages around them.

The device memory of a layer is a grid of rows. Its first and last pages are guards that no tensor of the pool
covers, and each row may be followed by a gap, so that a transfer that reaches past its rows is seen::

    [guard page][page 0][page 1]...[page n-1][guard page]      page: page_rows rows
    row: [row_bytes][gap_bytes]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen
from attrs import validators as v

from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.base import DeviceRuntime
from hicache_core.device_pool import DevicePool
from hicache_core.memory.ledger import Ledger
from hicache_core.plugins import PluginRegistry
from hicache_core.pool import HostPool
from hicache_core.spec import BufferSpec, PoolSpec
from hicache_core.testing.oracle import (
    POISON,
    Bytes,
    HostShape,
    PagePair,
    TokenShape,
    copy_tokens,
    distinct_bytes,
    distinct_rows,
    expected_device_rows,
    expected_host_bytes,
    first_difference,
    poison,
)
from hicache_core.testing.stand_ins import registry_of

Int64Array = npt.NDArray[np.int64]
RuntimeT = TypeVar("RuntimeT", bound=DeviceRuntime)
Snapshot = dict[tuple[str, str, str], Bytes]
"""All bytes of a rig: (side, pool, buffer) to the flat host bytes, or to uint8[layers, rows, stride]."""

SpacePages = Mapping[str, Sequence[PagePair]]
"""The page pairs of index spaces other than the anchor's."""
_NONE: SpacePages = {}
_OUT, _BACK = (3, 4, 7, 1), (0, 8, 2, 11)


@frozen(kw_only=True)
class DeviceOptions:
    """How the device rows of a rig lie in memory.

    Args:
        pages: device pages of each pool.
        other_pages: device pages of the pools of some index spaces, where these have another number.
        gap_bytes: bytes between the end of a row and the start of the next.
        dtype: element type of the tensors.
        slab: whether the layers of a buffer are cut from one allocation, else each has its own.
        guard_pages: pages before and after the pool's own that nothing may touch.
    """

    pages: int = field(default=12, validator=v.ge(1))
    other_pages: Mapping[str, int] = field(factory=dict)
    gap_bytes: int = field(default=0, validator=v.ge(0))
    dtype: torch.dtype = torch.uint8
    slab: bool = False
    guard_pages: int = field(default=1, validator=v.ge(0))


class DeviceRows:
    """The device rows of one buffer, guards and gaps included.

    Args:
        spec: the declaration of the pool.
        buffer: the buffer.
        runtime: the runtime that they are allocated on.
        options: how they lie.
        device: ordinal of the device.
    """

    def __init__(
        self, spec: PoolSpec, buffer: BufferSpec, runtime: DeviceRuntime, options: DeviceOptions, device: int
    ) -> None:
        guard = options.guard_pages * spec.page_rows
        pages = options.other_pages.get(spec.index_space.name, options.pages)
        count = pages * spec.page_rows
        stride = buffer.row_bytes + options.gap_bytes
        shape = (count + 2 * guard, stride)
        layers = spec.layers_of(buffer)
        if options.slab:
            self.memory = list(runtime.allocate(layers * shape[0] * stride, device).view(layers, *shape))
        else:
            self.memory = [runtime.allocate(shape[0] * stride, device).view(shape) for _ in range(layers)]
        self._inside = slice(guard, guard + count), slice(0, buffer.row_bytes)
        elements = buffer.row_bytes // options.dtype.itemsize
        self.tensors = [m.view(options.dtype)[self._inside[0], :elements] for m in self.memory]
        for layer, memory in enumerate(self.memory):
            labels = "device", spec.pool, buffer.name, layer
            memory.copy_(torch.from_numpy(distinct_rows(*labels, rows=shape[0], row_bytes=stride)))

    def rows_in(self, memory: Bytes) -> list[Bytes]:
        """The rows of each layer, without guards and gaps, as views of a copy of the memory."""
        return [layer[self._inside] for layer in memory]

    def copied(self) -> Bytes:
        """Every byte of every layer: uint8[layers, rows, stride], a copy."""
        if not self.memory:
            return np.empty((0, 0, 0), dtype=np.uint8)
        return np.stack([memory.cpu().numpy() for memory in self.memory])


class Rig(Generic[RuntimeT]):
    """A controller with the device rows that it moves. Close it, or use it as a context.

    Args:
        specs: the declarations, exactly one an anchor.
        config: the operator's choices.
        runtime: the runtime of the device.
        options: how the device rows lie.
        registry: the plugins that own the families; one that owns these and adds nothing where absent.
        device: ordinal of the device.
        ledger: the books; those of the process where absent.
    """

    def __init__(
        self,
        specs: Sequence[PoolSpec],
        config: ControllerConfig,
        runtime: RuntimeT,
        *,
        options: DeviceOptions | None = None,
        registry: PluginRegistry | None = None,
        device: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        self.runtime = runtime
        self.layout = config.layout
        self._options = options or DeviceOptions()
        self.device_rows: dict[str, dict[str, DeviceRows]] = {}
        pools = [self.device_pool(spec, device) for spec in specs]
        self.controller = Controller(
            config, pools, runtime, registry or registry_of(specs), device=device, ledger=ledger
        )

    def device_pool(self, spec: PoolSpec, device: int = 0) -> DevicePool:
        """New device rows of a declaration, which the rig knows under the name of its pool from now on."""
        rows = {b.name: DeviceRows(spec, b, self.runtime, self._options, device) for b in spec.buffers}
        self.device_rows[spec.pool] = rows
        return DevicePool(spec=spec, layers={name: mine.tensors for name, mine in rows.items()})

    def __enter__(self) -> Rig[RuntimeT]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.controller.close()

    @property
    def anchor_space(self) -> str:
        """Name of the anchor's index space."""
        return self.controller.group.anchor_space

    def page_slots(self, space: str | None = None) -> int:
        """Slots of one page of an index space, the anchor's where none is named."""
        return self.controller.group.allocator(space or self.anchor_space).space.page_slots

    def slots(self, pages: Iterable[int], space: str | None = None) -> Int64Array:
        """The slots of some pages, page by page: int64[n * page_slots]."""
        size = self.page_slots(space)
        return np.array([page * size + i for page in pages for i in range(size)], dtype=np.int64)

    def sides(self, pairs: Sequence[PagePair], space: str | None = None) -> tuple[Int64Array, Int64Array]:
        """Host slots and device slots of some page pairs, as a transfer takes them."""
        return self.slots((host for host, _ in pairs), space), self.slots(
            (device for _, device in pairs), space
        )

    def allocate(self, pages: int, space: str | None = None) -> list[int]:
        """Allocate host pages of an index space; their numbers."""
        name, size = space or self.anchor_space, self.page_slots(space)
        got = self.controller.group.allocate({name: pages * size})
        assert got is not None, f"no {pages} host pages are free"
        return [int(page) for page in got[name][::size] // size]

    def host_bytes(self, pool: str, buffer: str) -> Bytes:
        """The flat bytes of a host buffer, as a view."""
        (owner,) = (p for p in self.controller.group.pools if p.spec.pool == pool)
        return next(b.memory.view for b in owner.buffers if b.spec.name == buffer)

    def fill_host(self) -> None:
        """Distinct bytes in every host buffer."""
        for pool in self.controller.group.pools:
            for b in pool.buffers:
                view = b.memory.view
                view[...] = distinct_bytes("host", pool.spec.pool, b.spec.name, nbytes=view.size)

    def poison_host(self) -> None:
        """Poison every host byte."""
        for pool in self.controller.group.pools:
            for b in pool.buffers:
                poison(b.memory.view)

    def poison_device(self) -> None:
        """Poison every device byte, guards and gaps included."""
        for rows in self._all_device_rows():
            for memory in rows.memory:
                memory.fill_(POISON)

    def _all_device_rows(self) -> Iterable[DeviceRows]:
        return (rows for buffers in self.device_rows.values() for rows in buffers.values())

    def snapshot(self) -> Snapshot:
        """A copy of every byte of both sides."""
        taken: Snapshot = {}
        for pool in self.controller.group.pools:
            name = pool.spec.pool
            for b in pool.buffers:
                taken["host", name, b.spec.name] = b.memory.view.copy()
                taken["device", name, b.spec.name] = self.device_rows[name][b.spec.name].copied()
        return taken

    def after_backup(
        self, before: Snapshot, pairs: Sequence[PagePair], others: SpacePages = _NONE
    ) -> Snapshot:
        """What the oracle says of every byte after a backup of ``pairs``, and of other spaces' pages."""
        after = dict(before)
        for pool, buffer, shape, moved in self._shapes(pairs, others):
            host = before["host", pool, buffer]
            device = self.device_rows[pool][buffer].rows_in(before["device", pool, buffer])
            after["host", pool, buffer] = expected_host_bytes(host, self.layout, shape, device, moved)
        return after

    def after_load(self, before: Snapshot, pairs: Sequence[PagePair], others: SpacePages = _NONE) -> Snapshot:
        """What the oracle says of every byte after a load of ``pairs``, and of other spaces' pages."""
        after = dict(before)
        for pool, buffer, shape, moved in self._shapes(pairs, others):
            memory = before["device", pool, buffer].copy()
            device = self.device_rows[pool][buffer].rows_in(memory)
            loaded = expected_device_rows(device, self.layout, shape, before["host", pool, buffer], moved)
            for rows, new in zip(device, loaded, strict=True):
                rows[...] = new
            after["device", pool, buffer] = memory
        return after

    def after_tokens(
        self,
        before: Snapshot,
        pairs: Sequence[tuple[int, int]],
        layer: int | None = None,
        *,
        to_host: bool,
    ) -> Snapshot:
        """What the oracle says of every byte after copies of single tokens of the anchor.

        Args:
            before: every byte before them; not changed.
            pairs: (host token, device token), left out where one is negative.
            layer: the one layer that moves; None for all.
            to_host: whether the host side is written.
        """
        after = {key: value.copy() for key, value in before.items()}
        spec = self.controller.group.anchor.spec
        for buffer in spec.buffers:
            key = spec.pool, buffer.name
            whole_row = ((0, buffer.row_bytes, buffer.row_bytes),)
            copy_tokens(
                after["host", *key],
                self.device_rows[spec.pool][buffer.name].rows_in(after["device", *key]),
                self.layout,
                host_shape(self.controller.group.anchor, buffer),
                TokenShape(
                    row_tokens=buffer.row_tokens if buffer.spans else 1,
                    spans=tuple((s.offset, s.stride, s.nbytes) for s in buffer.spans) or whole_row,
                ),
                pairs,
                range(spec.layer_count) if layer is None else [layer],
                to_host=to_host,
            )
        return after

    def there_and_back(self, out: Sequence[int] = _OUT, back: Sequence[int] = _BACK) -> None:
        """Back pages of the anchor's space up, poison the device, load them into others, compare every byte.

        Args:
            out: device pages that are backed up; as many host pages are allocated.
            back: device pages that they are loaded into.
        """
        host = self.allocate(len(out))
        self.fill_host()
        pairs = list(zip(host, out, strict=True))
        expected = self.after_backup(self.snapshot(), pairs)
        self.controller.backup(*self.sides(pairs)).wait()
        assert not differences(self.snapshot(), expected), "backup"
        self.poison_device()
        pairs = list(zip(host, back, strict=True))
        expected = self.after_load(self.snapshot(), pairs)
        self.controller.load(*self.sides(pairs)).wait()
        assert not differences(self.snapshot(), expected), "load"

    def _shapes(
        self, pairs: Sequence[PagePair], others: SpacePages
    ) -> Iterable[tuple[str, str, HostShape, Sequence[PagePair]]]:
        of_space = {**others, self.anchor_space: pairs}
        for pool in self.controller.group.pools:
            for b in pool.spec.buffers:
                moved = of_space.get(pool.spec.index_space.name, ())
                yield pool.spec.pool, b.name, host_shape(pool, b), moved


def host_shape(pool: HostPool, buffer: BufferSpec) -> HostShape:
    """The rows of a host buffer, for the oracle."""
    spec = pool.spec
    return HostShape(
        pages=pool.pages, layers=spec.layers_of(buffer), page_rows=spec.page_rows, row_bytes=buffer.row_bytes
    )


def differences(got: Snapshot, expected: Snapshot) -> list[str]:
    """Where two snapshots differ, one line a buffer; empty where every byte is equal."""
    assert got.keys() == expected.keys()
    found = ((key, first_difference(got[key], expected[key])) for key in expected)
    return [f"{' '.join(key)}: {text}" for key, text in found if text]
