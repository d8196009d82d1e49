"""The token pairs of one call: CPU indices are checked by value, those on the device by shape."""

from __future__ import annotations

from typing import Any

import torch

from hicache_core.device.base import Int64Array
from hicache_core.errors import IndexRangeError, IndexTypeError, PairingError
from hicache_core.memory.slots import int64_array
from hicache_core.transfer.pairs import refuse_twice

_SHOWN = 8


def token_pairs(
    host_tokens: Any,
    device_tokens: Any,
    *,
    counts: tuple[int, int],
    who: str,
    host_is_target: bool,
) -> tuple[Int64Array, Int64Array]:
    """The pairs that are no padding, checked; the caller's arrays are not kept.

    A pair of which either number is negative is padding, and not looked at further.

    Args:
        host_tokens, device_tokens: int64[n] each, CPU.
        counts: tokens of the host side and of the device side.
        who: who asks, for errors.
        host_is_target: whether the host side is written.

    Raises:
        IndexTypeError, IndexRangeError: one side is wrong by itself.
        PairingError: unequal lengths, or a token is written twice.
    """
    host = int64_array(host_tokens, f"{who}, host tokens")
    device = int64_array(device_tokens, f"{who}, device tokens")
    _check_lengths(len(host), len(device), who)
    kept = (host >= 0) & (device >= 0)
    host, device = host[kept], device[kept]
    _check_range(host, counts[0], f"{who}, host tokens")
    _check_range(device, counts[1], f"{who}, device tokens")
    refuse_twice(host if host_is_target else device, who, "tokens")
    return host, device


def check_uploaded(host_tokens: Any, device_tokens: Any, who: str) -> None:
    """Refuse what is no pair of contiguous int64[n] tensors; their values are not read.

    Raises:
        IndexTypeError: one side is no such tensor.
        PairingError: unequal lengths.
    """
    _check_tensor(host_tokens, f"{who}, host tokens")
    _check_tensor(device_tokens, f"{who}, device tokens")
    _check_lengths(len(host_tokens), len(device_tokens), who)


def _check_tensor(tokens: Any, who: str) -> None:
    whole = isinstance(tokens, torch.Tensor) and tokens.dim() == 1 and tokens.is_contiguous()
    if not whole or tokens.dtype != torch.int64:
        raise IndexTypeError(
            who=who,
            got=f"{tokens.dtype}{list(tokens.shape)}" if hasattr(tokens, "dtype") else type(tokens).__name__,
            expected="a contiguous int64[n] tensor of the device",
            remedy="Upload the numbers, or give CPU indices to load and backup.",
        )


def _check_lengths(host: int, device: int, who: str) -> None:
    if host != device:
        raise PairingError(
            who=who,
            got=f"{host} host tokens and {device} device tokens",
            expected="one device token for each host token",
            remedy="Give indices of equal length.",
        )


def _check_range(tokens: Int64Array, count: int, who: str) -> None:
    outside = tokens[tokens >= count]
    if outside.size:
        raise IndexRangeError(
            who=who,
            got=f"tokens {outside[:_SHOWN].tolist()}",
            expected=f"tokens below {count}",
            remedy="Give tokens of this pool; a negative number skips a pair.",
        )
