"""``hicache doctor``: what this machine is, what it allows, and each path tried with bytes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from hicache_core.cli.output import json_option, print_json, print_table
from hicache_core.errors import HiCacheError
from hicache_core.plugins import load_plugins
from hicache_core.spec import Platform, platform_named

if TYPE_CHECKING:
    from hicache_core.device.base import DeviceRuntime
    from hicache_core.doctor import Finding


@click.command()
@click.option(
    "--platform", "platform_name", help="Simulate this platform; the machine's own device where left out."
)
@json_option
def doctor(platform_name: str | None, as_json: bool) -> None:
    """Look at this machine: limits, device, plugins, and a self-test of each path, with a verdict a line.

    Without a device the paths are those of the simulator. Exit 1 where something should work and does not.
    """
    from hicache_core.doctor import (
        Finding,
        Verdict,
        limit_findings,
        path_findings,
        platform_finding,
        plugin_findings,
    )
    from hicache_core.machine.limits import machine_limits

    registry = load_plugins()
    platform = None if platform_name is None else platform_named(platform_name, registry.platforms)
    sections: dict[str, list[Finding]] = {"machine": list(limit_findings(machine_limits()))}
    sections["plugins"] = list(plugin_findings(registry))
    try:
        runtime, kernels = _runtime(platform)
        sections["device"] = [platform_finding(runtime.platform, kernels)]
        sections["paths"] = list(path_findings(runtime))
    except HiCacheError as error:
        # What was found before still counts.
        failed = Finding(subject="device", verdict=Verdict.BAD, found=str(error), remedy=error.remedy)
        sections["device"], sections["paths"] = [failed], []
    if as_json:
        print_json(
            "hicache.doctor/1", **{name: [_data(f) for f in found] for name, found in sections.items()}
        )
    else:
        for name, found in sections.items():
            rows = [(f.subject, f.verdict.value, f.found, f.remedy) for f in found]
            print_table(name, ["what", "verdict", "found", "remedy"], rows)
    if any(f.verdict is Verdict.BAD for found in sections.values() for f in found):
        sys.exit(1)


def _data(finding: Finding) -> dict[str, str]:
    return {
        "subject": finding.subject,
        "verdict": finding.verdict.value,
        "found": finding.found,
        "remedy": finding.remedy,
    }


def _runtime(platform: Platform | None) -> tuple[DeviceRuntime, str]:
    """The runtime whose paths are tried, and why it has no kernels; empty where it has some."""
    from hicache_core.device.probe import machine_runtime
    from hicache_core.device.sim import SimRuntime

    native = machine_runtime() if platform is None else None
    if native is not None:
        return native, native.kernels_reason
    return (SimRuntime() if platform is None else SimRuntime(platform)), ""
