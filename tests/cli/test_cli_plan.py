"""``hicache plan``: bytes and pages of a host size before anything is allocated, and what does not fit.

Figures by hand: a token of qwen3-30b-a3b is 98,304 bytes; of qwen3.5-397b-a17b (bf16) 30,720, and a
checkpoint 192,061,440.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from hicache_core.cli import plan as plan_module
from tests.cli.commands import hicache, registry_without

MI355X = ["--platform", "rocm-mi355x", "--io-backend", "kernel", "--layout", "page_first"]
QWEN = ["--model", "qwen3-30b-a3b", *MI355X]
HYBRID = ["--model", "qwen3.5-397b-a17b", "--variant", "bf16", *MI355X]
GIB = 1_073_741_824


def asked(code: int, *arguments: object) -> dict[str, Any]:
    """The JSON of a plan that exits with ``code``."""
    result = hicache("plan", *arguments, "--json")
    assert (result.exit_code, result.stderr) == (code, "")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def pages(found: dict[str, Any]) -> dict[str, int]:
    """Host pages of each index space."""
    return {space["index_space"]: space["pages"] for space in found["index_spaces"]}


def test_one_rank_and_all_ranks_of_the_host() -> None:
    """64 GiB are 699,050 tokens and 65,536 bytes; eight times that, and the ring, of a host of 1 TiB."""
    options = ["--host-size", "64GiB", "--ranks", 8, "--host-memory", "1TiB", "--reserve", "100GiB"]
    found = asked(0, *QWEN, *options)
    assert (found["answer"], found["fits"], found["problems"], found["warnings"]) == ("yes", True, [], [])
    assert found["rank"] == {"nbytes": 68_719_411_200, "left_bytes": 65_536}
    assert found["host"] == {"nbytes": 8 * 68_719_411_200, "left_bytes": 8 * 65_536}
    (pool,) = found["pools"]
    assert (pool["layers"], pool["row_bytes"], pool["page_bytes"]) == (48, {"k": 1024, "v": 1024}, 98_304)
    assert (pool["pages"], pool["nbytes"], pool["host_nbytes"]) == (
        699_050,
        68_719_411_200,
        549_755_289_600,
    )
    (space,) = found["index_spaces"]
    assert (space["slots"], space["basis"], space["page_bytes"]) == (699_050, "all", 98_304)
    assert found["staging_bytes"] == 64 * 1024 * 1024
    assert (found["host_size_bytes"], found["host_memory_left_bytes"]) == (64 * GIB, 412 * GIB)


def test_a_reserve_of_no_memory_is_misuse() -> None:
    """It would be ignored, and the operator would take the plan for one that keeps it free."""
    assert hicache("plan", *QWEN, "--host-size", "64GiB", "--reserve", "1GB").exit_code == 2


def test_gigabytes_are_not_gibibytes() -> None:
    """64 GB / 98,304 = 651,041.67; 64 GiB are 48,009 tokens more."""
    assert pages(asked(0, *QWEN, "--host-size", "64GB")) == {"full": 651_041}
    assert pages(asked(0, *QWEN, "--host-size", "64000000000")) == {"full": 651_041}
    assert pages(asked(0, *QWEN, "--host-size", "64GiB")) == {"full": 699_050}


def test_page_size_rounds_to_whole_pages() -> None:
    """Pages of 64 tokens: 64 GiB / 6,291,456 = 10,922.67."""
    found = asked(0, *QWEN, "--page-size", 64, "--host-size", "64GiB")
    assert pages(found) == {"full": 10_922}
    assert found["index_spaces"][0]["slots"] == 10_922 * 64
    assert found["rank"]["left_bytes"] == 64 * GIB - 10_922 * 6_291_456


def test_spaces_share_one_total() -> None:
    """By blocks of 512 tokens, by blocks of 64, by percent, by pages: never more than was asked for."""
    size = ["--host-size", "64GiB"]
    assert pages(asked(0, *HYBRID, *size)) == {"full": 169_326, "state": 330}
    assert pages(asked(0, *HYBRID, *size, "--block-tokens", 64)) == {"full": 22_667, "state": 354}
    # 0.875 x 64 GiB = 60,129,542,144 bytes and 0.125 x 64 GiB = 8,589,934,592.
    shares = ["--share", "full=87.5", "--share", "state=12.5%"]
    assert pages(asked(0, *HYBRID, *size, *shares)) == {"full": 1_957_341, "state": 44}
    # 64 GiB - 100 x 192,061,440 = 49,513,332,736 bytes.
    found = asked(0, *HYBRID, *size, "--pages", "state=100")
    assert pages(found) == {"full": 1_611_762, "state": 100}
    assert found["rank"]["nbytes"] + found["rank"]["left_bytes"] == 64 * GIB


def test_output_says_how_spaces_share() -> None:
    """Only where a block decides; bytes stand in the unit that was given and exactly."""
    by_blocks = hicache("plan", *HYBRID, "--host-size", "64GiB", "--block-tokens", 512)
    assert by_blocks.exit_code == 0
    assert "one block of 512 tokens" in by_blocks.stdout
    assert "512 of 'full', 1 of 'state'" in by_blocks.stdout
    assert "63.872 GiB (68,581,969,920 bytes)" in by_blocks.stdout
    assert " GB " not in by_blocks.stdout
    by_pages = hicache("plan", *HYBRID, "--host-size", "64GB", "--pages", "state=100")
    assert "one block" not in by_pages.stdout
    assert "GiB" not in by_pages.stdout


def test_size_below_a_page_of_each_space_says_what_would_fit() -> None:
    """100 MB lack 92,092,160 bytes of a checkpoint and a token; what is named is enough, no less."""
    found = asked(1, *HYBRID, "--host-size", "100MB")
    assert (found["answer"], found["fits"], found["rank"], found["pools"]) == ("yes", False, None, [])
    (problem,) = found["problems"]
    assert problem["code"] == "host-size-split"
    assert (problem["short_bytes"], problem["fits_bytes"]) == (92_092_160, 192_092_160)
    assert pages(asked(0, *HYBRID, "--host-size", 192_092_160)) == {"full": 1, "state": 1}
    assert asked(1, *HYBRID, "--host-size", 192_092_159)["problems"][0]["short_bytes"] == 1
    people = hicache("plan", *HYBRID, "--host-size", "100MB")
    assert people.exit_code == 1
    assert "92.092 MB (92,092,160 bytes)" in people.stdout


def test_ranks_above_the_host_memory_say_what_would_fit() -> None:
    """8 x 64 GiB of 512 GiB less 32 are 32 GiB too much; 60 GiB each would fit."""
    host = ["--ranks", 8, "--host-memory", "512GiB", "--reserve", "32GiB"]
    found = asked(1, *QWEN, "--host-size", "64GiB", *host)
    (problem,) = found["problems"]
    assert problem["code"] == "host-size-host-memory"
    assert (problem["short_bytes"], problem["fits_bytes"]) == (32 * GIB, 60 * GIB)
    assert found["host_memory_left_bytes"] is None
    assert asked(0, *QWEN, "--host-size", "60GiB", *host)["host_memory_left_bytes"] == 0


def test_i12_host_tier_below_the_device_tier_is_a_warning() -> None:
    """699,050 host pages: one more on the device is worth a word, and no failure."""
    size = [*QWEN, "--host-size", "64GiB"]
    found = asked(0, *size, "--device-pages", 699_051)
    assert [warning["code"] for warning in found["warnings"]] == ["host-below-device"]
    assert asked(0, *size, "--device-pages", 699_050)["warnings"] == []
    people = hicache("plan", *size, "--device-pages", 699_051)
    assert people.exit_code == 0
    assert "warning [host-below-device]" in people.stdout


def test_combination_that_cannot_work_is_a_no_with_its_reasons() -> None:
    """Beside what does not fit: all reasons at once, and the figures where there are any."""
    options = ["--io-backend", "kernel", "--layout", "layer_first"]
    found = asked(1, *QWEN, *options, "--host-size", "64GiB")
    assert [v["id"] for v in found["violations"]] == ["R3-not-opted-in"]
    assert found["nearest"]["layout"] == "page_first"
    assert (found["staging_bytes"], found["problems"], pages(found)) == (None, [], {"full": 699_050})
    both = hicache("plan", *QWEN, *options, "--host-size", "1KiB")
    assert both.exit_code == 1
    assert "[R3-not-opted-in]" in both.stdout
    assert "[host-size-split]" in both.stdout
    probed = asked(0, *QWEN, *options, "--host-size", "64GiB", "--allow-kernel-layer-first")
    assert (probed["answer"], probed["fits"]) == ("yes-if-probed", True)


def test_direct_needs_no_staging() -> None:
    """Runtime copies go past the ring."""
    direct = ["--io-backend", "direct", "--layout", "page_first_direct", "--host-size", "1GB"]
    assert asked(0, *QWEN, *direct)["staging_bytes"] == 0


def test_missing_family_is_a_no_without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools that are there must not be given the bytes of the one that is not."""
    monkeypatch.setattr(plan_module, "load_plugins", lambda: registry_without("mamba"))
    found = asked(1, *HYBRID, "--host-size", "64GiB")
    assert [(v["id"], v["pool"]) for v in found["violations"]] == [("R6-required-pool", "mamba")]
    assert (found["rank"], found["pools"], found["index_spaces"]) == (None, [], [])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--host-size", "64G"],
        ["--host-size", "-1"],
        ["--host-size", "1GB", "--ranks", "0"],
        ["--host-size", "1GB", "--pages", "state"],
        ["--host-size", "1GB", "--pages", "state=x"],
        ["--host-size", "1GB", "--pages", "=3"],
        ["--host-size", "1GB", "--pages", "state=0"],
        ["--host-size", "1GB", "--pages", "state=1", "--pages", "state=2"],
        ["--host-size", "1GB", "--pages", "nosuch=1"],
        ["--host-size", "1GB", "--share", "state=1/0"],
        ["--host-size", "1GB", "--share", "state=100"],
        ["--host-size", "1GB", "--share", "state=1e1"],
        ["--host-size", "1GB", "--share", "state=1E-99999999999"],
        ["--host-size", "1GB", "--share", "state=60", "--share", "full=60"],
        ["--host-size", "1GB", "--share", "state=60", "--pages", "state=1"],
        ["--host-size", "1GB", "--block-tokens", "0"],
        ["--host-size", "1GB", "--device-pages", "0"],
    ],
)
def test_misuse_exits_with_2(arguments: list[str]) -> None:
    """A reason on the error stream, nothing on the output."""
    result = hicache("plan", *HYBRID, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr
    assert "Traceback" not in result.stderr
