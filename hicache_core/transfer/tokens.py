"""Copies of single tokens between the host rows and the device rows of a pool, outside of the controller.

Token t of a pool is token ``t % row_tokens`` of row ``t // row_tokens``, and row r is row ``r % page_rows``
of page ``r // page_rows``. Where a row is a token, that is its slot; where a row is a page, tokens are those
that the spans of the declaration name, so that a compressed page counts compressed slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hicache_core.device.base import DeviceRuntime, Stream
from hicache_core.errors import AddressError, IndexRangeError, UnsupportedTokensError
from hicache_core.memory.tables import PoolTables
from hicache_core.spec.capability import token_granular
from hicache_core.spec.pool import PoolSpec
from hicache_core.transfer.token_pairs import check_uploaded, token_pairs
from hicache_core.transfer.token_ways import TOKEN_WAYS, TokenBuffer, TokenMove


class TokenCopies:
    """Loads and backups of single tokens of one pool, each submitted to a stream that the caller orders.

    Nothing is waited for but what the stream has, and no slot is held: the host memory must stay, and both
    sides must be left alone, until what was submitted has run. All buffers of the pool move. Where the
    runtime has kernels, one launch per buffer goes through the pointer tables; elsewhere the call is one
    batch of copies in which tokens that are neighbours on both sides are one.

    Args:
        spec: the pool's declaration.
        tables: its tables, one entry per buffer.
        runtime: the runtime of the device.
        device: ordinal of the device.

    Raises:
        UnsupportedTokensError: a buffer has no spans, or one series of rows for all layers; the rows of two
            buffers hold different numbers of tokens; or the pool has no tables.
        AddressError: the tables are of another device.
    """

    def __init__(self, spec: PoolSpec, tables: PoolTables, runtime: DeviceRuntime, device: int) -> None:
        self._who = f"pool '{spec.pool}' ({spec.family})"
        _check_declaration(spec, tables, self._who)
        _check_device(tables, device, self._who)
        self._layer_count = spec.layer_count
        buffers = [
            TokenBuffer(tables=own, spans=spec.token_spans(buffer), row_tokens=spec.row_tokens(buffer))
            for own, buffer in zip(tables, spec.buffers, strict=True)
        ]
        self.host_tokens = min(buffer.tokens(buffer.tables.host) for buffer in buffers)
        """Tokens of the host side; valid numbers are below it."""
        self.device_tokens = min(buffer.tokens(buffer.tables.device) for buffer in buffers)
        """Tokens of the whole pages of the device side."""
        self._way = TOKEN_WAYS[runtime.kernels is not None](buffers, runtime, device, self._who)

    def load(self, host_tokens: Any, device_tokens: Any, layer: int | None, stream: Stream) -> None:
        """Copy tokens from host to device in the order of ``stream``.

        The indices are read before the call returns. A pair of which either number is negative is padding:
        it is skipped and not looked at further. With no pair left nothing is submitted.

        Args:
            host_tokens: int64[n], CPU (numpy or torch), token numbers.
            device_tokens: int64[n], CPU, paired with them, each at most once.
            layer: one of the pool's own layers, from 0; None for all of them.
            stream: a stream of the device.

        Raises:
            IndexTypeError, IndexRangeError, PairingError: the indices or the layer are not what they must be;
                nothing has moved.
            DeviceError: the runtime refused the submission.
        """
        self._submit("load", host_tokens, device_tokens, layer, stream)

    def backup(self, host_tokens: Any, device_tokens: Any, layer: int | None, stream: Stream) -> None:
        """Copy tokens from device to host: as :meth:`load`, but each host token at most once."""
        self._submit("backup", host_tokens, device_tokens, layer, stream)

    def load_uploaded(
        self, host_tokens: torch.Tensor, device_tokens: torch.Tensor, layer: int | None, stream: Stream
    ) -> None:
        """Copy tokens from host to device whose numbers the device holds, read when the kernel runs.

        Their values cannot be checked without a synchronisation. The kernel skips a pair of which either
        number is negative; one that is out of range is the caller's fault, which the simulator reports as a
        DeviceFault of the stream; of two pairs with one destination, either may win. The tensors must stay as
        they are until the kernel has run.

        Args:
            host_tokens, device_tokens: int64[n], contiguous, of the device, as ``runtime.upload`` gives them.
            layer: one of the pool's own layers, from 0; None for all of them.
            stream: a stream of the device; the numbers are there by its order. 0 pairs launch nothing.

        Raises:
            UnsupportedTokensError: the runtime has no kernels.
            IndexTypeError, IndexRangeError, PairingError: dtype, shape, layer or lengths; nothing has moved.
        """
        self._launch("load", host_tokens, device_tokens, layer, stream)

    def backup_uploaded(
        self, host_tokens: torch.Tensor, device_tokens: torch.Tensor, layer: int | None, stream: Stream
    ) -> None:
        """Copy tokens from device to host whose numbers the device holds; as :meth:`load_uploaded`."""
        self._launch("backup", host_tokens, device_tokens, layer, stream)

    def _submit(self, what: str, host_tokens: Any, device_tokens: Any, layer: Any, stream: Stream) -> None:
        who = f"{self._who}, token {what}"
        move = self._move(what, layer, who)
        host, device = token_pairs(
            host_tokens,
            device_tokens,
            counts=(self.host_tokens, self.device_tokens),
            who=who,
            host_is_target=move.host_is_target,
        )
        if len(host):
            self._way.submit(host, device, move, stream)

    def _launch(self, what: str, host_tokens: Any, device_tokens: Any, layer: Any, stream: Stream) -> None:
        who = f"{self._who}, token {what}"
        move = self._move(what, layer, who)
        check_uploaded(host_tokens, device_tokens, who)
        self._way.launch(host_tokens, device_tokens, move, stream)

    def _move(self, what: str, layer: Any, who: str) -> TokenMove:
        layers = range(self._layer_count)
        if layer is not None:
            if not isinstance(layer, int | np.integer) or layer not in layers:
                raise IndexRangeError(
                    who=who,
                    got=f"layer {layer!r}",
                    expected=f"a layer of the pool, 0 to {self._layer_count - 1}, or None for all",
                    remedy="Give the pool's own number of the layer, not the model's.",
                )
            layers = range(int(layer), int(layer) + 1)
        return TokenMove(layers=layers, host_is_target=what == "backup")


def _check_declaration(spec: PoolSpec, tables: PoolTables, who: str) -> None:
    can = token_granular(spec)
    if not can:
        raise UnsupportedTokensError(
            who=who,
            got=can.text,
            expected="buffers of which every token has bytes of its own in each layer",
            remedy=can.remedy or "Use a pool that holds bytes.",
            reason=can.code or can.verdict.value,
        )
    if not tables:
        raise UnsupportedTokensError(
            who=who,
            got="a pool that is not bound to a device",
            expected="a table for each buffer",
            remedy="Ask once the controller has taken the pool; one without layers has no tables.",
            reason="no-tables",
        )


def _check_device(tables: PoolTables, device: int, who: str) -> None:
    others = {t.device for own in tables for t in (own.host_kernel, own.device)} - {device}
    if others:
        raise AddressError(
            who=who,
            got=f"tables of device {sorted(others)[0]}",
            expected=f"tables of device {device}",
            remedy="Name the device that the pool is bound to.",
        )
