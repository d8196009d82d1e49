"""A sidecar joins while others use the group, or is interrupted: nothing of theirs breaks, nothing leaks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device.base import Stream
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import ProbeError, SidecarError
from hicache_core.group import HostGroup
from hicache_core.memory.ledger import Ledger
from hicache_core.pool import HostPool, PoolBuffers
from hicache_core.spec import IndexSpace, PoolSpec, Reuse, RowUnit, platform_named
from hicache_core.testing.rigs import Rig
from hicache_core.testing.stand_ins import pool_spec, registry_of
from hicache_core.transfer.pairs import PagePairs
from hicache_core.transfer.ticket import Ticket
from hicache_core.transfer.ways import Way

KV = pool_spec(48)
SIDE = pool_spec(64, 32, pool="side", anchor=False, layer_ids=(1, 2))
STATES = pool_spec(
    256,
    unit=RowUnit.SLOT,
    pool="state",
    anchor=False,
    space=IndexSpace(name="states", page_slots=1, reuse=Reuse.LEAF),
)
Hooks = Mapping[str, Callable[..., Any]]
NO_HOOKS: Hooks = {}


def _rig(*specs: PoolSpec, hooks: Hooks = NO_HOOKS, probe: bool = True) -> Rig[SimRuntime]:
    runtime = SimRuntime(platform_named("rocm-mi355x"))
    config = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=16, probe=probe)
    return Rig([KV], config, runtime, registry=registry_of([KV, *specs], **hooks), ledger=Ledger())


def _at_the_tables_of(pool: str, act: Callable[[], None]) -> Hooks:
    """Something that happens while a sidecar's tables are made."""

    def hicache_build_pointer_table(spec: PoolSpec, buffers: PoolBuffers, device: int) -> None:
        if spec.pool == pool:
            act()

    return {"hicache_build_pointer_table": hicache_build_pointer_table}


@pytest.mark.parametrize("of", ["allocators", "links"])
def test_who_walks_over_the_spaces_is_not_disturbed_by_a_new_one(of: str) -> None:
    """A thread that frees, or describes the controller, goes on over what it began with."""
    more = pool_spec(
        64, unit=RowUnit.SLOT, pool="more", anchor=False, space=IndexSpace(name="more", page_slots=1)
    )
    with _rig(STATES, more) as rig:
        rig.controller.register_sidecar(rig.device_pool(STATES), host_pages=6)
        walked: Mapping[str, Any] = getattr(rig.controller.group, of)
        names = iter(walked)
        first = next(names)
        rig.controller.register_sidecar(rig.device_pool(more), host_pages=6)
        assert "more" not in [first, *names]
        assert "more" in getattr(rig.controller.group, of)


class _FailingWriter:
    """A writer that submits what it is asked to, and then raises."""

    def __init__(self, way: Way, error: BaseException) -> None:
        self._way, self._error = way, error

    def submit(self, pairs: PagePairs, layers: range, stream: Stream) -> None:
        self._way.submit(pairs, layers, stream)
        raise self._error


def _failing_writer(error: BaseException) -> Hooks:
    def hicache_staged_write_back(pool: HostPool, device: int) -> _FailingWriter | None:
        assert pool.ways is not None
        return _FailingWriter(pool.ways.backup, error) if pool.spec.pool == "side" else None

    return {"hicache_staged_write_back": hicache_staged_write_back}


def test_whatever_a_writer_raises_names_the_probe_and_leaves_the_bytes() -> None:
    """An error that is none of hicache is a failed probe, with the error in it."""
    with _rig(SIDE, hooks=_failing_writer(ValueError("odd"))) as rig:
        offered = rig.device_pool(SIDE)
        before = {name: rows.copied() for name, rows in rig.device_rows["side"].items()}
        with pytest.raises(SidecarError) as caught:
            rig.controller.register_sidecar(offered)
        assert caught.value.step == "probe"
        assert isinstance(caught.value.__cause__, ProbeError)
        for name, rows in rig.device_rows["side"].items():
            assert np.array_equal(rows.copied(), before[name])


@pytest.mark.parametrize("at", ["submission", "wait"])
def test_an_interrupt_during_the_probe_leaves_bytes_and_group(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device rows are what they were, nothing runs over memory that was given back, the group serves."""
    hooks = _failing_writer(KeyboardInterrupt()) if at == "submission" else NO_HOOKS
    with _rig(SIDE, hooks=hooks) as rig:
        offered = rig.device_pool(SIDE)
        registered = sorted(rig.runtime.memory.registrations)
        before = {name: rows.copied() for name, rows in rig.device_rows["side"].items()}
        with monkeypatch.context() as patch:
            if at == "wait":
                patch.setattr(Ticket, "wait", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                rig.controller.register_sidecar(offered)
        for name, rows in rig.device_rows.pop("side").items():
            assert np.array_equal(rows.copied(), before[name])
        assert sorted(rig.runtime.memory.registrations) == registered
        rig.there_and_back()


def _interrupted(ticket: Ticket) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("probe", [True, False], ids=["probe", "no probe"])
def test_a_controller_that_is_closed_meanwhile_keeps_nothing_of_the_sidecar(probe: bool) -> None:
    """Closing wins at whatever step the sidecar is; its memory is given back like the others'."""

    def close() -> None:
        rig.controller.close()

    rig = _rig(SIDE, hooks=_at_the_tables_of("side", close), probe=probe)
    with pytest.raises(SidecarError):
        rig.controller.register_sidecar(rig.device_pool(SIDE))
    assert not rig.runtime.memory.registrations
    assert not rig.controller.ledger.snapshot()
    assert [pool.spec.pool for pool in rig.controller.group.pools] == ["kv"]


def test_a_close_while_a_sidecar_is_published_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the publication, and then closes over all pools."""
    rig = _rig(SIDE)
    offered = rig.device_pool(SIDE)
    admit, closing = HostGroup.admit, threading.Thread(target=rig.controller.close)

    def slow_admit(group: HostGroup, pool: HostPool) -> None:
        closing.start()
        closing.join(0.3)
        admit(group, pool)

    monkeypatch.setattr(HostGroup, "admit", slow_admit)
    rig.controller.register_sidecar(offered)
    closing.join()
    assert not rig.runtime.memory.registrations
    assert not rig.controller.ledger.snapshot()
