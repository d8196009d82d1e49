"""The report of a replay: counted while it runs, printed as a table, written as JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from attrs import asdict, define, field

from hicache_core.replay.setup import Assembly, ReplayConfig

SCHEMA = "hicache.replay/2"


@define(kw_only=True)
class Report:
    """Counts, bytes and seconds of one replay."""

    requests: int = 0
    requests_too_large: int = 0
    blocks_referenced: int = 0
    hits_device_blocks: int = 0
    hits_host_blocks: int = 0
    hits_cut_blocks: int = 0
    bytes_device_to_host: int = 0
    bytes_host_to_device: int = 0
    verified_bytes: int = 0
    swept_bytes: int = 0
    mismatches: int = 0
    dropped: Counter[str] = field(factory=Counter)
    failed_transfers: int = 0
    seconds: dict[str, float] = field(factory=dict)

    @property
    def dropped_blocks(self) -> int:
        """Blocks that should have been backed up and were not, over all index spaces."""
        return self.dropped.total()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the body takes to ``name``."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def gigabytes_per_second(self, nbytes: int, name: str) -> float:
        """Bandwidth in 1e9 bytes a second; 0 where nothing was timed."""
        seconds = self.seconds.get(name, 0.0)
        return nbytes / seconds / 1e9 if seconds else 0.0

    def as_dict(self, config: ReplayConfig, assembly: Assembly, shrunk: list[str]) -> dict[str, Any]:
        """The report with its schema, for JSON."""
        return {
            "schema": SCHEMA,
            "made": where_and_when(),
            "config": asdict(config),
            "model": assembly.model,
            "variant": assembly.variant,
            "pools": [
                {
                    "pool": spec.pool,
                    "family": spec.family,
                    "index_space": spec.index_space.name,
                    "layers": spec.layer_count,
                    "row_bytes": {b.name: b.row_bytes for b in spec.buffers},
                }
                for spec in assembly.specs
            ],
            "left_out": [asdict(left) for left in assembly.left_out],
            "shrunk": shrunk,
            "requests": self.requests,
            "requests_too_large": self.requests_too_large,
            "blocks": {"referenced": self.blocks_referenced},
            "hits": {
                "device_blocks": self.hits_device_blocks,
                "host_blocks": self.hits_host_blocks,
                "cut_blocks": self.hits_cut_blocks,
            },
            "bytes": {
                "device_to_host": self.bytes_device_to_host,
                "host_to_device": self.bytes_host_to_device,
            },
            "verified_bytes": self.verified_bytes,
            "swept_bytes": self.swept_bytes,
            "mismatches": self.mismatches,
            "dropped_blocks": self.dropped_blocks,
            "dropped_blocks_by_space": dict(self.dropped),
            "failed_transfers": self.failed_transfers,
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "gigabytes_per_second": {
                "device_to_host": round(self.gigabytes_per_second(self.bytes_device_to_host, "backup"), 3),
                "host_to_device": round(self.gigabytes_per_second(self.bytes_host_to_device, "load"), 3),
            },
        }


def where_and_when() -> dict[str, Any]:
    """What a kept result must say of the machine that it was made on."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
