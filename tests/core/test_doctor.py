"""The doctor: what limits mean, what the device is, and each path tried with bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from hicache_core.device.sim import Faults, SimRuntime
from hicache_core.doctor import (
    Finding,
    Verdict,
    limit_findings,
    path_findings,
    platform_finding,
    plugin_findings,
)
from hicache_core.errors import PluginError
from hicache_core.machine.cgroups import MemoryLevel
from hicache_core.machine.limits import HugePages, MachineLimits
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import PLATFORMS, platform_named

GIB = 1 << 30
WELL = MachineLimits(
    total_bytes=64 * GIB,
    available_bytes=48 * GIB,
    thp_policy="madvise",
    shm_total_bytes=32 * GIB,
    shm_free_bytes=31 * GIB,
    cpu_numbers=(0, 1, 2, 3),
)
ALL_PAIRS = [
    "kernel + page_first",
    "kernel + layer_first",
    "direct + page_first_direct",
    "direct + layer_first",
]


def _by_subject(**changes: Any) -> dict[str, Finding]:
    return {finding.subject: finding for finding in limit_findings(evolve(WELL, **changes))}


def _paths(runtime: SimRuntime) -> dict[str, Verdict]:
    return {finding.subject: finding.verdict for finding in path_findings(runtime)}


def test_a_machine_that_is_well_has_nothing_to_be_done() -> None:
    """No remedy where nothing is wrong."""
    found = _by_subject()
    assert {finding.verdict for finding in found.values()} == {Verdict.GOOD}
    assert {finding.remedy for finding in found.values()} == {""}
    assert found["host memory"].found.startswith("48 GiB of 64 GiB")


@pytest.mark.parametrize(
    ("changes", "subject", "verdict"),
    [
        ({"memlock_soft_bytes": 8 << 20}, "memlock", Verdict.NOTE),
        ({"memlock_soft_bytes": 64 * GIB}, "memlock", Verdict.GOOD),
        ({"thp_policy": "never"}, "transparent huge pages", Verdict.NOTE),
        ({"thp_policy": ""}, "transparent huge pages", Verdict.NOTE),
        ({"shm_total_bytes": None, "shm_free_bytes": None}, "/dev/shm", Verdict.NOTE),
        ({"available_bytes": 0}, "host memory", Verdict.BAD),
        (
            {"hugepages": (HugePages(page_bytes=2 << 20, total_pages=512, free_pages=4),)},
            "huge pages of 2 MiB",
            Verdict.NOTE,
        ),
    ],
)
def test_each_limit_has_its_verdict(changes: dict[str, Any], subject: str, verdict: Verdict) -> None:
    """And a remedy where it is not good."""
    finding = _by_subject(**changes)[subject]
    assert finding.verdict is verdict
    assert bool(finding.remedy) is (verdict is not Verdict.GOOD)


def test_the_control_group_that_binds_is_named() -> None:
    """I11: each level has its line, and the tightest decides what there is."""
    levels = (
        MemoryLevel(
            file="/inner/memory.max", limit_bytes=20 * GIB, usage_bytes=3 * GIB, reclaimable_bytes=GIB
        ),
        MemoryLevel(
            file="/outer/memory.high", limit_bytes=10 * GIB, usage_bytes=12 * GIB, reclaimable_bytes=GIB
        ),
    )
    found = _by_subject(memory_levels=levels)
    assert found["control group /inner/memory.max"].verdict is Verdict.GOOD
    assert found["control group /inner/memory.max"].found == "18 GiB left of 20 GiB"
    assert found["control group /outer/memory.high"].verdict is Verdict.BAD
    assert found["host memory"].verdict is Verdict.BAD
    assert "/outer/memory.high" in found["host memory"].found


@pytest.mark.parametrize("name", ["cpu-sim", "cuda", "cuda-wsl2", "rocm", "rocm-mi355x"])
def test_every_path_of_a_platform_that_works_is_good(name: str) -> None:
    """Each served pair moves; consent is given where a pair is served on request only."""
    asked = " with --allow-kernel-layer-first" if name.startswith("rocm") else ""
    expected = [pair + (asked if pair == ALL_PAIRS[1] else "") for pair in ALL_PAIRS]
    assert _paths(SimRuntime(platform_named(name))) == dict.fromkeys(expected, Verdict.GOOD)


def test_a_path_that_cannot_work_is_refused_with_its_rules() -> None:
    """Without kernels, which is no fault of the machine."""
    facts = evolve(PLATFORMS["cuda"], has_kernels=False)
    found = {finding.subject: finding for finding in path_findings(SimRuntime(facts))}
    refused = found.pop("kernel + layer_first")
    assert (refused.verdict, refused.found) == (Verdict.REFUSED, "R9-no-kernel")
    assert "kernel + page_first" in refused.remedy
    assert {finding.verdict for finding in found.values()} == {Verdict.GOOD}


def test_a_path_that_should_work_and_does_not_is_bad() -> None:
    """A copy that fails, on the path that it belongs to; the others go on."""
    runtime = SimRuntime(platform_named("rocm-mi355x"), faults=Faults(fail_copy_at=1))
    found = _paths(runtime)
    assert found["kernel + page_first"] is Verdict.BAD
    assert found["direct + layer_first"] is Verdict.GOOD
    assert not runtime.memory.registrations


def test_a_profile_that_is_not_true_is_bad() -> None:
    """Aliases that differ where the profile has them equal."""
    runtime = SimRuntime(platform_named("rocm-mi355x"))
    runtime.platform = platform_named("rocm")
    assert set(_paths(runtime).values()) == {Verdict.BAD}


def test_the_platform_line_says_what_a_kernel_may_be_given() -> None:
    """And a reason where there are no kernels."""
    good = platform_finding(PLATFORMS["rocm-mi355x"], "")
    assert (good.verdict, good.remedy) == (Verdict.GOOD, "")
    assert "another address" in good.found
    without = platform_finding(PLATFORMS["cuda"], "triton is not there")
    assert without.verdict is Verdict.NOTE
    assert "triton is not there" in without.found


def test_refused_plugins_are_bad() -> None:
    """With what was got and what to do."""
    registry = PluginRegistry()
    with pytest.raises(PluginError) as caught:
        registry.register(SimpleNamespace(), name="empty")
    registry.refuse("empty", "empty 0.1", caught.value)
    (finding,) = plugin_findings(registry)
    assert (finding.verdict, finding.found, finding.remedy) == (
        Verdict.BAD,
        caught.value.got,
        caught.value.remedy,
    )
