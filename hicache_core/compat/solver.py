"""Solving a query, and looking for the nearest one that works."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from attrs import evolve

from hicache_core.compat.answer import Answer, Combination, Outcome, Violation
from hicache_core.compat.paths import LAYER_FIRST_KERNEL, SERVED, pool_plan
from hicache_core.compat.plan import Plan, Query
from hicache_core.compat.rules import RULES, conditions
from hicache_core.errors import IncompatibleError


def violations(query: Query) -> tuple[Violation, ...]:
    """Every reason why the combination cannot work; none where it works."""
    rules = itertools.chain.from_iterable(RULES.values())
    return tuple(itertools.chain.from_iterable(rule(query) for rule in rules))


def _others(query: Query) -> Iterator[Combination]:
    """What else the operator could choose, nearest first: no new option, then the backend, then the order."""

    def distance(other: Combination) -> tuple[bool, bool, bool]:
        same_order = other.layout.startswith(query.layout) or query.layout.startswith(other.layout)
        opts_in = other.allow_kernel_layer_first and not query.allow_kernel_layer_first
        return opts_in, other.io_backend != query.io_backend, not same_order

    every = (
        Combination(
            io_backend=pair[0],
            layout=pair[1],
            # Advised where it is needed, and nowhere else.
            allow_kernel_layer_first=pair == LAYER_FIRST_KERNEL and not query.platform.kernel_layer_first,
        )
        for pair in SERVED
    )
    return iter(sorted(every, key=distance))


def nearest(query: Query) -> Combination | None:
    """The nearest combination that works for the whole group on its platform; None where none does."""
    for other in _others(query):
        changed = evolve(
            query,
            io_backend=other.io_backend,
            layout=other.layout,
            allow_kernel_layer_first=other.allow_kernel_layer_first,
        )
        if not violations(changed):
            return other
    return None


def answer(query: Query) -> Answer:
    """The answer to a query: a plan, a plan that the probe must prove, or every reason why not."""
    found = violations(query)
    if found:
        return Answer(outcome=Outcome.NO, violations=found, nearest=nearest(query))
    plans = ((member.spec.pool, pool_plan(query, member)) for member in query.pools if member.spec.buffers)
    proofs = conditions(query)
    plan = Plan(
        platform=query.platform.name,
        io_backend=query.io_backend,
        layout=query.layout,
        pools={pool: plan for pool, plan in plans if plan is not None},
        conditions=proofs,
    )
    return Answer(outcome=Outcome.IF_PROBED if proofs else Outcome.YES, plan=plan)


def solve(query: Query, *, who: str = "solver") -> Plan:
    """The plan of a combination.

    Raises:
        IncompatibleError: it cannot work; carries every violation, and the nearest combination that does.
    """
    solved = answer(query)
    if solved.plan is None:
        remedies = dict.fromkeys(violation.remedy for violation in solved.violations)
        found = f"Nearest combination that works for the whole group: {solved.nearest}."
        raise IncompatibleError(
            who=who,
            violations=solved.violations,
            nearest=solved.nearest,
            remedy=" ".join([*remedies, found if solved.nearest else "No other pair works either."]),
        )
    return solved.plan
