"""The page pairs of one transfer, checked and ordered once, shared by all pools that ride on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from hicache_core.device.base import DeviceRuntime, Int64Array, Stream
from hicache_core.errors import PairingError
from hicache_core.memory.slots import all_true, pages_of
from hicache_core.spec.pool import IndexSpace

_Found = TypeVar("_Found")


class PagePairs:
    """Host page i pairs with device page i, in ascending order of the host pages.

    Args:
        host_pages: int64[n], distinct.
        device_pages: int64[n].
    """

    def __init__(self, host_pages: Int64Array, device_pages: Int64Array) -> None:
        self.host_pages = host_pages
        self.device_pages = device_pages
        self._uploaded: tuple[torch.Tensor, torch.Tensor] | None = None
        self._remembered: dict[object, Any] = {}

    def __len__(self) -> int:
        return len(self.host_pages)

    def remembered(self, owner: object, find: Callable[[PagePairs], _Found]) -> _Found:
        """What ``find`` makes of the pairs, found once per owner for all layers of the transfer."""
        if owner not in self._remembered:
            self._remembered[owner] = find(self)
        found: _Found = self._remembered[owner]
        return found

    def uploaded(
        self, runtime: DeviceRuntime, device: int, stream: Stream
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Host and device pages as tensors of the device, uploaded once for all pools and layers."""
        if self._uploaded is None:
            self._uploaded = (
                runtime.upload(self.host_pages, device, stream),
                runtime.upload(self.device_pages, device, stream),
            )
        return self._uploaded


def page_pairs(
    host_slots: Any,
    device_slots: Any,
    space: IndexSpace,
    *,
    host_pages: int,
    device_pages: int,
    who: str,
    host_is_target: bool,
) -> PagePairs:
    """Check the slots of a transfer and turn them into page pairs; the caller's arrays are not kept.

    Args:
        host_slots, device_slots: int64[n] each, CPU, whole pages.
        space: their index space.
        host_pages, device_pages: pages that exist on either side.
        who: who asks, for errors.
        host_is_target: whether the transfer writes the host side.

    Raises:
        IndexTypeError, PageContractError, IndexRangeError: one side is wrong by itself.
        PairingError: unequal lengths, or a page is written twice.
    """
    host = pages_of(host_slots, space, host_pages, f"{who}, host slots")
    device = pages_of(device_slots, space, device_pages, f"{who}, device slots")
    if host.size != device.size:
        raise PairingError(
            who=who,
            got=f"{host.size} host pages and {device.size} device pages",
            expected="one device page for each host page",
            remedy="Give slots of equal length.",
        )
    if not _ascends(host):
        order = host.argsort()
        host, device = host[order], device[order]
    target = host if host_is_target else device
    if not _ascends(target):
        _refuse_twice(np.sort(target), who)
    return PagePairs(host, device)


def _ascends(pages: Int64Array) -> bool:
    return len(pages) < 2 or all_true(pages[1:] > pages[:-1])


def _refuse_twice(ordered: Int64Array, who: str) -> None:
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise PairingError(
            who=who,
            got=f"pages {twice[:8].tolist()} as a destination twice",
            expected="each destination once",
            remedy="Remove the duplicates.",
        )
