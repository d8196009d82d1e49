"""The books of this process, with a budget that follows from the machine."""

from __future__ import annotations

import functools
import os

from hicache_core.machine.budget import memory_budget
from hicache_core.machine.limits import machine_limits
from hicache_core.memory.ledger import Ledger

_RESERVE_SHARE = 20
"""One part in so many of the host's memory is kept back for everything else."""


@functools.cache
def process_ledger() -> Ledger:
    """The one ledger of this process, made at the first call.

    Its budget is what the host and every control group allow at that moment, less a twentieth of the host's
    memory, over the ranks of this host that share it: ``LOCAL_WORLD_SIZE`` of the launcher, or one.

    Raises:
        MachineError: the limits of the machine cannot be read.
    """
    limits = machine_limits()
    budget = memory_budget(
        limits,
        reserve_bytes=limits.total_bytes // _RESERVE_SHARE,
        ranks_per_host=int(os.environ.get("LOCAL_WORLD_SIZE") or 1),
    )
    return Ledger(budget.usable_bytes, source=str(budget))
