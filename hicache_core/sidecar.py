"""The steps by which a sidecar joins a group, named in the error of the one that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hicache_core.errors import HiCacheError, RegistrationError, SidecarError
from hicache_core.events import DecisionLog
from hicache_core.spec import PoolSpec


@contextmanager
def sidecar_steps(spec: PoolSpec, decisions: DecisionLog) -> Iterator[Callable[[str], None]]:
    """A function that says which step begins; errors of hicache become a :class:`SidecarError` naming it.

    Args:
        spec: the declaration of the pool that joins.
        decisions: where a refusal is counted.
    """
    step = "validate"

    def enter(name: str) -> None:
        nonlocal step
        step = name

    try:
        yield enter
    except HiCacheError as error:
        # Memory is mapped and registered in one go, and gives itself back where either fails.
        failed = "register" if isinstance(error, RegistrationError) else step
        decisions.record("sidecar-refused", f"at step {failed}: [{error.code}]", pool=spec.pool)
        raise SidecarError(
            who=f"sidecar '{spec.pool}' ({spec.family})",
            got=f"a refusal at step '{failed}': {error.who}: got {error.got}, expected {error.expected}",
            expected="a pool that works with the whole group",
            remedy=f"The group is what it was. {error.remedy}",
            pool=spec.pool,
            step=failed,
        ) from error
