"""``hicache replay``: exit codes, what it refuses and how, the report, and what a terminal sees."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache_core.replay.rows import ReplayRows
from hicache_core.replay.runner import Replay
from hicache_core.replay.trace import read_trace
from tests.cli.commands import COMMAND, environment, generated, hicache, printed_json, process, replay_options
from tests.hybrid_twin import HybridTwin, TwinSpace, hybrid_counts
from tests.lru_twin import Counts, twin_counts
from tests.replay.replays import runtime_of

BLOCK_BYTES = 4 * 4096
SIZES = (60, 200)
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A generated trace of 40 requests, some larger than the device, whose last 12 come once more."""
    path = generated(tmp_path / "trace.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([*lines, *lines[-12:]]), encoding="utf-8")
    return path


def twin(trace: Path, limit: int | None = None) -> Counts:
    """What the twin counts for the file, read without the product."""
    records = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    return twin_counts([record["hash_ids"] for record in records[:limit]], *SIZES)


def test_good_replay_exits_with_0_and_agrees_with_the_twin(trace: Path) -> None:
    """JSON with a schema, the counts of the twin, and bytes that are blocks times row bytes."""
    expected = twin(trace)
    found = printed_json("replay", trace, *replay_options(), "--json")
    assert found["schema"] == "hicache.replay/2"
    assert (found["requests"], found["requests_too_large"]) == (52, expected.too_large)
    assert expected.too_large > 0
    assert found["blocks"]["referenced"] == expected.referenced
    assert found["hits"] == {
        "device_blocks": expected.device_hits,
        "host_blocks": expected.host_hits,
        "cut_blocks": 0,
    }
    assert found["bytes"]["device_to_host"] == expected.backed_up * BLOCK_BYTES
    assert found["bytes"]["host_to_device"] == expected.host_hits * BLOCK_BYTES
    assert found["verified_bytes"] == expected.host_hits * BLOCK_BYTES > 0
    assert (found["mismatches"], found["dropped_blocks"], found["failed_transfers"]) == (0, 0, 0)


def test_table_shows_the_figures_of_the_report(trace: Path, tmp_path: Path) -> None:
    """People read the numbers that machines get, and every shrinking."""
    report = tmp_path / "report.json"
    result = hicache("replay", trace, *replay_options(limit=30), "--report", report)
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(report.read_text(encoding="utf-8"))
    lines = [line.split(None, 0)[0] for line in result.stdout.splitlines() if line.strip()]
    assert lines[0].startswith("llama-3.1-8b, bf16")
    for start, value in (
        ("requests", f"{found['requests']}"),
        ("blocks referenced", f"{found['blocks']['referenced']:,}"),
        ("hits on the device", f"{found['hits']['device_blocks']:,}"),
        ("hits on the host", f"{found['hits']['host_blocks']:,}"),
        ("hits cut", f"{found['hits']['cut_blocks']:,}"),
        ("bytes device to host", f"{found['bytes']['device_to_host']:,}"),
        ("bytes host to device", f"{found['bytes']['host_to_device']:,}"),
        ("wrong bytes", "0"),
        ("dropped blocks", "0"),
    ):
        (line,) = (line for line in lines if line.startswith(start))
        assert value in line
    assert found["shrunk"]
    assert all(any(said in line for line in lines) for said in found["shrunk"])
    assert not CONTROL.search(result.stdout)


def test_report_is_written_into_folders_that_do_not_exist(trace: Path, tmp_path: Path) -> None:
    """The file holds what ``--json`` prints."""
    report = tmp_path / "a" / "b" / "report.json"
    printed = printed_json("replay", trace, *replay_options(limit=5), "--report", report, "--json")
    assert json.loads(report.read_text(encoding="utf-8")) == printed


def test_report_that_cannot_be_written_is_misuse_before_the_work(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the place of a folder is refused at once, and named."""
    monkeypatch.setattr(Replay, "run", lambda *_: pytest.fail("the replay was run"))
    (tmp_path / "file").touch()
    for report in (tmp_path / "file" / "r.json", tmp_path):
        result = hicache("replay", trace, *replay_options(), "--report", report)
        assert result.exit_code == 2
        assert "--report" in result.stderr
        assert str(tmp_path) in result.stderr


def test_packed_trace_is_read_as_well(trace: Path, tmp_path: Path) -> None:
    """A .gz file gives the same report but for times."""
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    plain, unpacked = (printed_json("replay", p, *replay_options(), "--json") for p in (trace, packed))
    for report in (plain, unpacked):
        del report["seconds"], report["gigabytes_per_second"], report["made"]
    assert plain == unpacked


def test_claude_code_sessions_are_read_as_well(tmp_path: Path) -> None:
    """The tokens of a block are those of the trace where none are given: here 64, which is 16 pages."""
    turn = {"t": 0.0, "type": "n", "in": 130, "out": 1, "hash_ids": [1, 2]}
    runs = {"t": 0.0, "type": "n", "in": 130, "out": 1, "hash_runs": [[1, 2]]}
    for kind in (turn, runs):
        sessions = [{"id": name, "block_size": 64, "requests": [kind, {**kind, "t": 1.0}]} for name in "ab"]
        path = tmp_path / "sessions.jsonl"
        path.write_text("".join(json.dumps(s) + "\n" for s in sessions), encoding="utf-8")
        found = printed_json("replay", path, *replay_options(tokens_per_block=None), "--json")
        assert (found["requests"], found["blocks"]["referenced"]) == (4, 8)
        assert found["hits"] == {"device_blocks": 4, "host_blocks": 0, "cut_blocks": 0}
        assert found["bytes"]["device_to_host"] == 4 * 64 * 4096


def test_limit_and_layers_reach_the_replay(trace: Path) -> None:
    """So many requests, so many layers; both are said."""
    found = printed_json("replay", trace, *replay_options(limit=7, layers=3), "--json")
    expected = twin(trace, 7)
    assert found["requests"] == 7
    assert found["bytes"]["device_to_host"] == expected.backed_up * 3 * BLOCK_BYTES
    assert any("3 of 32 layers" in said for said in found["shrunk"])
    assert any("7 requests" in said for said in found["shrunk"])
    assert (found["config"]["limit"], found["config"]["layers"]) == (7, 3)


def test_variant_and_seed_reach_the_replay(trace: Path) -> None:
    """The row format and the seed are those that were asked for."""
    options = replay_options(
        model="deepseek-v4-flash",
        variant="rocm_unified_fp8",
        platform="rocm-mi355x",
        page_size=None,
        tokens_per_block=256,
        limit=4,
        seed=9,
    )
    found = printed_json("replay", trace, *options, "--json")
    assert (found["variant"], found["config"]["seed"]) == ("rocm_unified_fp8", 9)
    block_bytes = 32_768 + 8_192 + 8_448 + 1_024 + 256
    assert found["bytes"]["device_to_host"] == twin(trace, 4).backed_up * block_bytes


@pytest.mark.parametrize(
    ("model", "bound", "space", "blocks", "last_blocks"),
    [
        # A window of 128 slots is eight blocks of 16, each of four pages of 4.
        ("gpt-oss-120b", {"swa_pages": 120}, "swa", 30, 8),
        ("jamba-v0.1", {"state_slots": 6}, "state", 6, 1),
    ],
)
def test_bounds_of_windows_and_states_reach_the_replay(
    trace: Path,
    model: str,
    bound: dict[str, int],
    space: str,
    blocks: int,
    last_blocks: int,
) -> None:
    """The second space has as many pages as were asked for, and the hits are the twin's with so many."""
    found = printed_json(
        "replay", trace, *replay_options(model=model, tokens_per_block=16, **bound), "--json"
    )
    assert {name: found["config"][name] for name in ("swa_pages", "state_slots")} == {
        "swa_pages": None,
        "state_slots": None,
        **bound,
    }
    host_blocks = -(-blocks * SIZES[1] // SIZES[0])
    spaces = {space: TwinSpace(blocks, host_blocks, last_blocks)}
    records = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    filled = [(r["hash_ids"], r["input_length"] // 512) for r in records]
    expected = hybrid_counts(filled, HybridTwin(*SIZES, spaces))
    assert expected.cut > 0
    assert found["hits"] == {
        "device_blocks": expected.device_hits,
        "host_blocks": expected.host_hits,
        "cut_blocks": expected.cut,
    }
    assert (found["mismatches"], found["failed_transfers"]) == (0, 0)


@pytest.mark.parametrize("content", ["not JSON\n", '{"hash_ids": 7}\n', "[]\n"])
def test_broken_line_is_named_and_exits_with_2(trace: Path, tmp_path: Path, content: str) -> None:
    """A line in the middle of a trace: file and line on the error stream, and no report."""
    lines = trace.read_text(encoding="utf-8").splitlines(keepends=True)
    trace.write_text("".join([*lines[:20], content, *lines[20:]]), encoding="utf-8")
    report = tmp_path / "report.json"
    result = hicache("replay", trace, *replay_options(), "--report", report)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{trace}:21" in result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert not report.exists()


def test_trace_that_is_not_there_or_empty_exits_with_2(tmp_path: Path) -> None:
    """Both are named; a damaged .gz as well."""
    (tmp_path / "empty").touch()
    (tmp_path / "damaged.gz").write_bytes(gzip.compress(b"{}" * 1000)[:20])
    for name in ("nosuch", "empty", "damaged.gz"):
        result = hicache("replay", tmp_path / name, *replay_options())
        assert (result.exit_code, result.stdout) == (2, "")
        assert str(tmp_path / name) in result.stderr


def test_combination_that_cannot_work_exits_with_2_and_every_reason(trace: Path) -> None:
    """The pair and the variant are both wrong; each is named by its rule, with what to do."""
    wrong = {"platform": "cuda", "layout": "page_first_direct"}
    model = {"model": "deepseek-v4-flash", "variant": "rocm_unified_fp8", "page_size": None}
    result = hicache("replay", trace, *replay_options(**model, **wrong))
    assert (result.exit_code, result.stdout) == (2, "")
    reason, remedy = result.stderr.splitlines()
    assert "[incompatible]" in reason
    assert "[R1-served-pair]" in reason
    assert "[R7-variant-platform]" in reason
    assert "kernel + page_first" in remedy
    assert "another variant" in remedy


def test_kernel_on_layer_first_rows_is_refused_on_rocm(trace: Path) -> None:
    """With the pairs that do work."""
    result = hicache("replay", trace, *replay_options(platform="rocm-mi355x", layout="layer_first"))
    assert result.exit_code == 2
    assert "[R3-not-opted-in]" in result.stderr
    assert "direct + layer_first" in result.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "llama-9"},
        {"model": "nosuch.json"},
        {"variant": "int3"},
        {"platform": "abacus"},
        {"io_backend": "pigeon"},
        {"layout": "tokens_first"},
        {"policy": "write_never"},
        {"device": "tpu"},
        {"device_blocks": 0},
        {"host_blocks": -1},
        {"layers": 0},
        {"limit": 0},
        {"tokens_per_block": 0},
        {"swa_pages": 0},
        {"state_slots": 0},
        {"model": "gpt-oss-120b", "swa_pages": 3, "tokens_per_block": 16},
        {"page_size": "many"},
        {"model": None},
        {"host_blocks": None},
        {"model": "deepseek-v4-flash", "page_size": 128},
    ],
    ids=str,
)
def test_choice_that_does_not_exist_exits_with_2(trace: Path, wrong: dict[str, Any]) -> None:
    """Whichever it is, the reason is said and nothing is printed as a result."""
    result = hicache("replay", trace, *replay_options(**wrong))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr


@pytest.mark.parametrize(("device", "platform"), [("cuda", "cuda"), ("hip", "rocm"), ("hip", "cuda")])
def test_device_that_torch_was_not_built_for_exits_with_2(
    trace: Path, monkeypatch: pytest.MonkeyPatch, device: str, platform: str
) -> None:
    """As does a platform of another vendor; the reason names the device, and there is no result."""
    monkeypatch.setattr(torch.version, device, None)
    result = hicache("replay", trace, *replay_options(device=device, platform=platform))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"[device] {device}: " in result.stderr


def test_wrong_byte_exits_with_1_and_is_reported(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is printed and written all the same, with the count."""
    right = ReplayRows.sweep_device

    def flipped(rows: ReplayRows, *arguments: Any) -> int:
        rows.device_pools[0].layers["k"][0][0, 0] ^= 1
        return right(rows, *arguments)

    monkeypatch.setattr(ReplayRows, "sweep_device", flipped)
    report = tmp_path / "report.json"
    result = hicache("replay", trace, *replay_options(), "--report", report, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["mismatches"] == 1
    assert json.loads(report.read_text(encoding="utf-8"))["mismatches"] == 1


def test_failed_transfer_exits_with_1(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that lost a transfer is no success, even where no byte is wrong."""
    right = Replay.run

    def failing(replay: Replay, *arguments: Any) -> Any:
        report = right(replay, *arguments)
        report.failed_transfers = 1
        return report

    monkeypatch.setattr(Replay, "run", failing)
    result = hicache("replay", trace, *replay_options(limit=2), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["failed_transfers"] == 1


def test_memory_is_released_whatever_happens(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay is closed after a broken line as after a good end."""
    closed: list[Replay] = []
    right = Replay.close

    def close(replay: Replay) -> None:
        right(replay)
        closed.append(replay)

    monkeypatch.setattr(Replay, "close", close)
    hicache("replay", trace, *replay_options(limit=2))
    trace.write_text(trace.read_text(encoding="utf-8") + "broken\n", encoding="utf-8")
    assert hicache("replay", trace, *replay_options()).exit_code == 2
    assert [runtime_of(replay).memory.registrations for replay in closed] == [{}, {}]


@pytest.mark.slow
def test_process_prints_the_report_and_no_progress_into_a_pipe(trace: Path, tmp_path: Path) -> None:
    """In a process of its own: exit 0, a table without control characters, a silent error stream."""
    done = process("replay", trace, *replay_options(limit=10), "--report", tmp_path / "new" / "r.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert not CONTROL.search(done.stdout)
    assert "llama-3.1-8b" in done.stdout
    assert json.loads((tmp_path / "new" / "r.json").read_text(encoding="utf-8"))["requests"] == 10


@pytest.mark.slow
def test_terminal_sees_progress(trace: Path) -> None:
    """Where the error stream is a terminal, requests are counted there, and the output stays clean."""
    master, terminal = pty.openpty()
    running = subprocess.Popen(
        [*COMMAND, "replay", str(trace), *replay_options(), "--json"],
        stdout=subprocess.PIPE,
        stderr=terminal,
        env=environment(TERM="xterm"),
    )
    os.close(terminal)
    seen = b""
    while chunk := _read(master):
        seen += chunk
    os.close(master)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 0
    assert json.loads(output)["requests"] == len(list(read_trace(trace)))
    assert b"requests" in seen
    assert b"\x1b[" in seen


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65_536)
    except OSError:  # Linux says EIO once nobody holds the other end.
        return b""
