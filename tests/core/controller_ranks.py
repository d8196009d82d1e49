"""What the ranks of the controller tests run, each in a process of its own."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import evolve

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import HiCacheError, SidecarError
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.process import process_ledger
from hicache_core.spec import platform_named
from hicache_core.testing.rigs import Rig
from hicache_core.testing.stand_ins import pool_spec, registry_of
from tests.core.lying_pools import idle_writer
from tests.core.rank_programs import distributed

CONFIG = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=16, agree_timeout_s=8.0)
SIDE = pool_spec(32, pool="side", anchor=False)
HOST_BYTES = 40_000


def _runtime() -> SimRuntime:
    return SimRuntime(platform_named("rocm-mi355x"))


def _state(rig: Rig[SimRuntime]) -> dict[str, Any]:
    controller = rig.controller
    return {
        "pages": controller.group.anchor.pages,
        "pools": [pool.spec.pool for pool in controller.group.pools],
        "registrations": len(rig.runtime.memory.registrations),
        "booked": [entry.who for entry in controller.ledger.snapshot()],
        "decisions": [decision["code"] for decision in controller.decisions.as_data()],
    }


def _unequal_pages(rank: int) -> Any:
    """Rank 1 can hold fewer pages."""
    with Rig([pool_spec(48)], evolve(CONFIG, host_pages=16 - 4 * rank), _runtime()) as rig:
        rig.there_and_back()
        return _state(rig)


def _unequal_layers(rank: int) -> Any:
    """The same bytes, and more layers on rank 1."""
    spec = pool_spec(48, layer_ids=range(3 + rank))
    config = ControllerConfig(
        io_backend="kernel", layout="page_first", host_bytes=HOST_BYTES, agree_timeout_s=8.0
    )
    with Rig([spec], config, _runtime()) as rig:
        rig.there_and_back()
        return _state(rig)


def _runs_out(rank: int) -> Any:
    """The books of rank 1 hold less than was agreed on."""
    runtime = _runtime()
    ledger = Ledger(4096 if rank else None)
    config = evolve(CONFIG, host_pages=64)
    try:
        # The device rows are made before the books are asked.
        rig = Rig([pool_spec(48)], config, runtime, ledger=ledger)
    except HiCacheError as error:
        left = len(runtime.memory.registrations), len(ledger.snapshot())
        return {"error": error.code, "reason": str(error), "left": left}
    rig.controller.close()
    return {"error": None}


def _no_books(rank: int) -> Any:
    """Rank 1 cannot make the books of its process, since its launcher counts the ranks in words."""
    process_ledger.cache_clear()
    runtime = _runtime()
    if rank:
        os.environ["LOCAL_WORLD_SIZE"] = "all"
    try:
        Rig([pool_spec(48)], CONFIG, runtime).controller.close()
    except HiCacheError as error:
        return {"error": error.code, "reason": str(error), "left": len(runtime.memory.registrations)}
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        process_ledger.cache_clear()
    return {"error": None}


def _sidecar(rank: int) -> Any:
    """The sidecar of rank 1 does not move as it declares; later an honest one joins."""
    good = pool_spec(64, pool="good", anchor=False)
    hooks = idle_writer("side") if rank else {}
    with Rig(
        [pool_spec(48)], CONFIG, _runtime(), registry=registry_of([pool_spec(48), SIDE], **hooks)
    ) as rig:
        before = _state(rig)
        try:
            rig.controller.register_sidecar(rig.device_pool(SIDE))
            step = None
        except SidecarError as error:
            step = error.step
        del rig.device_rows["side"]
        after = _state(rig)
        rig.there_and_back()
        rig.controller.register_sidecar(rig.device_pool(good))
        rig.there_and_back()
        kept = ("pages", "pools", "registrations", "booked")
        return {"step": step, "same": all(before[key] == after[key] for key in kept), "last": _state(rig)}


def _draft_and_target(rank: int) -> Any:
    """Two controllers a rank, made at once and in another order on each."""
    pages = {"draft": 8 + rank, "target": 16 - rank}
    rigs: dict[str, Rig[SimRuntime]] = {}

    def make(name: str) -> None:
        rigs[name] = Rig([pool_spec(48)], evolve(CONFIG, name=name, host_pages=pages[name]), _runtime())

    threads = [threading.Thread(target=make, args=(name,)) for name in sorted(pages, reverse=bool(rank))]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    found = {name: rig.controller.group.anchor.pages for name, rig in rigs.items()}
    for rig in rigs.values():
        rig.controller.close()
    return found


SCENARIOS: dict[str, Callable[[int], Any]] = {
    "unequal pages": _unequal_pages,
    "unequal layers": _unequal_layers,
    "runs out": _runs_out,
    "no books": _no_books,
    "sidecar": _sidecar,
    "draft and target": _draft_and_target,
}


def run_scenarios(rank: int, init_method: str, report: Path) -> None:
    """Run every scenario, one after the other, and write down what came of each."""
    found = {}
    with distributed(rank, init_method):
        for name, scenario in SCENARIOS.items():
            begun = time.monotonic()
            found[name] = {"result": scenario(rank), "seconds": time.monotonic() - begun}
    report.write_text(json.dumps(found), encoding="utf-8")
