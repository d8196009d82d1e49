"""``hicache check``: answers, reasons and exit codes, for models and for hand-made groups."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_core.cli import check as check_module
from hicache_core.spec import IO_BACKENDS, LAYOUTS, PLATFORMS
from tests.cli.commands import COMMAND, environment, hicache, registry_without

PAGE_FIRST = ["--io-backend", "kernel", "--layout", "page_first"]
LAYER_FIRST = ["--io-backend", "kernel", "--layout", "layer_first"]
QWEN = ["--model", "qwen3-30b-a3b"]
MI355X = ["--platform", "rocm-mi355x"]

HYBRID = """
[[pools]]
pool = "kv"
family = "mha"
layers = 4
page_slots = 16
anchor = true
[pools.geometry]
kv_heads = 2
k_head_dim = 64
dtype = "bfloat16"

[[pools]]
pool = "window"
family = "mha"
layer_ids = [1, 3]
index_space = "swa"
page_slots = 8
reuse = "trailing_pages"
window_slots = 128
[pools.geometry]
kv_heads = 2
k_head_dim = 64
dtype = "bfloat16"
"""


def asked(code: int, *arguments: object) -> dict[str, Any]:
    """The JSON of a check that exits with ``code``."""
    result = hicache("check", *arguments, "--json")
    assert (result.exit_code, result.stderr) == (code, "")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def pools_file(folder: Path, text: str) -> Path:
    """A file of hand-made pools."""
    path = folder / "pools.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_yes_says_how_each_pool_moves() -> None:
    """On ROCm, kernel + page_first is a staged write-back out and runtime copies back."""
    found = asked(0, *QWEN, *MI355X, *PAGE_FIRST)
    assert (found["answer"], found["group"], found["violations"]) == ("yes", "qwen3-30b-a3b/bf16", [])
    (pool,) = found["pools"]
    assert (pool["pool"], pool["layers"], pool["row_bytes"]) == ("kv", 48, {"k": 1024, "v": 1024})
    plan = pool["plan"]
    assert (plan["backup"], plan["load"], plan["staged"]) == ("staged", "copies", True)
    assert (plan["backup_host_indices"], plan["load_host_indices"]) == ("cpu", "cpu")
    assert (plan["backup_device_indices"], plan["load_device_indices"]) == ("device", "cpu")
    assert plan["pointer_domain"] == "device"
    assert plan["staging_bytes"] == found["staging_bytes"] == found["ring_bytes"] == 64 * 1024 * 1024


def test_yes_for_people_is_a_line_and_a_table_of_all_pools() -> None:
    """The answer first; pools without bytes stand there too."""
    result = hicache("check", "--model", "deepseek-v4-pro", *MI355X, *PAGE_FIRST)
    assert result.exit_code == 0
    answer, *rest = result.stdout.splitlines()
    assert answer == "deepseek-v4-pro/cuda_v4 on rocm-mi355x, kernel + page_first: yes"
    names = [line.split(" ")[0] for line in rest]
    for pool in ("kv", "swa", "c4", "c4_indexer", "c4_state", "c4_indexer_state", "c128"):
        assert pool in names
    (anchor,) = (line for line in rest if line.startswith("kv "))
    assert "no bytes" in anchor
    (window,) = (line for line in rest if line.startswith("swa "))
    assert all(word in window for word in ("staged", "copies", "yes", "cpu", "device", "67,108,864"))


def test_ring_is_what_staging_gets() -> None:
    """``--ring-bytes`` is a size; without room for a row nothing goes through it, and the plan says so."""
    (pool,) = asked(0, *QWEN, *MI355X, *PAGE_FIRST, "--ring-bytes", "1MiB")["pools"]
    assert pool["plan"]["staging_bytes"] == 1024 * 1024
    (pool,) = asked(0, *QWEN, *MI355X, *PAGE_FIRST, "--ring-bytes", "1000")["pools"]
    assert (pool["plan"]["backup"], pool["plan"]["staged"], pool["plan"]["staging_bytes"]) == (
        "copies",
        True,
        0,
    )
    assert pool["plan"]["choices"]


def test_no_lists_every_violation_and_the_nearest_combination() -> None:
    """A state pool serves no layer_first, and ROCm no kernel + layer_first without being asked."""
    found = asked(1, "--model", "qwen3.5-397b-a17b", *MI355X, *LAYER_FIRST)
    assert found["answer"] == "no"
    assert {(v["id"], v["pool"]) for v in found["violations"]} == {
        ("R1-served-pair", "mamba"),
        ("R3-not-opted-in", None),
    }
    assert all(v["got"] and v["expected"] and v["remedy"] for v in found["violations"])
    assert found["nearest"] == {
        "io_backend": "kernel",
        "layout": "page_first",
        "allow_kernel_layer_first": False,
    }
    assert [pool["plan"] for pool in found["pools"]] == [None, None]


def test_no_for_people_is_two_lines_a_violation() -> None:
    """Reason with its id, remedy indented below; then what works."""
    result = hicache("check", "--model", "qwen3.5-397b-a17b", *MI355X, *LAYER_FIRST)
    assert result.exit_code == 1
    answer, *reasons, nearest = result.stdout.splitlines()
    assert answer.endswith(": no")
    assert [line.split("]")[0] for line in reasons[::2]] == ["[R1-served-pair", "[R3-not-opted-in"]
    assert all(line.startswith("  ") and line.strip() for line in reasons[1::2])
    assert len(reasons) == 4
    assert nearest.endswith("kernel + page_first")


def test_opted_in_is_yes_if_the_probe_passes() -> None:
    """It exits 0 and names what is to be proved; with the probe switched off it is a no."""
    opted = [*QWEN, *MI355X, *LAYER_FIRST, "--allow-kernel-layer-first"]
    found = asked(0, *opted)
    assert found["answer"] == "yes-if-probed"
    assert [(c["rule"], c["code"]) for c in found["conditions"]] == [("R3", "kernel-sees-host-rows")]
    assert "[R3-kernel-sees-host-rows]" in hicache("check", *opted).stdout
    off = asked(1, *opted, "--no-probe")
    assert [v["id"] for v in off["violations"]] == ["R3-probe-off"]


def test_pool_whose_family_nobody_brings_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is required and not left out, and the remedy names the family; nothing else would work either."""
    monkeypatch.setattr(check_module, "load_plugins", lambda: registry_without("dsa_indexer"))
    found = asked(1, "--model", "deepseek-v3.2", *MI355X, *PAGE_FIRST)
    (violation,) = found["violations"]
    assert (violation["id"], violation["pool"]) == ("R6-required-pool", "indexer")
    assert "'dsa_indexer'" in violation["remedy"]
    assert found["nearest"] is None
    people = hicache("check", "--model", "deepseek-v3.2", *MI355X, *PAGE_FIRST)
    assert people.exit_code == 1
    assert "R6-required-pool" in people.stdout


def test_variant_that_the_platform_lacks_is_a_violation() -> None:
    """A variant for CUDA alone, asked about on ROCm."""
    found = asked(
        1, "--model", "deepseek-v4-pro", "--variant", "sm100_v41", "--platform", "rocm", *PAGE_FIRST
    )
    assert [v["id"] for v in found["violations"]] == ["R7-variant-platform"]


def test_matrix_asks_about_every_pair_of_a_platform() -> None:
    """By the rules of compatibility for token rows on ROCm; the table says the same as JSON."""
    found = asked(0, *QWEN, *MI355X, "--matrix")
    cells = {(c["io_backend"], c["layout"]): (c["answer"], c["violations"]) for c in found["cells"]}
    assert cells == {
        ("kernel", "layer_first"): ("no", ["R3-not-opted-in"]),
        ("kernel", "page_first"): ("yes", []),
        ("kernel", "page_first_direct"): ("no", ["R1-served-pair"]),
        ("direct", "layer_first"): ("yes", []),
        ("direct", "page_first"): ("no", ["R1-served-pair"]),
        ("direct", "page_first_direct"): ("yes", []),
    }
    result = hicache("check", *QWEN, *MI355X, "--matrix")
    assert result.exit_code == 0
    lines = [line.split("│") for line in result.stdout.splitlines() if line.startswith("rocm-mi355x")]
    shown = {line[2].strip(): [cell.strip() for cell in line[3:]] for line in lines}
    assert shown == {
        "kernel": ["R3-not-opted-in", "yes", "R1-served-pair"],
        "direct": ["yes", "R1-served-pair", "yes"],
    }


def test_matrix_shows_what_the_probe_must_prove() -> None:
    """With the option, a cell reads `if probed`."""
    result = hicache("check", *QWEN, *MI355X, "--matrix", "--allow-kernel-layer-first")
    assert "if probed" in result.stdout


def test_matrix_without_platform_asks_about_all() -> None:
    """Each in the variant that is its default."""
    found = asked(0, *QWEN, "--matrix")
    assert len(found["cells"]) == len(PLATFORMS) * len(IO_BACKENDS) * len(LAYOUTS)
    assert {cell["platform"] for cell in found["cells"]} == set(PLATFORMS)


def test_matrix_without_a_yes_exits_with_1() -> None:
    """The model has no variant for an NPU."""
    found = asked(1, *QWEN, "--platform", "npu", "--matrix")
    assert {cell["answer"] for cell in found["cells"]} == {"no"}
    assert all("R7-variant-platform" in cell["violations"] for cell in found["cells"])


def test_hand_made_group_is_checked_like_a_model(tmp_path: Path) -> None:
    """Layers as a number or a list, an index space of its own for a window, rows by the family."""
    found = asked(0, "--pools", pools_file(tmp_path, HYBRID), *MI355X, *PAGE_FIRST)
    assert found["answer"] == "yes"
    assert [(p["pool"], p["index_space"], p["page_slots"], p["layers"]) for p in found["pools"]] == [
        ("kv", "full", 16, 4),
        ("window", "swa", 8, 2),
    ]
    assert found["pools"][0]["row_bytes"] == {"k": 2 * 64 * 2, "v": 2 * 64 * 2}


def test_hand_made_group_breaks_rules_like_a_model(tmp_path: Path) -> None:
    """Two page sizes in one space, no anchor, a family that nobody brings: answers, not misuse."""
    text = HYBRID.replace('index_space = "swa"\n', "").replace("anchor = true\n", "")
    text += '\n[[pools]]\npool = "odd"\nfamily = "nosuch"\nlayers = 1\npage_slots = 16\n'
    found = asked(1, "--pools", pools_file(tmp_path, text), *MI355X, *PAGE_FIRST)
    assert {(v["id"], v["pool"]) for v in found["violations"]} == {
        ("R6-page-size", "window"),
        ("R6-anchor", None),
        ("R6-required-pool", "odd"),
    }


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (("layers = 4", "layers = 4\nlayer = 4"), "pools[0]"),
        (("layers = 4", "layers = 4\nlayer_ids = [1]"), "pools[0]"),
        (("layers = 4\n", ""), "pools[0]"),
        (("layers = 4", "layers = -1"), "pools[0].layers"),
        (("layers = 4", "layers = 1_000_000_000_000"), "pools[0].layers"),
        (("layers = 4", "layers = true"), "pools[0].layers"),
        (("[1, 3]", "[3, 1]"), "pools[1].layer_ids[1]"),
        (("[1, 3]", "[1, 1]"), "pools[1].layer_ids[1]"),
        (("page_slots = 16", "page_slots = 0"), "pools[0].page_slots"),
        (("page_slots = 16", "page_slots = 1.5"), "pools[0].page_slots"),
        (('reuse = "trailing_pages"', 'reuse = "some"'), "pools[1].reuse"),
        (("window_slots = 128\n", ""), "pools[1]"),
        (('reuse = "trailing_pages"\n', ""), "pools[1]"),
        (("anchor = true", 'anchor = "yes"'), "pools[0].anchor"),
        (('pool = "window"', 'pool = "kv"'), "pools[1].pool"),
        (('pool = "kv"', 'pool = ""'), "pools[0].pool"),
        (('family = "mha"', "family = 7"), "pools[0].family"),
        (("k_head_dim = 64", "k_head_dim = 64\nheads = 3"), "pools[0].geometry.heads"),
        (("kv_heads = 2", "kv_heads = 0"), "pools[0]"),
        (("[[pools]]", "[[pool]]"), ""),
        (("[[pools]]", "title = 1\n[[pools]]"), ""),
        (("anchor = true", "anchor = "), ""),
    ],
)
def test_file_that_breaks_its_form_is_misuse(tmp_path: Path, change: tuple[str, str], place: str) -> None:
    """Exit 2; the reason names the file and the key, and nothing is on the output."""
    path = pools_file(tmp_path, HYBRID.replace(*change, 1))
    result = hicache("check", "--pools", path, *MI355X, *PAGE_FIRST)
    assert (result.exit_code, result.stdout) == (2, "")
    reason, remedy = result.stderr.splitlines()
    assert reason.startswith(f"hicache: [pools-file] {path}: {place + ': ' if place else ''}got ")
    assert remedy.startswith("  expected ")


def test_file_that_cannot_be_read_is_misuse(tmp_path: Path) -> None:
    """No such file, a folder, bytes that are no UTF-8, no pools."""
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "empty.toml").write_text("pools = []\n", encoding="utf-8")
    for name in ("none.toml", "", "bytes.toml", "empty.toml"):
        result = hicache("check", "--pools", tmp_path / name, *MI355X, *PAGE_FIRST)
        assert result.exit_code == 2
        assert "[pools-file]" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [*MI355X, *PAGE_FIRST],
        [*QWEN, *PAGE_FIRST],
        [*QWEN, *MI355X],
        [*QWEN, *MI355X, "--io-backend", "kernel"],
        [*QWEN, *MI355X, "--io-backend", "kernel", "--layout", "sideways"],
        [*QWEN, *MI355X, *PAGE_FIRST, "--matrix"],
        [*QWEN, *MI355X, *PAGE_FIRST, "--pools", "x.toml"],
        ["--pools", "x.toml", "--page-size", "4", *MI355X, *PAGE_FIRST],
        ["--pools", "x.toml", "--variant", "bf16", *MI355X, *PAGE_FIRST],
        [*QWEN, *MI355X, *PAGE_FIRST, "--ring-bytes", "64G"],
        [*QWEN, *MI355X, *PAGE_FIRST, "--page-size", "0"],
        [*QWEN, *MI355X, *PAGE_FIRST, "--variant", "nosuch"],
        ["--model", "nosuch", *MI355X, *PAGE_FIRST],
        ["--model", "deepseek-v4-pro", "--page-size", "4", *MI355X, *PAGE_FIRST],
        [*QWEN, "--platform", "abacus", *PAGE_FIRST],
    ],
)
def test_misuse_exits_with_2(arguments: list[str]) -> None:
    """A reason on the error stream, nothing on the output."""
    result = hicache("check", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr
    assert "Traceback" not in result.stderr


def _modules(*arguments: str) -> tuple[int, set[str]]:
    """Exit code of a command in a process of its own, and what that process had imported by its end."""
    watch = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    done = subprocess.run(
        [sys.executable, "-c", f"{watch}{COMMAND[2]}", *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    return done.returncode, set(done.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "plan"])
def test_process_of_an_answer_imports_nothing_heavy(command: str) -> None:
    """No torch, no triton, no numpy; rich only where a table is printed."""
    size = ["--host-size", "64GiB"] if command == "plan" else []
    arguments = [command, "--model", "qwen3.5-397b-a17b", *MI355X, *PAGE_FIRST, *size]
    code, modules = _modules(*arguments, "--json")
    assert code == 0
    assert "hicache_core.compat.solver" in modules
    assert {"torch", "triton", "numpy", "rich"} & modules == set()
    code, modules = _modules(*arguments)
    assert code == 0
    assert "rich" in modules
    assert {"torch", "triton", "numpy"} & modules == set()
