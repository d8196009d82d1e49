"""Pinning benchmark: a plain registration of fresh memory against ours, side by side in alternating order.

"plain" maps anonymous memory and has the runtime register all of it in one call (the driver makes its pages
present). "ours" is HostMemory: populated by several threads, registered in parts meanwhile. Both are then
undone: plain by one unregistration and munmap, ours by destroy. Seconds.

    python benchmarks/pinning.py --gib 8 64 --out benchmarks/results/NAME.json
    python benchmarks/pinning.py --gib 0.25 --runtime sim --out /tmp/dry.json      # no GPU: a dry run

The first touch of memory that a virtual machine's host has not backed yet is slower than any later one, for
either way: more repeats keep it out of the medians. On the simulator a registration makes no page present, so
its ratios say nothing of a device.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import importlib
import json
import os
import platform as host_platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hicache_core.memory import allocation, libc
from hicache_core.memory.addresses import HostRange
from hicache_core.memory.host import HostMemory
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.options import MAX_REGISTRATION_BYTES, MemoryOptions

RUNTIMES = {
    "cuda": ("hicache_core.device.cuda", "CudaRuntime"),
    "sim": ("hicache_core.device.sim", "SimRuntime"),
}
Row = dict[str, Any]


def plain(runtime: Any, nbytes: int, options: MemoryOptions) -> Row:
    """One mapping, one registration; the figures of both ways."""
    start = time.perf_counter()
    host = HostRange(start=libc.map_memory(nbytes), nbytes=nbytes)
    mapped = time.perf_counter()
    runtime.register(host)
    registered = time.perf_counter()
    runtime.unregister(host)
    unregistered = time.perf_counter()
    libc.unmap(host.start, nbytes)
    return {
        "obtain_s": registered - start,
        "register_s": registered - mapped,
        "destroy_s": time.perf_counter() - registered,
        "unregister_s": unregistered - registered,
        "registrations": 1,
    }


def ours(runtime: Any, nbytes: int, options: MemoryOptions) -> Row:
    """HostMemory, and its destroy."""
    watch = Watch(runtime)
    start = time.perf_counter()
    memory = HostMemory(nbytes, 1, watch, who="benchmark", options=options, ledger=Ledger())
    obtained = time.perf_counter()
    facts, parts = memory.facts, len(memory.segments)
    memory.destroy()
    return {
        "obtain_s": obtained - start,
        "register_s": watch.register_s,
        "populate_s": facts.seconds,
        "populate_gib_per_second": nbytes / 2**30 / facts.seconds if facts.seconds else None,
        "destroy_s": time.perf_counter() - obtained,
        "unregister_s": watch.unregister_s,
        "registrations": parts,
        "threads": facts.threads,
        "notes": list(facts.notes),
    }


class Watch:
    """A registrar that keeps the time of its runtime's calls."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.register_s = self.unregister_s = 0.0

    def register(self, host: HostRange) -> None:
        start = time.perf_counter()
        self._runtime.register(host)
        self.register_s += time.perf_counter() - start

    def unregister(self, host: HostRange) -> None:
        start = time.perf_counter()
        self._runtime.unregister(host)
        self.unregister_s += time.perf_counter() - start


WAYS: dict[str, Callable[[Any, int, MemoryOptions], Row]] = {"plain": plain, "ours": ours}


def measure(runtime: Any, nbytes: int, repeats: int, options: MemoryOptions) -> Row:
    """Both ways in turns, the first to go alternating, and what they come to."""
    rows: list[Row] = []
    for number in range(repeats):
        for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
            gc.collect()
            figures = WAYS[way](runtime, nbytes, options)
            rows.append({"way": way, "repeat": number, **figures})
            print(json.dumps({"nbytes": nbytes, **rows[-1]}), flush=True)
    median = functools.partial(_median, rows)
    obtained = {way: median(way, "obtain_s") for way in WAYS}
    return {
        "nbytes": nbytes,
        "plain_obtain_s": obtained["plain"],
        "ours_obtain_s": obtained["ours"],
        "ratio": round(obtained["plain"] / obtained["ours"], 3),
        "slowest_pair_ratio": round(min(_pairs(rows)), 3),
        "ours_destroy_s": median("ours", "destroy_s"),
        "ours_slowest_destroy_s": max(row["destroy_s"] for row in rows if row["way"] == "ours"),
        "plain_destroy_s": median("plain", "destroy_s"),
        "rows": rows,
    }


def _median(rows: list[Row], way: str, figure: str) -> float:
    return statistics.median(row[figure] for row in rows if row["way"] == way)


def _pairs(rows: list[Row]) -> list[float]:
    """Plain over ours of each repeat."""
    of = {(row["way"], row["repeat"]): row["obtain_s"] for row in rows}
    return [of["plain", repeat] / of["ours", repeat] for way, repeat in of if way == "plain"]


def machine(name: str) -> Row:
    """What the figures were measured on."""
    on_device = name == "cuda"
    return {
        "runtime": name,
        "device": torch.cuda.get_device_name(0) if on_device else "none: simulated, a dry run",
        "cuda": torch.version.cuda if on_device else None,
        "torch": torch.__version__,
        "python": host_platform.python_version(),
        "kernel": host_platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "transparent_hugepages": allocation._policy("enabled").strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, nargs="+", default=[8.0, 64.0], help="Sizes in GiB.")
    parser.add_argument("--runtime", choices=sorted(RUNTIMES), default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="Threads that populate; 0 for all CPUs.")
    parser.add_argument("--max-registration-gib", type=float, default=64.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    module, name = RUNTIMES[options.runtime]
    runtime = getattr(importlib.import_module(module), name)()
    largest = min(int(options.max_registration_gib * 2**30), MAX_REGISTRATION_BYTES)
    memory = MemoryOptions(populate_threads=options.threads, max_registration_bytes=largest)
    # The driver's first registration makes a context, which is nobody's to pay for.
    for way in WAYS.values():
        way(runtime, 64 << 20, memory)
    report: Row = {
        "schema": "hicache.bench.pinning/1",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **machine(options.runtime),
        "repeats": options.repeats,
        "max_registration_bytes": largest,
        "sizes": [],
    }
    for gib in options.gib:
        report["sizes"].append(measure(runtime, int(gib * 2**30), options.repeats, memory))
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for size in report["sizes"]:
        print(
            f"{size['nbytes'] / 2**30:g} GiB: plain {size['plain_obtain_s']:.3f} s, ours "
            f"{size['ours_obtain_s']:.3f} s, ratio {size['ratio']}, destroy {size['ours_destroy_s']:.3f} s"
        )


if __name__ == "__main__":
    main()
