"""Where the host's microseconds go between ``controller.backup`` (or ``load``) and the runtime calls.

Times every step of a transfer by wrapping its function; nested steps are subtracted, so that the steps add up
to the whole. The wrapping costs about 0.3 us a step, which the untouched run beside it shows.

    python benchmarks/profile_host.py --out benchmarks/results/NAME.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transfer import PAGE_SLOTS, POOL_PAGES, Recorder, make_controller

from hicache_core import controller as controller_module
from hicache_core.memory.slots import PageAllocator, page_numbers, pages_of, slots_of
from hicache_core.transfer.plan import Planner

REPEATS = 200
INDICES = ("slots", "pages")


class Clock:
    """Exclusive nanoseconds by step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._stack: list[float] = []

    def wrap(self, owner: Any, name: str, step: str) -> None:
        """Time ``owner.name`` as ``step``."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            self._stack.append(0.0)
            start = time.perf_counter_ns()
            try:
                return inner(*arguments, **named)
            finally:
                total = time.perf_counter_ns() - start
                self.spent[step] = self.spent.get(step, 0.0) + total - self._stack.pop()
                if self._stack:
                    self._stack[-1] += total

        setattr(owner, name, timed)


class Checks:
    """What turns indices into page numbers, by what the indices are."""

    slots = staticmethod(pages_of)
    pages = staticmethod(page_numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runtime = Recorder()
    rows: list[dict[str, Any]] = []
    warm = make_controller(runtime, 2048, 8, ("kernel", "page_first"))
    warm.group.allocate({"full": POOL_PAGES * PAGE_SLOTS})
    for _ in range(20):
        whole(warm.backup, [np.arange(64), np.arange(64)], "slots")
    warm.close()
    for row_bytes, layers in ((2048, 61), (65536, 61)):
        controller = make_controller(runtime, row_bytes, layers, ("kernel", "page_first"))
        controller.group.allocate({"full": POOL_PAGES * PAGE_SLOTS})
        rng = np.random.default_rng(0)
        for pages in (1, 64):
            sides = [rng.permutation(POOL_PAGES)[:pages].astype(np.int64) for _ in range(2)]
            for name, indices in itertools.product(("backup", "load"), INDICES):
                rows.append({"row_bytes": row_bytes, "layers": layers, "pages": pages, "call": name})
                rows[-1]["indices"] = indices
                rows[-1]["whole_us"] = whole(getattr(controller, name), sides, indices)
        controller.close()
    clock = Clock()
    clock.wrap(Checks, "slots", "check the indices")
    clock.wrap(Checks, "pages", "check the indices")
    clock.wrap(controller_module, "page_pairs", "pair and sort")
    clock.wrap(PageAllocator, "hold_to_write", "hold pages")
    clock.wrap(PageAllocator, "hold_to_read", "hold pages")
    clock.wrap(Planner, "copies", "plan copies")
    clock.wrap(Recorder, "strided_copies", "runtime calls")
    clock.wrap(Recorder, "batch_copies", "runtime calls")
    clock.wrap(Recorder, "record", "record events")
    clock.wrap(Recorder, "wait_current", "wait for the current stream")
    for row in rows:
        controller = make_controller(runtime, row["row_bytes"], row["layers"], ("kernel", "page_first"))
        controller.group.allocate({"full": POOL_PAGES * PAGE_SLOTS})
        rng = np.random.default_rng(0)
        sides = [rng.permutation(POOL_PAGES)[: row["pages"]].astype(np.int64) for _ in range(2)]
        clock.spent.clear()
        timed_whole = whole(getattr(controller, row["call"]), sides, row["indices"])
        steps = {step: round(spent / REPEATS / 1e3, 2) for step, spent in clock.spent.items()}
        steps["everything else"] = round(timed_whole - sum(steps.values()), 2)
        row["wrapped_whole_us"], row["steps_us"] = timed_whole, steps
        print(json.dumps(row), flush=True)
        controller.close()
    about = {"schema": "hicache.bench.profile/1", "device": torch.cuda.get_device_name(0)}
    options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def whole(move: Any, sides: Sequence[np.ndarray], indices: str) -> float:
    """Median microseconds until the call returns; ``sides`` are page numbers, given as ``indices`` says."""
    host, device = (slots_of(side, PAGE_SLOTS) if indices == "slots" else side for side in sides)
    numbers = getattr(Checks, indices)
    samples = []
    for _ in range(REPEATS):
        start = time.perf_counter_ns()
        ticket = move(host, device, numbers=numbers)
        samples.append((time.perf_counter_ns() - start) / 1e3)
        ticket.wait()
    return round(statistics.median(samples), 2)


if __name__ == "__main__":
    main()
