"""What is asked of the solver, and the plan of a combination that works."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from attrs import field, frozen
from attrs import validators as v

from hicache_core.spec import Capabilities, IndexPlace, Platform, PointerDomain, PoolSpec
from hicache_core.spec.checks import whole

DEFAULT_RING_BYTES = 64 << 20
"""The staging ring of a device, where nothing else is asked for."""


class Path(enum.Enum):
    """How the rows of a pool move in one direction."""

    STAGED = "staged"
    """A kernel relays rows out in the device's ring; copies issued by the host carry them over."""
    COPIES = "copies"
    """Strided or plain runtime copies, issued by the host."""
    KERNEL = "kernel"
    """A kernel reads or writes host rows through the pointer tables."""

    @property
    def host_indices(self) -> IndexPlace:
        """Where this path reads the host indices."""
        return IndexPlace.DEVICE if self is Path.KERNEL else IndexPlace.CPU

    @property
    def device_indices(self) -> IndexPlace:
        """Where this path reads the device indices."""
        return IndexPlace.CPU if self is Path.COPIES else IndexPlace.DEVICE


@frozen(kw_only=True)
class Choice:
    """Something that was decided where more than one thing was possible, and why.

    Args:
        code: reason code.
        text: for people.
    """

    code: str
    text: str


@frozen(kw_only=True)
class Condition(Choice):
    """Something that the start-up probe has to prove before a plan holds.

    Args:
        rule: the rule that asks for it.
    """

    rule: str


@frozen(kw_only=True)
class PoolPlan:
    """How one pool moves.

    Args:
        backup, load: the path of each direction.
        staged: whether backups are a staged write-back.
        pointer_domain: what the pool's kernel tables hold for host memory.
        staging_bytes: bytes of the device's ring, which all pools share, that its backups go through; 0 for
            none.
        choices: what was decided for it.
    """

    backup: Path
    load: Path
    staged: bool = False
    pointer_domain: PointerDomain = PointerDomain.DEVICE
    staging_bytes: int = 0
    choices: tuple[Choice, ...] = ()

    @property
    def backup_host_indices(self) -> IndexPlace:
        """Where this pool's host indices are in a backup, whatever the other pools of the group need."""
        return self.backup.host_indices

    @property
    def load_host_indices(self) -> IndexPlace:
        """Where this pool's host indices are in a load."""
        return self.load.host_indices


@frozen(kw_only=True)
class Plan:
    """How the pools of a group move.

    Args:
        platform, io_backend, layout: the combination.
        pools: the plan of each pool by name; pools without bytes have none.
        conditions: what the start-up probe has to prove; none where the plan holds as it is.
    """

    platform: str
    io_backend: str
    layout: str
    pools: Mapping[str, PoolPlan] = field(factory=dict)
    conditions: tuple[Condition, ...] = ()

    @property
    def staging_bytes(self) -> int:
        """Bytes of the device's ring; 0 where no pool goes through it."""
        return max((plan.staging_bytes for plan in self.pools.values()), default=0)


@frozen(kw_only=True)
class Member:
    """A pool of the group that is asked about.

    Args:
        spec: its declaration.
        capabilities: what it can do on the platform.
        host_pages: its host pages; None where that is not asked.
        device_row_bytes: bytes of the rows that the engine has on the device, by buffer; empty where that is
            not asked.
    """

    spec: PoolSpec = field(validator=v.instance_of(PoolSpec))
    capabilities: Capabilities = field(validator=v.instance_of(Capabilities))
    host_pages: int | None = field(default=None, validator=whole(0, or_none=True))
    device_row_bytes: Mapping[str, int] = field(factory=dict)


def _members(members: Iterable[Member]) -> tuple[Member, ...]:
    return tuple(members)


@frozen(kw_only=True)
class Query:
    """A combination to be solved.

    Args:
        platform: facts about the device.
        io_backend: ``kernel`` or ``direct``.
        layout: name of the host layout.
        pools: the pools of the group.
        variant_platforms: platforms on which the model's variant exists, or None where that is not asked.
        required: names of pools that the group must have, each with the reason why it might lack one.
        allow_kernel_layer_first: whether the operator takes kernel + layer_first where the platform serves it
            on request only.
        probe: whether the start-up probe runs.
        ring_bytes: budget of the staging ring of a device.
    """

    platform: Platform = field(validator=v.instance_of(Platform))
    io_backend: str
    layout: str
    pools: tuple[Member, ...] = field(converter=_members)
    variant_platforms: tuple[str, ...] | None = None
    required: Mapping[str, str] = field(factory=dict)
    allow_kernel_layer_first: bool = field(default=False, validator=v.instance_of(bool))
    probe: bool = field(default=True, validator=v.instance_of(bool))
    ring_bytes: int = field(default=DEFAULT_RING_BYTES, validator=whole(0))

    @property
    def pair(self) -> tuple[str, str]:
        """The (io_backend, layout) pair."""
        return self.io_backend, self.layout

    @property
    def asked(self) -> str:
        """The combination, for people."""
        return f"{self.io_backend} + {self.layout} on {self.platform.name}"
