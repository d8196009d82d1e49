"""What this machine is good for: its limits, its device, and each path tried with bytes."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from attrs import frozen

from hicache_core.compat import SERVED, PoolPlan
from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.base import DeviceRuntime
from hicache_core.device_pool import DevicePool
from hicache_core.errors import HiCacheError, IncompatibleError
from hicache_core.machine.budget import memory_budget
from hicache_core.machine.limits import MachineLimits
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import Alias, Platform, PoolSpec, RowUnit
from hicache_core.spec.units import format_bytes
from hicache_core.testing.stand_ins import pool_spec, registry_of

_THP_THAT_HELPS = ("always", "madvise")
_PAGES = 8


class Verdict(enum.Enum):
    """What a finding means for host pools."""

    GOOD = "good"
    NOTE = "note"
    """Works, with something to know."""
    REFUSED = "refused"
    """Cannot work here, and is refused at construction."""
    BAD = "bad"
    """Should work here and does not."""


@frozen(kw_only=True)
class Finding:
    """One line of the doctor.

    Args:
        subject: what was looked at.
        verdict: what it means.
        found: what was seen.
        remedy: what to do about it, where something is to be done.
    """

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


def limit_findings(limits: MachineLimits) -> Iterator[Finding]:
    """What the limits of a machine mean for host pools.

    Args:
        limits: the snapshot.
    """
    budget = memory_budget(limits, reserve_bytes=0)
    yield Finding(
        subject="host memory",
        verdict=Verdict.GOOD if budget.usable_bytes else Verdict.BAD,
        found=f"{format_bytes(budget.usable_bytes)} of {format_bytes(limits.total_bytes)}, "
        f"by {budget.binding.source}",
        remedy="" if budget.usable_bytes else "Free memory, or raise the limit of that control group.",
    )
    for level in limits.memory_levels:
        yield Finding(
            subject=f"control group {level.file}",
            verdict=Verdict.GOOD if level.headroom_bytes > 0 else Verdict.BAD,
            found=f"{format_bytes(level.headroom_bytes)} left of {format_bytes(level.limit_bytes)}",
            remedy="" if level.headroom_bytes > 0 else "Raise its limit, or ask for fewer host pages.",
        )
    locked = limits.memlock_soft_bytes
    short = locked is not None and locked < limits.total_bytes
    yield Finding(
        subject="memlock",
        verdict=Verdict.NOTE if short else Verdict.GOOD,
        found="unlimited" if locked is None else format_bytes(locked),
        remedy="Drivers that count registered memory refuse more; raise it with ulimit -l." if short else "",
    )
    helps = limits.thp_policy in _THP_THAT_HELPS
    yield Finding(
        subject="transparent huge pages",
        verdict=Verdict.GOOD if helps else Verdict.NOTE,
        found=limits.thp_policy or "none",
        remedy="" if helps else "Set them to madvise: host memory is then pinned in fewer, larger pages.",
    )
    for pages in limits.hugepages:
        yield Finding(
            subject=f"huge pages of {format_bytes(pages.page_bytes)}",
            verdict=Verdict.NOTE if pages.total_pages else Verdict.GOOD,
            found=f"{pages.free_pages} free of {pages.total_pages} set aside",
            remedy="Host pools do not take them; they are missing elsewhere." if pages.total_pages else "",
        )
    yield Finding(
        subject="/dev/shm",
        verdict=Verdict.GOOD if limits.shm_total_bytes else Verdict.NOTE,
        found="none"
        if limits.shm_total_bytes is None
        else f"{format_bytes(limits.shm_free_bytes or 0)} free of {format_bytes(limits.shm_total_bytes)}",
        remedy="" if limits.shm_total_bytes else "Storage engines that share memory by name need it.",
    )
    yield Finding(
        subject="CPUs",
        verdict=Verdict.GOOD,
        found=f"{limits.cpus:g} for this process, {len(limits.nodes) or 1} NUMA node(s)",
    )


def platform_finding(platform: Platform, kernels: str) -> Finding:
    """What the device is.

    Args:
        platform: its facts, as probed.
        kernels: why there are no kernels; empty where there are.
    """
    address = {
        Alias.EQUAL: "registered memory has the same address on the device",
        Alias.DISTINCT: "registered memory has another address on the device",
        Alias.NONE: "nothing is registered; the framework pins",
    }[platform.alias]
    takes = ", ".join(sorted(kind.value for kind in platform.copy_accepts_host_address)) or "no kind"
    return Finding(
        subject=f"platform {platform.name}",
        verdict=Verdict.NOTE if kernels else Verdict.GOOD,
        found=f"{address}; copies that take the CPU address: {takes}; kernels: {kernels or 'yes'}",
        remedy="kernel + layer_first needs kernels; the other pairs do not." if kernels else "",
    )


def plugin_findings(registry: PluginRegistry) -> Iterator[Finding]:
    """The plugins that are there, and those that were refused."""
    for plugin in registry.plugins:
        names = [*(f.name for f in plugin.families), *(p.name for p in plugin.platforms)]
        brings = ", ".join(names) or "host allocators"
        yield Finding(subject=f"plugin {plugin.title}", verdict=Verdict.GOOD, found=brings)
    for refused in registry.refused:
        yield Finding(
            subject=f"plugin {refused.name} ({refused.distribution})",
            verdict=Verdict.BAD,
            found=refused.error.got,
            remedy=refused.error.remedy,
        )


_SPECS = (
    pool_spec(1024, 512, page_slots=16, pool="token rows"),
    pool_spec(1 << 16, page_slots=16, unit=RowUnit.PAGE, pool="page rows", anchor=False),
)


def _device_pool(spec: PoolSpec, runtime: DeviceRuntime, device: int) -> DevicePool:
    rows = _PAGES * spec.page_rows
    return DevicePool(
        spec=spec,
        layers={
            b.name: [
                runtime.allocate(rows * b.row_bytes, device).view(rows, b.row_bytes)
                for _ in range(spec.layers_of(b))
            ]
            for b in spec.buffers
        },
    )


def path_findings(runtime: DeviceRuntime, device: int = 0) -> Iterator[Finding]:
    """Each served (io_backend, layout) pair, tried with two pools whose bytes go there and back.

    Args:
        runtime: the runtime of the device.
        device: its ordinal.
    """
    pools = [_device_pool(spec, runtime, device) for spec in _SPECS]
    on_request = not runtime.platform.kernel_layer_first
    for io_backend, layout in SERVED:
        consent = on_request and (io_backend, layout) == ("kernel", "layer_first")
        config = ControllerConfig(
            io_backend=io_backend, layout=layout, host_pages=_PAGES, allow_kernel_layer_first=consent
        )
        yield _tried(config, pools, runtime, device)


def _tried(config: ControllerConfig, pools: list[DevicePool], runtime: DeviceRuntime, device: int) -> Finding:
    option = " with --allow-kernel-layer-first" if config.allow_kernel_layer_first else ""
    subject = f"{config.io_backend} + {config.layout}{option}"
    try:
        controller = Controller(config, pools, runtime, registry_of(_SPECS), device=device)
    except IncompatibleError as error:
        ids = ", ".join(dict.fromkeys(violation.id for violation in error.violations))
        return Finding(
            subject=subject,
            verdict=Verdict.REFUSED,
            found=ids,
            remedy=f"Nearest that works: {error.nearest}.",
        )
    except HiCacheError as error:
        return Finding(subject=subject, verdict=Verdict.BAD, found=str(error), remedy=error.remedy)
    found = "; ".join(f"{name}: {_ways(plan)}" for name, plan in controller.plan.pools.items())
    controller.close()
    return Finding(subject=subject, verdict=Verdict.GOOD, found=f"every byte there and back; {found}")


def _ways(plan: PoolPlan) -> str:
    staged = " (staged write-back)" if plan.staged else ""
    return f"backup {plan.backup.value}{staged}, load {plan.load.value}"
