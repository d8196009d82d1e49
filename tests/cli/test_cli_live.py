"""``hicache doctor`` and ``hicache describe --live``, as people and machines read them."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path

import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device import probe
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import DeviceError, LiveError
from hicache_core.live import LiveSocket, describe, read_live
from hicache_core.spec import platform_named
from hicache_core.testing.rigs import Rig
from hicache_core.testing.stand_ins import pool_spec
from tests.cli.commands import COMMAND, generated, hicache, replay_options
from tests.cli.test_schemas import errors


def test_the_doctor_has_a_verdict_a_line() -> None:
    """Every section, as JSON by its schema and as tables."""
    result = hicache("doctor", "--platform", "rocm-mi355x", "--json")
    found = json.loads(result.output)
    assert errors(found) == []
    assert [line["verdict"] for line in found["paths"]] == ["good"] * 4
    assert found["device"][0]["subject"] == "platform rocm-mi355x"
    shown = hicache("doctor", "--platform", "rocm-mi355x").output
    for section in ("machine", "plugins", "device", "paths"):
        assert section in shown


def test_a_device_that_fails_takes_no_other_finding_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1, with what the limits and the plugins are."""

    def fail() -> None:
        raise DeviceError(who="driver", got="code 999", expected="a device", remedy="Restart it.")

    monkeypatch.setattr(probe, "machine_runtime", fail)
    result = hicache("doctor", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, errors(found)) == (1, [])
    assert [line["verdict"] for line in found["device"]] == ["bad"]
    assert found["machine"]
    assert found["plugins"]


def test_the_doctor_refuses_an_unknown_platform() -> None:
    """Misuse: exit 2."""
    assert hicache("doctor", "--platform", "abacus").exit_code == 2


def test_a_running_controller_is_described_to_another_process(tmp_path: Path) -> None:
    """Through its socket; what is read follows the schema and names the process that serves."""
    socket = tmp_path / "live.sock"
    config = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=8)
    with (
        Rig([pool_spec(48)], config, SimRuntime(platform_named("rocm-mi355x"))) as rig,
        LiveSocket(str(socket), lambda: describe(rig.controller)),
    ):
        done = subprocess.run(
            [*COMMAND, "describe", "--live", str(socket), "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        assert errors(found) == []
        assert found == json.loads(json.dumps(describe(rig.controller)))
        assert found["ledger"]
        shown = hicache("describe", "--live", socket).output
        assert "load-loads-by-copies" in shown
        assert "not-captured" in shown
    assert not socket.exists()


def test_describe_wants_a_family_or_a_socket() -> None:
    """Not both, not none; a socket where nobody serves is misuse as well."""
    assert hicache("describe").exit_code == 2
    assert hicache("describe", "mha", "--live", "/nowhere").exit_code == 2
    assert hicache("describe", "--live", "/nowhere").exit_code == 2


def test_a_replay_serves_its_controller(tmp_path: Path) -> None:
    """The socket answers while it runs, and is gone afterwards."""
    socket = tmp_path / "live.sock"
    trace = generated(tmp_path / "trace.jsonl", requests=600)
    command = [*COMMAND, "replay", str(trace), *replay_options(), "--live", str(socket)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
        found = None
        while found is None and running.poll() is None:
            with contextlib.suppress(LiveError):
                found = read_live(socket)
        assert running.wait(timeout=120) == 0
    assert found is not None
    assert (found["process"], errors(found)) == (running.pid, [])
    assert not socket.exists()
