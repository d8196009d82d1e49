"""How host memory is obtained, populated and registered, as one value."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from attrs import field, frozen
from attrs import validators as v

from hicache_core.errors import SpecError
from hicache_core.spec.checks import name, whole

MAX_REGISTRATION_BYTES = 64 << 30

Progress = Callable[[int, int], object]
"""Told (bytes populated, bytes in all), in the caller's thread; what it raises ends the allocation."""


def _at_most_the_limit(instance: object, attribute: Any, value: int) -> None:
    if value > MAX_REGISTRATION_BYTES:
        raise SpecError(
            who=f"{type(instance).__name__}.{attribute.name}",
            got=str(value),
            expected=f"at most {MAX_REGISTRATION_BYTES}; drivers refuse or stall on larger registrations",
            remedy="Give a smaller size; memory of any size is registered in several parts.",
        )


@frozen(kw_only=True)
class MemoryOptions:
    """What an operator chooses about host memory.

    Args:
        allocator: ``anonymous``, ``memfd``, or the name of one that a plugin brings.
        hugepages: ask for huge pages where the kernel gives them on request.
        populate: make the pages present before they are registered, several threads at once.
        populate_threads: most threads that populate; 0 for one per CPU that the process may use.
        numa_node: node that the pages should come from, that of the device; None for no wish.
        max_registration_bytes: largest registration that is tried, at most 64 GiB.
        min_registration_bytes: below it, or below one cut of whole copy units and pages, a refused
            registration is not halved any more.
        accept_pageable: go on with memory that the runtime will not register. Kernels are not given it, and
            copies are slower.
        progress: called while memory is populated.
    """

    allocator: str = field(default="anonymous", validator=name())
    hugepages: bool = field(default=True, validator=v.instance_of(bool))
    populate: bool = field(default=True, validator=v.instance_of(bool))
    populate_threads: int = field(default=0, validator=whole(0))
    numa_node: int | None = field(default=None, validator=whole(0, or_none=True))
    max_registration_bytes: int = field(
        default=MAX_REGISTRATION_BYTES, validator=[whole(1), _at_most_the_limit]
    )
    min_registration_bytes: int = field(default=1, validator=whole(1))
    accept_pageable: bool = field(default=False, validator=v.instance_of(bool))
    progress: Progress | None = field(
        default=None, validator=v.optional(v.is_callable()), eq=False, repr=False
    )

    @property
    def threads(self) -> int:
        """Threads that populate: never more than the CPUs that the process may use."""
        usable = len(os.sched_getaffinity(0))
        return min(self.populate_threads or usable, usable)
