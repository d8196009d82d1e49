"""What a machine is, found by asking its runtime and moving bytes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from attrs import evolve

from hicache_core.device.probe import probed
from hicache_core.device.sim import Faults, SimRuntime
from hicache_core.errors import DeviceError, RegistrationError
from hicache_core.spec import PLATFORMS, Alias, CopyKind, Platform

REGISTERING = ("cuda", "cuda-wsl2", "rocm", "rocm-mi355x")
USUAL = {"cuda": "cuda", "cuda-wsl2": "cuda", "rocm": "rocm", "rocm-mi355x": "rocm"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", REGISTERING)
def test_a_machine_is_recognised_by_what_it_does(name: str, seed: int) -> None:
    """The runtime is given the usual profile of its vendor, and turns out to be what it is."""
    runtime = SimRuntime(PLATFORMS[name], seed=seed)
    runtime.platform = PLATFORMS[USUAL[name]]
    found = probed(runtime)
    assert found.name == name
    assert found == PLATFORMS[name]
    assert not runtime.memory.registrations


def test_a_kind_of_copy_that_refuses_the_cpu_address_is_found_out() -> None:
    """The profile says that the kind takes it, this machine does not: the alias is used for it."""
    machine = evolve(PLATFORMS["rocm-mi355x"], copy_accepts_host_address=(CopyKind.ONE_D, CopyKind.TWO_D))
    runtime = SimRuntime(machine)
    runtime.platform = PLATFORMS["rocm"]
    assert probed(runtime).copy_accepts_host_address == {CopyKind.ONE_D, CopyKind.TWO_D}


def test_a_runtime_that_moves_nothing_is_an_error() -> None:
    """Neither from the CPU address nor from the alias; nothing stays registered."""
    runtime = SimRuntime(PLATFORMS["cuda-wsl2"], faults=Faults(refuse_copy_at=2))
    with pytest.raises(DeviceError):
        probed(runtime)
    assert not runtime.memory.registrations


def test_a_refused_registration_is_an_error() -> None:
    """There is nothing to learn from it."""
    with pytest.raises(RegistrationError):
        probed(SimRuntime(PLATFORMS["cuda"], faults=Faults(refuse_registration_at=1)))


def test_a_platform_of_a_third_party_keeps_its_own_profile() -> None:
    """Its vendor has no other profiles here."""
    acme = Platform(name="acme-x1", vendor="acme", alias=Alias.DISTINCT)
    assert probed(SimRuntime(acme)) == acme


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here")
def test_a_machine_without_a_device_is_the_simulator() -> None:
    """In a process of its own, which had not imported torch before."""
    code = "import sys; from hicache_core.spec import Platform; "
    code += "print('torch' in sys.modules, Platform.probe().name)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["False", "cpu-sim"]
