"""How long the solver takes to answer for 12 pools, and how long ``hicache plugins`` takes to start.

python benchmarks/solver.py --out benchmarks/results/NAME/solver.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hicache_core.compat import Member, Query, answer
from hicache_core.spec import PLATFORMS, default_capabilities
from hicache_core.testing.stand_ins import pool_spec

POOLS = 12
CASES = {
    "yes": ("cuda", "kernel", "page_first", 64),
    "yes, staged": ("rocm", "kernel", "page_first", 64),
    "no, the first neighbour works": ("rocm", "kernel", "layer_first", 64),
    "no, none works": ("rocm", "kernel", "page_first", 24),
}
"""Platform, io_backend, layout and row bytes; in the last case two pools share a name as well."""


def question(facts: str, io_backend: str, layout: str, row_bytes: int, names: list[str]) -> Query:
    """A query of a pool for each name, the first of which is the anchor."""
    specs = [pool_spec(row_bytes, pool=name, anchor=not i) for i, name in enumerate(names)]
    on = PLATFORMS[facts]
    pools = [Member(spec=spec, capabilities=default_capabilities(spec, on)) for spec in specs]
    return Query(platform=on, io_backend=io_backend, layout=layout, pools=pools)


def cpu_seconds() -> float:
    """Processor time of this process and of those that it started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def spread(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Milliseconds of a call: the least, the median and the 95th percentile, and those of a processor, mean.

    On a machine that others use, the least and the processor's are what the call itself takes.
    """
    taken, before = [], cpu_seconds()
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        taken.append((time.perf_counter_ns() - start) / 1e6)
    cpu = (cpu_seconds() - before) * 1e3 / repeats
    ordered = sorted(taken)
    found = ordered[0], statistics.median(ordered), ordered[int(0.95 * (repeats - 1))], cpu
    names = ("least_ms", "median_ms", "p95_ms", "cpu_mean_ms")
    return dict(zip(names, (round(one, 4) for one in found), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--starts", type=int, default=10)
    options = parser.parse_args()
    solver = {}
    for case, asked in CASES.items():
        names = [f"p{i}" for i in range(POOLS)]
        query = question(*asked, names[:-1] + names[-2:-1] if "none" in case else names)
        solved = answer(query)
        told = {
            "outcome": solved.outcome.value,
            "violations": len(solved.violations),
            "nearest": str(solved.nearest),
        }
        solver[case] = {**told, **spread(lambda query=query: answer(query), options.repeats)}  # type: ignore[misc]
    command = [sys.executable, "-m", "hicache_core.cli", "plugins"]
    start = spread(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), options.starts)
    result = {
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "hicache_core": importlib.metadata.version("hicache-core"),
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "pools": POOLS,
        "repeats": options.repeats,
        "answer": solver,
        "starts": options.starts,
        "hicache plugins": start,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
