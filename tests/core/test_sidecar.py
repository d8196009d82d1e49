"""A sidecar joins as a transaction: all of it or nothing, whichever step fails, and the group serves on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from attrs import evolve, field, frozen

from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.sim import Faults, SimRuntime
from hicache_core.device_pool import DevicePool
from hicache_core.errors import (
    AddressError,
    BufferMismatchError,
    CapacityError,
    HiCacheError,
    HostMemoryError,
    IncompatibleError,
    OverBudgetError,
    PluginError,
    ProbeError,
    RegistrationError,
    SidecarError,
    SlotError,
    SpecError,
    TransferError,
)
from hicache_core.group import HostGroup
from hicache_core.memory.ledger import Ledger
from hicache_core.spec import (
    Capabilities,
    IndexSpace,
    Platform,
    PoolSpec,
    Reuse,
    RowUnit,
    default_capabilities,
    platform_named,
    unsupported,
)
from hicache_core.testing.rigs import DeviceOptions, Rig, differences
from hicache_core.testing.stand_ins import pool_spec, registry_of
from tests.core.lying_pools import Hooks, cpu_tables, idle_writer

KV = pool_spec(48)
SIDE = pool_spec(64, 32, pool="side", anchor=False, layer_ids=(1, 2))
NO_HOOKS: Hooks = {}
STATES = IndexSpace(name="states", page_slots=1, reuse=Reuse.LEAF)


def _config(pair: tuple[str, str] = ("kernel", "page_first")) -> ControllerConfig:
    return ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=16)


def _rig(
    *specs: PoolSpec,
    hooks: Hooks = NO_HOOKS,
    config: ControllerConfig | None = None,
    platform: str = "rocm-mi355x",
) -> Rig[SimRuntime]:
    """A group of the anchor, whose registry knows the sidecars as well."""
    runtime = SimRuntime(platform_named(platform), devices=2)
    registry = registry_of([KV, *specs], **hooks)
    return Rig([KV], config or _config(), runtime, registry=registry, ledger=Ledger())


def _state(rig: Rig[SimRuntime]) -> dict[str, Any]:
    """All that a refusal must leave as it was."""
    controller, group = rig.controller, rig.controller.group
    return {
        "free": {name: allocator.free_pages for name, allocator in group.allocators.items()},
        "links": sorted(group.links),
        "pools": group.pools,
        "plan": controller.plan,
        "capabilities": {pool.spec.pool: controller.capabilities(pool) for pool in group.pools},
        "booked": controller.ledger.snapshot(),
        "device pages": dict(controller.device_pages),
        "registrations": sorted(rig.runtime.memory.registrations),
        "ring": controller.engine.ring.made,
        "bytes": {key: found.tobytes() for key, found in rig.snapshot().items() if key[1] == "kv"},
    }


def _serves(rig: Rig[SimRuntime]) -> None:
    """The pools of the group still move, bytes compared."""
    for name in set(rig.device_rows) - {pool.spec.pool for pool in rig.controller.group.pools}:
        del rig.device_rows[name]
    rig.there_and_back()


@pytest.mark.parametrize(
    "pair",
    [("kernel", "page_first"), ("direct", "layer_first"), ("direct", "page_first_direct")],
    ids="+".join,
)
def test_a_sidecar_moves_with_the_next_transfer(pair: tuple[str, str]) -> None:
    """Its rows go out and come back with the anchor's, byte for byte; the plan says how."""
    with _rig(SIDE, config=_config(pair)) as rig:
        rig.there_and_back()
        rig.controller.register_sidecar(rig.device_pool(SIDE))
        assert [pool.spec.pool for pool in rig.controller.group.pools] == ["kv", "side"]
        assert set(rig.controller.plan.pools) == {"kv", "side"}
        assert rig.controller.decisions.count("sidecar-joined") == 1
        rig.there_and_back()


def test_a_sidecar_can_bring_an_index_space() -> None:
    """Its slots are linked, allocated and moved as if it had been there from the start."""
    states = pool_spec(256, unit=RowUnit.SLOT, pool="state", anchor=False, space=STATES)
    with _rig(states) as rig:
        rig.allocate(12)
        rig.controller.register_sidecar(rig.device_pool(states), host_pages=6)
        rig.allocate(6, "states")
        assert (rig.controller.device_pages["states"], sorted(rig.controller.group.links)) == (12, ["states"])
        before = rig.snapshot()
        pairs, others = [(3, 0), (4, 2)], {"states": [(5, 1)]}
        host, device = rig.sides(pairs)
        rig.controller.backup(host, device, others={"states": rig.sides(others["states"], "states")}).wait()
        assert differences(rig.snapshot(), rig.after_backup(before, pairs, others)) == []


def test_pages_from_before_are_refused_until_they_are_written_again() -> None:
    """I40: the sidecar has no part of them; a backup or a new owner makes them whole."""
    with _rig(SIDE) as rig:
        pages = rig.allocate(8)
        group, controller = rig.controller.group, rig.controller
        controller.backup(*rig.sides([(page, page) for page in pages])).wait()
        controller.register_sidecar(rig.device_pool(SIDE))
        before = rig.snapshot()
        with pytest.raises(SlotError) as caught:
            controller.load(*rig.sides([(pages[0], 9), (pages[3], 2)]))
        assert set(caught.value.slots) == {pages[0] * 4, pages[3] * 4}
        assert differences(rig.snapshot(), before) == []
        assert group.usable_pages(np.array(pages, dtype=np.int64)) == 0
        controller.backup(*rig.sides([(pages[0], 1), (pages[1], 5)])).wait()
        assert group.usable_pages(np.array(pages, dtype=np.int64)) == 2
        controller.load(*rig.sides([(pages[0], 9), (pages[1], 2)])).wait()
        group.free({"full": rig.slots(pages[2:])})
        rig.there_and_back()


def test_pages_that_nobody_owned_are_whole() -> None:
    """Nothing is refused that was never written without the sidecar."""
    with _rig(SIDE) as rig:
        rig.controller.register_sidecar(rig.device_pool(SIDE))
        rig.there_and_back()


def test_a_second_sidecar_joins_like_the_first() -> None:
    """And is moved with both."""
    third = pool_spec(128, unit=RowUnit.PAGE, pool="third", anchor=False)
    with _rig(SIDE, third) as rig:
        for spec in (SIDE, third):
            rig.controller.register_sidecar(rig.device_pool(spec))
        rig.there_and_back()


def _unstaged(only: str) -> Hooks:
    def hicache_declare_capabilities(spec: PoolSpec, platform: Platform) -> Capabilities | None:
        if spec.pool != only:
            return None
        lacking = unsupported("no-writer", "its writer is not written", "Write it.")
        return default_capabilities(spec, platform).amended({"staged_write_back": lacking})

    return {"hicache_declare_capabilities": hicache_declare_capabilities}


def _failing(error: HiCacheError) -> Callable[..., Any]:
    def admit(*_: Any) -> None:
        raise error

    return admit


@frozen(kw_only=True)
class Failure:
    """A registration that has to fail.

    Args:
        step: the step at which it does.
        cause: class of the error of that step.
        spec: the declaration of the sidecar.
        hooks: what its plugin answers.
        change: what is wrong with its device rows.
        host_pages: host pages that are asked for.
        faults: which call of the runtime fails, counted from the registration on.
        code: id of the violation, where the solver refuses it.
    """

    step: str
    cause: type[HiCacheError]
    spec: PoolSpec = SIDE
    hooks: Hooks = NO_HOOKS
    change: Callable[[Rig[SimRuntime], DevicePool], DevicePool] = lambda rig, pool: pool
    host_pages: int | None = None
    faults: Mapping[str, int] = field(factory=dict)
    code: str = ""


def _from_now_on(runtime: SimRuntime, faults: Mapping[str, int]) -> Faults:
    so_far = {"refuse_registration_at": runtime.registration_calls}
    counts: dict[str, Any] = {n: at + so_far.get(n, runtime.copy_calls) for n, at in faults.items()}
    return Faults(**counts)


def _same_rows(rig: Rig[SimRuntime], pool: DevicePool) -> DevicePool:
    """Rows that lie in those of the anchor."""
    shared = [rows[:, :32] for rows in rig.device_rows["kv"]["b0"].tensors[:2]]
    return DevicePool(spec=pool.spec, layers={**pool.layers, "b1": shared})


def _of_another_device(rig: Rig[SimRuntime], pool: DevicePool) -> DevicePool:
    layers = [rig.runtime.allocate(48 * 64, 1).view(48, 64) for _ in range(2)]
    return DevicePool(spec=pool.spec, layers={**pool.layers, "b0": layers})


def _cut_rows(rig: Rig[SimRuntime], pool: DevicePool) -> DevicePool:
    return DevicePool(spec=pool.spec, layers={n: [t[:16] for t in rows] for n, rows in pool.layers.items()})


def _narrow_rows(rig: Rig[SimRuntime], pool: DevicePool) -> DevicePool:
    return DevicePool(spec=pool.spec, layers={**pool.layers, "b0": [t[:, :16] for t in pool.layers["b0"]]})


def _missing_layer(rig: Rig[SimRuntime], pool: DevicePool) -> DevicePool:
    return DevicePool(spec=pool.spec, layers={**pool.layers, "b0": pool.layers["b0"][:1]})


def _space(**changes: Any) -> PoolSpec:
    return evolve(SIDE, index_space=evolve(SIDE.index_space, **changes))


FAILURES: Mapping[str, Failure] = {
    "duplicate name": Failure(
        step="validate", cause=IncompatibleError, spec=evolve(SIDE, pool="kv"), code="R6-pool-name"
    ),
    "wrong page size": Failure(
        step="validate", cause=IncompatibleError, spec=_space(page_slots=8), code="R6-page-size"
    ),
    "another rule of reuse": Failure(
        step="validate", cause=IncompatibleError, spec=_space(reuse=Reuse.LEAF), code="R6-space"
    ),
    "second anchor": Failure(
        step="validate", cause=IncompatibleError, spec=evolve(SIDE, anchor=True), code="R6-anchor"
    ),
    "no staged write-back": Failure(
        step="validate", cause=IncompatibleError, hooks=_unstaged("side"), code="R2-staged-write-back"
    ),
    "fewer host pages": Failure(
        step="validate", cause=IncompatibleError, host_pages=15, code="R6-derived-pages"
    ),
    "row bytes": Failure(step="validate", cause=IncompatibleError, change=_narrow_rows, code="R5-row-bytes"),
    "missing layer": Failure(step="validate", cause=BufferMismatchError, change=_missing_layer),
    "shared device rows": Failure(step="validate", cause=BufferMismatchError, change=_same_rows),
    "wrong device": Failure(step="validate", cause=AddressError, change=_of_another_device),
    "fewer device pages": Failure(step="validate", cause=SpecError, change=_cut_rows),
    "layer of no stage": Failure(step="validate", cause=SpecError, spec=evolve(SIDE, layer_ids=(1, 3))),
    "space without pages": Failure(
        step="validate",
        cause=SpecError,
        spec=pool_spec(256, unit=RowUnit.SLOT, pool="side", anchor=False, space=STATES),
    ),
    "no host pages": Failure(step="validate", cause=SpecError, host_pages=0),
    "out of memory": Failure(step="allocate", cause=HostMemoryError, host_pages=1 << 44),
    "register refused": Failure(
        step="register", cause=RegistrationError, faults={"refuse_registration_at": 2}
    ),
    "foreign tables": Failure(step="tables", cause=PluginError, hooks=cpu_tables("side")),
    "probe mismatch": Failure(step="probe", cause=ProbeError, hooks=idle_writer("side")),
    "copy fails": Failure(step="probe", cause=ProbeError, faults={"fail_copy_at": 2}),
    "copy refused": Failure(step="probe", cause=ProbeError, faults={"refuse_copy_at": 2}),
}


@pytest.mark.parametrize("name", FAILURES)
def test_whatever_fails_the_group_is_what_it_was_and_serves_on(name: str) -> None:
    """Free counts, registrations, plan, links, ring and bytes; then a good sidecar still joins."""
    case = FAILURES[name]
    good = pool_spec(16, pool="good", anchor=False)
    with _rig(SIDE, good, hooks=case.hooks) as rig:
        rig.allocate(4)
        rig.controller.backup(*rig.sides([(0, 3), (2, 1)])).wait()
        before = _state(rig)
        kept = rig.device_rows["kv"]
        offered = case.change(rig, rig.device_pool(case.spec))
        rig.runtime.faults = _from_now_on(rig.runtime, case.faults)
        rig.device_rows["kv"] = kept
        with pytest.raises(SidecarError) as caught:
            rig.controller.register_sidecar(offered, host_pages=case.host_pages)
        assert (caught.value.step, caught.value.pool) == (case.step, case.spec.pool)
        cause = caught.value.__cause__
        assert type(cause) is case.cause
        if isinstance(cause, IncompatibleError):
            assert case.code in [violation.id for violation in cause.violations]
        rig.device_rows = {"kv": kept}
        assert _state(rig) == before
        assert rig.controller.decisions.count("sidecar-refused") == 1
        _serves(rig)
        rig.controller.register_sidecar(rig.device_pool(good))
        rig.there_and_back()


def test_a_failure_while_publishing_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step too."""
    with _rig(SIDE) as rig:
        before = _state(rig)
        error = CapacityError(who="test", got="a failure", expected="none", remedy="None.")
        with monkeypatch.context() as patch:
            patch.setattr(HostGroup, "admit", _failing(error))
            with pytest.raises(SidecarError) as caught:
                rig.controller.register_sidecar(rig.device_pool(SIDE))
        assert caught.value.step == "publish"
        del rig.device_rows["side"]
        assert _state(rig) == before
        _serves(rig)


def test_a_ring_that_only_the_refused_sidecar_needed_is_given_back() -> None:
    """I43: no staging is kept for a pool that is not there."""
    anchor = pool_spec(unit=RowUnit.PAGE)
    registry = registry_of([anchor, SIDE], **idle_writer("side"))
    runtime = SimRuntime(platform_named("rocm-mi355x"))
    with Rig([anchor], _config(), runtime, registry=registry) as rig:
        assert not rig.controller.engine.ring.made
        with pytest.raises(SidecarError):
            rig.controller.register_sidecar(rig.device_pool(evolve(SIDE, layer_ids=(1, 2))))
        assert not rig.controller.engine.ring.made


def test_a_sidecar_that_the_budget_does_not_hold_is_refused() -> None:
    """Before a byte is mapped; the books say what is there, and the group serves on."""
    ledger = Ledger(9_216 + 4096)
    runtime = SimRuntime(platform_named("rocm-mi355x"))
    with Rig([KV], _config(), runtime, registry=registry_of([KV, SIDE]), ledger=ledger) as rig:
        before = _state(rig)
        with pytest.raises(SidecarError) as caught:
            rig.controller.register_sidecar(rig.device_pool(SIDE))
        assert caught.value.step == "allocate"
        cause = caught.value.__cause__
        assert isinstance(cause, OverBudgetError)
        assert cause.budget_bytes == 9_216 + 4096
        del rig.device_rows["side"]
        assert _state(rig) == before
        _serves(rig)


def test_a_declaration_without_tensors_is_no_device_pool() -> None:
    """Neither at construction nor later."""
    wrong: Any = SIDE
    with _rig(SIDE) as rig, pytest.raises(SpecError):
        rig.controller.register_sidecar(wrong)
    with pytest.raises(SpecError):
        Controller(_config(), [wrong], SimRuntime(), registry_of([SIDE]))


def test_a_closed_controller_takes_no_sidecar() -> None:
    """Its memory is gone."""
    rig = _rig(SIDE)
    offered = rig.device_pool(SIDE)
    rig.controller.close()
    with pytest.raises(SidecarError) as caught:
        rig.controller.register_sidecar(offered)
    assert isinstance(caught.value.__cause__, TransferError)
    assert not rig.runtime.memory.registrations


def test_options_of_device_rows_hold_for_sidecars_too() -> None:
    """Rows with gaps between them."""
    runtime = SimRuntime(platform_named("rocm-mi355x"))
    registry = registry_of([KV, SIDE])
    with Rig([KV], _config(), runtime, options=DeviceOptions(gap_bytes=16), registry=registry) as rig:
        rig.controller.register_sidecar(rig.device_pool(SIDE))
        rig.there_and_back()
