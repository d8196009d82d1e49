"""Small replays for tests: streams of requests, models of a few bytes, and a replay in one call."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.plugins import PluginRegistry, load_plugins
from hicache_core.replay import runner
from hicache_core.replay.report import Report
from hicache_core.replay.runner import Replay
from hicache_core.replay.setup import ReplayConfig
from hicache_core.replay.trace import TraceRequest
from hicache_core.spec import Platform
from tests.hybrid_twin import HybridCounts, HybridTwin, TwinSpace, hybrid_counts
from tests.lru_twin import Counts, twin_counts

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"
needs_traces = pytest.mark.skipif(
    not TRACES.is_dir(), reason="the published traces are not beside the checkout (shared/data/traces)"
)

Corrupt = Callable[[Replay], None]

# Prefixes are names of blocks here: "abd" shares two blocks with "abc". On 6 + 10 blocks this stream hits
# and evicts on both tiers.
WALK = ("abc", "abd", "aefg", "xyz", "abc", "aefgh", "xyzuv", "abd", "aefgh", "abcd", "xyz", "abc")
WALK_BLOCKS = (6, 10)

CHOICES: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "platform": "cpu-sim",
    "io_backend": "kernel",
    "layout": "page_first",
    "device_blocks": WALK_BLOCKS[0],
    "host_blocks": WALK_BLOCKS[1],
    "page_slots": 4,
    "layers": 1,
    "block_tokens": 8,
}
"""A block is two pages of four tokens, each with 2,048 bytes of keys and as many of values."""
PAGE_BYTES = 4 * (2048 + 2048)
BLOCK_BYTES = 2 * PAGE_BYTES


def request(blocks: Sequence[int], session: str = "") -> TraceRequest:
    """A request made by hand."""
    return TraceRequest(
        session=session,
        block_ids=np.array(blocks, dtype=np.int64),
        block_tokens=512,
        input_tokens=512 * len(blocks),
        output_tokens=1,
        timestamp_s=0.0,
        line=0,
    )


def stream(*paths: str, session: str = "") -> list[TraceRequest]:
    """A request for each path; a block's id names its prefix, numbered in order of first use."""
    ids: dict[str, int] = {}
    prefixes = [[path[: i + 1] for i in range(len(path))] for path in paths]
    return [request([ids.setdefault(prefix, len(ids)) for prefix in path], session) for path in prefixes]


def blocks_of(requests: Iterable[TraceRequest]) -> list[list[tuple[str, int]]]:
    """The blocks of requests as the twin wants them."""
    return [[(r.session, block) for block in r.block_ids.tolist()] for r in requests]


def twin_of(requests: Iterable[TraceRequest], device_blocks: int, host_blocks: int) -> Counts:
    """What the twin counts for requests."""
    return twin_counts(blocks_of(requests), device_blocks, host_blocks)


def hybrid_of(
    requests: Iterable[TraceRequest],
    device_blocks: int,
    host_blocks: int,
    spaces: Mapping[str, TwinSpace] | None = None,
) -> HybridCounts:
    """What the twin counts for requests to a model with further index spaces."""
    listed = list(requests)
    full = [r.input_tokens // r.block_tokens for r in listed]
    streamed = zip(blocks_of(listed), full, strict=True)
    return hybrid_counts(streamed, HybridTwin(device_blocks, host_blocks, spaces or {}))


def check_hybrid(report: Report, twin: HybridCounts, block_bytes: Mapping[str, int]) -> None:
    """A report without a fault that says what the twin says, in blocks and in bytes.

    Args:
        report: of the product.
        twin: of the same requests.
        block_bytes: bytes that a block keeps in each index space.
    """
    assert (report.mismatches, report.failed_transfers) == (0, 0)
    assert (report.requests, report.requests_too_large) == (twin.requests, twin.too_large)
    assert report.blocks_referenced == twin.referenced
    hits = report.hits_device_blocks, report.hits_host_blocks, report.hits_cut_blocks
    assert hits == (twin.device_hits, twin.host_hits, twin.cut)
    assert {name: blocks for name, blocks in report.dropped.items() if blocks} == +twin.dropped
    assert report.bytes_device_to_host == twin.backed_up_bytes(block_bytes)
    assert report.bytes_host_to_device == report.verified_bytes == twin.loaded_bytes(block_bytes)


def figures(report: Report) -> Counts:
    """The counts of a report, as the twin has them; backed-up blocks are not in a report."""
    return Counts(
        requests=report.requests,
        too_large=report.requests_too_large,
        referenced=report.blocks_referenced,
        device_hits=report.hits_device_blocks,
        host_hits=report.hits_host_blocks,
        dropped=report.dropped_blocks,
    )


@functools.cache
def installed() -> PluginRegistry:
    """The plugins that are installed."""
    return load_plugins(strict=True)


@contextmanager
def replaying(
    registry: PluginRegistry | None = None, trace_block_tokens: int = 512, /, **choices: Any
) -> Iterator[Replay]:
    """A replay with CHOICES but for ``choices``, closed at the end."""
    config = ReplayConfig(**{**CHOICES, **choices})
    replay = Replay(config, registry or installed(), trace_block_tokens)
    try:
        yield replay
    finally:
        replay.close()


def replayed(
    requests: Iterable[TraceRequest], advance: Callable[[], Any] = lambda: None, /, **choices: Any
) -> Report:
    """The report of a whole replay."""
    with replaying(**choices) as replay:
        return replay.run(requests, advance)


def device_rows(replay: Replay, pool: str = "kv") -> dict[str, list[np.ndarray]]:
    """The device rows of each buffer, one array a layer, as views: uint8[rows, row_bytes]."""
    rows = [books.rows for books in replay._books.values()]
    (owner,) = (p for row in rows for p in row.device_pools if p.spec.pool == pool)
    return {name: [layer.numpy() for layer in layers] for name, layers in owner.layers.items()}


def host_bytes(replay: Replay, pool: str = "kv") -> dict[str, np.ndarray]:
    """The flat host bytes of each buffer, as views."""
    (owner,) = (p for p in replay.controller.group.pools if p.spec.pool == pool)
    return {buffer.spec.name: buffer.memory.view for buffer in owner.buffers}


def free_pages(replay: Replay, space: str) -> tuple[int, int]:
    """Pages of an index space that the device and the host have to hand out."""
    host = replay.controller.group.allocator(space)
    return replay._books[space].allocator.free_pages, host.free_pages


def runtime_of(replay: Replay) -> SimRuntime:
    """The simulator that a replay runs on."""
    runtime = replay.controller.runtime
    assert isinstance(runtime, SimRuntime)
    return runtime


def mismatches(requests: Sequence[str], corrupt: Corrupt, after: int, **choices: Any) -> tuple[int, int]:
    """Wrong bytes that a replay finds, and bytes that it verified, if it is corrupted after some requests."""
    served: list[None] = []
    with replaying(**choices) as replay:

        def advance() -> None:
            served.append(None)
            if len(served) == after:
                corrupt(replay)

        report = replay.run(stream(*requests), advance)
    assert len(served) == len(requests)
    return report.mismatches, report.verified_bytes


def _unproved(**choices: Any) -> ControllerConfig:
    return ControllerConfig(**{**choices, "probe": False})


def with_faults(monkeypatch: pytest.MonkeyPatch, **faults: Any) -> list[SimRuntime]:
    """Let replays run on simulators in which something goes wrong; they are in the list.

    Faults are counted from the first call on, and the start-up probe would meet them: it is off.
    """
    made: list[SimRuntime] = []

    def make(platform: Platform, *, seed: int) -> SimRuntime:
        made.append(SimRuntime(platform, seed=seed, faults=Faults(**faults)))
        return made[-1]

    monkeypatch.setattr(runner, "SimRuntime", make)
    monkeypatch.setattr(runner, "ControllerConfig", _unproved)
    return made


def still(host_pages: np.ndarray, device_pages: np.ndarray) -> tuple[Any, Any]:
    """No pages at all."""
    return host_pages[:0], device_pages[:0]


def turned(host_pages: np.ndarray, device_pages: np.ndarray) -> tuple[Any, Any]:
    """Each page pairs with the next one's partner."""
    return host_pages, np.roll(device_pages, 1)


def short(host_pages: np.ndarray, device_pages: np.ndarray) -> tuple[Any, Any]:
    """All pages but the last."""
    return host_pages[:-1], device_pages[:-1]


ASTRAY = [still, turned, short]
"""Ways in which a transfer that claims to be done has moved other pages than it should."""


def tiny_model(path: Path, row_bytes: int, layers: int = 1) -> str:
    """Write a model file with one pool of latent rows of ``row_bytes``; its path."""
    pool = {
        "pool": "kv",
        "family": "mla",
        "index_space": "full",
        "anchor": True,
        "layer_ids": list(range(layers)),
        "geometry": {"latent_dim": row_bytes - 1, "rope_dim": 1, "row_format": "fp8"},
        "reuse": "all_pages",
        "row_bytes": row_bytes,
        "status": "derived",
        "source": "made up",
    }
    variant = {"platforms": ["cuda", "rocm"], "index_spaces": {"full": {}}, "pools": [pool]}
    model = {
        "schema": 1,
        "id": f"tiny-{row_bytes}",
        "name": "tiny",
        "layer_count": layers,
        "page_slots": None,
        "page_slots_default": 1,
        "default_variant": {"cuda": "only", "cpu-sim": "only"},
        "config": {"layers": {"value": layers, "status": "derived", "source": "made up"}},
        "variants": {"only": variant},
    }
    file = path / f"tiny-{row_bytes}.json"
    file.write_text(json.dumps(model), encoding="utf-8")
    return str(file)
