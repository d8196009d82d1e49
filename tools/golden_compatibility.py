"""Every cell that an operator can ask about, as the solver answers it: one line each, to be read in a diff.

A cell is a variant of a shipped model, a platform, an io_backend and a layout; kernel + layer_first is asked
with and without ``--allow-kernel-layer-first``.

    python tools/golden_compatibility.py            # writes tests/golden/compatibility.tsv
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hicache_core.compat import Answer, Member, PoolPlan, Query, Violation, answer
from hicache_core.models import Variant, load_model, model_names
from hicache_core.plugins import PluginRegistry, load_plugins
from hicache_core.spec import IO_BACKENDS, LAYOUTS, PLATFORMS

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "compatibility.tsv"
UPDATE = "python tools/golden_compatibility.py"
COLUMNS = (
    "model",
    "variant",
    "platform",
    "io_backend",
    "layout",
    "kernel_layer_first",
    "outcome",
    "violations",
    "nearest",
    "paths",
)
NOTHING = "-"


def refusals(violations: tuple[Violation, ...]) -> str:
    """``rule-code:pool,pool`` of each rule; without pools where the combination breaks it."""
    pools: dict[str, list[str]] = {}
    for violation in violations:
        pools.setdefault(violation.id, []).append(violation.pool)
    return " ".join(
        f"{name}:{','.join(named)}" if any(named) else name for name, named in sorted(pools.items())
    )


def way(plan: PoolPlan) -> str:
    """``backup(host indices/device indices)``, the load likewise, whether it is staged, and the domain."""
    backup = f"{plan.backup.value}({plan.backup_host_indices.value}/{plan.backup.device_indices.value})"
    load = f"{plan.load.value}({plan.load_host_indices.value}/{plan.load.device_indices.value})"
    return f"{backup} {load} {'staged' if plan.staged else 'unstaged'} {plan.pointer_domain.value}"


def paths(solved: Answer) -> str:
    """The ways of a plan, each with the pools that take it."""
    pools: dict[str, list[str]] = {}
    for name, plan in solved.plan.pools.items() if solved.plan else ():
        pools.setdefault(way(plan), []).append(name)
    return "; ".join(f"{how}: {','.join(names)}" for how, names in pools.items())


def _asked() -> Iterator[dict[str, Any]]:
    """Each pair; kernel + layer_first also with the option that some platforms serve it on."""
    for io_backend, layout in itertools.product(IO_BACKENDS, LAYOUTS):
        options = (False, True) if (io_backend, layout) == ("kernel", "layer_first") else (False,)
        for option in options:
            yield {"io_backend": io_backend, "layout": layout, "allow_kernel_layer_first": option}


def _cells(variant: Variant, registry: PluginRegistry) -> Iterator[tuple[str, ...]]:
    specs = [registry.spec(geometry) for geometry in variant.geometries()]
    for platform in PLATFORMS.values():
        pools = [Member(spec=spec, capabilities=registry.capabilities(spec, platform)) for spec in specs]
        for asked in _asked():
            query = Query(platform=platform, pools=pools, variant_platforms=variant.platforms, **asked)
            solved = answer(query)
            option = "allowed" if query.allow_kernel_layer_first else ""
            yield (
                *(variant.model, variant.name, platform.name, query.io_backend, query.layout, option),
                solved.outcome.value,
                refusals(solved.violations),
                str(solved.nearest) if solved.nearest else "",
                paths(solved),
            )


def lines() -> list[str]:
    """The header and a line for each cell, in the order of models, variants and platforms."""
    registry = load_plugins(strict=True)
    variants = [variant for name in model_names() for variant in load_model(name).variants.values()]
    cells = [cell for variant in variants for cell in _cells(variant, registry)]
    return ["\t".join(field or NOTHING for field in row) for row in (COLUMNS, *cells)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=GOLDEN)
    options = parser.parse_args()
    written = lines()
    options.out.write_text("\n".join(written) + "\n", encoding="utf-8")
    print(f"{options.out}: {len(written) - 1} cells")


if __name__ == "__main__":
    main()
