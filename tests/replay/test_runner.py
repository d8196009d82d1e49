"""The runner: blocks and pages, the report, what is said of every shrinking, and what is left behind."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs
import pytest

from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.errors import (
    CapacityError,
    IncompatibleError,
    ModelFileError,
    RegistrationError,
    TraceError,
    UnknownNameError,
)
from hicache_core.hookspecs import ENTRY_POINT_GROUP
from hicache_core.memory.process import process_ledger
from hicache_core.plugins import PluginRegistry, load_plugins
from hicache_core.replay import runner
from hicache_core.replay.report import write_report
from hicache_core.replay.runner import Replay
from hicache_core.replay.setup import ReplayConfig
from hicache_core.spec import Platform
from tests.replay.replays import (
    BLOCK_BYTES,
    PAGE_BYTES,
    WALK,
    WALK_BLOCKS,
    figures,
    replayed,
    replaying,
    request,
    runtime_of,
    stream,
    tiny_model,
    twin_of,
)


def registry_without(plugin: str) -> PluginRegistry:
    """The installed plugins but for one."""
    return load_plugins(found=[e for e in entry_points(group=ENTRY_POINT_GROUP) if e.name != plugin])


@pytest.mark.parametrize(
    ("block_tokens", "pages", "said"),
    [
        (1, 1, ["stands for 1", "fills 4 slots"]),
        (3, 1, ["stands for 3", "fills 4 slots"]),
        (4, 1, ["stands for 4"]),
        (5, 2, ["stands for 5", "fills 8 slots"]),
        (8, 2, ["stands for 8"]),
        (30, 8, ["stands for 30", "fills 32 slots"]),
        (None, 3, []),
        (12, 3, []),
    ],
)
def test_block_takes_whole_pages(block_tokens: int | None, pages: int, said: list[str]) -> None:
    """A block is at least one page of 4 slots, a partial page counts as full, and what differs is said."""
    requests = [attrs.evolve(r, block_tokens=12) for r in stream(*WALK)]
    twin = twin_of(requests, *WALK_BLOCKS)
    with replaying(None, 12, block_tokens=block_tokens) as replay:
        report = replay.run(requests)
        about_blocks = [sentence for sentence in replay.shrunk() if "block" in sentence]
    assert report.mismatches == 0
    assert report.bytes_device_to_host == twin.backed_up * pages * PAGE_BYTES
    assert report.bytes_host_to_device == twin.host_hits * pages * PAGE_BYTES
    assert [part in sentence for part, sentence in zip(said, about_blocks, strict=True)] == [True] * len(said)


def test_block_of_another_size_is_refused_unless_said_what_it_stands_for() -> None:
    """Sessions with blocks of different sizes: the line is named, and --tokens-per-block settles it."""
    first, second = stream("ab"), [attrs.evolve(r, block_tokens=64, line=7) for r in stream("cd")]
    with replaying(block_tokens=None) as replay, pytest.raises(TraceError) as caught:
        replay.run([*first, *second])
    assert caught.value.line == 7
    with replaying(block_tokens=8) as replay:
        assert replay.run([*first, *second]).requests == 2


@pytest.mark.parametrize("page_slots", [1, 2, 3, 16, 64])
def test_bytes_do_not_depend_on_the_page_where_it_divides_the_block(page_slots: int) -> None:
    """192 tokens are 192 rows, whatever pages they are cut into."""
    requests = stream("abc", "abd", "abc")
    choices = {"device_blocks": 3, "host_blocks": 6, "block_tokens": 192, "page_slots": page_slots}
    report = replayed(requests, **choices)
    twin = twin_of(requests, 3, 6)
    assert report.bytes_device_to_host == twin.backed_up * 192 * 4096
    assert report.bytes_host_to_device == twin.host_hits * 192 * 4096
    assert report.mismatches == 0


@pytest.mark.parametrize("row_bytes", [9, 15, 3])
@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_rows_that_are_no_whole_words_replay(tmp_path: Path, row_bytes: int, layout: str) -> None:
    """Pages of 27, 45 and 9 bytes in three layers; direct needs no alignment."""
    requests = stream(*WALK)
    twin = twin_of(requests, *WALK_BLOCKS)
    choices = {"io_backend": "direct", "layout": layout, "page_slots": 3, "block_tokens": 6, "layers": None}
    report = replayed(requests, model=tiny_model(tmp_path, row_bytes, layers=3), **choices)
    assert report.mismatches == 0
    assert report.verified_bytes == twin.host_hits * 6 * row_bytes * 3
    assert report.swept_bytes == (2 * sum(WALK_BLOCKS) + 4) * 3 * row_bytes * 3


def test_rows_that_no_kernel_can_move_are_refused(tmp_path: Path) -> None:
    """The same rows under kernel are refused before anything is allocated, with the remedy."""
    with (
        pytest.raises(IncompatibleError) as caught,
        replaying(model=tiny_model(tmp_path, 9), io_backend="kernel", layout="page_first"),
    ):
        pass
    assert "direct" in caught.value.remedy


def test_request_larger_than_the_device_is_counted_and_skipped() -> None:
    """It changes nothing: its blocks are neither referenced, nor hit, nor resident afterwards."""
    with_large = stream("abc", "abcdefg", "abc", "abcdef", "abcdefgh", "abc")
    without = stream("abc", "abc", "abcdef", "abc")
    report, small = replayed(with_large), replayed(without)
    assert (report.requests, report.requests_too_large) == (6, 2)
    assert (small.requests, small.requests_too_large) == (4, 0)
    assert report.blocks_referenced == small.blocks_referenced == 3 + 3 + 6 + 3
    assert report.hits_device_blocks == small.hits_device_blocks == 0 + 3 + 3 + 3
    assert report.bytes_device_to_host == small.bytes_device_to_host == 6 * BLOCK_BYTES


def test_request_without_blocks_is_a_request() -> None:
    """A prompt shorter than a block is counted, and moves nothing."""
    report = replayed([request([]), request([1])])
    assert (report.requests, report.blocks_referenced, report.requests_too_large) == (2, 1, 0)
    assert report.bytes_device_to_host == BLOCK_BYTES


def test_sessions_share_nothing() -> None:
    """The same ids in two sessions are different blocks, on both tiers and in content."""
    walks = [request([1, 2], name) for name in ("a", "b", "a", "b", "c", "d", "a")]
    report = replayed(walks, device_blocks=4, host_blocks=8)
    assert figures(report) == without_backed_up(walks, 4, 8)
    assert report.hits_device_blocks == 4
    assert report.hits_host_blocks == 2
    assert report.mismatches == 0


def without_backed_up(requests: list[Any], device_blocks: int, host_blocks: int) -> Any:
    """The twin's counts but for the one that a report has in bytes alone."""
    counts = twin_of(requests, device_blocks, host_blocks)
    counts.backed_up = 0
    return counts


@pytest.mark.parametrize("host_blocks", [1, 2, 5])
def test_host_smaller_than_a_request_drops_blocks_and_says_so(host_blocks: int) -> None:
    """What does not fit is dropped and counted; what is kept is a leading run, and right."""
    requests = stream(*WALK)
    twin = twin_of(requests, WALK_BLOCKS[0], host_blocks)
    report = replayed(requests, host_blocks=host_blocks)
    assert report.dropped_blocks == twin.dropped
    assert (twin.dropped > 0) == (host_blocks < 5)
    assert figures(report) == without_backed_up(requests, WALK_BLOCKS[0], host_blocks)
    assert report.bytes_device_to_host == twin.backed_up * BLOCK_BYTES
    assert report.mismatches == 0


@pytest.mark.parametrize(("limit", "requests"), [(1, 1), (5, 5), (99, len(WALK)), (None, len(WALK))])
def test_limit_ends_the_replay(limit: int | None, requests: int) -> None:
    """So many requests are replayed, at most all; the limit is said, and nothing is read beyond it."""
    source = iter(stream(*WALK))
    steps: list[None] = []
    with replaying(limit=limit) as replay:
        report = replay.run(source, lambda: steps.append(None))
        assert any(f"{limit} requests" in said for said in replay.shrunk()) == (limit is not None)
    assert report.requests == len(steps) == requests
    assert len(list(source)) == len(WALK) - requests


def test_report_has_every_figure_by_its_name(tmp_path: Path) -> None:
    """The names that others read are there, with the values of the run, and survive the file."""
    requests = stream(*WALK)
    twin = twin_of(requests, *WALK_BLOCKS)
    with replaying(limit=50, seed=7) as replay:
        replay.run(requests)
        found = replay.as_dict()
    file = tmp_path / "some" / "folder" / "report.json"
    write_report(file, found)
    assert json.loads(file.read_text(encoding="utf-8")) == json.loads(json.dumps(found))
    assert found["schema"] == "hicache.replay/2"
    assert (found["model"], found["variant"]) == ("llama-3.1-8b", "bf16")
    assert found["config"]["platform"] == "cpu-sim"
    assert (found["config"]["seed"], found["config"]["limit"]) == (7, 50)
    assert found["requests"] == 12
    assert found["requests_too_large"] == 0
    assert found["blocks"] == {"referenced": twin.referenced}
    assert found["hits"] == {
        "device_blocks": twin.device_hits,
        "host_blocks": twin.host_hits,
        "cut_blocks": 0,
    }
    assert found["bytes"]["device_to_host"] == twin.backed_up * BLOCK_BYTES
    assert found["bytes"]["host_to_device"] == twin.host_hits * BLOCK_BYTES
    assert found["verified_bytes"] == twin.host_hits * BLOCK_BYTES
    assert (found["mismatches"], found["dropped_blocks"], found["failed_transfers"]) == (0, 0, 0)
    assert found["dropped_blocks_by_space"] == {"full": 0}
    assert found["pools"] == [
        {
            "pool": "kv",
            "family": "mha",
            "index_space": "full",
            "layers": 1,
            "row_bytes": {"k": 2048, "v": 2048},
        }
    ]
    assert found["seconds"].keys() >= {"load", "backup", "compute", "verify", "sweep", "total"}
    assert found["seconds"]["total"] >= max(found["seconds"].values()) > 0
    for rate, nbytes in found["gigabytes_per_second"].items():
        seconds = found["seconds"][{"device_to_host": "backup", "host_to_device": "load"}[rate]]
        assert rate in found["bytes"]
        assert nbytes == pytest.approx(found["bytes"][rate] / seconds / 1e9, rel=0.1, abs=2e-3)


def test_nothing_is_said_to_be_smaller_where_nothing_is() -> None:
    """All layers, the trace's own blocks, no limit: a replay of the whole thing claims no shrinking."""
    with replaying(None, 8, layers=None, block_tokens=None) as replay:
        assert replay.shrunk() == []


def test_every_shrinking_is_said() -> None:
    """Layers per pool, tokens of a block, the limit, and each pool that is left out with its reason."""
    choices = {"model": "deepseek-v4-flash", "variant": "cuda_v4", "page_slots": None}
    registry = registry_without("dsv4_state")
    with replaying(registry, block_tokens=100, layers=3, limit=9, **choices) as replay:
        said = replay.shrunk()
        left = {pool.pool: pool.reason for pool in replay.assembly.left_out}
        found = replay.as_dict()
    assert said[:7] == [
        "pool swa: 3 of 43 layers",
        "pool c4: 3 of 21 layers",
        "pool c4_indexer: 3 of 21 layers",
        "pool c128: 3 of 20 layers",
        "a block of 512 tokens stands for 100",
        "a block of 100 tokens fills 256 slots",
        "at most 9 requests",
    ]
    assert set(left) == {"c4_state", "c4_indexer_state"}
    assert all("dsv4_state" in reason for reason in left.values())
    assert said[7:] == [f"without pool {pool}: {reason}" for pool, reason in left.items()]
    assert found["shrunk"] == said
    assert {pool["pool"]: pool["reason"] for pool in found["left_out"]} == left


def test_pool_of_a_family_that_nobody_brings_is_left_out_and_named() -> None:
    """A model with an anchor that can be replayed is, without the pools whose plugin is missing."""
    registry = registry_without("dsa_indexer")
    with replaying(registry, model="deepseek-v3.2", page_slots=64) as replay:
        report = replay.run(stream("ab", "c", "ab"))
        left = replay.assembly.left_out
        assert [spec.pool for spec in replay.assembly.specs] == ["kv"]
    assert report.mismatches == 0
    assert left
    assert all("plugin" in pool.reason for pool in left)


def test_model_of_which_nothing_can_be_replayed_is_refused() -> None:
    """An empty replay would prove nothing; each pool is named with its reason."""
    with (
        pytest.raises(CapacityError) as caught,
        replaying(registry_without("mha_mla"), model="llama-3.1-8b"),
    ):
        pass
    assert "kv" in caught.value.remedy


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "llama-9"},
        {"variant": "int3"},
        {"platform": "abacus"},
        {"policy": "write_back"},
        {"device": "tpu"},
    ],
)
def test_unknown_names_are_refused_before_anything_is_made(
    wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever name is wrong, no memory has been registered when it is refused."""
    made: list[SimRuntime] = []
    monkeypatch.setattr(runner, "SimRuntime", remembering(made))
    with pytest.raises(UnknownNameError), replaying(**wrong):
        pass
    assert [runtime.memory.registrations for runtime in made] in ([], [{}])


def test_model_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """A path is read as a model file, and what is wrong with it is said."""
    file = tmp_path / "model.json"
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(ModelFileError), replaying(model=str(file)):
        pass


def remembering(made: list[SimRuntime], **faults: Any) -> Any:
    """A maker of simulators that keeps those that it made."""

    def make(platform: Platform, *, seed: int) -> SimRuntime:
        made.append(SimRuntime(platform, seed=seed, **faults))
        return made[-1]

    return make


@pytest.mark.parametrize("platform", ["cpu-sim", "rocm-mi355x"])
def test_close_leaves_no_registration(platform: str) -> None:
    """All host memory is registered while the replay lives, and none after; closing twice is harmless."""
    with replaying(model="deepseek-v4-flash", page_slots=None, block_tokens=256, platform=platform) as replay:
        runtime = runtime_of(replay)
        replay.run(stream(*WALK))
        pools = {"swa", "c4", "c4_indexer", "c4_state", "c4_indexer_state", "c128"}
        assert len(runtime.memory.registrations) == len(pools)
    assert runtime.memory.registrations == {}
    replay.close()


def test_refused_registration_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the second buffer cannot be registered, the first is taken back."""
    made: list[SimRuntime] = []
    faults = Faults(refuse_registration_above=4096)
    monkeypatch.setattr(runner, "SimRuntime", remembering(made, faults=faults))
    with pytest.raises(RegistrationError), replaying():
        pass
    assert [runtime.memory.registrations for runtime in made] == [{}]


def without_times(replay: runner.Replay) -> dict[str, Any]:
    """A report without what differs from run to run."""
    found = replay.as_dict()
    differs = ("made", "seconds", "gigabytes_per_second", "config")
    return {name: found[name] for name in found if name not in differs}


@pytest.mark.parametrize(
    ("platform", "io_backend", "layout"),
    [
        ("rocm-mi355x", "kernel", "page_first"),
        ("cuda", "kernel", "layer_first"),
        ("cuda-wsl2", "direct", "page_first_direct"),
    ],
)
def test_seed_of_the_simulator_changes_no_figure(platform: str, io_backend: str, layout: str) -> None:
    """Whatever order the streams run in, and whatever the content, the report but for times is the same."""
    reports = []
    for seed in range(8):
        choices = {"platform": platform, "io_backend": io_backend, "layout": layout, "layers": 3}
        with replaying(seed=seed, **choices) as replay:
            replay.run(stream(*WALK))
            reports.append(without_times(replay))
    assert reports[0]["mismatches"] == 0
    assert reports[0]["hits"]["host_blocks"] > 0
    assert all(report == reports[0] for report in reports)


def test_host_memory_is_told_as_it_comes_and_can_be_stopped() -> None:
    """Every buffer to its end; an interruption leaves nothing booked."""
    told: list[tuple[int, int]] = []
    registry = load_plugins()
    config = ReplayConfig(
        model="llama-3.1-8b",
        platform="cpu-sim",
        io_backend="kernel",
        layout="page_first",
        device_blocks=4,
        host_blocks=8,
        page_slots=4,
        layers=1,
        block_tokens=4,
    )
    before = process_ledger().snapshot()
    Replay(config, registry, 4, progress=lambda done, nbytes: told.append((done, nbytes))).close()
    assert sum(done == nbytes for done, nbytes in told) == 2

    def stop(done: int, nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Replay(config, registry, 4, progress=stop)
    assert process_ledger().snapshot() == before
