"""What the solver answers: a plan, a plan that the start-up probe must prove, or every reason why not."""

from __future__ import annotations

import enum

from attrs import frozen

from hicache_core.compat.plan import Plan


class Outcome(enum.Enum):
    """The answer in a word."""

    YES = "yes"
    IF_PROBED = "yes-if-probed"
    NO = "no"


@frozen(kw_only=True)
class Violation:
    """One reason why a combination cannot work.

    Args:
        rule: the rule, ``R1`` to ``R9``.
        code: which of the rule's reasons.
        pool: the pool that breaks it, or empty where the combination does.
        got, expected, remedy: for people.
    """

    rule: str
    code: str
    pool: str = ""
    got: str
    expected: str
    remedy: str

    @property
    def id(self) -> str:
        """``rule-code``."""
        return f"{self.rule}-{self.code}"

    def __str__(self) -> str:
        subject = f"pool '{self.pool}': " if self.pool else ""
        return f"[{self.id}] {subject}{self.got}, expected {self.expected}"


@frozen(kw_only=True)
class Combination:
    """What an operator can choose.

    Args:
        io_backend, layout: the pair.
        allow_kernel_layer_first: whether the option of that name is given.
    """

    io_backend: str
    layout: str
    allow_kernel_layer_first: bool = False

    def __str__(self) -> str:
        option = " with --allow-kernel-layer-first" if self.allow_kernel_layer_first else ""
        return f"{self.io_backend} + {self.layout}{option}"


@frozen(kw_only=True)
class Answer:
    """The answer to a query.

    Args:
        outcome: the answer in a word.
        plan: how the pools move; None where the answer is no.
        violations: every reason for a no.
        nearest: the combination nearest to what was asked that works for the whole group on its platform;
            None where the answer is not no, or where none works.
    """

    outcome: Outcome
    plan: Plan | None = None
    violations: tuple[Violation, ...] = ()
    nearest: Combination | None = None
