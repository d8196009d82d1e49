"""Slot indices as they arrive: brought to the CPU where they are not there, and converted once for a load."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve, field, frozen

from hicache_core.device.base import Stream
from hicache_core.transfer.pairs import PagePairs

_NOT_COPIED = frozenset({"cpu", "meta"})


class IndexReader:
    """Brings index tensors of an accelerator to the CPU, and counts what that costs.

    Attributes:
        synchronisations: tensors that were copied; each copy waits for the device once.
    """

    def __init__(self) -> None:
        self.synchronisations = 0
        self._lock = threading.Lock()

    def on_cpu(self, slots: Any) -> Any:
        """A copy on the CPU of a tensor of an accelerator; anything else as it is, wrong or not.

        The copy waits for the work of the current stream of that device, by which the tensor is written.
        """
        if not isinstance(slots, torch.Tensor) or slots.device.type in _NOT_COPIED:
            return slots
        with self._lock:
            self.synchronisations += 1
        return slots.cpu()


@frozen(kw_only=True, eq=False)
class _Seen:
    """A tensor as it was when it was converted.

    Args:
        tensor: the tensor; it is not kept alive, and once it is gone no other can be taken for it.
        state: where it lies, and its version.
    """

    tensor: weakref.ref[torch.Tensor]
    state: tuple[object, ...]

    def is_still(self, slots: Any) -> bool:
        """Whether ``slots`` is that tensor, unchanged."""
        return self.tensor() is slots and _state(slots) == self.state


@frozen(kw_only=True, eq=False)
class _Kept:
    """The pairs of one load.

    Args:
        host, device: the tensors that they were made of.
        pairs: what they were made into.
        stream: the stream whose uploads the pairs hold.
    """

    host: _Seen
    device: _Seen
    pairs: PagePairs = field(repr=False)
    stream: Stream


class IndexCache:
    """The page pairs of the load that is being driven, kept for its layers.

    They are kept as long as both index tensors are the same objects at the same address, with the same
    strides and the same version, which torch raises at each change in place. Indices that may change unseen
    are converted at each call: numpy arrays, tensors of inference mode (which have no version), and tensors
    whose memory is shared with numpy, another library or another process. Not seen is a write that goes round
    the version of a tensor of torch's own: through ``.data``, or by a kernel that torch does not know.

    One load at a time; loads whose layers alternate are right, and converted at each turn.

    Args:
        convert: makes page pairs of host and device slots, both on the CPU; raises IndicesError.

    Attributes:
        conversions: calls of ``convert`` so far.
    """

    def __init__(self, convert: Callable[[Any, Any], PagePairs]) -> None:
        self.conversions = 0
        self._convert = convert
        self._reader = IndexReader()
        self._kept: _Kept | None = None

    @property
    def synchronisations(self) -> int:
        """Index tensors that were copied from an accelerator so far; each copy waited for it once."""
        return self._reader.synchronisations

    def pairs(self, host_slots: Any, device_slots: Any, stream: Stream) -> PagePairs:
        """The page pairs of a load, converted now or at an earlier layer; the caller's slots are not changed.

        Args:
            host_slots, device_slots: int64[n] each, numpy arrays or tensors of any device.
            stream: where the pairs will be used; what they upload is ordered on it.

        Raises:
            IndicesError: the slots are not what ``convert`` takes; nothing is kept of them.
        """
        kept = self._kept
        if kept is not None and kept.host.is_still(host_slots) and kept.device.is_still(device_slots):
            if kept.stream != stream:
                fresh = PagePairs(kept.pairs.host_pages, kept.pairs.device_pages)
                kept = self._kept = evolve(kept, pairs=fresh, stream=stream)
            return kept.pairs
        self._kept = None
        # The state is read before the slots: a change in between is then seen at the next layer.
        host, device = _seen(host_slots), _seen(device_slots)
        self.conversions += 1
        pairs = self._convert(self._snapshot(host_slots), self._snapshot(device_slots))
        if host is not None and device is not None:
            self._kept = _Kept(host=host, device=device, pairs=pairs, stream=stream)
        return pairs

    def forget(self) -> None:
        """Keep nothing any more."""
        self._kept = None

    def _snapshot(self, slots: Any) -> Any:
        """``slots`` on the CPU; a copy of a tensor, since a numpy view of its own memory would mark it."""
        read = self._reader.on_cpu(slots)
        return read.detach().clone() if read is slots and isinstance(slots, torch.Tensor) else read


def _seen(slots: Any) -> _Seen | None:
    state = _state(slots)
    return None if state is None else _Seen(tensor=weakref.ref(slots), state=state)


def _state(slots: Any) -> tuple[object, ...] | None:
    """Where a tensor lies, and its version; None for what may change unseen."""
    if not isinstance(slots, torch.Tensor) or slots.layout is not torch.strided or slots.is_inference():
        return None
    storage = slots.untyped_storage()
    # Torch fixes the size of memory that it shares with numpy or another library, and calls all memory of an
    # accelerator shared.
    if not storage.resizable() or (slots.device.type == "cpu" and storage.is_shared()):
        return None
    return slots.data_ptr(), tuple(slots.shape), slots.stride(), slots._version
