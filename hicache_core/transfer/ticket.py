"""Tickets: what a submitted backup or load returns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence

from hicache_core.device.base import DeviceRuntime, Event, Stream
from hicache_core.errors import DeviceError, TransferError, UnknownNameError


class Ticket:
    """A submitted transfer. Nothing that it reads or writes may be reused before it is acknowledged.

    It is acknowledged by the first :meth:`poll` or :meth:`wait` that finds it done. A failed transfer is not
    a finished one: its bytes count as not moved, and the error is kept.

    Args:
        what: ``backup`` or ``load``, for errors.
        nbytes: bytes that it moves.
        events: points that must pass, the last one last.
        mark_of_layer: for each model layer, which of the events tells that it has landed.
        on_acknowledged: called once, when it is done or has failed.
    """

    def __init__(
        self,
        what: str,
        nbytes: int,
        events: Sequence[Event],
        mark_of_layer: Mapping[int, int],
        on_acknowledged: Callable[[], None],
    ) -> None:
        self.what = what
        self.nbytes = nbytes
        self._pending = list(events)
        self._events = tuple(events)
        self._mark_of_layer = mark_of_layer
        self._on_acknowledged = on_acknowledged
        self._lock = threading.Lock()
        self._acknowledged = False
        self._error: TransferError | None = None

    @property
    def error(self) -> TransferError | None:
        """What went wrong, once it is acknowledged."""
        return self._error

    def poll(self) -> bool:
        """Whether the transfer has ended, well or badly; never waits and never raises."""
        if not self._lock.acquire(blocking=False):
            # Somebody else is just about to find out.
            return False
        try:
            return self._settle()
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Wait for the end; raises TransferError if the transfer failed, each time it is asked."""
        for event in self._events:
            # What an event has to report is read below, once.
            with contextlib.suppress(DeviceError):
                event.synchronize()
        with self._lock:
            self._settle()
        if self._error is not None:
            raise self._error

    def mark(self, model_layer: int) -> Event:
        """The event that tells that a model layer has landed; unmapped layers have one as well.

        Raises:
            UnknownNameError: the model has no such layer, or this is a backup, which has no marks.
        """
        number = self._mark_of_layer.get(model_layer)
        if number is None:
            raise UnknownNameError(
                who=f"ticket of a {self.what}",
                got=f"model layer {model_layer}",
                expected=f"a layer from {min(self._mark_of_layer)} to {max(self._mark_of_layer)}"
                if self._mark_of_layer
                else "no layer: a backup moves all layers at once",
                remedy="Wait for the ticket itself, or for a layer that the model has.",
            )
        return self._events[number]

    def wait_layer(self, runtime: DeviceRuntime, stream: Stream, model_layer: int) -> None:
        """Let ``stream`` go on only after a model layer has landed; the caller does not wait."""
        runtime.wait_event(stream, self.mark(model_layer))

    def _settle(self) -> bool:
        """Read the events that have passed; at the last one the transfer is acknowledged."""
        while self._pending:
            try:
                if not self._pending[0].query():
                    return False
            except DeviceError as error:
                self._error = self._error or _failed(self.what, error)
            self._pending.pop(0)
        if not self._acknowledged:
            self._acknowledged = True
            self._on_acknowledged()
        return True


def _failed(what: str, error: DeviceError) -> TransferError:
    failure = TransferError(
        who=what,
        got=str(error),
        expected="a transfer without a device error",
        remedy="Its bytes count as not moved: submit it again, or give its slots back.",
    )
    failure.__cause__ = error
    return failure
