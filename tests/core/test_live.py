"""A running controller describes itself: what it is, what it can do, each decision with its reason."""

from __future__ import annotations

import json
import logging
import socket
import threading
from pathlib import Path

import pytest
from attrs import evolve

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import LiveError, SidecarError
from hicache_core.events import DecisionLog
from hicache_core.live import SCHEMA, LiveSocket, describe, read_live
from hicache_core.spec import RowUnit, platform_named
from hicache_core.testing.rigs import Rig
from hicache_core.testing.stand_ins import pool_spec, registry_of

KV, SIDE = pool_spec(48), pool_spec(1 << 20, unit=RowUnit.PAGE, pool="side", anchor=False)


def _rig(platform: str = "rocm-mi355x", host_pages: int = 8) -> Rig[SimRuntime]:
    config = ControllerConfig(
        io_backend="kernel", layout="page_first", host_pages=host_pages, ring_bytes=1 << 16
    )
    return Rig([KV], config, SimRuntime(platform_named(platform)), registry=registry_of([KV, SIDE]))


def _codes(rig: Rig[SimRuntime], pool: str) -> list[str]:
    return [d["code"] for d in rig.controller.decisions.as_data() if d["pool"] == pool]


def test_choices_and_fallbacks_are_decisions_with_reasons() -> None:
    """The load that goes by copies, the smaller host tier (I12), and rows that the ring cannot take."""
    with _rig() as rig:
        assert _codes(rig, "kv") == ["probe-passed", "load-loads-by-copies", "host-smaller-than-device"]
        rig.controller.register_sidecar(rig.device_pool(SIDE))
        assert "backup-ring-too-small" in _codes(rig, "side")
        assert all(d["reason"] for d in rig.controller.decisions.as_data())


def test_a_host_tier_as_large_as_the_device_is_no_news() -> None:
    """The warning is for the smaller one alone."""
    with _rig(host_pages=12) as rig:
        assert "host-smaller-than-device" not in _codes(rig, "kv")


def test_a_runtime_without_kernels_says_why() -> None:
    """What needs none is served, and the reason is at hand."""
    facts = evolve(platform_named("cuda"), has_kernels=False)
    config = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=12)
    with Rig([KV], config, SimRuntime(facts)) as rig:
        assert [d for d in rig.controller.decisions.as_data() if d["code"] == "no-kernels"] == [
            {"code": "no-kernels", "pool": "", "reason": "platform cuda has none", "count": 1}
        ]
    with _rig() as rig:
        assert rig.controller.decisions.count("no-kernels") == 0


def test_copies_that_take_the_alias_are_a_decision() -> None:
    """On WSL2, where one kind of copy refuses the CPU address."""
    with _rig("cuda-wsl2") as rig:
        assert "copies-take-alias" in _codes(rig, "kv")


def test_a_refused_sidecar_is_counted_each_time_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A line in the log for the first of each kind."""
    with caplog.at_level(logging.INFO, "hicache"), _rig() as rig:
        for _ in range(3):
            with pytest.raises(SidecarError):
                rig.controller.register_sidecar(rig.device_pool(SIDE), host_pages=1)
            del rig.device_rows["side"]
        assert rig.controller.decisions.count("sidecar-refused") == 3
    assert len([r for r in caplog.records if "sidecar-refused" in r.getMessage()]) == 1


def test_decisions_are_counted_across_threads() -> None:
    """No count is lost."""
    log = DecisionLog()

    def many() -> None:
        for _ in range(500):
            log.record("code", "reason", pool="p")

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.as_data() == [{"code": "code", "pool": "p", "reason": "reason", "count": 2000}]


def test_a_reader_sees_the_controller_as_it_is_now(tmp_path: Path) -> None:
    """Each reader gets what holds at that moment; the socket goes with its owner."""
    path = tmp_path / "live.sock"
    with _rig() as rig, LiveSocket(path, lambda: describe(rig.controller)):
        first = read_live(path)
        assert first == json.loads(json.dumps(describe(rig.controller)))
        assert first["spaces"] == {"full": {"page_slots": 4, "pages": 8, "free_pages": 8}}
        rig.allocate(3)
        rig.controller.register_sidecar(rig.device_pool(SIDE))
        second = read_live(path)
        assert second["spaces"]["full"]["free_pages"] == 5
        assert [pool["pool"] for pool in second["pools"]] == ["kv", "side"]
        moves = second["pools"][0]["moves"]
        assert (moves["backup"], moves["load"], moves["staged"]) == ("staged", "copies", True)
        capture = second["pools"][0]["capabilities"]["graph_capture"]
        assert (capture["verdict"], capture["code"]) == ("unsupported", "not-captured")
    assert not path.exists()


def test_nobody_there_and_somebody_else_are_told_apart_from_a_controller(tmp_path: Path) -> None:
    """LiveError in each case, and for a path that cannot be taken."""
    with pytest.raises(LiveError):
        read_live(tmp_path / "nobody.sock")
    with LiveSocket(tmp_path / "other.sock", lambda: {"schema": "other/1"}), pytest.raises(LiveError):
        read_live(tmp_path / "other.sock")
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute.sock"))
        with pytest.raises(LiveError):
            read_live(tmp_path / "mute.sock")
    with LiveSocket(tmp_path / "one.sock", dict), pytest.raises(LiveError):
        LiveSocket(tmp_path / "one.sock", dict)
    with pytest.raises(LiveError):
        LiveSocket(tmp_path / "no folder" / "one.sock", dict)


def test_a_second_close_leaves_the_socket_of_the_next_owner(tmp_path: Path) -> None:
    """Whoever serves on the path by then is still there."""
    path = tmp_path / "live.sock"
    first = LiveSocket(path, dict)
    first.close()
    with _rig() as rig, LiveSocket(path, lambda: describe(rig.controller)):
        first.close()
        assert read_live(path)["schema"] == SCHEMA
