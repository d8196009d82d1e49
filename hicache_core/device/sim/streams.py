"""Streams and events of the simulator: queues that any call of the runtime may run a little of."""

from __future__ import annotations

import functools
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, cast

from hicache_core.errors import DeviceError, StreamsStuckError

_MOST_STEPS = 3
_PACES = (1, 2, 8, 32)


class SimEvent:
    """A point in a stream; done once everything before it has run."""

    def __init__(self, scheduler: Scheduler, stream: SimStream) -> None:
        self.scheduler = scheduler
        self._stream = stream
        self.done = False
        self.error: DeviceError | None = None

    def query(self) -> bool:
        """Whether everything before it has run; raises what failed there."""
        self.scheduler.tick()
        return self._settled()

    def synchronize(self) -> None:
        """Run what is needed until it is done; raises what failed before it."""
        self.scheduler.run_until(self)
        self._settled()

    def _settled(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done

    @property
    def stream(self) -> SimStream:
        """The stream in which it was recorded."""
        return self._stream


class SimStream:
    """A queue of operations of one device, run in order; the higher its pace, the more of them at a time."""

    def __init__(self, device: int, number: int, pace: int) -> None:
        self.device = device
        self.number = number
        self.pace = pace
        self.queue: deque[Callable[[], None] | SimEvent | _Wait] = deque()
        self.failure: DeviceError | None = None


class _Wait:
    def __init__(self, event: SimEvent) -> None:
        self.event = event


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _locked(method: _Method) -> _Method:
    """One thread at a time in the scheduler."""

    @functools.wraps(method)
    def locked(self: Scheduler, *arguments: Any, **named: Any) -> Any:
        with self._lock:
            return method(self, *arguments, **named)

    return cast(_Method, locked)


class Scheduler:
    """Decides, from a seed, when queued operations run.

    Args:
        seed: the same seed and the same calls give the same order.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        # An operation that was taken from its queue has run before anybody takes the next.
        self._lock = threading.RLock()
        self.streams: list[SimStream] = []

    @_locked
    def new_stream(self, device: int, slow: bool) -> SimStream:
        """A stream with a pace of its own; a slow one runs only when somebody waits for it."""
        pace = self._random.choice(_PACES)
        self.streams.append(SimStream(device, len(self.streams), 0 if slow else pace))
        return self.streams[-1]

    @_locked
    def tick(self) -> None:
        """Run up to a few operations of streams that may run, drawn at random by their pace."""
        busy = [stream for stream in self.streams if stream.queue and stream.pace]
        if not busy:
            return
        paces = [stream.pace for stream in busy]
        for stream in self._random.choices(busy, paces, k=self._random.randint(0, _MOST_STEPS)):
            self._step(stream)

    @_locked
    def run_until(self, event: SimEvent) -> None:
        """Run the streams, in a random order, until ``event`` is done.

        Raises:
            StreamsStuckError: nothing can run any more and the event is not done: its stream waits for ever.
        """
        while not event.done:
            if not self._step(event.stream) and not self._step_any():
                raise StreamsStuckError(
                    who="sim",
                    got="streams that wait for one another",
                    expected="an event that some stream will reach",
                    remedy="Record the event before another stream waits for it.",
                )
            self.tick()

    def _step_any(self) -> bool:
        order = [stream for stream in self.streams if stream.queue]
        self._random.shuffle(order)
        return any(self._step(stream) for stream in order)

    def _step(self, stream: SimStream) -> bool:
        """Run the next operation of a stream; whether there was one that may run."""
        if not stream.queue:
            return False
        head = stream.queue[0]
        if isinstance(head, _Wait):
            if not head.event.done:
                return False
            stream.queue.popleft()
            return True
        stream.queue.popleft()
        if isinstance(head, SimEvent):
            head.error, stream.failure = stream.failure, None
            head.done = True
            return True
        try:
            head()
        except DeviceError as error:
            stream.failure = stream.failure or error
        return True

    @_locked
    def submit(self, stream: SimStream, operation: Callable[[], None]) -> None:
        """Queue an operation."""
        stream.queue.append(operation)
        self.tick()

    @_locked
    def record(self, stream: SimStream) -> SimEvent:
        """Queue an event; it is done at once where nothing is queued before it."""
        event = SimEvent(self, stream)
        if stream.queue or stream.failure is not None:
            stream.queue.append(event)
        else:
            event.done = True
        self.tick()
        return event

    @_locked
    def wait(self, stream: SimStream, event: SimEvent) -> None:
        """Queue a wait for an event of this scheduler."""
        if getattr(event, "scheduler", None) is not self:
            raise DeviceError(
                who="sim",
                got=f"{event!r} to wait for",
                expected="an event of the same runtime",
                remedy="Record it with the runtime of the transfer.",
            )
        if not event.done:
            stream.queue.append(_Wait(event))
        self.tick()
