"""Index tensors of an accelerator: copied to the CPU where they are needed there, each copy counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache_core.device.sim import SimRuntime
from hicache_core.errors import IndexTypeError
from hicache_core.testing.rigs import Rig, differences
from hicache_core.testing.stand_ins import pool_spec

MakeRig = Callable[..., Rig[SimRuntime]]
PAIRS = [(5, 3), (0, 9), (7, 1)]
LATER = [(2, 8), (6, 0), (1, 11)]


class OnDevice(torch.Tensor):
    """A tensor that says it is on an accelerator, and counts how often it is copied from there."""

    copies = 0

    @property
    def device(self) -> Any:  # type: ignore[override]
        """Not the CPU."""
        return torch.device("cuda", 0)

    def numpy(self, *_: Any, **__: Any) -> Any:
        """As torch answers for a tensor of an accelerator."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """A copy on the CPU."""
        self.copies += 1
        return self.as_subclass(torch.Tensor).clone()


def _on_device(values: Any) -> OnDevice:
    return torch.tensor(values).as_subclass(OnDevice)


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig[SimRuntime]:
    """Three layers, all host pages allocated and filled."""
    made = make_rig(pool_spec(48), seed=7)
    made.allocate(8)
    made.fill_host()
    return made


def _slots(rig: Rig[SimRuntime], pairs: list[tuple[int, int]]) -> tuple[OnDevice, OnDevice]:
    return _on_device(rig.slots(h for h, _ in pairs)), _on_device(rig.slots(d for _, d in pairs))


@pytest.mark.parametrize("move", ["backup", "load"])
def test_a_controller_copies_each_once_and_counts(rig: Rig[SimRuntime], move: str) -> None:
    """One synchronisation a tensor; tensors of the CPU cost none."""
    host, device = _slots(rig, PAIRS)
    before = rig.snapshot()
    getattr(rig.controller, move)(host, device).wait()
    assert differences(rig.snapshot(), getattr(rig, f"after_{move}")(before, PAIRS)) == []
    assert (host.copies, device.copies) == (1, 1)
    assert rig.controller.index_synchronisations == 2
    getattr(rig.controller, move)(host.cpu(), device).wait()
    assert rig.controller.index_synchronisations == 3
    getattr(rig.controller, move)(host.cpu(), device.cpu()).wait()
    assert rig.controller.index_synchronisations == 3


@pytest.mark.parametrize("move", ["backup", "load"])
def test_a_wrong_dtype_is_refused_there_as_well(rig: Rig[SimRuntime], move: str) -> None:
    """I23: int32 on an accelerator is no better than on the CPU."""
    host, device = rig.slots([1]), _on_device(rig.slots([2])).to(torch.int32)
    with pytest.raises(IndexTypeError):
        getattr(rig.controller, move)(host, device)


def test_load_layer_copies_once_a_conversion(rig: Rig[SimRuntime]) -> None:
    """Two tensors over three layers cost two; after a change in place of one, two more."""
    pool, stream = rig.controller.group.anchor, rig.runtime.new_stream(0)
    host, device = _slots(rig, PAIRS)
    before = rig.snapshot()
    for layer in range(3):
        pool.load_layer(host, device, layer, stream)
    rig.runtime.synchronize(stream)
    assert differences(rig.snapshot(), rig.after_load(before, PAIRS)) == []
    assert (pool.load_indices.conversions, pool.load_indices.synchronisations) == (1, 2)
    host[:] = torch.tensor(rig.slots(h for h, _ in LATER))
    device[:] = torch.tensor(rig.slots(d for _, d in LATER))
    before = rig.snapshot()
    for layer in range(3):
        pool.load_layer(host, device, layer, stream)
    rig.runtime.synchronize(stream)
    assert differences(rig.snapshot(), rig.after_load(before, LATER)) == []
    assert (pool.load_indices.conversions, pool.load_indices.synchronisations) == (2, 4)
