"""Host memory: one anonymous mapping per buffer, registered in chunks of whole copy units."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
from attrs import frozen

from hicache_core.errors import AddressError, HostMemoryError, RegistrationError
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.tables import Segment
from hicache_core.spec.layout import RowGrid, Strides
from hicache_core.spec.pool import BufferSpec

MAX_REGISTRATION_BYTES = 64 << 30


class Registrar(Protocol):
    """What makes host memory visible to devices; a device runtime is one."""

    def register(self, host: HostRange) -> None:
        """Make a range visible; RegistrationError with the return code where refused."""

    def unregister(self, host: HostRange) -> None:
        """Undo :meth:`register` of exactly this range."""


class HostMemory:
    """Host memory of one buffer and its registrations.

    Registrations are cut where a copy unit and an operating-system page both end. A refused one is halved and
    tried again down to one such cut; if that is refused too, what was registered is undone, last first.

    Args:
        nbytes: size; 0 maps and registers nothing.
        copy_unit: bytes that one registration must hold whole.
        runtime: the runtime that the memory is registered with.
        who: name for errors.
        max_registration_bytes: largest registration that is tried.

    Raises:
        HostMemoryError: the mapping was refused.
        RegistrationError: the runtime refused even the smallest registration; nothing is left behind.
    """

    def __init__(
        self,
        nbytes: int,
        copy_unit: int,
        runtime: Registrar,
        *,
        who: str,
        max_registration_bytes: int = MAX_REGISTRATION_BYTES,
    ) -> None:
        self._runtime = runtime
        self._who = who
        self._registered: list[HostRange] = []
        self._map: mmap.mmap | None = None
        self.view: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self.segments: tuple[Segment, ...] = ()
        if not nbytes:
            return
        try:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise HostMemoryError(
                who=who,
                got=f"{error} for a mapping of {nbytes} bytes",
                expected="host memory for the whole buffer",
                remedy="Ask for fewer host pages.",
            ) from error
        # The child of a fork must not make pinned pages move.
        self._map.madvise(mmap.MADV_DONTFORK)
        self.view = np.frombuffer(self._map, dtype=np.uint8)
        self.range = HostRange(start=self.view.ctypes.data, nbytes=nbytes)
        self._register(math.lcm(copy_unit, mmap.PAGESIZE), max_registration_bytes)
        self.segments = tuple(self._as_segments())

    def _register(self, cut: int, limit: int) -> None:
        chunk = max(limit // cut, 1) * cut
        offset = 0
        while offset < self.range.nbytes:
            part = self.range.part(offset, min(chunk, self.range.nbytes - offset))
            try:
                self._runtime.register(part)
            except RegistrationError as error:
                if part.nbytes <= cut:
                    self._unregister_all()
                    raise self._refused(error, offset, part.nbytes) from error
                chunk = max(part.nbytes // 2 // cut, 1) * cut
                continue
            except BaseException:
                self._unregister_all()
                raise
            self._registered.append(part)
            offset += part.nbytes

    def _refused(self, error: RegistrationError, offset: int, nbytes: int) -> RegistrationError:
        return RegistrationError(
            who=self._who,
            got=f"return code {error.rc} for {nbytes} bytes at offset {offset} of {self.range.nbytes}",
            expected="registered host memory",
            remedy="Raise the memlock limit (ulimit -l), or ask for fewer host pages.",
            rc=error.rc,
            offset_bytes=offset,
            nbytes=nbytes,
        )

    def _as_segments(self) -> Iterator[Segment]:
        for part in self._registered:
            yield Segment(offset=part.start - self.range.start, host=part)

    def _unregister_all(self) -> None:
        while self._registered:
            self._runtime.unregister(self._registered[-1])
            self._registered.pop()

    def destroy(self) -> None:
        """Unregister each chunk once; a second call does nothing.

        What could not be unregistered stays mapped; the mapping goes when the last view of it does.
        """
        if self._map is None:
            return
        self._unregister_all()
        self.segments = ()
        self.view = np.empty(0, dtype=np.uint8)
        self._map = None

    def page_view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The bytes ``offset`` to ``offset + nbytes`` of the buffer; AddressError where they leave it."""
        if offset < 0 or offset + nbytes > self.view.size:
            raise AddressError(
                who=self._who,
                got=f"bytes {offset} to {offset + nbytes} of a buffer of {self.view.size}",
                expected="bytes inside the buffer",
                remedy="Give a page that the pool has.",
            )
        return self.view[offset : offset + nbytes]


@frozen(kw_only=True, eq=False)
class HostBuffer:
    """The host rows of one buffer."""

    spec: BufferSpec
    grid: RowGrid
    strides: Strides
    memory: HostMemory
