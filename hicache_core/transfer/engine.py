"""The engine: orders transfers of one device on its streams and hands out tickets."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from hicache_core.compat import DEFAULT_RING_BYTES
from hicache_core.device.base import DeviceRuntime, Event, Stream
from hicache_core.errors import DeviceError, StreamsStuckError, TransferError
from hicache_core.memory.ledger import Ledger
from hicache_core.transfer.pairs import SpacePairs
from hicache_core.transfer.staging import StagingRing
from hicache_core.transfer.ticket import Ticket
from hicache_core.transfer.ways import PoolWays, Way

_BYTES_WORTH_A_CALL = 192 << 10
"""Bytes that a link moves while the host submits one more copy (55 GB/s and 3.1 us a call, on an H200)."""
_FIRST_GROUPS = (4, 16)
"""The groups before the last end at a sixteenth and at a quarter of the layers."""


def load_groups(layers: range, copy_bytes: int) -> tuple[range, ...]:
    """Model layers in groups that grow, so that the first layer of a load lands early.

    Each group costs the host a call per page and pool. There are as many as the link hides: one where pages
    are small, since the calls would take longer than the bytes.

    Args:
        layers: model layers, those of a pipeline stage where a rank has not all of them.
        copy_bytes: bytes that one page of one pool holds over all layers, on average.
    """
    count = min(max(copy_bytes // _BYTES_WORTH_A_CALL, 1), len(_FIRST_GROUPS) + 1)
    stops = [max(len(layers) // part, 1) for part in _FIRST_GROUPS[len(_FIRST_GROUPS) + 1 - count :]]
    bounds = sorted({0, *(stop for stop in stops if stop < len(layers)), len(layers)})
    return tuple(layers[first:stop] for first, stop in itertools.pairwise(bounds))


Step = tuple[tuple[str, Way, range], ...]
"""What moves together: index space, way and own layers of each pool."""


@frozen(kw_only=True, eq=False)
class _Lane:
    """One direction of one device.

    Args:
        what: ``backup`` or ``load``, for errors.
        stream: where it is submitted.
        steps: what moves, in order; an event follows each.
        mark_of_layer: for each model layer, the step after which it has landed.
        page_bytes: for each index space, bytes of a page, all pools and layers.
    """

    what: str
    stream: Stream
    steps: Sequence[Step]
    mark_of_layer: Mapping[int, int]
    page_bytes: Mapping[str, int]


@frozen(kw_only=True, eq=False)
class Lanes:
    """What moves in each direction, from :meth:`Engine.lanes`."""

    backup: _Lane
    load: _Lane


class Engine:
    """Moves the pages of host pools over one device, backups on one stream, loads on another.

    Args:
        runtime: the runtime of the device.
        device: its ordinal.
        groups: model layers that a load moves together, ascending; each group has a mark.
        ring_bytes: budget of the staging ring.
        ledger: where the ring is booked; None for books of its own.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        device: int,
        groups: Sequence[range],
        ring_bytes: int = DEFAULT_RING_BYTES,
        ledger: Ledger | None = None,
    ) -> None:
        self.ring = StagingRing(runtime, device, ring_bytes, ledger)
        self._runtime = runtime
        self._device = device
        self._groups = tuple(groups)
        self._lock = threading.Lock()
        self._closed = False
        self._streams = runtime.new_stream(device), runtime.new_stream(device)
        self._lanes = self.lanes(())

    def lanes(self, pools: Sequence[PoolWays]) -> Lanes:
        """How some pools move: in backups all layers at once, in loads group by group."""
        page_bytes: Counter[str] = Counter()
        for pool in pools:
            page_bytes[pool.space] += pool.spec.page_bytes
        backups, loads = self._streams
        backup = _Lane(
            what="backup",
            stream=backups,
            steps=[tuple((pool.space, pool.backup, range(pool.spec.layer_count)) for pool in pools)],
            mark_of_layer={},
            page_bytes=page_bytes,
        )
        load = _Lane(
            what="load",
            stream=loads,
            steps=[_load_step(pools, group) for group in self._groups],
            mark_of_layer={layer: n for n, group in enumerate(self._groups) for layer in group},
            page_bytes=page_bytes,
        )
        return Lanes(backup=backup, load=load)

    def attach(self, lanes: Lanes) -> None:
        """Say what moves from now on."""
        self._lanes = lanes

    def backup(
        self,
        pairs: SpacePairs,
        *,
        after: Event | None,
        on_acknowledged: Callable[[], None],
        lanes: Lanes | None = None,
    ) -> Ticket:
        """Copy pages from device to host, all layers of a pool at once.

        Args:
            pairs: which pages of each index space; the pools of a space move together.
            after: what wrote the device pages; None for all work that the caller's current stream has so far.
            on_acknowledged: called once, when the ticket is.
            lanes: what moves; None for what is attached.

        Raises:
            TransferError: a submission was refused; what was submitted before it has run.
        """
        return self._submit((lanes or self._lanes).backup, pairs, after, on_acknowledged)

    def load(
        self,
        pairs: SpacePairs,
        *,
        after: Event | None,
        on_acknowledged: Callable[[], None],
        lanes: Lanes | None = None,
    ) -> Ticket:
        """Copy pages from host to device, by model layer, with a mark per layer.

        Args:
            pairs: which pages of each index space; the pools of a space move together.
            after: who still reads the device pages; None for all work that the caller's current stream has.
            on_acknowledged: called once, when the ticket is.
            lanes: what moves; None for what is attached.

        Raises:
            TransferError: a submission was refused; what was submitted before it has run.
        """
        return self._submit((lanes or self._lanes).load, pairs, after, on_acknowledged)

    def _submit(
        self, lane: _Lane, pairs: SpacePairs, after: Event | None, on_acknowledged: Callable[[], None]
    ) -> Ticket:
        runtime, stream = self._runtime, lane.stream
        moved = {space: mine for space, mine in pairs.items() if len(mine)}
        events = []
        with self._lock:
            if self._closed:
                raise closed_error(lane.what)
            try:
                if after is None:
                    runtime.wait_current(stream, self._device)
                else:
                    runtime.wait_event(stream, after)
                for step in lane.steps:
                    for space, way, layers in step:
                        # Nothing to move is nothing to launch; the marks fire with what runs already.
                        if space in moved:
                            way.submit(moved[space], layers, stream)
                    events.append(runtime.record(stream))
            except BaseException as error:
                self._drain(stream)
                if isinstance(error, DeviceError):
                    raise _refused(lane.what, error) from error
                raise
        nbytes = sum(len(mine) * lane.page_bytes[space] for space, mine in moved.items())
        return Ticket(lane.what, nbytes, events, lane.mark_of_layer, on_acknowledged)

    @property
    def closed(self) -> bool:
        """Whether it takes no more transfers."""
        return self._closed

    def close(self) -> None:
        """Take no more transfers, wait for those that were submitted, and let the staging ring go."""
        with self._lock:
            self._closed = True
        self.drain()
        self.ring.release()

    def drain(self) -> None:
        """Wait for everything that was submitted."""
        for stream in self._streams:
            self._drain(stream)

    def _drain(self, stream: Stream) -> None:
        """Wait for a stream whatever it reports: nothing may be released while it still runs."""
        try:
            self._runtime.synchronize(stream)
        except StreamsStuckError:
            raise
        except DeviceError:
            return


def _load_step(pools: Sequence[PoolWays], group: range) -> Step:
    """The ways of the pools that have layers in the group, each with its own numbers of these layers."""
    step = []
    for pool in pools:
        ids = pool.spec.layer_ids
        own = range(bisect_left(ids, group.start), bisect_left(ids, group.stop))
        if own:
            step.append((pool.space, pool.load, own))
    return tuple(step)


def closed_error(what: str) -> TransferError:
    """The error, for the caller to raise, of a call on what was closed."""
    return TransferError(
        who=what,
        got="a controller that was closed",
        expected="one whose host memory is there",
        remedy="Make a new controller.",
    )


def _refused(what: str, error: DeviceError) -> TransferError:
    return TransferError(
        who=what,
        got=str(error),
        expected="every copy accepted",
        remedy="Nothing counts as moved; what was submitted has been waited for.",
    )
