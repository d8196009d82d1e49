"""The solver: whether platform, io_backend, layout and pools work together, and which way each pool moves.

A pure function over facts and declarations; nothing here looks at a machine or imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import field, frozen

from hicache_core.errors import IncompatibleError
from hicache_core.spec import IO_BACKENDS, LAYOUTS, Capabilities, Capability, IndexSpace, Platform, PoolSpec


class IndexPlace(enum.Enum):
    """Where what moves the rows of a pool reads its host indices."""

    CPU = "cpu"
    """In arrays of the host, which issues the copies."""
    DEVICE = "device"
    """In tensors of the device, which a kernel reads."""


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
        """Where this path wants the host indices."""
        return _HOST_INDICES[self]


_HOST_INDICES: Mapping[Path, IndexPlace] = {
    Path.STAGED: IndexPlace.CPU,
    Path.COPIES: IndexPlace.CPU,
    Path.KERNEL: IndexPlace.DEVICE,
}


@frozen(kw_only=True)
class Violation:
    """One reason why a combination cannot work.

    Args:
        rule: id of the rule.
        pool: the pool that breaks it, or empty where the combination does.
        got, expected, remedy: for people.
    """

    rule: str
    pool: str
    got: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        subject = f"pool '{self.pool}': " if self.pool else ""
        return f"[{self.rule}] {subject}{self.got}, expected {self.expected}"


@frozen(kw_only=True)
class PoolPlan:
    """How one pool moves.

    Args:
        backup, load: the path of each direction.
        staged: whether backups are a staged write-back.
    """

    backup: Path
    load: Path
    staged: bool = False

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
    """The answer to a combination that works.

    Args:
        platform, io_backend, layout: the combination.
        pools: the plan of each pool by name; pools without bytes have none.
    """

    platform: str
    io_backend: str
    layout: str
    pools: Mapping[str, PoolPlan] = field(factory=dict)


@frozen(kw_only=True)
class Query:
    """A combination to be solved.

    Args:
        platform: facts about the device.
        io_backend: ``kernel`` or ``direct``.
        layout: name of the host layout.
        pools: each pool's declaration and what it can do on the platform.
        variant_platforms: platforms on which the model's variant exists, or None where that is not asked.
    """

    platform: Platform
    io_backend: str
    layout: str
    pools: Sequence[tuple[PoolSpec, Capabilities]]
    variant_platforms: Sequence[str] | None = None

    @property
    def pair(self) -> tuple[str, str]:
        """The (io_backend, layout) pair."""
        return self.io_backend, self.layout


@frozen(kw_only=True)
class _Candidate:
    """A path, and what a platform and a pool must have for it."""

    path: Path
    needs: Callable[[Platform, Capabilities], object]
    staged: bool = False


def _unstaged_because(can: Capabilities) -> Capability | None:
    """The first capability that a staged write-back takes and the pool lacks."""
    return next((one for one in (can.staged_write_back, can.per_pool_backup_indices) if not one), None)


_STAGED = _Candidate(
    path=Path.STAGED,
    needs=lambda platform, can: platform.has_kernels and _unstaged_because(can) is None,
    staged=True,
)
_STAGED_COPIES = _Candidate(
    path=Path.COPIES,
    needs=lambda platform, can: _unstaged_because(can) is None and can.strided_copy,
    staged=True,
)
_COPIES = _Candidate(path=Path.COPIES, needs=lambda platform, can: can.strided_copy)
_KERNEL = _Candidate(path=Path.KERNEL, needs=lambda platform, can: platform.has_kernels and can.kernel_rows)
_KERNEL_LOAD = _Candidate(
    path=Path.KERNEL,
    needs=lambda platform, can: platform.kernel_loads_page_first and _KERNEL.needs(platform, can),
)

# In order of preference: the first path that a platform and a pool can take is taken.
_BACKUP: Mapping[tuple[str, str], tuple[_Candidate, ...]] = {
    ("kernel", "page_first"): (_STAGED, _STAGED_COPIES, _KERNEL),
    ("kernel", "layer_first"): (_KERNEL,),
    ("direct", "layer_first"): (_COPIES,),
    ("direct", "page_first_direct"): (_COPIES,),
}
_LOAD: Mapping[tuple[str, str], tuple[_Candidate, ...]] = {
    ("kernel", "page_first"): (_KERNEL_LOAD, _COPIES),
    ("kernel", "layer_first"): (_KERNEL,),
    ("direct", "layer_first"): (_COPIES,),
    ("direct", "page_first_direct"): (_COPIES,),
}


def _first(
    candidates: Sequence[_Candidate], platform: Platform, declared: Capabilities
) -> _Candidate | None:
    return next((c for c in candidates if c.needs(platform, declared)), None)


def _pool_plan(query: Query, declared: Capabilities) -> PoolPlan | None:
    backup = _first(_BACKUP[query.pair], query.platform, declared)
    load = _first(_LOAD[query.pair], query.platform, declared)
    if backup is None or load is None:
        return None
    return PoolPlan(backup=backup.path, load=load.path, staged=backup.staged)


_STAGED_PAIR = ("kernel", "page_first")
_LAYER_FIRST_KERNEL = ("kernel", "layer_first")


def _combination(query: Query) -> Iterator[Violation]:
    served = ", ".join(f"{b} + {layout}" for b, layout in _BACKUP)
    if query.io_backend not in IO_BACKENDS or query.layout not in LAYOUTS:
        names = f"io_backend {' or '.join(IO_BACKENDS)} and layout {', '.join(LAYOUTS)}"
        yield _violation("R1-served-pair", "", query, names, f"Use one of {served}.")
    elif query.pair not in _BACKUP:
        nearest = next(f"{b} + {layout}" for b, layout in _BACKUP if b == query.io_backend)
        yield _violation("R1-served-pair", "", query, f"one of {served}", f"Use {nearest}.")
    platforms = query.variant_platforms
    if platforms is not None and query.platform.name not in platforms:
        yield Violation(
            rule="R7-variant-platform",
            pool="",
            got=f"a variant for {', '.join(platforms)} on {query.platform.name}",
            expected="a platform on which the variant exists",
            remedy="Choose another variant, or one of these platforms.",
        )
    if query.pair == _LAYER_FIRST_KERNEL and not query.platform.kernel_layer_first:
        yield _violation(
            "R3-kernel-layer-first",
            "",
            query,
            "a pair that this platform serves without a kernel on host rows",
            "Use direct + layer_first or kernel + page_first.",
        )


def _violation(rule: str, pool: str, query: Query, expected: str, remedy: str) -> Violation:
    got = f"{query.io_backend} + {query.layout} on {query.platform.name}"
    return Violation(rule=rule, pool=pool, got=got, expected=expected, remedy=remedy)


def _pool(query: Query, spec: PoolSpec, declared: Capabilities) -> Iterator[Violation]:
    pairs = declared.served_pairs.value
    if not isinstance(pairs, frozenset) or query.pair not in pairs:
        listed = sorted(" + ".join(pair) for pair in pairs) if isinstance(pairs, frozenset) else []
        yield _violation(
            "R1-served-pair", spec.pool, query, f"one of {', '.join(listed) or 'none'}", "Use a served pair."
        )
        return
    lacking = _unstaged_because(declared)
    if query.pair == _STAGED_PAIR and query.platform.staged_required and lacking is not None:
        yield _violation(
            "R2-staged-write-back",
            spec.pool,
            query,
            f"staged write-back, which it lacks ({lacking.code}: {lacking.text})",
            lacking.remedy,
        )
    elif _pool_plan(query, declared) is None:
        kernel = declared.kernel_rows
        yield _violation(
            "R5-no-way",
            spec.pool,
            query,
            f"a way to move its rows; kernels: {kernel.text or 'none in this runtime'}",
            kernel.remedy or "Use direct.",
        )


def _group(query: Query) -> Iterator[Violation]:
    pages: dict[str, int] = {}
    spaces: dict[str, IndexSpace] = {}
    names: set[str] = set()
    for spec, _ in query.pools:
        space = spec.index_space
        if pages.setdefault(space.name, space.page_slots) != space.page_slots:
            yield Violation(
                rule="R6-page-size",
                pool=spec.pool,
                got=f"pages of {space.page_slots} slots in index space '{space.name}'",
                expected=f"{pages[space.name]}, as the other pools of that space",
                remedy="Give all pools of an index space one page size.",
            )
        if spaces.setdefault(space.name, space) != space and pages[space.name] == space.page_slots:
            yield Violation(
                rule="R6-space",
                pool=spec.pool,
                got=f"reuse {space.reuse.value} in index space '{space.name}'",
                expected=f"{spaces[space.name].reuse.value}, as the other pools of that space",
                remedy="Give all pools of an index space one rule and one window.",
            )
        if spec.pool in names:
            yield Violation(
                rule="R6-pool-name",
                pool=spec.pool,
                got="the name twice",
                expected="a name once",
                remedy="Rename one pool.",
            )
        names.add(spec.pool)
    anchors = [spec.pool for spec, _ in query.pools if spec.anchor]
    if len(anchors) != 1:
        yield Violation(
            rule="R6-anchor",
            pool="",
            got=f"anchors {anchors}",
            expected="exactly one anchor",
            remedy="Mark the pool whose slots name the pages of the group.",
        )


def violations(query: Query) -> tuple[Violation, ...]:
    """Every reason why the combination cannot work; none where it works."""
    found = [*_combination(query), *_group(query)]
    if not any(v.rule == "R1-served-pair" for v in found):
        for spec, declared in query.pools:
            if spec.buffers:
                found.extend(_pool(query, spec, declared))
    return tuple(found)


def solve(query: Query, *, who: str = "solver") -> Plan:
    """The plan of a combination.

    Raises:
        IncompatibleError: it cannot work; carries every violation.
    """
    found = violations(query)
    if found:
        raise IncompatibleError(who=who, violations=found, remedy=" ".join(v.remedy for v in found))
    plans = {
        spec.pool: plan
        for spec, declared in query.pools
        if spec.buffers and (plan := _pool_plan(query, declared)) is not None
    }
    return Plan(
        platform=query.platform.name, io_backend=query.io_backend, layout=query.layout, pools=plans
    )
