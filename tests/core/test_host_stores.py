"""Kernels say how often they were told to write to host memory: what shows that a staged pool is staged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.spec import platform_named
from hicache_core.testing.rigs import Rig
from hicache_core.testing.stand_ins import pool_spec

SRig = Rig[SimRuntime]


def stores(layout: str, act: Callable[[SRig, list[int]], object]) -> int:
    """Host stores while a group of two pools of one and two buffers does something."""
    specs = [
        pool_spec(64, 32, page_slots=2, layer_ids=range(3)),
        pool_spec(48, page_slots=2, layer_ids=range(3), pool="index", anchor=False),
    ]
    config = ControllerConfig(io_backend="kernel", layout=layout, host_pages=8)
    with Rig(specs, config, SimRuntime(platform_named("cpu-sim"))) as rig:
        kernels = rig.runtime.kernels
        assert kernels is not None
        host, before = rig.allocate(4), kernels.host_stores
        act(rig, host)
        return kernels.host_stores - before


def backup(rig: SRig, host: list[int]) -> None:
    """Two pages out."""
    rig.controller.backup(rig.slots(host[:2]), rig.slots([1, 2])).wait()


def load(rig: SRig, host: list[int]) -> None:
    """Two pages in."""
    rig.controller.load(rig.slots(host[:2]), rig.slots([1, 2])).wait()


def backup_of_nothing(rig: SRig, host: list[int]) -> None:
    """No page out."""
    rig.controller.backup(rig.slots([]), rig.slots([])).wait()


def tokens(direction: str) -> Callable[[SRig, list[int]], None]:
    """Tokens of the anchor in one direction."""

    def act(rig: SRig, host: list[int]) -> None:
        stream = rig.runtime.new_stream(0)
        pair = np.array([3], dtype=np.int64), np.array([5], dtype=np.int64)
        getattr(rig.controller.group.anchor.token_copies(), direction)(*pair, None, stream)
        rig.runtime.synchronize(stream)

    return act


@pytest.mark.parametrize(
    ("layout", "act", "expected"),
    [
        ("page_first", backup, 0),
        ("page_first", load, 0),
        ("layer_first", backup, 3),
        ("layer_first", load, 0),
        ("layer_first", backup_of_nothing, 0),
        ("page_first", tokens("backup"), 2),
        ("page_first", tokens("load"), 0),
    ],
    ids=[
        "staged backup",
        "load by kernel",
        "backup by kernel",
        "load of layers",
        "nothing",
        "tokens out",
        "tokens in",
    ],
)
def test_launches_that_write_to_the_host_are_counted(
    layout: str, act: Callable[[SRig, list[int]], object], expected: int
) -> None:
    """I43: one a buffer for a backup by kernel, none for a staged one, none for a load."""
    assert stores(layout, act) == expected
