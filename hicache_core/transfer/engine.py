"""The engine: orders transfers of one device on its streams and hands out tickets."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from hicache_core.device.base import DeviceRuntime, Event, Stream
from hicache_core.errors import DeviceError, TransferError
from hicache_core.pool import HostPool
from hicache_core.transfer.pairs import PagePairs
from hicache_core.transfer.staging import DEFAULT_RING_BYTES, StagingRing
from hicache_core.transfer.ticket import Ticket


def growing_groups(layer_count: int) -> tuple[range, ...]:
    """Model layers in groups of 1, 2, 4, ...: the first lands early, the rest take few calls."""
    groups, first, width = [], 0, 1
    while first < layer_count:
        groups.append(range(first, min(first + width, layer_count)))
        first += width
        width *= 2
    return tuple(groups)


class Engine:
    """Moves the pages of host pools over one device, backups on one stream, loads on another.

    Args:
        runtime: the runtime of the device.
        device: its ordinal.
        layer_count: model layers that a load has marks for.
        ring_bytes: budget of the staging ring.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        device: int,
        layer_count: int,
        ring_bytes: int = DEFAULT_RING_BYTES,
    ) -> None:
        self.runtime = runtime
        self.device = device
        self.ring = StagingRing(runtime, device, ring_bytes)
        self._backup_stream = runtime.new_stream(device)
        self._load_stream = runtime.new_stream(device)
        self._groups = growing_groups(layer_count)
        self._mark_of_layer = [number for number, group in enumerate(self._groups) for _ in group]
        self._lock = threading.Lock()

    def backup(
        self,
        pools: Sequence[HostPool],
        pairs: PagePairs,
        *,
        after: Event | None,
        on_acknowledged: Callable[[], None],
    ) -> Ticket:
        """Copy pages of all pools from device to host, all layers of a pool at once.

        Args:
            pools: the pools whose pages move; they share the pairs.
            pairs: which pages.
            after: what wrote the device pages; None for all work that the caller's current stream has so far.
            on_acknowledged: called once, when the ticket is.

        Raises:
            TransferError: a submission was refused; what was submitted before it has run.
        """

        def submit() -> Iterator[Event]:
            for pool in pools:
                if pool.backup_way is not None:
                    pool.backup_way.submit(pairs, range(pool.spec.layer_count), self._backup_stream)
            yield self.runtime.record(self._backup_stream)

        return self._submit("backup", pools, pairs, submit, after, on_acknowledged)

    def load(
        self,
        pools: Sequence[HostPool],
        pairs: PagePairs,
        *,
        after: Event | None,
        on_acknowledged: Callable[[], None],
    ) -> Ticket:
        """Copy pages of all pools from host to device, by model layer, with a mark per layer.

        Args:
            pools: the pools whose pages move; they share the pairs.
            pairs: which pages.
            after: who still reads the device pages; None for all work that the caller's current stream has.
            on_acknowledged: called once, when the ticket is.

        Raises:
            TransferError: a submission was refused; what was submitted before it has run.
        """

        def submit() -> Iterator[Event]:
            for group in self._groups:
                for pool in pools:
                    if pool.load_way is not None:
                        own = _own_layers(pool.spec.layer_ids, group)
                        if own:
                            pool.load_way.submit(pairs, own, self._load_stream)
                yield self.runtime.record(self._load_stream)

        return self._submit("load", pools, pairs, submit, after, on_acknowledged)

    def _submit(
        self,
        what: str,
        pools: Sequence[HostPool],
        pairs: PagePairs,
        submit: Callable[[], Iterator[Event]],
        after: Event | None,
        on_acknowledged: Callable[[], None],
    ) -> Ticket:
        nbytes = len(pairs) * sum(pool.spec.page_bytes for pool in pools)
        marks = self._mark_of_layer if what == "load" else ()
        stream = self._load_stream if what == "load" else self._backup_stream
        if not len(pairs):
            event = self.runtime.record(stream)
            return Ticket(what, 0, [event], [0] * len(marks), on_acknowledged)
        with self._lock:
            if after is None:
                after = self.runtime.record(self.runtime.current_stream(self.device))
            self.runtime.wait_event(stream, after)
            try:
                events = list(submit())
            except DeviceError as error:
                self._drain(stream)
                raise TransferError(
                    who=what,
                    got=str(error),
                    expected="every copy accepted",
                    remedy="Nothing counts as moved; what was submitted has been waited for.",
                ) from error
            except BaseException:
                self._drain(stream)
                raise
        return Ticket(what, nbytes, events, marks, on_acknowledged)

    def drain(self) -> None:
        """Wait for everything that was submitted."""
        for stream in (self._backup_stream, self._load_stream):
            self._drain(stream)

    def _drain(self, stream: Stream) -> None:
        """Wait for a stream whatever it reports: nothing may be released while it still runs."""
        try:
            self.runtime.synchronize(stream)
        except DeviceError:
            return


def _own_layers(layer_ids: Sequence[int], group: range) -> range:
    """The pool's own layers whose model layers lie in the group."""
    return range(bisect_left(layer_ids, group.start), bisect_left(layer_ids, group.stop))
