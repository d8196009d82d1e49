"""Fixtures of the core's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.spec import platform_named
from hicache_core.testing.rigs import DeviceOptions, Rig
from hicache_core.testing.stand_ins import pool_spec

MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """Makes rigs and closes them: kernel + page_first on cpu-sim, 8 host pages, 3 layers of 48-byte token rows."""
    made: list[Rig] = []

    def make(
        *specs: Any,
        platform: str = "cpu-sim",
        pair: tuple[str, str] = ("kernel", "page_first"),
        seed: int = 0,
        faults: Faults | None = None,
        options: DeviceOptions | None = None,
        devices: int = 1,
        device: int = 0,
        **config: Any,
    ) -> Rig:
        chosen = {"host_pages": 8, "ring_bytes": 4096, **config}
        rig = Rig(
            list(specs) or [pool_spec(48)],
            ControllerConfig(io_backend=pair[0], layout=pair[1], **chosen),
            SimRuntime(platform_named(platform), devices=devices, seed=seed, faults=faults),
            options=options,
            device=device,
        )
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.controller.close()
