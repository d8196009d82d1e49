"""What the launcher of compiled kernels hands to Triton, with the compiler and the device stood in for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import field, frozen

pytest.importorskip("triton", reason="triton is not installed")

from hicache_core.device.kernels import compiled, source
from hicache_core.device.kernels.compiled import KERNELS, CompiledLauncher, load_launcher
from hicache_core.errors import DeviceError

NUMBERS = tuple(range(100, 122))


@frozen(kw_only=True)
class TorchStream:
    """As much of a stream of torch as is looked at."""

    device_index: int
    cuda_stream: int = 0xABC


def stream_of(device: int) -> Any:
    """A stream of a device."""
    return TorchStream(device_index=device)


@frozen(kw_only=True, eq=False)
class Machine:
    """Devices of torch that compile anything and launch nothing.

    Args:
        current: the current device, innermost last.
        compiled: what was compiled, and for which device.
        launches: current device, grid, arguments and stream of each launch.
        failure: raised by launches.
    """

    current: list[int] = field(factory=lambda: [0])
    compiled: list[tuple[int, str, tuple[int, int]]] = field(factory=list)
    launches: list[tuple[int, Any, Any, Any]] = field(factory=list)
    failure: list[Exception] = field(factory=list)

    @contextmanager
    def device(self, number: int) -> Iterator[None]:
        """Make a device the current one."""
        self.current.append(number)
        try:
            yield
        finally:
            self.current.pop()

    def get_current_target(self) -> int:
        """The current device stands for its own target."""
        return self.current[-1]

    def compile(self, name: str, tile: tuple[int, int], target: object) -> Machine:
        """A kernel; this object stands for it."""
        self.compiled.append((self.current[-1], name, tile))
        return self

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*arguments: int, stream: int) -> None:
            if self.failure:
                raise self.failure[0]
            self.launches.append((self.current[-1], grid, arguments, stream))

        return run


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The stand-in, in the place of compiler, driver and torch's current device."""
    made = Machine()
    monkeypatch.setattr(compiled, "compile_kernel", made.compile)
    monkeypatch.setattr(compiled, "driver", SimpleNamespace(active=made))
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current[-1])
    return made


def test_a_launch_hands_on_numbers_constants_and_the_stream_itself(machine: Machine) -> None:
    """As many arguments as the kernel has, and the handle, so that no stream need be made current."""
    CompiledLauncher().launch("move_rows", 7, NUMBERS, (16, 128), stream_of(0))
    assert machine.launches == [(0, (7, 1, 1), (*NUMBERS, 16, 128), 0xABC)]
    assert len(machine.launches[0][2]) == len(source.move_rows.arg_names)


def test_a_kernel_is_loaded_once_for_each_device_and_launched_there(machine: Machine) -> None:
    """The current device is the stream's while a kernel is loaded and launched, then what it was."""
    launcher = CompiledLauncher()
    for device in (1, 0, 1, 1, 0):
        launcher.launch("move_rows", 1, NUMBERS, (16, 128), stream_of(device))
    assert machine.compiled == [(device, "move_rows", (16, 128)) for device in (1, 0)]
    assert [launch[0] for launch in machine.launches] == [1, 0, 1, 1, 0]
    assert machine.current == [0]


def test_what_the_driver_refuses_is_an_error_of_the_device(machine: Machine) -> None:
    """The cause stays with it."""
    machine.failure.append(RuntimeError("Triton Error [CUDA]: invalid argument"))
    with pytest.raises(DeviceError) as caught:
        CompiledLauncher().launch("move_rows", 1, NUMBERS, (16, 128), stream_of(0))
    assert caught.value.__cause__ is machine.failure[0]


def test_every_kernel_is_loaded_before_the_first_transfer(machine: Machine) -> None:
    """In the widest vectors and in both sizes of program, for the device that is named."""
    load_launcher(3)
    assert sorted(machine.compiled) == sorted(
        (3, name, (16, tile)) for name in KERNELS for tile in (128, 1024)
    )
