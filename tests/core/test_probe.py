"""The self-test at start-up: it catches what is not as declared, and leaves every byte as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
from attrs import evolve

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import DeviceFault, IncompatibleError, PluginError, ProbeError
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.options import MemoryOptions
from hicache_core.spec import PLATFORMS, Alias, RowUnit, platform_named
from hicache_core.testing.rigs import DeviceOptions, Rig
from hicache_core.testing.stand_ins import pool_spec, registry_of
from tests.core.lying_pools import (
    Hooks,
    cpu_tables,
    far_pages,
    foreign_device_rows,
    idle_writer,
    kernel_writer,
    late_base,
    shifted_writer,
    swapped_layers,
)

KERNEL_PAGE_FIRST, KERNEL_LAYER_FIRST = ("kernel", "page_first"), ("kernel", "layer_first")
PAIRS = (KERNEL_PAGE_FIRST, KERNEL_LAYER_FIRST, ("direct", "layer_first"), ("direct", "page_first_direct"))
PLATFORM_NAMES = ("cpu-sim", "cuda", "cuda-wsl2", "rocm", "rocm-mi355x")


def _config(pair: tuple[str, str] = KERNEL_PAGE_FIRST, *, probe: bool = True) -> ControllerConfig:
    return ControllerConfig(
        io_backend=pair[0],
        layout=pair[1],
        host_pages=16,
        probe=probe,
        allow_kernel_layer_first=pair == KERNEL_LAYER_FIRST,
        memory=MemoryOptions(max_registration_bytes=8192),
    )


@pytest.mark.parametrize("platform", PLATFORM_NAMES)
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_an_honest_pool_passes_and_every_byte_stays(platform: str, pair: tuple[str, str]) -> None:
    """Device rows, guards and gaps are as before; the host memory is as it was mapped."""
    specs = [pool_spec(48, 32), pool_spec(1024, unit=RowUnit.PAGE, pool="side", anchor=False)]
    options = DeviceOptions(gap_bytes=16)
    rows = []
    for probe in (True, False):
        facts = evolve(platform_named(platform), kernel_layer_first=True)
        with Rig(specs, _config(pair, probe=probe), SimRuntime(facts), options=options) as rig:
            rows.append(rig.snapshot())
            assert rig.controller.decisions.count("probe-passed") == (2 if probe else 0)
            assert rig.controller.decisions.count("probe-off") == (0 if probe else 2)
    proved, untouched = rows
    assert proved.keys() == untouched.keys()
    for key, found in proved.items():
        assert np.array_equal(found, untouched[key]), key
        assert key[0] == "device" or not found.any()


def test_what_the_probe_moved_is_said() -> None:
    """Pages of every registration, at most four, there and back."""
    spec = pool_spec(1024)
    with Rig([spec], _config(), SimRuntime(platform_named("rocm-mi355x"))) as rig:
        (pool,) = rig.controller.group.pools
        assert len(pool.buffers[0].memory.segments) > 4
        (event,) = [e for e in rig.controller.decisions.as_data() if e["code"] == "probe-passed"]
        assert event["reason"].startswith(f"{2 * 4 * spec.page_bytes} bytes")


LIES: dict[str, tuple[Callable[[], Hooks], tuple[str, str], str]] = {
    "a writer that moves nothing": (idle_writer, KERNEL_PAGE_FIRST, "backup"),
    "a kernel where staged write-back is declared": (kernel_writer, KERNEL_PAGE_FIRST, "backup"),
    "pages that land beside their place": (shifted_writer, KERNEL_PAGE_FIRST, "backup"),
    "layers in each other's place": (swapped_layers, KERNEL_LAYER_FIRST, "backup"),
}


@pytest.mark.parametrize("platform", ["cpu-sim", "rocm-mi355x"])
@pytest.mark.parametrize("lie", LIES)
def test_a_pool_that_is_not_what_it_declares_is_caught_before_the_first_request(
    lie: str, platform: str
) -> None:
    """The pool and the step are named, and nothing stays registered."""
    hooks, pair, step = LIES[lie]
    spec = pool_spec(48)
    runtime = SimRuntime(platform_named(platform))
    with pytest.raises(ProbeError) as caught:
        Rig([spec], _config(pair), runtime, registry=registry_of([spec], **hooks()))
    assert (caught.value.pool, caught.value.step) == ("kv", step)
    assert not runtime.memory.registrations


@pytest.mark.parametrize("lie", LIES)
def test_the_same_pool_is_taken_where_the_probe_is_off(lie: str) -> None:
    """It is the probe that catches these, and nothing before it."""
    hooks, pair, _ = LIES[lie]
    spec = pool_spec(48)
    config = _config(pair, probe=False)
    Rig([spec], config, SimRuntime(), registry=registry_of([spec], **hooks())).controller.close()


def test_only_the_pool_that_lies_is_named() -> None:
    """Its neighbour in the group moves through ways of its own."""
    specs = [pool_spec(48), pool_spec(64, pool="side", anchor=False)]
    registry = registry_of(specs, **idle_writer("side"))
    with pytest.raises(ProbeError) as caught:
        Rig(specs, _config(), SimRuntime(platform_named("rocm-mi355x")), registry=registry)
    assert caught.value.pool == "side"


@pytest.mark.parametrize("platform", ["rocm-mi355x", "cuda-wsl2"])
@pytest.mark.parametrize(
    "pair", [KERNEL_LAYER_FIRST, KERNEL_PAGE_FIRST, ("direct", "layer_first")], ids="+".join
)
@pytest.mark.parametrize("probe", [True, False])
def test_cpu_addresses_in_a_kernel_table_are_refused_whatever_is_allowed(
    platform: str, pair: tuple[str, str], probe: bool
) -> None:
    """R3, R4: the core asks the runtime for the aliases itself; no kernel has to fault for it."""
    spec = pool_spec(48)
    registry = registry_of([spec], **cpu_tables())
    config = _config(pair, probe=probe)
    if pair == KERNEL_LAYER_FIRST and platform == "rocm-mi355x" and not probe:
        with pytest.raises(IncompatibleError):
            Rig([spec], config, SimRuntime(platform_named(platform)), registry=registry)
        return
    with pytest.raises(PluginError) as caught:
        Rig([spec], config, SimRuntime(platform_named(platform)), registry=registry)
    assert "host_kernel" in caught.value.got


def test_device_rows_that_are_not_the_pools_own_are_refused() -> None:
    """Before anything is written there."""
    spec = pool_spec(48)
    runtime = SimRuntime(platform_named("rocm-mi355x"))
    with pytest.raises(PluginError) as caught:
        Rig([spec], _config(), runtime, registry=registry_of([spec], **foreign_device_rows()))
    assert "device of b0" in caught.value.got
    assert not runtime.memory.registrations


def test_a_profile_that_is_not_true_here_is_caught() -> None:
    """The runtime is asked for the alias: equal by the profile, distinct in fact."""
    runtime = SimRuntime(platform_named("rocm-mi355x"))
    runtime.platform = evolve(PLATFORMS["rocm-mi355x"], alias=Alias.EQUAL)
    with pytest.raises(ProbeError) as caught:
        Rig([pool_spec(48)], _config(("direct", "layer_first")), runtime)
    assert caught.value.step == "alias"


def test_a_fault_during_the_probe_is_the_cause_of_its_error() -> None:
    """Copies on this machine refuse CPU addresses, and the profile says that they take them."""
    runtime = SimRuntime(platform_named("cuda-wsl2"))
    runtime.platform = evolve(
        runtime.platform, copy_accepts_host_address=PLATFORMS["cuda"].copy_accepts_host_address
    )
    with pytest.raises(ProbeError) as caught:
        Rig([pool_spec(48)], _config(("direct", "layer_first")), runtime)
    assert caught.value.step == "backup"
    cause: BaseException | None = caught.value
    while cause is not None and not isinstance(cause, DeviceFault):
        cause = cause.__cause__
    assert isinstance(cause, DeviceFault)


def test_kernel_layer_first_on_rocm_takes_consent_and_a_probe() -> None:
    """R3: a condition of the plan, which the probe proves with bytes."""
    with Rig([pool_spec(48)], _config(KERNEL_LAYER_FIRST), SimRuntime(platform_named("rocm-mi355x"))) as rig:
        (condition,) = rig.controller.plan.conditions
        assert (condition.rule, condition.code) == ("R3", "kernel-sees-host-rows")
        assert rig.controller.decisions.count("probe-passed") == 1
        rig.allocate(12)
        rig.there_and_back()
    for config in (
        _config(KERNEL_LAYER_FIRST, probe=False),
        evolve(_config(KERNEL_LAYER_FIRST), allow_kernel_layer_first=False),
    ):
        with pytest.raises(IncompatibleError):
            Rig([pool_spec(48)], config, SimRuntime(platform_named("rocm-mi355x")))


def test_pools_without_bytes_or_device_pages_have_nothing_to_prove() -> None:
    """A logical anchor, and a pool without layers."""
    specs = [pool_spec(unit=RowUnit.PAGE), pool_spec(64, pool="none", layer_ids=(), anchor=False)]
    with Rig(specs, _config(), SimRuntime()) as rig:
        reasons = [e["reason"] for e in rig.controller.decisions.as_data() if e["code"] == "probe-passed"]
        assert len(reasons) == 2
        assert all(reason.startswith("0 bytes") for reason in reasons)


@pytest.mark.parametrize("platform", ["rocm-mi355x", "cuda-wsl2", "cuda"])
def test_nothing_of_the_probe_keeps_host_memory_from_its_release(platform: str) -> None:
    """Once a controller is closed nothing is booked, though no garbage was collected."""
    gc.collect()
    gc.disable()
    try:
        config = ControllerConfig(io_backend="direct", layout="page_first_direct", host_pages=16)
        rig = Rig([pool_spec(48)], config, SimRuntime(platform_named(platform)), ledger=Ledger())
        rig.controller.close()
        assert rig.controller.ledger.snapshot() == ()
    finally:
        gc.enable()


@pytest.mark.parametrize("pair", [KERNEL_PAGE_FIRST, ("direct", "layer_first")], ids="+".join)
@pytest.mark.parametrize(
    "hooks",
    [far_pages(1 << 40), far_pages(1 << 62), far_pages(-4096), late_base(16)],
    ids=["far", "beyond int64", "backwards", "late"],
)
def test_tables_whose_pages_leave_the_memory_are_refused(hooks: Hooks, pair: tuple[str, str]) -> None:
    """Before anything moves over them, the probe included: on a device they would write into another's."""
    spec = pool_spec(48)
    with pytest.raises(PluginError):
        Rig([spec], _config(pair, probe=False), SimRuntime(), registry=registry_of([spec], **hooks))
