"""Paired transfer benchmark on a CUDA device: the controller against the bare runtime calls and the link.

Every cell is measured in one process, ours and bare in turns. "ours" is ``controller.backup`` or ``load``
until it returns (submit) and until its ticket is waited for (complete), given page numbers; "slots" is the
same given token slots, 256 a page, all of which are checked. "bare" submits the very same runtime calls, made
into Python lists beforehand, and waits for their stream. Medians; microseconds.

A shared host changes its speed by a factor of two while this runs. Every cell is therefore measured in ROUNDS
rounds, seconds to minutes apart, and the round with the fastest bare submission is the cell's, for all of its
figures; what the other rounds had for their own host time stays in the row.

    python benchmarks/transfer.py --out benchmarks/results/NAME.json
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import itertools
import json
import platform as host_platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.base import BatchCopies, StridedCopies
from hicache_core.device.cuda import CudaRuntime
from hicache_core.device.runtime_library import COPY_DEFAULT
from hicache_core.device_pool import DevicePool
from hicache_core.memory.slots import page_numbers, slots_of
from hicache_core.plugins import load_plugins
from hicache_core.spec import IndexSpace, PoolGeometry

PAGE_SLOTS = 256
ROWS = {65536: ("unified_bf16", 4), 8448: ("index_fp8", 4), 2048: ("unified_bf16", 128)}
LAYERS = (8, 61)
PAGES = (1, 4, 16, 64)
POOL_PAGES = 320
PAIRS = (("kernel", "page_first"), ("direct", "page_first_direct"), ("direct", "layer_first"))
REPEATS = 21
ROUNDS = 3
LINK_BYTES = 1 << 30


class Recorder(CudaRuntime):
    """A runtime that keeps the copies it was given, while asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[StridedCopies | BatchCopies] | None = None

    def strided_copies(self, copies: StridedCopies, stream: torch.cuda.Stream) -> None:
        if self.kept is not None:
            self.kept.append(copies)
        super().strided_copies(copies, stream)

    def batch_copies(self, copies: BatchCopies, stream: torch.cuda.Stream) -> None:
        if self.kept is not None:
            self.kept.append(copies)
        super().batch_copies(copies, stream)


Calls = Callable[[int], None]


def bare_calls(runtime: Recorder, copies: Sequence[StridedCopies | BatchCopies], *, batched: bool) -> Calls:
    """The same copies as prepared runtime calls; called with a stream handle.

    Args:
        runtime: whose library is called.
        copies: what the controller submitted.
        batched: strided copies as one 3D batch each, else as one 2D copy each.
    """
    rt = runtime._rt
    calls: list[tuple[Any, tuple[int, ...]]] = []
    for c in copies:
        if isinstance(c, StridedCopies) and batched:
            calls.append((functools.partial(rt.copy_2d_batch, c), ()))
        elif isinstance(c, StridedCopies):
            for target, source, width, height in c.rows():
                arguments = (target, c.target_pitch, source, c.source_pitch, width, height, COPY_DEFAULT)
                calls.append((rt.copy_2d, arguments))
        else:
            calls.append((functools.partial(rt.copy_batch, c.targets, c.sources, c.sizes), ()))

    def run(stream: int) -> None:
        for function, arguments in calls:
            function(*arguments, stream)

    return run


def timed(submit: Callable[[], Any], finish: Callable[[Any], None]) -> tuple[float, float]:
    """Microseconds until ``submit`` returns and until ``finish`` does."""
    start = time.perf_counter_ns()
    token = submit()
    submitted = time.perf_counter_ns()
    finish(token)
    return (submitted - start) / 1e3, (time.perf_counter_ns() - start) / 1e3


def median_pair(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(s for s, _ in samples), statistics.median(c for _, c in samples)


def make_controller(runtime: Recorder, row_bytes: int, layers: int, pair: tuple[str, str]) -> Controller:
    registry = load_plugins(required=["dsv4_paged"])
    row_format, ratio = ROWS[row_bytes]
    spec = registry.spec(
        PoolGeometry(
            pool="rows",
            family="dsv4_paged",
            index_space=IndexSpace(name="full", page_slots=PAGE_SLOTS),
            layer_ids=range(layers),
            params={"row_format": row_format, "compress_ratio": ratio},
            anchor=True,
        )
    )
    assert spec.buffers[0].row_bytes == row_bytes
    slab = runtime.allocate(layers * POOL_PAGES * row_bytes, 0).view(layers, POOL_PAGES, row_bytes)
    slab.random_(0, 256)
    config = ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=POOL_PAGES)
    device_pool = DevicePool(spec=spec, layers={spec.buffers[0].name: list(slab.unbind(0))})
    return Controller(config, [device_pool], runtime, registry)


def cells(runtime: Recorder, row_bytes: int, layers: int, pair: tuple[str, str]) -> list[dict[str, Any]]:
    controller = make_controller(runtime, row_bytes, layers, pair)
    every = controller.group.allocate({"full": POOL_PAGES * PAGE_SLOTS})
    assert every is not None
    rng = np.random.default_rng(0)
    found = []
    for pages in PAGES:
        host = rng.permutation(POOL_PAGES)[:pages].astype(np.int64)
        device = rng.permutation(POOL_PAGES)[:pages].astype(np.int64)
        for direction, move in (("d2h", controller.backup), ("h2d", controller.load)):
            found.append(
                {
                    "io_backend": pair[0],
                    "layout": pair[1],
                    "direction": direction,
                    "layers": layers,
                    "row_bytes": row_bytes,
                    "pages": pages,
                    "bytes": pages * layers * row_bytes,
                    **measure(runtime, move, host, device),
                }
            )
            print(json.dumps(found[-1]), flush=True)
    controller.close()
    return found


def measure(runtime: Recorder, move: Any, host: np.ndarray, device: np.ndarray) -> dict[str, Any]:
    runtime.kept = []
    move(host, device, numbers=page_numbers).wait()
    slots = slots_of(host, PAGE_SLOTS), slots_of(device, PAGE_SLOTS)
    copies, runtime.kept = runtime.kept, None
    stream = runtime.new_stream(0)
    bare = {f"bare_{n}": bare_calls(runtime, copies, batched=b) for n, b in (("2d", False), ("3d", True))}
    rows: dict[str, list[tuple[float, float]]] = {"ours": [], "slots": [], **{name: [] for name in bare}}
    gc.disable()
    for _ in range(REPEATS + 3):
        torch.cuda.synchronize()
        by_pages = functools.partial(move, host, device, numbers=page_numbers)
        rows["ours"].append(timed(by_pages, lambda ticket: ticket.wait()))
        torch.cuda.synchronize()
        rows["slots"].append(timed(functools.partial(move, *slots), lambda ticket: ticket.wait()))
        for name, calls in bare.items():
            torch.cuda.synchronize()
            submit = functools.partial(calls, stream.cuda_stream)
            rows[name].append(timed(submit, lambda _: stream.synchronize()))
    gc.enable()
    result: dict[str, Any] = {"copies": sum(len(c) for c in copies), "submissions": len(copies)}
    for name, samples in rows.items():
        submit, complete = median_pair(samples[3:])
        result[f"{name}_submit_us"] = round(submit, 1)
        result[f"{name}_complete_us"] = round(complete, 1)
    strided = [c for c in copies if isinstance(c, StridedCopies)]
    path = "bare_3d" if strided and all(map(runtime.takes_batch, strided)) else "bare_2d"
    result["path"] = path
    for name, prefix in (("ours", ""), ("slots", "slots_")):
        own = result[f"{name}_submit_us"] - result[f"{path}_submit_us"]
        result[f"{prefix}own_host_us"] = round(own, 1)
        ratio = result[f"{name}_complete_us"] / result[f"{path}_complete_us"]
        result[f"{prefix}complete_ratio"] = round(ratio, 3)
    return result


def link(runtime: Recorder) -> dict[str, float]:
    """GB/s of one plain pinned copy in each direction."""
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
    rates = {}
    for name, to, frm in (("d2h", host, device), ("h2d", device, host)):
        seconds = []
        for _ in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            to.copy_(frm, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        rates[name] = round(LINK_BYTES / statistics.median(seconds[1:]) / 1e9, 2)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=len(PAIRS), help="Measure the first N served pairs.")
    options = parser.parse_args()
    runtime = Recorder()
    report: dict[str, Any] = {
        "schema": "hicache.bench.transfer/2",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "runtime_version": runtime._rt.version,
        "python": host_platform.python_version(),
        "repeats": REPEATS,
        "rounds": ROUNDS,
        "page_slots": PAGE_SLOTS,
        "link_gigabytes_per_second": link(runtime),
        "cells": [],
    }
    # The host's clocks take seconds to rise: what is measured meanwhile is thrown away.
    cells(runtime, 2048, LAYERS[0], PAIRS[0])
    rounds: list[list[dict[str, Any]]] = []
    for _ in range(ROUNDS):
        rounds.append([])
        for pair, layers, row_bytes in itertools.product(PAIRS[: options.pairs], LAYERS, ROWS):
            rounds[-1].extend(cells(runtime, row_bytes, layers, pair))
    report["cells"] = [fastest(of_cell) for of_cell in zip(*rounds, strict=True)]
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def fastest(of_cell: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The round in which the host was fastest, with the own host time of every round beside it."""
    chosen = min(of_cell, key=lambda cell: cell["bare_2d_submit_us"])
    figures = "bare_2d_submit_us", "own_host_us", "slots_own_host_us"
    return {**chosen, "rounds": [{figure: cell[figure] for figure in figures} for cell in of_cell]}


if __name__ == "__main__":
    main()
