"""Ways to move single tokens of a pool: bound to its tables once, then given pairs that were checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from attrs import frozen

from hicache_core.device.base import BatchCopies, DeviceRuntime, Int64Array, MoveTokens, Stream
from hicache_core.errors import UnsupportedTokensError
from hicache_core.memory.tables import BufferTables, HostTable, KernelTable
from hicache_core.spec.pool import Span
from hicache_core.transfer.ways import copied_host_rows


@frozen(kw_only=True, eq=False)
class TokenBuffer:
    """A buffer of the pool, and where one token lies in a row of it."""

    tables: BufferTables
    spans: tuple[Span, ...]
    row_tokens: int

    def tokens(self, table: HostTable | KernelTable) -> int:
        """Tokens of one layer in whole pages of a table."""
        return table.grid.pages * table.grid.page_rows * self.row_tokens


@frozen(kw_only=True)
class TokenMove:
    """Which layers of the pool move, and whether the host rows are written."""

    layers: range
    host_is_target: bool


class TokenWay(Protocol):
    """Moves single tokens of one pool in both directions."""

    def submit(self, host: Int64Array, device: Int64Array, move: TokenMove, stream: Stream) -> None:
        """Move tokens that were checked; CPU indices, int64[n], n at least 1."""

    def launch(self, host: torch.Tensor, device: torch.Tensor, move: TokenMove, stream: Stream) -> None:
        """Move tokens whose numbers the device holds."""


class KernelTokens:
    """One launch per buffer, with tables of the device and token numbers that it holds."""

    def __init__(
        self, buffers: Sequence[TokenBuffer], runtime: DeviceRuntime, device: int, who: str
    ) -> None:
        self._buffers = buffers
        self._runtime = runtime
        self._device = device

    def submit(self, host: Int64Array, device: Int64Array, move: TokenMove, stream: Stream) -> None:
        """See :class:`TokenWay`."""
        numbers = [self._runtime.upload(side, self._device, stream) for side in (host, device)]
        self.launch(numbers[0], numbers[1], move, stream)

    def launch(self, host: torch.Tensor, device: torch.Tensor, move: TokenMove, stream: Stream) -> None:
        """See :class:`TokenWay`."""
        kernels = self._runtime.kernels
        assert kernels is not None, "the way of a runtime with kernels"
        for buffer in self._buffers if len(host) else ():
            sides = ((buffer.tables.host_kernel, host), (buffer.tables.device, device))
            (target, target_tokens), (source, source_tokens) = sides if move.host_is_target else sides[::-1]
            kernels.move_tokens(
                MoveTokens(
                    target=target,
                    source=source,
                    target_tokens=target_tokens,
                    source_tokens=source_tokens,
                    layers=move.layers,
                    spans=buffer.spans,
                    row_tokens=buffer.row_tokens,
                ),
                stream,
            )


class CopiedTokens:
    """One batch of plain copies, at the addresses that the runtime's copies take."""

    def __init__(
        self, buffers: Sequence[TokenBuffer], runtime: DeviceRuntime, device: int, who: str
    ) -> None:
        self._sides = [(buffer, copied_host_rows(buffer.tables, runtime)) for buffer in buffers]
        self._runtime = runtime
        self._who = who

    def submit(self, host: Int64Array, device: Int64Array, move: TokenMove, stream: Stream) -> None:
        """See :class:`TokenWay`."""
        order = (host if move.host_is_target else device).argsort()
        tokens = host[order], device[order]
        runs = [
            _runs((rows, buffer.tables.device), tokens, span, buffer.row_tokens, move.layers)
            for buffer, rows in self._sides
            for span in buffer.spans
        ]
        on_host, on_device, sizes = (np.concatenate(parts) for parts in zip(*runs, strict=True))
        targets, sources = (on_host, on_device) if move.host_is_target else (on_device, on_host)
        self._runtime.batch_copies(
            BatchCopies(targets=targets, sources=sources, sizes=sizes, host_is_target=move.host_is_target),
            stream,
        )

    def launch(self, host: torch.Tensor, device: torch.Tensor, move: TokenMove, stream: Stream) -> None:
        """Refused: copies are made from CPU indices."""
        raise UnsupportedTokensError(
            who=self._who,
            got="indices on the device, with a runtime that has no kernels",
            expected="CPU indices",
            remedy="Use load and backup.",
            reason="no-kernel",
        )


TOKEN_WAYS: Mapping[bool, Callable[[Sequence[TokenBuffer], DeviceRuntime, int, str], TokenWay]] = {
    True: KernelTokens,
    False: CopiedTokens,
}
"""By whether the runtime has kernels."""


def _runs(
    tables: tuple[HostTable | KernelTable, KernelTable],
    tokens: tuple[Int64Array, Int64Array],
    span: Span,
    row_tokens: int,
    layers: range,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Host address, device address and bytes of each run of tokens in each layer: int64[runs * layers] each.

    A run stays in one group of either side, and so in one registration.
    """
    placed = [_placed(table, own, span, row_tokens) for table, own in zip(tables, tokens, strict=True)]
    joined = np.ones(len(tokens[0]) - 1, dtype=np.bool_)
    for groups, offsets in placed:
        joined &= (np.diff(offsets) == span.nbytes) & (np.diff(groups) == 0)
    first = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    sizes = np.diff(np.append(first, len(tokens[0]))) * span.nbytes
    host, device = (
        (table.bases[groups[first], layers.start : layers.stop] + offsets[first, None]).ravel()
        for table, (groups, offsets) in zip(tables, placed, strict=True)
    )
    return host, device, np.repeat(sizes, len(layers))


def _placed(
    table: HostTable | KernelTable, tokens: Int64Array, span: Span, row_tokens: int
) -> tuple[Int64Array, Int64Array]:
    """Group of each token, and bytes from the group's base to its span: int64[n] each."""
    numbers, within = np.divmod(tokens, row_tokens)
    pages, rows = np.divmod(numbers, table.grid.page_rows)
    groups = table.groups_of(pages)
    inside = span.offset + within * span.stride
    return groups, table.page_offsets(pages, groups) + rows * table.row_stride + inside
