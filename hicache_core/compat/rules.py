"""The rules of compatibility: each looks at a query and names all that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hicache_core.compat.answer import Violation
from hicache_core.compat.paths import (
    LAYER_FIRST_KERNEL,
    SERVED,
    STAGED_PAIR,
    has_way,
    pool_plan,
    unstaged_because,
    uses_alias,
)
from hicache_core.compat.plan import Condition, Member, Path, Query
from hicache_core.spec import IO_BACKENDS, LAYOUTS, Alias, IndexSpace, PointerDomain

_NOT_BY_KERNEL = "direct + layer_first and kernel + page_first need no kernel on host rows here."


def _is_served(query: Query) -> bool:
    return query.pair in SERVED


def _moving(query: Query) -> Iterator[Member]:
    """The pools with bytes that serve the pair."""
    for member in query.pools:
        pairs = member.capabilities.served_pairs.value
        if member.spec.buffers and isinstance(pairs, frozenset) and query.pair in pairs:
            yield member


def _served_pair(query: Query) -> Iterator[Violation]:
    served = ", ".join(" + ".join(pair) for pair in SERVED)
    if _is_served(query):
        return
    expected, pairs = f"one of {served}", [pair for pair in SERVED if pair[0] == query.io_backend]
    if query.io_backend not in IO_BACKENDS or query.layout not in LAYOUTS:
        expected = f"io_backend {' or '.join(IO_BACKENDS)} and layout {', '.join(LAYOUTS)}"
    yield Violation(
        rule="R1",
        code="served-pair",
        got=query.asked,
        expected=expected,
        remedy=f"Use {' or '.join(' + '.join(pair) for pair in pairs or SERVED)}.",
    )


def _pool_pairs(query: Query) -> Iterator[Violation]:
    if not _is_served(query):
        return
    for member in query.pools:
        pairs = member.capabilities.served_pairs.value
        own = pairs if isinstance(pairs, frozenset) else frozenset()
        if member.spec.buffers and query.pair not in own:
            listed = ", ".join(sorted(" + ".join(pair) for pair in own)) or "no pair"
            yield Violation(
                rule="R1",
                code="served-pair",
                pool=member.spec.pool,
                got=query.asked,
                expected=f"what its family serves: {listed}",
                remedy="Use a pair that every pool serves.",
            )


def _staged_write_back(query: Query) -> Iterator[Violation]:
    if query.pair != STAGED_PAIR or not query.platform.staged_required:
        return
    for member in _moving(query):
        lacking = unstaged_because(member.capabilities)
        if lacking is not None:
            yield Violation(
                rule="R2",
                code="staged-write-back",
                pool=member.spec.pool,
                got=query.asked,
                expected=f"staged write-back, which it lacks ({lacking.code}: {lacking.text})",
                remedy=lacking.remedy,
            )


def _asks_for_layer_first(query: Query) -> bool:
    return query.pair == LAYER_FIRST_KERNEL and not query.platform.kernel_layer_first


def _outside_device_domain(query: Query) -> Iterator[Member]:
    for member in _moving(query):
        if member.capabilities.kernel_pointer_domain.value is not PointerDomain.DEVICE:
            yield member


def _kernel_layer_first(query: Query) -> Iterator[Violation]:
    if not _asks_for_layer_first(query):
        return
    for member in _outside_device_domain(query):
        yield Violation(
            rule="R3",
            code="cpu-pointers",
            pool=member.spec.pool,
            got=f"{query.asked}, with tables that do not hold addresses of the device",
            expected="tables in the device domain, whatever is allowed",
            remedy=f"Build its tables from the aliases; {_NOT_BY_KERNEL}",
        )
    if not query.allow_kernel_layer_first:
        yield Violation(
            rule="R3",
            code="not-opted-in",
            got=query.asked,
            expected="a pair that this platform serves without being asked to",
            remedy=f"Give --allow-kernel-layer-first, or use another pair: {_NOT_BY_KERNEL}",
        )
    elif not query.probe:
        yield Violation(
            rule="R3",
            code="probe-off",
            got=f"{query.asked}, with the start-up probe switched off",
            expected="a probe that proves that kernels see the host rows",
            remedy=f"Leave the probe on, or use another pair: {_NOT_BY_KERNEL}",
        )


def _pointer_domain(query: Query) -> Iterator[Violation]:
    if not _is_served(query):
        return
    for member in _moving(query):
        plan = pool_plan(query, member)
        if plan is None or not uses_alias(query, plan):
            continue
        if query.platform.alias is Alias.DISTINCT and plan.pointer_domain is not PointerDomain.DEVICE:
            yield Violation(
                rule="R4",
                code="pointer-domain",
                pool=member.spec.pool,
                got=f"tables in the {plan.pointer_domain.value} domain for {query.asked}",
                expected="addresses of the device: those of registered memory differ from the CPU's here",
                remedy="Build its tables from the aliases, as the core's default does.",
            )
        if query.platform.alias is Alias.NONE and plan.pointer_domain is PointerDomain.DEVICE:
            yield Violation(
                rule="R9",
                code="nothing-registered",
                pool=member.spec.pool,
                got=f"tables in the device domain for {query.asked}",
                expected="raw addresses: nothing is registered on this platform, so nothing has an alias",
                remedy="Build its tables from raw addresses there.",
            )


def _row_bytes(query: Query) -> Iterator[Violation]:
    for member in query.pools:
        host = {buffer.name: buffer.row_bytes for buffer in member.spec.buffers}
        for name, found in member.device_row_bytes.items():
            if found != host.get(name):
                yield Violation(
                    rule="R5",
                    code="row-bytes",
                    pool=member.spec.pool,
                    got=f"device rows of {found} bytes in buffer '{name}'",
                    expected=f"{host[name]}, as its host rows" if name in host else f"buffers {list(host)}",
                    remedy="Give the tensors that the engine allocated for this pool, or another variant.",
                )


def _no_way(query: Query) -> Iterator[Violation]:
    if not _is_served(query):
        return
    unstaged = {violation.pool for violation in _staged_write_back(query)}
    for member in _moving(query):
        kernel = member.capabilities.kernel_rows
        rule, code = ("R5", "no-way") if query.platform.has_kernels else ("R9", "no-kernel")
        # Of a pool that is not staged, R2 has told why its backups cannot go; its loads are another matter.
        needed = ("load",) if member.spec.pool in unstaged else ("backup", "load")
        if not all(has_way(direction, query, member) for direction in needed):
            yield Violation(
                rule=rule,
                code=code,
                pool=member.spec.pool,
                got=query.asked,
                expected=f"a way to move its rows; kernels: {kernel.text or 'none for this pair'}",
                remedy=kernel.remedy or "Use direct.",
            )


def _page_sizes(query: Query) -> Iterator[Violation]:
    spaces: dict[str, IndexSpace] = {}
    for member in query.pools:
        space = member.spec.index_space
        first = spaces.setdefault(space.name, space)
        if first.page_slots != space.page_slots:
            yield Violation(
                rule="R6",
                code="page-size",
                pool=member.spec.pool,
                got=f"pages of {space.page_slots} slots in index space '{space.name}'",
                expected=f"{first.page_slots}, as the other pools of that space",
                remedy="Give all pools of an index space one page size.",
            )
        elif first != space:
            yield Violation(
                rule="R6",
                code="space",
                pool=member.spec.pool,
                got=f"reuse {space.reuse.value} in index space '{space.name}'",
                expected=f"{first.reuse.value}, as the other pools of that space",
                remedy="Give all pools of an index space one rule and one window.",
            )


def _derived_pages(query: Query) -> Iterator[Violation]:
    """A derived pool has at least the pages of its source: the anchor's, or the first of another space."""
    sources: dict[str, int | None] = {}
    for member in sorted(query.pools, key=lambda member: not member.spec.anchor):
        source = sources.setdefault(member.spec.index_space.name, member.host_pages)
        if member.host_pages is None or source is None:
            continue
        if member.host_pages < source:
            yield Violation(
                rule="R6",
                code="derived-pages",
                pool=member.spec.pool,
                got=f"{member.host_pages} host pages",
                expected=f"at least {source}, as the pool whose slots it rides on",
                remedy="Give it as many pages.",
            )


def _names(query: Query) -> Iterator[Violation]:
    names = [member.spec.pool for member in query.pools]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield Violation(
            rule="R6",
            code="pool-name",
            pool=name,
            got=f"the name {names.count(name)} times",
            expected="a name once",
            remedy="Rename one pool.",
        )
    missing = [name for name in query.required if name not in names]
    for name, reason in query.required.items():
        if name in missing:
            yield Violation(
                rule="R6",
                code="required-pool",
                pool=name,
                got="a group without it",
                expected="every pool that the model needs to restore a page",
                remedy=reason,
            )
    anchors = [member.spec.pool for member in query.pools if member.spec.anchor]
    if len(anchors) != 1:
        yield Violation(
            rule="R6",
            code="anchor",
            got=f"anchors {anchors}",
            expected="exactly one anchor",
            remedy="Mark the pool whose slots name the pages of the group"
            + ("; it may be one that is missing here." if missing and not anchors else "."),
        )


def _variant(query: Query) -> Iterator[Violation]:
    platforms = query.variant_platforms
    if platforms is not None and not set(query.platform.variant_names) & set(platforms):
        yield Violation(
            rule="R7",
            code="variant-platform",
            got=f"a variant for {', '.join(platforms) or 'no platform'} on {query.platform.name}",
            expected="a platform on which the variant exists",
            remedy="Choose another variant, or one of these platforms.",
        )


Rule = Callable[[Query], Iterator[Violation]]

RULES: Mapping[str, tuple[Rule, ...]] = {
    "R1": (_served_pair, _pool_pairs),
    "R2": (_staged_write_back,),
    "R3": (_kernel_layer_first,),
    "R4": (_pointer_domain,),
    "R5": (_row_bytes, _no_way),
    "R6": (_page_sizes, _names, _derived_pages),
    "R7": (_variant,),
}
"""The rules by id. What R8 asks for is that a joining sidecar is held to all of these; the reasons of R9, of
platforms that register nothing, come from the same checks as those of R4 and R5."""


def conditions(query: Query) -> tuple[Condition, ...]:
    """What the start-up probe has to prove for a combination that breaks no rule."""
    if not _asks_for_layer_first(query):
        return ()
    moved = [
        m for m in _moving(query) if (plan := pool_plan(query, m)) and Path.KERNEL in (plan.backup, plan.load)
    ]
    return tuple(
        Condition(
            rule="R3",
            code="kernel-sees-host-rows",
            text=f"a kernel on {query.platform.name} moves rows of '{member.spec.pool}' through its tables",
        )
        for member in moved
    )
