"""The books of this process, with a budget that follows from the machine."""

from __future__ import annotations

import functools
import os

from hicache_core.errors import SpecError
from hicache_core.machine.budget import memory_budget
from hicache_core.machine.limits import machine_limits
from hicache_core.memory.ledger import Ledger

_RANKS = "LOCAL_WORLD_SIZE"
_RESERVE_SHARE = 20
"""One part in so many of the host's memory is kept back for everything else."""


@functools.cache
def process_ledger() -> Ledger:
    """The one ledger of this process, made at the first call.

    Its budget is what the host and every control group allow at that moment, less a twentieth of the host's
    memory, over the ranks of this host that share it: ``LOCAL_WORLD_SIZE`` of the launcher, or one.

    Raises:
        MachineError: the limits of the machine cannot be read.
        SpecError: ``LOCAL_WORLD_SIZE`` is no number of ranks.
    """
    ranks_per_host = _ranks_per_host()
    limits = machine_limits()
    budget = memory_budget(
        limits,
        reserve_bytes=limits.total_bytes // _RESERVE_SHARE,
        ranks_per_host=ranks_per_host,
    )
    return Ledger(budget.usable_bytes, source=str(budget))


def _ranks_per_host() -> int:
    text = os.environ.get(_RANKS) or "1"
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise SpecError(
            who=f"environment variable {_RANKS}",
            got=repr(text[:80]),
            expected="the number of ranks of this host, a whole number of at least 1",
            remedy=f"Correct or unset {_RANKS}, or give the controller a ledger of your own.",
        )
    return int(text)
