"""The command line but for ``replay``: what it prints, for people and machines, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import pytest

from hicache_core import cli
from hicache_core.cli import introspection
from hicache_core.models import load_model, model_names
from hicache_core.plugins import load_plugins
from tests.cli.commands import COMMAND, environment, generated, hicache, printed_json, process

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
PLUGINS = {
    "dsa_indexer": ("hicache-dsa-indexer", {"dsa_indexer"}),
    "dsv4_paged": ("hicache-dsv4-paged", {"dsv4_anchor", "dsv4_paged"}),
    "dsv4_state": ("hicache-dsv4-state", {"dsv4_state"}),
    "mamba": ("hicache-mamba", {"mamba"}),
    "mha_mla": ("hicache-mha-mla", {"mha", "mla", "k_only"}),
}


def test_command_is_installed_under_its_name() -> None:
    """The distribution brings a script ``hicache`` that is this command."""
    (script,) = entry_points(group="console_scripts", name="hicache")
    assert script.load() is cli.main


def test_version_is_that_of_the_distribution() -> None:
    """``hicache --version`` says what is installed."""
    result = hicache("--version")
    assert result.exit_code == 0
    assert version("hicache-core") in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["nosuch"],
        ["describe"],
        ["describe", "nosuch"],
        ["describe", "mha", "--platform", "abacus"],
        ["models", "nosuch"],
        ["plugins", "--nosuch"],
        ["trace"],
        ["trace", "generate"],
        ["trace", "generate", "--requests", "0", "--out", "t"],
        ["trace", "inspect", "nosuch.jsonl"],
        ["trace", "inspect", "t", "--lru", "0"],
        ["replay"],
    ],
)
def test_misuse_exits_with_2_and_says_why(arguments: list[str]) -> None:
    """Nothing is on the output, the reason is on the error stream, and there is no traceback."""
    result = hicache(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr
    assert "Traceback" not in result.stderr


def test_error_is_one_line_of_reason_and_one_of_remedy() -> None:
    """With the code that scripts can look at, and the names that exist."""
    result = hicache("describe", "nosuch")
    reason, remedy = result.stderr.splitlines()
    assert "[unknown-name]" in reason
    assert "'nosuch'" in reason
    assert all(family in remedy for family in ("mha", "mla", "dsv4_paged"))
    assert "Install" in remedy


def test_plugins_lists_distributions_versions_and_families() -> None:
    """All plugins are there by name, distribution and version, in the table and in JSON."""
    found = printed_json("plugins", "--json")
    assert found["schema"] == "hicache.plugins/1"
    table = hicache("plugins").stdout
    by_name = {plugin["plugin"]: plugin for plugin in found["plugins"]}
    assert set(by_name) >= set(PLUGINS)
    for name, (distribution, families) in PLUGINS.items():
        plugin = by_name[name]
        titled = f"{distribution} {version(distribution)}"
        assert (plugin["distribution"], plugin["state"]) == (titled, "loaded")
        assert set(plugin["families"]) == families
        assert plugin["api"] == [[1, 1]]
        (line,) = (line for line in table.splitlines() if line.startswith(name))
        assert titled in line
        assert all(family in line for family in families)


def test_refused_plugin_is_listed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken plugin hides no other, and the list says what is wrong with it; this is still an answer."""
    good = [e for e in entry_points(group="hicache.pools") if e.name == "mha_mla"]
    broken = EntryPoint(name="broken", value="no_such_module_anywhere", group="hicache.pools")
    monkeypatch.setattr(introspection, "load_plugins", lambda: load_plugins(found=[broken, *good]))
    found = {plugin["plugin"]: plugin for plugin in printed_json("plugins", "--json")["plugins"]}
    assert found["mha_mla"]["state"] == "loaded"
    assert found["broken"]["state"] == "refused"
    assert "no_such_module_anywhere" in found["broken"]["reason"]
    table = hicache("plugins").stdout
    assert "refused" in table
    assert "no_such_module_anywhere" in table


def test_models_lists_every_model() -> None:
    """By id, with its variants."""
    table = hicache("models").stdout
    for name in model_names():
        (line,) = (line for line in table.splitlines() if line.split(" ")[0] == name)
        assert str(load_model(name).layer_count) in line
        assert next(iter(load_model(name).variants)) in line


def test_models_as_json_has_a_row_for_each_pool() -> None:
    """With the exact row bytes, the platforms and the source of each."""
    found = printed_json("models", "--json")
    assert found["schema"] == "hicache.models/1"
    rows = {(row["model"], row["variant"], row["pool"]): row for row in found["pools"]}
    assert {model for model, _, _ in rows} == set(model_names())
    c4 = rows["deepseek-v4-flash", "rocm_unified_bf16", "c4"]
    assert (c4["row_bytes"], c4["layers"], c4["family"]) == (65_536, 21, "dsv4_paged")
    assert {"rocm", "rocm-mi355x"} <= set(c4["platforms"])
    assert all(row["source"] and row["status"] for row in rows.values())


def test_one_model_is_shown_pool_by_pool() -> None:
    """Only that model, all its variants; a path of a model file does as well as a name."""
    found = printed_json("models", "deepseek-v3", "--json")
    assert {row["model"] for row in found["pools"]} == {"deepseek-v3"}
    sizes = {row["variant"]: row["row_bytes"] for row in found["pools"]}
    assert (sizes["bf16"], sizes["fp8_plain"]) == (1_152, 576)
    table = hicache("models", "deepseek-v3").stdout
    assert "1152" in table
    assert "fp8_plain" in table


def test_describe_says_what_a_family_cannot_do_and_why() -> None:
    """On a platform without kernels, a kernel is refused with reason and remedy; copies are there."""
    found = printed_json("describe", "mha", "--platform", "npu", "--json")
    assert found["schema"] == "hicache.describe/1"
    assert (found["family"], found["platform"]) == ("mha", "npu")
    assert "hicache-mha-mla" in found["plugin"]
    assert {"kv_heads", "k_head_dim", "dtype"} <= set(found["geometry"])
    assert found["pools"]
    for pool in found["pools"].values():
        can = pool["capabilities"]
        assert can["kernel_rows"]["verdict"] == "unsupported"
        assert can["kernel_rows"]["code"] == "no-kernel"
        assert can["kernel_rows"]["remedy"]
        assert can["strided_copy"]["verdict"] == "supported"
        assert can["kernel_pointer_domain"]["value"] == "raw"
        assert pool["row_bytes"].keys() == {"k", "v"}


def test_describe_prints_the_same_for_people() -> None:
    """Owner, geometry, and a line for each capability with its reason."""
    output = hicache("describe", "mha", "--platform", "npu").stdout
    assert output.startswith("mha, by mha_mla (hicache-mha-mla ")
    assert "kv_heads" in output
    (line, *_) = (line for line in output.splitlines() if "kernel_rows" in line)
    assert "unsupported" in line
    assert "no kernels for npu" in line


def test_describe_of_a_family_that_no_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures, and where to ask instead of an empty table."""
    monkeypatch.setattr(introspection, "model_names", list)
    output = hicache("describe", "mha").stdout
    assert "kv_heads" in output
    assert "hicache check --pools" in output
    assert "verdict" not in output


def test_describe_where_kernels_are() -> None:
    """The same family on ROCm has kernels and a staged write-back."""
    for pool in printed_json("describe", "mha", "--platform", "rocm", "--json")["pools"].values():
        can = pool["capabilities"]
        assert can["kernel_rows"]["verdict"] == can["staged_write_back"]["verdict"] == "supported"
        assert can["kernel_pointer_domain"]["value"] == "device"
        assert "direct + page_first_direct" in can["served_pairs"]["value"]


def test_describe_of_a_pool_without_bytes() -> None:
    """An anchor can do nothing and lacks nothing."""
    found = printed_json("describe", "dsv4_anchor", "--json")
    assert found["platform"] == "cpu-sim"
    for pool in found["pools"].values():
        assert pool["row_bytes"] == {}
        assert pool["capabilities"]["staged_write_back"]["verdict"] == "not-applicable"
    assert "no bytes" in hicache("describe", "dsv4_anchor").stdout


def test_generated_trace_is_a_function_of_its_seed(tmp_path: Path) -> None:
    """The same seed gives the same bytes, another gives others; folders are made."""

    def trace(name: str, seed: int) -> bytes:
        result = hicache("trace", "generate", "--requests", 30, "--seed", seed, "--out", tmp_path / name)
        assert result.exit_code == 0
        assert "30 requests" in result.stdout
        return (tmp_path / name).read_bytes()

    first = trace("some/folder/a", 5)
    assert first == trace("b", 5)
    assert first != trace("c", 6)
    records = [json.loads(line) for line in first.splitlines()]
    assert len(records) == 30
    fields = {"timestamp", "input_length", "output_length", "hash_ids"}
    assert all(record.keys() >= fields for record in records)


def test_trace_that_cannot_be_written_is_misuse(tmp_path: Path) -> None:
    """A file in the place of a folder is named, without a traceback."""
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "t", tmp_path / "file" / "more" / "t", tmp_path):
        result = hicache("trace", "generate", "--requests", 1, "--out", out)
        assert result.exit_code == 2
        assert str(tmp_path) in result.stderr


def test_inspect_counts_a_trace_and_its_lru_curve(tmp_path: Path) -> None:
    """Three requests counted by hand; a cache of three blocks hits two of nine."""
    records = [(0, 1, 2), (0, 1, 3), (0, 4, 5)]
    lines = [
        {"timestamp": 0, "input_length": 1400, "output_length": 1, "hash_ids": list(ids)} for ids in records
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = printed_json("trace", "inspect", path, "--json", "--lru", 3, "--lru", 1)
    assert (found["schema"], found["trace"]) == ("hicache.trace/1", str(path))
    assert (found["request_count"], found["reference_blocks"], found["unique_blocks"]) == (3, 9, 6)
    curve = {point["capacity_blocks"]: point["block_hit_ratio"] for point in found["lru"]}
    assert curve == {3: pytest.approx(3 / 9), 1: pytest.approx(2 / 9)}
    table = hicache("trace", "inspect", path, "--lru", 3).stdout
    for name, value in (("reference_blocks", 9), ("unique_blocks", 6), ("block_tokens", 512)):
        (line,) = (line for line in table.splitlines() if line.startswith(name))
        assert line.split()[-1] == str(value)
    assert "capacity_blocks 3" in table


def test_inspect_of_a_broken_trace_names_file_and_line(tmp_path: Path) -> None:
    """Exit 2, with the place of the line that is wrong."""
    path = generated(tmp_path / "t.jsonl", 3)
    path.write_text(path.read_text(encoding="utf-8") + '{"hash_ids": 7}\n', encoding="utf-8")
    result = hicache("trace", "inspect", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{path}:4" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["plugins"],
        ["models"],
        ["models", "deepseek-v4-pro"],
        ["describe", "mla"],
        ["plugins", "--json"],
        ["--help"],
    ],
)
def test_output_that_is_no_terminal_has_no_control_characters(arguments: list[str]) -> None:
    """What goes to a file or a pipe is text and newlines, no colour, no cursor."""
    output = hicache(*arguments).output
    assert output
    assert not CONTROL.search(output)


def test_table_in_a_pipe_is_not_folded_to_a_terminal() -> None:
    """A line that holds what belongs together can be searched for."""
    (line,) = (x for x in hicache("models", "deepseek-v4-flash").stdout.splitlines() if "index_space" in x)
    assert all(column in line for column in ("variant", "pool", "family", "layers", "row_bytes", "source"))


@pytest.mark.slow
def test_process_exits_as_the_command_says(tmp_path: Path) -> None:
    """The same answers and exit codes in a process of its own, whose output is a pipe."""
    good, bad = process("plugins"), process("describe", "nosuch")
    assert (good.returncode, good.stderr) == (0, "")
    assert "hicache-mha-mla" in good.stdout
    assert not CONTROL.search(good.stdout)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "[unknown-name]" in bad.stderr


@pytest.mark.slow
def test_reader_that_goes_away_is_no_failure() -> None:
    """``hicache models | head -1`` prints no traceback."""
    running = subprocess.Popen(
        [*COMMAND, "models", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert running.stdout is not None
    running.stdout.close()
    _, errors = running.communicate(timeout=60)
    assert errors == b""
    assert running.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_output_that_cannot_be_written_is_no_answer() -> None:
    """A full disk exits with 2 and says so; 1 would be a no."""
    with Path("/dev/full").open("wb") as full:
        command = [*COMMAND, "models", "--json"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"hicache: ")
    assert b"Traceback" not in ended.stderr


@pytest.mark.slow
def test_introspection_needs_no_torch(tmp_path: Path) -> None:
    """An operator asks in well under a second, on a machine that has no torch."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    for arguments in (["plugins"], ["models"], ["describe", "mha"]):
        done = subprocess.run(
            [sys.executable, *COMMAND[1:], *arguments],
            capture_output=True,
            text=True,
            env=environment(PYTHONPATH=path),
        )
        assert (done.returncode, done.stderr) == (0, "")
