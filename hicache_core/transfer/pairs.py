"""The page pairs of one transfer, checked and ordered once, shared by all pools that ride on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from hicache_core.device.base import DeviceRuntime, Int64Array, Stream
from hicache_core.errors import PairingError
from hicache_core.memory.slots import all_true, pages_of
from hicache_core.spec.pool import IndexSpace

_Found = TypeVar("_Found")
Numbers = Callable[[Any, IndexSpace, int, str], Int64Array]
"""Turns one side of a transfer into checked page numbers, as ``pages_of`` does with slots."""


class PagePairs:
    """Host page i pairs with device page i, in ascending order of the host pages.

    Args:
        host_pages: int64[n], distinct.
        device_pages: int64[n].
    """

    def __init__(self, host_pages: Int64Array, device_pages: Int64Array) -> None:
        self.host_pages = host_pages
        self.device_pages = device_pages
        self._uploaded_host: torch.Tensor | None = None
        self._uploaded_device: torch.Tensor | None = None
        self._remembered: dict[object, Any] = {}

    def __len__(self) -> int:
        return len(self.host_pages)

    def remembered(self, owner: object, find: Callable[[PagePairs], _Found]) -> _Found:
        """What ``find`` makes of the pairs, found once per owner for all layers of the transfer."""
        if owner not in self._remembered:
            self._remembered[owner] = find(self)
        found: _Found = self._remembered[owner]
        return found

    def uploaded_host(self, runtime: DeviceRuntime, device: int, stream: Stream) -> torch.Tensor:
        """Host pages as a tensor of the device, uploaded once for all pools whose kernels read them."""
        if self._uploaded_host is None:
            self._uploaded_host = runtime.upload(self.host_pages, device, stream)
        return self._uploaded_host

    def uploaded_device(self, runtime: DeviceRuntime, device: int, stream: Stream) -> torch.Tensor:
        """Device pages as a tensor of the device, uploaded once for all pools and layers."""
        if self._uploaded_device is None:
            self._uploaded_device = runtime.upload(self.device_pages, device, stream)
        return self._uploaded_device


def page_pairs(
    host: Any,
    device: Any,
    space: IndexSpace,
    *,
    host_pages: int,
    device_pages: int,
    who: str,
    host_is_target: bool,
    numbers: Numbers = pages_of,
) -> PagePairs:
    """Check the two sides of a transfer and turn them into page pairs; the caller's arrays are not kept.

    Args:
        host, device: int64[n] each, CPU: the slots of whole pages, or what ``numbers`` takes.
        space: their index space.
        host_pages, device_pages: pages that exist on either side.
        who: who asks, for errors.
        host_is_target: whether the transfer writes the host side.
        numbers: how a side becomes page numbers, checked.

    Raises:
        IndexTypeError, PageContractError, IndexRangeError: one side is wrong by itself.
        PairingError: unequal lengths, or a page is written twice.
    """
    of_host = numbers(host, space, host_pages, f"{who}, host side")
    of_device = numbers(device, space, device_pages, f"{who}, device side")
    if of_host.size != of_device.size:
        raise PairingError(
            who=who,
            got=f"{of_host.size} host pages and {of_device.size} device pages",
            expected="one device page for each host page",
            remedy="Give both sides the same number of pages.",
        )
    rises = _ascends(of_host)
    if not rises:
        order = of_host.argsort()
        of_host, of_device = of_host[order], of_device[order]
    if not (rises and host_is_target):
        refuse_twice(of_host if host_is_target else of_device, who, "pages")
    return PagePairs(of_host, of_device)


def _ascends(pages: Int64Array) -> bool:
    return len(pages) < 2 or all_true(pages[1:] > pages[:-1])


def refuse_twice(targets: Int64Array, who: str, unit: str) -> None:
    """PairingError where one of ``targets`` (int64[n], CPU, ``unit`` in the plural) is there twice."""
    if _ascends(targets):
        return
    ordered = np.sort(targets)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise PairingError(
            who=who,
            got=f"{unit} {twice[:8].tolist()} as a destination twice",
            expected="each destination once",
            remedy="Remove the duplicates.",
        )


SpacePairs = Mapping[str, PagePairs]
"""What one transfer moves: the page pairs of each index space that takes part."""
