"""The paths of each served pair, and what a platform and a pool must have for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import evolve, frozen

from hicache_core.compat.plan import Choice, Member, Path, PoolPlan, Query
from hicache_core.spec import Capabilities, Capability, IndexPlace, PointerDomain, unsupported


@frozen(kw_only=True)
class _Candidate:
    """A path, and what speaks against it for a pool.

    Args:
        path: the path.
        against: the reason why a pool cannot or should not take it; None where it does.
        staged: whether a backup on it is a staged write-back.
    """

    path: Path
    against: Callable[[Query, Member], Capability | None]
    staged: bool = False


def _no(code: str, text: str) -> Capability:
    return unsupported(code, text, "")


def _first(*found: Capability | None) -> Capability | None:
    """The first that is there; an unsupported capability counts as false, so that ``or`` would lose it."""
    return next((one for one in found if one is not None), None)


def _lacks(*capabilities: Capability) -> Capability | None:
    return next((one for one in capabilities if not one), None)


def unstaged_because(can: Capabilities) -> Capability | None:
    """What keeps a pool from a staged write-back, and why; None where nothing does."""
    found = _lacks(can.staged_write_back, can.per_pool_backup_indices)
    if found is None and not _takes(can, "backup", "kernel", IndexPlace.CPU):
        return unsupported(
            "host-indices-on-device",
            "the pool takes the host indices of a backup on the device only",
            "Take them on the CPU, from where a staged write-back issues its copies.",
        )
    return found


def _takes(can: Capabilities, direction: str, io_backend: str, place: IndexPlace) -> bool:
    places = can.host_index_device.value
    return isinstance(places, frozenset) and (direction, io_backend, place) in places


def _no_kernels(query: Query) -> Capability | None:
    if query.platform.has_kernels:
        return None
    return _no("no-kernel", f"there are no kernels for {query.platform.name} here")


def _no_relayout(query: Query, member: Member) -> Capability | None:
    rows = [buffer.row_bytes for buffer in member.spec.buffers]
    if not query.platform.relays_out_backups:
        return _no("copies-faster", f"strided copies are preferred to a relayout on {query.platform.name}")
    if min(rows) > query.ring_bytes:
        return _no("ring-too-small", f"no row of {min(rows)} bytes fits a ring of {query.ring_bytes}")
    return _first(_no_kernels(query), unstaged_because(member.capabilities))


def _no_staged_copies(query: Query, member: Member) -> Capability | None:
    return _first(unstaged_because(member.capabilities), _lacks(member.capabilities.strided_copy))


def _no_copies(query: Query, member: Member) -> Capability | None:
    return _lacks(member.capabilities.strided_copy)


def _no_row_kernel(query: Query, member: Member) -> Capability | None:
    return _first(_no_kernels(query), _lacks(member.capabilities.kernel_rows))


def _no_kernel_load(query: Query, member: Member) -> Capability | None:
    if not query.platform.kernel_loads_page_first:
        text = f"page_first loads on {query.platform.name} go by runtime copies"
        return _no("loads-by-copies", text)
    return _no_row_kernel(query, member)


_STAGED = _Candidate(path=Path.STAGED, against=_no_relayout, staged=True)
_STAGED_COPIES = _Candidate(path=Path.COPIES, against=_no_staged_copies, staged=True)
_COPIES = _Candidate(path=Path.COPIES, against=_no_copies)
_KERNEL = _Candidate(path=Path.KERNEL, against=_no_row_kernel)
_KERNEL_LOAD = _Candidate(path=Path.KERNEL, against=_no_kernel_load)

# In order of preference: the first path that nothing speaks against is taken.
_BACKUP: Mapping[tuple[str, str], tuple[_Candidate, ...]] = {
    ("kernel", "page_first"): (_STAGED, _STAGED_COPIES, _KERNEL),
    ("kernel", "layer_first"): (_KERNEL,),
    ("direct", "page_first_direct"): (_COPIES,),
    ("direct", "layer_first"): (_COPIES,),
}
_LOAD: Mapping[tuple[str, str], tuple[_Candidate, ...]] = {
    ("kernel", "page_first"): (_KERNEL_LOAD, _COPIES),
    ("kernel", "layer_first"): (_KERNEL,),
    ("direct", "page_first_direct"): (_COPIES,),
    ("direct", "layer_first"): (_COPIES,),
}

SERVED: tuple[tuple[str, str], ...] = tuple(_BACKUP)
"""The (io_backend, layout) pairs that are served at all."""
STAGED_PAIR = ("kernel", "page_first")
LAYER_FIRST_KERNEL = ("kernel", "layer_first")


_CANDIDATES: Mapping[str, Mapping[tuple[str, str], Sequence[_Candidate]]] = {"backup": _BACKUP, "load": _LOAD}


def _taken(direction: str, query: Query, member: Member) -> tuple[_Candidate | None, list[Choice]]:
    """The path that is taken, and why those before it are not."""
    choices: list[Choice] = []
    for candidate in _CANDIDATES[direction][query.pair]:
        against = candidate.against(query, member)
        if against is None and _takes(
            member.capabilities, direction, query.io_backend, candidate.path.host_indices
        ):
            return candidate, choices
        code, text = (
            (against.code, against.text)
            if against is not None
            else ("indices", "its host indices lie elsewhere")
        )
        choices.append(Choice(code=f"{direction}-{code}", text=f"no {candidate.path.value}: {text}"))
    return None, choices


def has_way(direction: str, query: Query, member: Member) -> bool:
    """Whether a pool can move in a direction under a served pair."""
    return _taken(direction, query, member)[0] is not None


def pool_plan(query: Query, member: Member) -> PoolPlan | None:
    """How a pool moves under a served pair; None where it has no way."""
    backup, backup_choices = _taken("backup", query, member)
    load, load_choices = _taken("load", query, member)
    if backup is None or load is None:
        return None
    domain = member.capabilities.kernel_pointer_domain.value
    plan = PoolPlan(
        backup=backup.path,
        load=load.path,
        staged=backup.staged,
        pointer_domain=domain if isinstance(domain, PointerDomain) else PointerDomain.CPU,
        staging_bytes=query.ring_bytes if backup.path is Path.STAGED else 0,
    )
    own = [*backup_choices, *load_choices, *_bypasses(query, member, plan), *_aliased(query, plan)]
    return evolve(plan, choices=tuple(own))


def _bypasses(query: Query, member: Member, plan: PoolPlan) -> Iterator[Choice]:
    """Rows that are too large for the ring go by strided copies beside it."""
    for buffer in member.spec.buffers:
        if plan.staging_bytes and buffer.row_bytes > query.ring_bytes:
            yield Choice(
                code="backup-ring-bypass",
                text=f"'{buffer.name}': rows of {buffer.row_bytes} bytes bypass a ring of {query.ring_bytes}",
            )


def uses_alias(query: Query, plan: PoolPlan) -> bool:
    """Whether something of the plan needs the device's address of host memory, not the CPU's."""
    return Path.KERNEL in (plan.backup, plan.load) or not query.platform.copies_take_host


def _aliased(query: Query, plan: PoolPlan) -> Iterator[Choice]:
    if {plan.backup, plan.load} != {Path.KERNEL} and not query.platform.copies_take_host:
        yield Choice(
            code="copies-take-alias",
            text=f"copies on {query.platform.name} get the alias: not every kind takes the CPU address",
        )
